// A warp chooses a token's experts from its logits; one block makes the work list of all tokens.
//
// The choice: the K-th largest of the lanes' best is a bar that K experts reach, and few more. Those are gathered, and
// each counts how many are better. Loops are short: an instruction that no multiprocessor has takes longer than most.
//
// The list: each expert has a bit for every token that visits it, so that a pair's place is a count of bits, whoever
// set them first. A token visits an expert once.

#pragma once

#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

constexpr int kWords = kMostTokens / 32;

// What a warp needs for its choice, in shared memory.
struct Scratch {
    uint32_t* orders;  // [E] places in the order of choice
    float* weights;    // [E] before they are shared out
    uint32_t* best;    // [32] of the lanes
    float* shares;     // [32] weights of the chosen
    uint2* near;       // [E] orders and ids of those that may be chosen

    static __host__ __device__ int bytes(int experts) { return 16 * experts + 256; }

    __device__ Scratch(uint4* room, int experts) {
        orders = reinterpret_cast<uint32_t*>(room);
        weights = reinterpret_cast<float*>(orders + experts);
        best = reinterpret_cast<uint32_t*>(weights + experts);
        shares = reinterpret_cast<float*>(best + 32);
        near = reinterpret_cast<uint2*>(shares + 32);
    }
};

// Grows with x, NaN above all as torch sorts it; never 0.
__device__ inline uint32_t order_of(float x) {
    int32_t bits = __float_as_int(x);
    return x == x ? bits ^ (bits >> 31 | 1 << 31) : ~0u;
}

__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

__device__ inline bool all_there(float4 v) {
    return __float_as_int(v.x) && __float_as_int(v.y) && __float_as_int(v.z) && __float_as_int(v.w);
}

// For a warp. Waits for a token's logits, then leaves zeros where they were. The best order of the lane's experts.
__device__ inline uint32_t score_experts(const RouteParams& p, int token, const Scratch& to) {
    constexpr int kAtOnce = 3;  // fours of a lane under way
    float4* logits = reinterpret_cast<float4*>(p.logits + int64_t(token) * p.E);
    const float4* bias = reinterpret_cast<const float4*>(p.bias);
    uint32_t best = 0;
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
                bool own = from + 32 * i < p.E / 4;
                x[i] = own ? look(logits + from + 32 * i) : b[i];
                there &= !own || all_there(x[i]);
            }
        } while (!there);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int at = from + 32 * i;
            if (at >= p.E / 4) break;
            float4 w = make_float4(sigmoid(x[i].x), sigmoid(x[i].y), sigmoid(x[i].z), sigmoid(x[i].w));
            uint4 order = {order_of(w.x + b[i].x), order_of(w.y + b[i].y), order_of(w.z + b[i].z),
                           order_of(w.w + b[i].w)};
            best = max(best, max(max(order.x, order.y), max(order.z, order.w)));
            reinterpret_cast<float4*>(to.weights)[at] = w;
            reinterpret_cast<uint4*>(to.orders)[at] = order;
            logits[at] = make_float4(0, 0, 0, 0);
        }
    }
    return best;
}

// For a warp. What the best of K lanes reach, if as many have experts.
__device__ inline uint32_t find_bar(uint32_t own, uint32_t* best, int K) {
    best[threadIdx.x % 32] = own;
    __syncwarp();
    int better = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint4 four = reinterpret_cast<const uint4*>(best)[i];
        better += (four.x > own) + (four.y > own) + (four.z > own) + (four.w > own);
    }
    return __reduce_min_sync(~0u, better < K ? own : ~0u);
}

// For a warp. At least K that reach the bar, with all that can be chosen among them, go to `near` in any order: all above
// it, then of equals the lowest ids. How many they are. A lane has the fours of experts that it scored.
__device__ inline int gather_near(const RouteParams& p, const uint32_t* orders, uint32_t bar, uint2* near) {
    unsigned lane = threadIdx.x % 32, before = (1u << lane) - 1, above = 0, equal = 0;
#pragma unroll 1
    for (int i = 0; 128 * i + 4 * lane < p.E; ++i) {
        uint4 x = reinterpret_cast<const uint4*>(orders)[32 * i + lane];
        above |= ((x.x > bar) | (x.y > bar) << 1 | (x.z > bar) << 2 | (x.w > bar) << 3) << 4 * i;
        equal |= ((x.x == bar) | (x.y == bar) << 1 | (x.z == bar) << 2 | (x.w == bar) << 3) << 4 * i;
    }
    auto lowest = [&](unsigned bits) -> unsigned {
        int bit = __ffs(bits) - 1;
        return 128 * (bit / 4) + 4 * lane + bit % 4;
    };
    int count = 0;
#pragma unroll 1
    while (unsigned lanes = __ballot_sync(~0u, above != 0)) {
        if (above) {
            unsigned id = lowest(above);
            near[count + __popc(lanes & before)] = {orders[id], id};
            above &= above - 1;
        }
        count += __popc(lanes);
    }
#pragma unroll 1
    for (; count < p.K; ++count) {
        unsigned own = equal ? lowest(equal) : ~0u, id = __reduce_min_sync(~0u, own);
        if (own == id) near[count] = {bar, id}, equal &= equal - 1;
    }
    __syncwarp();
    return count;
}

// For a warp, K times the best of all, the lower id among equals. The lane's: the k-th best's id and weight, -1 and 0 for
// padding.
struct Choice {
    int id;
    float weight;
};

__device__ inline Choice choose_experts(const RouteParams& p, int token, const Scratch& room) {
    unsigned lane = threadIdx.x % 32;
    bool valid = p.valid[token];
    uint32_t bar = find_bar(score_experts(p, token, room), room.best, p.K);
    if (!valid) return {-1, 0};
    int count = gather_near(p, room.orders, bar, room.near);
#pragma unroll 1
    for (int at = lane; at < count; at += 32) {
        uint2 own = room.near[at];
        int better = 0;
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            uint2 other = room.near[i];
            better += other.x > own.x || (other.x == own.x && other.y < own.y);
        }
        if (better < p.K) room.best[better] = own.y, room.shares[better] = room.weights[own.y];
    }
    __syncwarp();
    float sum = 1e-20f;
#pragma unroll 4
    for (int k = 0; k < p.K; ++k) sum += room.shares[k];
    return {int(room.best[lane]), room.shares[lane] / sum * p.scale};
}

// Which token a pair is of, without dividing.
struct Pairs {
    int K, inverse;
    __device__ explicit Pairs(int K) : K(K), inverse((1 << 20) / K + 1) {}
    __device__ int token(int pair) const { return pair * inverse >> 20; }
};

// What the list is made from and made of, in shared memory.
struct List {
    uint32_t* visits;  // [E + 1, kWords] a bit a token; padding visits E
    int* starts;       // [E + 1]
    uint16_t* chosen;  // [T, K]
    int E;

    static int bytes(const RouteParams& p) { return 20 * (p.E + 1) + 4 + 2 * p.T * p.K; }

    __device__ List(const RouteParams& p, uint4* room) : E(p.E) {
        visits = reinterpret_cast<uint32_t*>(room);
        starts = reinterpret_cast<int*>(visits + (E + 1) * kWords);
        chosen = reinterpret_cast<uint16_t*>(starts + E + 1);
    }
    __device__ void clear() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < (E + 1) * kWords; i += kThreads) visits[i] = 0;
    }
    __device__ void note(int pair, int token, int id) const {
        int expert = id < 0 ? E : id;
        chosen[pair] = expert;
        atomicOr(visits + expert * kWords + token / 32, 1u << token % 32);
    }
    // Of the tokens before this one.
    __device__ int visitors(int expert, int before) const {
        uint4 all = reinterpret_cast<const uint4*>(visits)[expert];
        uint32_t words[kWords] = {all.x, all.y, all.z, all.w};
        int count = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            int bits = min(max(before - 32 * w, 0), 32);
            count += __popc(words[w] & (bits == 32 ? ~0u : (1u << bits) - 1));
        }
        return count;
    }
};

// For a whole block: all tokens' choice, which their blocks show, and zeros where it was.
__device__ inline void gather_chosen(const RouteParams& p, const Pairs& pairs, const List& list) {
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
            if (at < p.T * p.K) list.note(at, pairs.token(at), shown[i] - 2), p.shown[at] = 0;
        }
    }
}

// For a whole block: how many come before this thread's.
__device__ inline int sum_before(int mine) {
    __shared__ alignas(16) int of_warps[kWarps];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) upto += w < warp ? of_warps[w] : 0;
    return upto - mine;
}

// For a whole block, the only one, after its barrier.
__device__ inline void list_pairs(const RouteParams& p, const Pairs& pairs, const List& list) {
    int each = (p.E + kThreads) / kThreads, first = threadIdx.x * each, last = min(first + each, p.E + 1), mine = 0;
#pragma unroll 1
    for (int e = first; e < last; ++e) mine += list.visitors(e, kMostTokens);
    int start = sum_before(mine);
#pragma unroll 1
    for (int e = first; e < last; ++e) {
        list.starts[e] = start;
        p.offsets[e] = start;
        start += list.visitors(e, kMostTokens);
    }
    __syncthreads();
#pragma unroll 2
    for (int pair = threadIdx.x; pair < p.T * p.K; pair += kThreads) {
        int e = list.chosen[pair], token = pairs.token(pair), before = list.visitors(e, token);
        int at = list.starts[e] + (e < p.E ? before : before * p.K + pair - token * p.K);
        p.order[at] = pair;
    }
}

}  // namespace kimi_fx::layer
