// From a matrix product's accumulator to 16-byte stores of 16-bit values.
//
// Of eight neighbouring columns of a row, four neighbouring lanes hold two each. Over four such blocks the lanes trade
// places, so that each ends with eight neighbouring columns.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kimi_fx {

__device__ inline uint32_t pack_bf16(float x, float y) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t&>(pair);
}

// Saturates at the largest finite value.
__device__ inline uint32_t pack_fp16(float x, float y) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

// `pairs[i]` is this lane's pair of block i; `to` the row's first of these 32 columns. All lanes must call it.
__device__ inline void store_blocks(void* to, uint32_t (&pairs)[4], int lane, bool write) {
    auto trade = [&](uint32_t& low, uint32_t& high, int bit) {
        bool upper = lane & bit;
        uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
        (upper ? low : high) = other;
    };
    trade(pairs[0], pairs[1], 1);
    trade(pairs[2], pairs[3], 1);
    trade(pairs[0], pairs[2], 2);
    trade(pairs[1], pairs[3], 2);
    if (write) reinterpret_cast<uint4*>(to)[lane % 4] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace kimi_fx
