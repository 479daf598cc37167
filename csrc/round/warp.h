// What the lanes of a warp find together.

#pragma once

#include <cstdint>

namespace kimi_fx::round {

// The warp's largest, for all its lanes.
__device__ inline uint64_t largest(uint64_t x) {
    uint32_t high = __reduce_max_sync(~0u, uint32_t(x >> 32));
    return uint64_t(high) << 32 | __reduce_max_sync(~0u, x >> 32 == high ? uint32_t(x) : 0);
}

__device__ inline uint64_t total(uint64_t x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

}  // namespace kimi_fx::round
