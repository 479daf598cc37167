// Products of Marlin words with 8 NT tokens on mma.sync m16n8k16, weights as the 16-row operand.
//
// Groups of 32 inputs are summed with codes as they are and their fp32 sums scaled, so a weight means q * scale, not
// yet rounded to bf16. The four blocks of 16 columns depend on each other nowhere: a warp has few neighbours to hide
// behind.

#pragma once

#include "asm.h"

namespace kimi_fx::moe {

// Four codes of a word as bf16 128 + code: 0x4300 is 128, whose last bit counts ones.
__device__ inline void widen(uint32_t (&a)[4], uint32_t word) {
    a[0] = codes(word);
    a[1] = codes(word >> 8);
    a[2] = codes(word >> 4);
    a[3] = codes(word >> 12);
}

// What 128 + code has too much of, -136 times the sum of a group's activations, where a product starts.
__device__ inline void offset_of(float (&offset)[4], const uint4& b) {
    const uint32_t a[4] = {0xc308c308, 0xc308c308, 0xc308c308, 0xc308c308};
    const float zero[4] = {};
    multiply(offset, a, b.x, b.y, zero);
    multiply(offset, a, b.z, b.w, offset);
}

// 64 columns x 32 inputs: two runs of words `row` vectors apart, and their scales.
template <int NT>
__device__ void multiply_group(float (&sums)[4][NT][4], const uint4* words, int row, const uint4* scales,
                               const uint4 (&b)[NT]) {
    int lane = threadIdx.x % 32;
    uint4 low = words[lane], high = words[row + lane], scale = scales[lane / 4];
    const uint32_t *w0 = &low.x, *w1 = &high.x, *s = &scale.x;
    float d[4][NT][4], offset[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) offset_of(offset[n], b[n]);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        uint32_t a[4];
        widen(a, w0[g]);
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(d[g][n], a, b[n].x, b[n].y, offset[n]);
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        uint32_t a[4];
        widen(a, w1[g]);
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
