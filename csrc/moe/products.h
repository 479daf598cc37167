// Products of Marlin words with activations on mma.sync m16n8k16, weights as the 16-row operand.

#pragma once

#include "params.h"

namespace kimi_fx::moe {

// Four codes of a word as bf16 128 + code: 0x4300 is 128, whose last bit counts ones.
__device__ inline void widen(uint32_t (&a)[4], uint32_t word) {
    uint32_t shifted[4] = {word, word >> 8, word >> 4, word >> 12};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[i]) : "r"(shifted[i]));
    }
}

// d = a b + c.
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// What 128 + code has too much of, -136 times the sum of a group's activations, where a product starts.
template <int NT>
__device__ void offset_of(float (&offset)[NT][4], const uint4 (&b)[NT]) {
    const uint32_t a[4] = {0xc308c308, 0xc308c308, 0xc308c308, 0xc308c308};
    const float zero[4] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        multiply(offset[n], a, b[n].x, b[n].y, zero);
        multiply(offset[n], a, b[n].z, b[n].w, offset[n]);
    }
}

// 64 columns x 32 inputs times 8 NT tokens. `words` points at the tile's first row.
template <int NT>
__device__ void multiply_tile(float (&sums)[4][NT][4], const uint4* words, const uint4* scales, const uint4 (&b)[NT],
                              const float (&offset)[NT][4]) {
    int lane = threadIdx.x % 32;
    uint4 low = words[lane], high = words[32 + lane], scale = scales[lane / 4];
    const uint32_t *w0 = &low.x, *w1 = &high.x, *s = &scale.x;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        float s0 = __uint_as_float(s[g] << 16), s1 = __uint_as_float(s[g] & 0xffff0000);
        uint32_t a0[4], a1[4];
        widen(a0, w0[g]);
        widen(a1, w1[g]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float d[4];
            multiply(d, a0, b[n].x, b[n].y, offset[n]);
            multiply(d, a1, b[n].z, b[n].w, d);
            sums[g][n][0] += s0 * d[0];
            sums[g][n][1] += s0 * d[1];
            sums[g][n][2] += s1 * d[2];
            sums[g][n][3] += s1 * d[3];
        }
    }
}

}  // namespace kimi_fx::moe
