// The router of one expert layer: every token's experts and weights, and the work list sorted by expert.
//
// Two launches, the second overlapped. Selection: a block a token, a thread an expert. An expert's rank is the number
// of keys above its own, counted first within a warp, then among the warps' best; keys are unique, so ranks are. The
// list: a block an expert, which counts the pairs of lower experts for its start and then writes its own in order.
// Nothing depends on which thread came first, and nothing is shared between blocks but the ids.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::moe {

constexpr int kMaxRouted = 1024;  // E
constexpr int kMaxChosen = 32;    // K

struct RouteParams {
    const float* logits;  // [T, E]
    const float* bias;    // [E], chooses but does not weigh
    const bool* valid;    // [T]
    int32_t* ids;         // [T, K] best first, -1: padding
    float* weights;       // [T, K]
    int32_t* order;       // [T * K] pairs (token * K + slot) by expert, padding last
    int32_t* offsets;     // [E + 1]
    int32_t T, E, K;
    float scale;
};

// K at most E.
cudaError_t launch_route(const RouteParams& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::moe
