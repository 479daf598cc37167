// The keyed noise of kimi_fx/ops/draw.py: Philox4x32-10 words, equal bit for bit, and what becomes of them.

#pragma once

#include <cstdint>

namespace kimi_fx::round {

struct NoiseKey {
    uint32_t seed[2];
    uint32_t index;  // of the drawn token in the sequence
    uint32_t sample;
};

// The words of ids 4 * quad and on.
__device__ inline uint4 philox(uint32_t quad, const NoiseKey& of) {
    uint32_t c0 = quad, c1 = of.index, c2 = of.sample, c3 = 0, k0 = of.seed[0], k1 = of.seed[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint64_t first = uint64_t(0xD2511F53u) * c0, second = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(second >> 32) ^ c1 ^ k0, c1 = uint32_t(second);
        c2 = uint32_t(first >> 32) ^ c3 ^ k1, c3 = uint32_t(first);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

__device__ inline uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ inline float uniform(uint32_t word) { return fminf(__uint2float_rn(word | 1) * 0x1p-32f, 1 - 0x1p-24f); }
__device__ inline float gumbel(float v) { return -logf(-log1pf(-v)); }

}  // namespace kimi_fx::round
