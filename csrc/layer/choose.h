// A warp chooses a token's experts from its logits; one block makes the work list of all tokens.
//
// The list: each expert has a bit for every token that visits it, so that a pair's place is a count of bits, whoever
// set them first. A token visits an expert once.

#pragma once

#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

constexpr int kWords = kMostTokens / 32;

// Grows with x, NaN above all as torch sorts it; among equals the lower id's is larger. No expert's is under 2^32.
__device__ inline uint64_t sort_key(float x, int id) {
    int32_t bits = __float_as_int(x);
    uint32_t high = x == x ? bits ^ (bits >> 31 | 1 << 31) : ~0u;
    return uint64_t(high) << 32 | ~uint32_t(id);
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__host__ __device__ inline int rounded(int experts) { return (experts + 31) / 32 * 32; }

// For a warp, K times the greatest of all keys. `keys`: [E rounded up to 32], of which each lane has every 32nd.
__device__ inline void choose_experts(const RouteParams& p, int token, uint64_t* keys) {
    constexpr int kAtOnce = 12;
    int lane = threadIdx.x % 32;
    const float* logits = p.logits + int64_t(token) * p.E;
    uint64_t best = 0, mine = 0;
    float2* both = reinterpret_cast<float2*>(keys);
#pragma unroll 1
    for (int from = lane; from < p.E; from += 32 * kAtOnce) {  // all loads under way together
        float2 x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int e = min(from + 32 * i, p.E - 1);
            x[i] = make_float2(logits[e], p.bias[e]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (from + 32 * i < p.E) both[from + 32 * i] = x[i];
        }
    }
#pragma unroll 1
    for (int e = lane; e < p.E; e += 32) {
        keys[e] = sort_key(sigmoid(both[e].x) + both[e].y, e);
        best = max(best, keys[e]);
    }
#pragma unroll 1
    for (int k = 0; k < p.K; ++k) {
        uint64_t top = greatest(best);
        if (lane == k) mine = top;
        if (best != top) continue;
        keys[~uint32_t(top)] = 0;  // the lane that had it goes on with the next of its own
        best = 0;
#pragma unroll 2
        for (int e = lane; e < p.E; e += 32) best = max(best, keys[e]);
    }
    bool real = p.valid[token], mark = lane < p.K;
    float score = real && mark ? sigmoid(logits[~uint32_t(mine)]) : 0.f, sum = 1e-20f;
#pragma unroll 1
    for (int k = 0; k < p.K; ++k) sum += __shfl_sync(~0u, score, k);
    if (!mark) return;
    p.ids[token * p.K + lane] = real ? int(~uint32_t(mine)) : -1;
    p.weights[token * p.K + lane] = score / sum * p.scale;
}

// For a whole block, the only one. `visits`: [E + 1, kWords] zero, a bit a token; padding visits E. `starts`: [E + 1]
__device__ inline void list_pairs(const RouteParams& p, uint32_t* visits, int* starts) {
    __shared__ int of_warps[kThreads / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = p.T * p.K;
    auto expert = [&](int pair) { return min(static_cast<uint32_t>(p.ids[pair]), static_cast<uint32_t>(p.E)); };
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
        int token = pair / p.K;
        atomicOr(visits + expert(pair) * kWords + token / 32, 1u << token % 32);
    }
    __syncthreads();
    auto visitors = [&](int e, int before) {  // of the tokens before this one
        int count = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            int bits = min(max(before - 32 * w, 0), 32);
            count += __popc(visits[e * kWords + w] & (bits == 32 ? ~0u : (1u << bits) - 1));
        }
        return count;
    };
    int each = (p.E + kThreads) / kThreads, first = threadIdx.x * each, last = min(first + each, p.E + 1), mine = 0;
#pragma unroll 1
    for (int e = first; e < last; ++e) mine += visitors(e, kMostTokens);
    int upto = mine;
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp; ++w) upto += of_warps[w];
#pragma unroll 1
    for (int e = first, start = upto - mine; e < last; ++e) {
        starts[e] = p.offsets[e] = start;
        start += visitors(e, kMostTokens);
    }
    __syncthreads();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
        int e = expert(pair), token = pair / p.K, before = visitors(e, token);
        p.order[starts[e] + (e < p.E ? before : before * p.K + pair % p.K)] = pair;
    }
}

}  // namespace kimi_fx::layer
