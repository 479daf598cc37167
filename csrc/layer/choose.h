// A block chooses a token's experts from its logits; one block makes the work list of all tokens.
//
// Selection counts: an expert's rank is the number of keys above its own, first among 32 neighbours, then among the best
// of all groups of 32. Keys are unique, so ranks are. The list: each expert has a bit for every token that visits it, so
// that a pair's place is a count of bits, whoever set them first. A token visits an expert once.

#pragma once

#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

// Grows with x, NaN above all as torch sorts it; among equals the lower id's is larger. No expert's is under 2^32.
__device__ inline uint64_t sort_key(float x, int id) {
    int32_t bits = __float_as_int(x);
    uint32_t high = x == x ? bits ^ (bits >> 31 | 1 << 31) : ~0u;
    return uint64_t(high) << 32 | ~uint32_t(id);
}

// How many of `count` keys are above `key`.
__device__ inline int count_above(const uint64_t* keys, int count, uint64_t key) {
    int above = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) above += keys[i] > key;
    return above;
}

// For a whole block. `room`: 8 bytes for each expert, rounded up to 32, and for each of K in every 32 of them.
__device__ inline void choose_experts(const RouteParams& p, int token, void* room) {
    __shared__ float chosen[kMostChosen];
    int groups = (p.E + 31) / 32, lane = threadIdx.x % 32;
    uint64_t* keys = static_cast<uint64_t*>(room);
    uint64_t* best = keys + groups * 32;
    const float* logits = p.logits + int64_t(token) * p.E;
    auto score = [&](int e) { return 1.f / (1.f + expf(-logits[e])); };
    for (int g = threadIdx.x / 32; g < groups; g += kThreads / 32) {
        int e = 32 * g + lane;
        uint64_t key = e < p.E ? sort_key(score(e) + p.bias[e], e) : ~uint32_t(e);
        keys[e] = key;
        __syncwarp();
        int rank = count_above(keys + 32 * g, 32, key);
        if (rank < p.K) best[g * p.K + rank] = key;
    }
    __syncthreads();
    bool real = p.valid[token];
    int32_t* ids = p.ids + token * p.K;
    for (int c = threadIdx.x; c < groups * p.K; c += kThreads) {
        int rank = count_above(best, groups * p.K, best[c]);
        if (rank >= p.K) continue;
        int e = ~uint32_t(best[c]);
        ids[rank] = real ? e : -1;
        chosen[rank] = real ? score(e) : 0.f;
    }
    __syncthreads();
    if (threadIdx.x < p.K) {
        float sum = 1e-20f;
        for (int j = 0; j < p.K; ++j) sum += chosen[j];
        p.weights[token * p.K + threadIdx.x] = chosen[threadIdx.x] / sum * p.scale;
    }
}

// For a whole block, the only one. `room`: 5 words for each expert and for padding.
__device__ inline void list_pairs(const RouteParams& p, void* room) {
    __shared__ int of_warps[kThreads / 32];
    constexpr int kWords = kMostTokens / 32;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = p.T * p.K;
    uint32_t* visits = static_cast<uint32_t*>(room);  // [E + 1, kWords] a bit a token; padding visits E
    int* starts = reinterpret_cast<int*>(visits + (p.E + 1) * kWords);
    auto expert = [&](int pair) { return min(static_cast<uint32_t>(p.ids[pair]), static_cast<uint32_t>(p.E)); };
    for (int i = threadIdx.x; i < (p.E + 1) * kWords; i += kThreads) visits[i] = 0;
    __syncthreads();
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
    for (int e = first; e < last; ++e) mine += visitors(e, kMostTokens);
    int upto = mine;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += of_warps[w];
    for (int e = first, start = upto - mine; e < last; ++e) {
        starts[e] = p.offsets[e] = start;
        start += visitors(e, kMostTokens);
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
        int e = expert(pair), token = pair / p.K, before = visitors(e, token);
        p.order[starts[e] + (e < p.E ? before : before * p.K + pair % p.K)] = pair;
    }
}

}  // namespace kimi_fx::layer
