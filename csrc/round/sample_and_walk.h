// Sampling and the walk: what host and device agree on. Letters: kimi_fx/graphs/__init__.py.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::round {

constexpr int kMaxRows = 32;  // A
constexpr int kMaxStops = 32;
constexpr int kAlternatives = 20;
constexpr int kMaxAhead = 8;      // more take longer than the tokens a walk draws one by one
constexpr int kFewestAhead = 4;  // fewer are not worth a launch

struct WalkParams {
    const float* logits;      // [B, N, V]
    const int64_t* token;     // [B, N]
    const int64_t* parent;    // [B, N]
    const int64_t* position;  // [B]
    const bool* active;       // [B]
    const float* temperature;  // [B], and so on: `Sampling` in kimi_fx/graphs/state.py
    const int64_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* presence;
    const float* frequency;
    const float* repetition;
    const float* bias;       // [B, V]
    const int32_t* counts;   // [B, V]
    const bool* seen;        // [B, V]
    const int64_t* seed;     // [B, 2]
    const int64_t* sample;   // [B]
    const int32_t* logprobs;  // [B]
    const int64_t* stop_ids;  // [B, stops]
    const int64_t* remaining;      // [B]
    const int64_t* min_remaining;  // [B]
    float* slices;        // scratch [B * max(ahead, 1), V rounded up to 4] where shared memory holds none, else null
    int32_t* drawn;       // scratch [B, ahead] tokens; -1: the row is not finite
    uint64_t* keys;       // scratch [B, A, 20, chunks]
    void* sums;           // scratch [B, A, chunks, 2] f32
    int32_t* arrived;     // scratch [B, A]
    int64_t* tokens;      // [B, A]
    int64_t* count;       // [B]
    int64_t* path;        // [B, A]
    int64_t* finish;      // [B]
    float* logprob;       // [B, A]
    int64_t* top_ids;     // [B, A, 20]
    float* top_logprobs;  // [B, A, 20]
    int32_t B, N, V, A, stops;
    int32_t ahead;  // nodes drawn from before the walk, all at once
};

// How many of a request's first nodes to draw from ahead of the walk; 0: none.
int nodes_ahead(int B, int N, int arch, int multiprocessors);
// Whether a block's shared memory of this many bytes cannot hold its slice of a row.
bool slices_spill(int B, int V, int N, int shared, int arch, int multiprocessors);
cudaError_t launch_walk(const WalkParams& params, int arch, int multiprocessors, cudaStream_t stream);
cudaError_t launch_logprobs(const WalkParams& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::round
