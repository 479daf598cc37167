// The k best of a row of logits and its log-sum-exp, without sorting the row.
//
// A row is cut into chunks, one a block, each from all over the row, as likely ids lie together. Of its threads' best
// every warp takes the one that k / 8 reach: no logit under the least of these can be among the block's k best, and few
// others are left, which are ranked by counting. Keys are unique, so nothing depends on which thread came first. A warp
// merges the chunks' lists (merge.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.h"
#include "launch.h"

namespace kimi_fx::round {

constexpr int kThreads = 256;
constexpr int kMost = 128;                   // k at most
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kChunk / kThreads;     // logits of a thread
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
    uint32_t least[kWarps];
    uint64_t candidate[kCandidates];
    uint64_t list[kMost];  // the result, best first; 0 past the last
    uint64_t threshold;
    int count;
    bool last;
    Sum of_warp[kWarps];
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

// A value that k of the block's logits reach, few of them if many do; the thread's best is `best`.
__device__ inline float common_value(float best, int k, TopMemory& m) {
    int warp = threadIdx.x / 32, each = ceil_div(k, kWarps), above = 0;
    uint32_t value = ordered(best), *values = reinterpret_cast<uint32_t*>(m.best) + 32 * warp;
    values[threadIdx.x % 32] = value;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 32; ++j) above += values[j] > value;
    uint32_t least = __reduce_min_sync(~0u, above < each ? value : ~0u);
    if (threadIdx.x % 32 == 0) m.least[warp] = least;
    if (threadIdx.x == 0) m.threshold = m.count = 0;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) least = min(least, m.least[w]);
    return value_of(uint64_t(least) << 32);
}

// The k best of the chunk's logits to `m.list`, of which `threshold` is reached by k. Where very many reach it, which
// takes equal logits, the threshold is the k-th best of the threads' best keys.
__device__ inline void select_logits(const float (&x)[kEach], float threshold, int first, int stride, int V, int k,
                                     TopMemory& m) {
    auto id_at = [&](int i) { return first + i / 4 * stride + i % 4; };
    auto add_keys = [&](auto reaches, int most) {
        int own = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) own += reaches(i);
        int at = own ? atomicAdd(&m.count, own) : 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (!reaches(i)) continue;
            if (at < most) m.candidate[at] = key_of(x[i], id_at(i));
            ++at;
        }
        __syncthreads();
    };
    add_keys([&](int i) { return x[i] >= threshold && id_at(i) < V; }, kFew);
    if (m.count > kFew) {
        auto key = [&](int i) { return id_at(i) < V ? key_of(x[i], id_at(i)) : 0; };
        uint64_t best = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) best = max(best, key(i));
        m.best[threadIdx.x] = best;
        __syncthreads();
        if (threadIdx.x == 0) m.count = 0;
        if (count_above(m.best, kThreads, best, 1) == k - 1) m.threshold = best;
        __syncthreads();
        uint64_t least = max(m.threshold, uint64_t(1));
        add_keys([&](int i) { return key(i) >= least; }, kCandidates);
    }
    rank_candidates(k, m);
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

// All of so many neighbouring lanes get the result.
__device__ inline Sum join_lanes(Sum s, int lanes = 32) {
    for (int d = lanes / 2; d; d /= 2) s = join(s, {__shfl_xor_sync(~0u, s.top, d), __shfl_xor_sync(~0u, s.sum, d)});
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
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = chunks * 4 * kThreads;
    int first = (chunk * kThreads + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        float4 four = load_four<float4>(row, first + i / 4 * stride, V, -INFINITY);
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
    if (lane == 0) m.of_warp[warp] = own;
    float threshold = common_value(best, k, m);
    if (warp == kWarps - 1) {
        own = join_lanes(m.of_warp[lane % kWarps], kWarps);
        if (lane == 0) sums[chunk] = own;
    }
    select_logits(x, threshold, first, stride, V, k, m);
    if (threadIdx.x < k) keys[threadIdx.x * chunks + chunk] = m.list[threadIdx.x];
}

}  // namespace kimi_fx::round
