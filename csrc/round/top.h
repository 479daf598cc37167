// The k best of a row of logits and its log-sum-exp, without sorting the row.
//
// A row is cut into chunks, one a block. A block's threads are cut into 2 k groups or more. No key under the k-th best
// of the groups' best can be among the block's k best, and few others are left: those are ranked by counting. The
// chunks' lists go through the same once more. Keys are unique, so nothing depends on which thread came first.

#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.h"
#include "launch.h"

namespace kimi_fx::round {

constexpr int kThreads = 256;
constexpr int kMost = 128;                   // k at most
constexpr int kEach = kChunk / kThreads;     // logits of a thread
constexpr int kListed = kMaxChunks * kMost / kThreads;  // keys of a thread, where chunks are joined
constexpr int kCandidates = kMost * kEach;   // how many keys can reach the threshold
constexpr int kFew = 512;                    // logits that usually do, at most

// Grows with the logit; -0 is +0.
__device__ inline uint32_t ordered(float x) {
    int32_t bits = __float_as_int(x + 0.0f);
    return bits ^ (bits >> 31 | 1 << 31);
}

// Grows with the logit, then with falling ids. 0 is no key.
__device__ inline uint64_t key_of(float x, int id) { return uint64_t(ordered(x)) << 32 | uint32_t(~id); }
__device__ inline int id_of(uint64_t key) { return static_cast<int>(~uint32_t(key)); }
__device__ inline float value_of(uint64_t key) {
    uint32_t bits = key >> 32;
    return __uint_as_float(bits >> 31 ? bits ^ 1u << 31 : ~bits);
}

// Exponentials added up, relative to their largest.
struct Sum {
    float top, sum;
    __device__ float log() const { return top + logf(sum); }
};

__device__ inline Sum join(Sum a, Sum b) {
    float top = fmaxf(a.top, b.top), shift = top == -INFINITY ? 0 : top;
    return {top, a.sum * __expf(a.top - shift) + b.sum * __expf(b.top - shift)};
}

struct TopMemory {
    uint64_t best[kThreads];
    uint64_t candidate[kCandidates];
    uint64_t list[kMost];  // the result, best first; 0 past the last
    uint64_t threshold;
    uint32_t threshold_value;
    int count;
    bool last;
    Sum of_warp[kThreads / 32];
};

// How many of `count` values are above `mine`; `lanes` neighbours, a power of two, share the count.
template <typename T>
__device__ int count_above(const T* values, int count, T mine, int lanes) {
    int above = 0;
#pragma unroll 8
    for (int j = threadIdx.x % lanes; j < count; j += lanes) above += values[j] > mine;
    for (int d = lanes / 2; d; d /= 2) above += __shfl_xor_sync(~0u, above, d);
    return above;
}

// The best of each group, a thread's own being `best`; lanes of a group.
template <typename T>
__device__ int group_best(T& best, int k, TopMemory& m) {
    int lanes = k <= kThreads / 8 ? 4 : k <= kThreads / 4 ? 2 : 1;
    for (int d = lanes / 2; d; d /= 2) best = max(best, __shfl_xor_sync(~0u, best, d));
    reinterpret_cast<T*>(m.best)[threadIdx.x / lanes] = best;
    if (threadIdx.x == 0) m.threshold = m.count = 0, m.threshold_value = ~0u;
    __syncthreads();
    return lanes;
}

// visit(i, how many are above) for each of the values. Every thread calls.
template <typename Visit>
__device__ void rank_all(const uint64_t* values, int count, Visit visit) {
    int lanes = count <= kThreads / 4 ? 4 : count <= kThreads / 2 ? 2 : 1;
    for (int first = 0; first < count; first += kThreads / lanes) {
        int i = first + static_cast<int>(threadIdx.x) / lanes;
        int above = count_above(values, count, i < count ? values[i] : 0, lanes);
        if (i < count) visit(i, above);
    }
}

// The k best of `m.candidate` to `m.list`.
__device__ inline void rank_candidates(int k, TopMemory& m) {
    if (threadIdx.x < k) m.list[threadIdx.x] = 0;
    __syncthreads();
    rank_all(m.candidate, m.count, [&](int i, int above) {
        if (above < k) m.list[above] = m.candidate[i];
    });
    __syncthreads();
}

// The k best of the block's keys go to `m.list`; key(i) is the thread's i-th, i < Keys.
template <int Keys, typename Key>
__device__ void select(Key key, int k, TopMemory& m) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < Keys; ++i) best = max(best, key(i));
    int lanes = group_best(best, k, m);
    if (count_above(m.best, kThreads / lanes, best, lanes) == k - 1) m.threshold = best;
    __syncthreads();
    uint64_t threshold = max(m.threshold, uint64_t(1));
#pragma unroll
    for (int i = 0; i < Keys; ++i) {
        uint64_t x = key(i);
        if (x >= threshold) m.candidate[atomicAdd(&m.count, 1)] = x;
    }
    rank_candidates(k, m);
}

// The k-th best of the groups' best values, a thread's own being `best`: no larger than the k-th best of all values.
__device__ inline float value_threshold(float best, int k, TopMemory& m) {
    uint32_t value = ordered(best);
    int lanes = group_best(value, k, m);
    bool within = count_above(reinterpret_cast<uint32_t*>(m.best), kThreads / lanes, value, lanes) < k;
    uint32_t least = __reduce_min_sync(~0u, within ? value : ~0u);
    if (threadIdx.x % 32 == 0) atomicMin(&m.threshold_value, least);
    __syncthreads();
    return value_of(uint64_t(m.threshold_value) << 32);
}

// The same as `select` for logits, whose values alone decide unless too many are equal to the threshold.
__device__ inline void select_logits(const float (&x)[kEach], float best, int first, int V, int k, TopMemory& m) {
    auto id_at = [&](int i) { return first + i / 4 * 4 * kThreads + i % 4; };
    float threshold = value_threshold(best, k, m);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (x[i] >= threshold && id_at(i) < V) {
            int slot = atomicAdd(&m.count, 1);
            if (slot < kFew) m.candidate[slot] = key_of(x[i], id_at(i));
        }
    }
    __syncthreads();
    if (m.count <= kFew) return rank_candidates(k, m);
    __syncthreads();
    select<kEach>([&](int i) { return id_at(i) < V ? key_of(x[i], id_at(i)) : 0; }, k, m);
}

// Whether this block is the last of `blocks` to arrive; then it sees what the others wrote.
__device__ inline bool last_to_arrive(int32_t* arrived, int blocks, TopMemory& m) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) m.last = atomicAdd(arrived, 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return m.last;
}

// All lanes get the result.
__device__ inline Sum join_warp(Sum s) {
    for (int d = 16; d; d /= 2) s = join(s, {__shfl_xor_sync(~0u, s.top, d), __shfl_xor_sync(~0u, s.sum, d)});
    return s;
}

// The four elements from `id` on, a multiple of 4; `past` beyond the end.
template <typename Four, typename T>
__device__ Four load_four(const T* row, int id, int V, T past) {
    if (V % 4 == 0 && id < V) return *reinterpret_cast<const Four*>(row + id);
    auto at = [&](int i) { return id + i < V ? row[id + i] : past; };
    return {at(0), at(1), at(2), at(3)};
}

// One of a row's chunks: its k best keys to `keys` [k, chunks], its exponentials to `sums` [chunks].
__device__ inline void summarise(const float* row, int V, int chunk, int chunks, int k, uint64_t* keys, Sum* sums,
                                 TopMemory& m) {
    float x[kEach];
    int first = chunk * kChunk + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        float4 four = load_four<float4>(row, first + i * kThreads, V, -INFINITY);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    float best = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = fmaxf(best, x[i]);
    Sum own{best, 0};
    for (int d = 16; d; d /= 2) own.top = fmaxf(own.top, __shfl_xor_sync(~0u, own.top, d));
    float shift = own.top == -INFINITY ? 0 : own.top;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own.sum += __expf(x[i] - shift);
    for (int d = 16; d; d /= 2) own.sum += __shfl_xor_sync(~0u, own.sum, d);
    if (threadIdx.x % 32 == 0) m.of_warp[threadIdx.x / 32] = own;
    select_logits(x, best, first, V, k, m);
    if (threadIdx.x < k) keys[threadIdx.x * chunks + chunk] = m.list[threadIdx.x];
    if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) own = join(own, m.of_warp[w]);
        sums[chunk] = own;
    }
}

// The chunks of a row joined: its k best keys in `m.list`; every thread gets the row's exponentials. Lists lie rank by
// rank, so that the best keys are far apart among the threads.
__device__ inline Sum gather(const uint64_t* keys, const Sum* sums, int chunks, int k, TopMemory& m) {
    uint64_t held[kListed];
#pragma unroll
    for (int i = 0; i < kListed; ++i) {
        int at = threadIdx.x + i * kThreads;
        held[i] = at < chunks * k ? __ldcg(keys + at) : 0;
    }
    int lane = threadIdx.x % 32;
    Sum own{-INFINITY, 0};
    if (lane < chunks) own = {__ldcg(&sums[lane].top), __ldcg(&sums[lane].sum)};
    Sum whole = join_warp(own);
    select<kListed>([&](int i) { return held[i]; }, k, m);
    return whole;
}

}  // namespace kimi_fx::round
