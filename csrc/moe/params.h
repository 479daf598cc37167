// What host and device agree on for the routed experts. Letters: kimi_fx/graphs/__init__.py.
//
// Weights are Marlin words (kimi_fx/ops/marlin.py): a warp's 32 vectors of 16 bytes are the fragments of 16 inputs x
// 64 columns. An item is one expert with at most 8 NT of its tokens. Two kinds of run make up the work of a warp:
//
//   gate|up  64 gate columns and the same 64 up columns of an item, some of the D / 32 groups of inputs
//   down     64 columns of an item, all I inputs
//
// h lies in fragment order: of every 32 columns, vector j = 0..3 holds columns 2j, 2j+1, 2j+8, 2j+9 and those 16 on,
// which is what one lane feeds to two products.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::moe {

constexpr int kGroup = 32;    // inputs that share a scale
constexpr int kColumns = 64;  // of a Marlin tile
constexpr int kWarps = 8;     // of a block of the experts' kernel
constexpr int kPerWarp = 3;   // tasks of gate|up a warp, about
constexpr int kMaxExperts = 1024;

struct Params {
    const uint4* x;            // [T, D/8] bf16
    const uint4* w13;          // [E, D/16, 2I/64, 32]
    const uint4* s13;          // [E, D/32, 2I/64, 8]
    const uint4* w2;           // [E, I/16, D/64, 32]
    const uint4* s2;           // [E, I/32, D/64, 8]
    const float* weights;      // [T, k]
    const int32_t* order;      // [T*k] pairs (token * k + slot) by expert, padding last
    const int32_t* offsets;    // [E+1]
    uint4* h_fragments;        // [T*k, I/32, 4] in the order of `order`
    float* pair_weights;       // [T*k], 0 for padding
    int32_t* arrived;          // [items, I/64] warps that have stored their part of gate|up
    int32_t* ready;            // [items] columns of h that are complete; follows `arrived`
    int32_t* queue;            // [1] tasks given out; follows `ready`
    float* partial;            // [3 * warps of the grid, 8 NT, 128] sums of gate|up over a piece's groups
    __nv_bfloat16* rows;       // [T*k, D] the experts' results by pair
    __nv_bfloat16* out;        // [T, D]
    int32_t T, k, E, D, I;
    int32_t tiles;     // NT: 8-token tiles of an item at most
    int32_t blocks;    // of the experts' grid
    int32_t counters;  // length of `arrived`, `ready` and `queue` together
};

}  // namespace kimi_fx::moe
