// A warp chooses a token's experts from its logits; one block makes the work list of all tokens.
//
// The list: each expert has a bit for every token that visits it, so that a pair's place is a count of bits, whoever
// set them first. A token visits an expert once.
//
// Both go through a first pass that is not `real`: it writes nothing, but the code is at hand when the logits come.

#pragma once

#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

constexpr int kWords = kMostTokens / 32;

// An expert's place in the order of choice and its weight before it is shared out. 0: chosen already.
struct Score {
    uint32_t order;
    float weight;
};

// Grows with x, NaN above all as torch sorts it; never 0.
__device__ inline uint32_t order_of(float x) {
    int32_t bits = __float_as_int(x);
    return x == x ? bits ^ (bits >> 31 | 1 << 31) : ~0u;
}

// Among equals the lower id's is larger.
__device__ inline uint64_t sort_key(uint32_t order, int id) {
    return order ? uint64_t(order) << 32 | ~uint32_t(id) : 0;
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__host__ __device__ inline int rounded(int experts) { return (experts + 31) / 32 * 32; }

__device__ inline bool all_there(float4 v) {
    return __float_as_int(v.x) && __float_as_int(v.y) && __float_as_int(v.z) && __float_as_int(v.w);
}

// For a warp. Waits for a token's logits, then leaves zeros where they were.
__device__ inline void score_experts(const RouteParams& p, int token, Score* scores, bool real) {
    constexpr int kAtOnce = 3;  // fours of a lane under way
    float4* logits = reinterpret_cast<float4*>(p.logits + int64_t(token) * p.E);
    const float4* bias = reinterpret_cast<const float4*>(p.bias);
#pragma unroll 1
    for (int from = threadIdx.x % 32; from < p.E / 4; from += 32 * kAtOnce) {
        float4 x[kAtOnce], b[kAtOnce];
        bool there;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) b[i] = bias[min(from + 32 * i, p.E / 4 - 1)];
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                bool own = real && from + 32 * i < p.E / 4;
                x[i] = own ? look(logits + from + 32 * i) : b[i];
                there &= !own || all_there(x[i]);
            }
        } while (!there);
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                int e = 4 * (from + 32 * i) + j;
                float weight = sigmoid(x[i].x);
                if (e < p.E) scores[e] = {order_of(weight + b[i].x), weight};
                x[i] = make_float4(x[i].y, x[i].z, x[i].w, 0), b[i] = make_float4(b[i].y, b[i].z, b[i].w, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (real && from + 32 * i < p.E / 4) logits[from + 32 * i] = make_float4(0, 0, 0, 0);
        }
    }
    __syncwarp();
}

// For a warp, K times the best of all. Each lane has every 32nd expert and keeps its best two. `scores`: [E]; the choice
// goes to `chosen` [K].
__device__ inline void choose_experts(const RouteParams& p, int token, Score* scores, uint16_t* chosen, bool real) {
    int lane = threadIdx.x % 32;
    bool valid = p.valid[token], mark = lane < p.K;
    score_experts(p, token, scores, real);
    uint64_t best = 0, second = 0, mine = 0;
#pragma unroll 1
    for (int k = -1; k < p.K; ++k) {
        uint64_t top = k < 0 ? 0 : greatest(best);
        if (lane == k) mine = top;
        if (best != top) continue;
        if (k >= 0) scores[~uint32_t(top)].order = 0;
        best = second, second = 0;
        if (best) continue;
#pragma unroll 4
        for (int e = lane; e < p.E; e += 32) {
            uint64_t key = sort_key(scores[e].order, e);
            second = max(second, min(best, key));
            best = max(best, key);
        }
    }
    float score = valid && mark ? scores[~uint32_t(mine)].weight : 0.f, sum = 1e-20f;
#pragma unroll 1
    for (int k = 0; k < p.K; ++k) sum += __shfl_sync(~0u, score, k);
    if (!mark) return;
    int id = valid ? int(~uint32_t(mine)) : -1;
    chosen[lane] = id;
    if (!real) return;
    p.ids[token * p.K + lane] = id;
    p.weights[token * p.K + lane] = score / sum * p.scale;
}

// For a whole block: all tokens' choice, which their blocks show, and zeros where it was.
__device__ inline void gather_chosen(const RouteParams& p, uint16_t* chosen) {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int from = threadIdx.x; from < p.T * p.K; from += kThreads * kAtOnce) {
        int shown[kAtOnce];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                int at = from + i * kThreads;
                shown[i] = at < p.T * p.K ? look(p.shown + at) : 1;
                there &= shown[i] != 0;
            }
        } while (!there);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int at = from + i * kThreads;
            if (at < p.T * p.K) chosen[at] = shown[i] - 2, p.shown[at] = 0;
        }
    }
}

// For a whole block, the only one. `visits`: [E + 1, kWords] zero, a bit a token; padding visits E. `starts`: [E + 1]
__device__ inline void list_pairs(const RouteParams& p, const uint16_t* chosen, uint32_t* visits, int* starts,
                                  bool real) {
    __shared__ int of_warps[kThreads / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = p.T * p.K;
    auto expert = [&](int pair) { return min(int(chosen[pair]), p.E); };
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
        starts[e] = start;
        if (real) p.offsets[e] = start;
        start += visitors(e, kMostTokens);
    }
    __syncthreads();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
        int e = expert(pair), token = pair / p.K, before = visitors(e, token);
        int at = starts[e] + (e < p.E ? before : before * p.K + pair % p.K);
        if (real) p.order[at] = pair;
    }
}

}  // namespace kimi_fx::layer
