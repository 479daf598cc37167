// What host and device agree on for the routed experts. Letters: kimi_fx/graphs/__init__.py.
//
// Weights are Marlin words (kimi_fx/ops/marlin.py): 32 vectors of 16 bytes are 16 inputs x 64 columns. An item is one
// expert with at most 8 NT of its tokens.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::moe {

constexpr int kGroup = 32;    // inputs that share a scale
constexpr int kColumns = 64;  // of a Marlin tile
constexpr int kInputs = 64;   // of a stage: two groups
constexpr int kWarps = 8;     // of a block, that multiply; one more copies
constexpr int kThreads = 32 * (kWarps + 1);
constexpr int kMaxExperts = 1024;
constexpr int kMaxInner = 2048;  // I
constexpr int kSector = 8;       // counters of 32 bytes

struct Params {
    const uint4* x;          // [T, D/8] bf16
    const uint4* w13;        // [E, D/16, 2I/64, 32]
    const uint4* s13;        // [E, D/32, 2I/64, 8]
    const uint4* w2;         // [E, I/16, D/64, 32]
    const uint4* s2;         // [E, I/32, D/64, 8]
    const float* weights;    // [T, k], 0 for padding
    const int32_t* order;    // [T*k] pairs (token * k + slot) by expert, padding last
    const int32_t* offsets;  // [E+1]
    int32_t* counters;       // [counters_size] zero before and after, a sector each
    float* between;          // from gate|up to down: sums (experts.cu) or h (prefill.cu)
    __nv_bfloat16* rows;     // [T*k, D] the experts' results by pair
    __nv_bfloat16* out;      // [T, D]
    int32_t T, k, E, D, I;
    int32_t tiles;     // NT: 8-token tiles of an item at most
    int32_t blocks;    // of the experts' grid
    int32_t stages;    // of a block's ring
    int32_t items;     // at most

    // Tasks given out.
    __device__ int32_t* queue() const { return counters; }
    // Warps that have stored their part of the item's gate|up.
    __device__ int32_t* arrived(int item) const { return counters + kSector * (1 + item); }
};

inline __host__ __device__ int counters_size(const Params& p) { return kSector * (1 + p.items); }

}  // namespace kimi_fx::moe
