// Products of Marlin words with 8 NT tokens on mma.sync m16n8k16, weights as the 16-row operand.
//
// Four bits are a bf16 as they are: a subnormal, code * 2^-133, where they lie lowest, and 16 times that where they lie
// next, as 2^-126 and up have the same spacing. So a word's eight codes take four masks and one shift. Activations are
// multiplied by 2^80, those of the codes that lie higher by 2^76; sums are 2^-53 of what they mean. All of it is exact
// for activations below 2^47.
//
// Groups of 32 inputs are summed with codes as they are and their fp32 sums scaled, so a weight means q * scale, not
// yet rounded to bf16.

#pragma once

#include "asm.h"

namespace kimi_fx::moe {

constexpr uint32_t kLowUp = 0x67806780, kHighUp = 0x65806580;  // pairs of 2^80 and 2^76
constexpr float kDown = 0x1p53f;

// The operand's four pairs; the second two, inputs 8..15, are 16 times too large.
__device__ inline void spread(uint32_t (&a)[4], uint32_t word) {
    uint32_t next = word >> 8;
    a[0] = word & 0x000f000f;
    a[1] = next & 0x000f000f;
    a[2] = word & 0x00f000f0;
    a[3] = next & 0x00f000f0;
}

// A group's activations as products take them.
__device__ inline void scale_up(uint4& b) {
    b.x = fma_pairs(b.x, kLowUp, 0x80008000);
    b.y = fma_pairs(b.y, kHighUp, 0x80008000);
    b.z = fma_pairs(b.z, kLowUp, 0x80008000);
    b.w = fma_pairs(b.w, kHighUp, 0x80008000);
}

// Codes are 8 too large: -8 times the sum of a group's activations, where a product starts.
__device__ inline void offset_of(float (&offset)[4], const uint4& b) {
    const uint32_t a[4] = {0x80088008, 0x80088008, 0x80808080, 0x80808080};
    const float zero[4] = {};
    multiply(offset, a, b.x, b.y, zero);
    multiply(offset, a, b.z, b.w, offset);
}

// A lane's part of 64 columns x 32 inputs.
struct Unit {
    uint4 low, high, scale;
};

template <int NT>
__device__ void multiply_unit(float (&sums)[4][NT][4], const Unit& unit, const uint4 (&b)[NT]) {
    const uint32_t *w0 = &unit.low.x, *w1 = &unit.high.x, *s = &unit.scale.x;
    float d[4][NT][4], offset[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) offset_of(offset[n], b[n]);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        uint32_t a[4];
        spread(a, w0[g]);
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(d[g][n], a, b[n].x, b[n].y, offset[n]);
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        uint32_t a[4];
        spread(a, w1[g]);
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(d[g][n], a, b[n].z, b[n].w, d[g][n]);
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        float s0 = __uint_as_float(s[g] << 16), s1 = __uint_as_float(s[g] & 0xffff0000);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            sums[g][n][0] += s0 * d[g][n][0];
            sums[g][n][1] += s0 * d[g][n][1];
            sums[g][n][2] += s1 * d[g][n][2];
            sums[g][n][3] += s1 * d[g][n][3];
        }
    }
}

}  // namespace kimi_fx::moe
