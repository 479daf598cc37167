// The draft tree: what host and device agree on. Letters: kimi_fx/graphs/__init__.py.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::round {

constexpr int kMaxNodes = 128;
constexpr int kMaxDepth = 16;  // S - 1

struct TreeParams {
    const float* logits;    // [B, D, V], D = S - 1
    const int64_t* anchor;  // [B]
    const int64_t* budget;  // [B]
    const int64_t* width;   // [B]
    uint64_t* keys;         // scratch [B, D, k, chunks]
    void* sums;             // scratch [B, D, chunks, 2] f32
    int64_t* token;         // [B, N]
    int64_t* parent;        // [B, N]
    int64_t* depth;         // [B, N]
    float* score;           // [B, N]
    uint64_t* ancestors;    // [B, N, 2]
    bool* valid;            // [B, N]
    int32_t B, D, V, N, k;  // k: best tokens of a depth, at most 128
};

cudaError_t launch_build_tree(const TreeParams& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::round
