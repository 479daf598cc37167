// The k best of a row of logits and its log-sum-exp, without sorting the row.
//
// A row is cut into chunks, one a block, each from all over the row, as likely ids lie together. A block's threads are
// cut into 2 k groups or more. No logit under the k-th best of the groups' best can be among the block's k best, and
// few others are left: those are ranked by counting, by their values, or where some are equal by their keys. Keys are
// unique, so nothing depends on which thread came first. A warp merges the chunks' lists (merge.h).

#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk.h"
#include "launch.h"

namespace kimi_fx::round {

constexpr int kThreads = 256;
constexpr int kMost = 128;                   // k at most
constexpr int kWarps = kThreads / 32;
constexpr int kSummaries = 3;  // blocks of a multiprocessor at least
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
    alignas(16) float value[kFew + 4];  // of the candidates, and -inf to a multiple of four; before, the groups' best
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

// The same for `count` values rounded up to a multiple of 4.
__device__ inline int count_above(const float* values, int count, float mine, int lanes) {
    int above = 0;
    const float4* fours = reinterpret_cast<const float4*>(values);
#pragma unroll 4
    for (int j = threadIdx.x % lanes; j < ceil_div(count, 4); j += lanes) {
        float4 x = fours[j];
        above += x.x > mine, above += x.y > mine, above += x.z > mine, above += x.w > mine;
    }
    for (int d = lanes / 2; d; d /= 2) above += __shfl_xor_sync(~0u, above, d);
    return above;
}

// The k-th best of the groups' best values, a thread's own being `best`: no larger than the k-th best of all values.
__device__ inline float value_threshold(float best, int k, TopMemory& m) {
    int lanes = k <= kThreads / 8 ? 4 : k <= kThreads / 4 ? 2 : 1;
    for (int d = lanes / 2; d; d /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
    m.value[threadIdx.x / lanes] = best;
    if (threadIdx.x == 0) m.threshold = m.count = 0;
    __syncthreads();
    bool within = count_above(m.value, kThreads / lanes, best, lanes) < k;
    uint32_t least = __reduce_min_sync(~0u, within ? ordered(best) : ~0u);
    if (threadIdx.x % 32 == 0) m.least[threadIdx.x / 32] = least;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) least = min(least, m.least[w]);
    return value_of(uint64_t(least) << 32);
}

// The `k` best of the candidates to `m.list`, unless two of these are equal.
__device__ inline bool rank_values(int k, TopMemory& m) {
    int count = m.count, lanes = count <= kThreads / 4 ? 4 : count <= kThreads / 2 ? 2 : 1;
    if (threadIdx.x < k) m.list[threadIdx.x] = 0;
    if (threadIdx.x < 4) m.value[count + threadIdx.x] = -INFINITY;
    __syncthreads();
    constexpr int kTurns = kFew / kThreads;
    int above[kTurns];
    auto candidate = [&](int t) { return t * kThreads / lanes + static_cast<int>(threadIdx.x) / lanes; };
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
        int i = candidate(t);
        above[t] = k;
        if (t * kThreads / lanes >= count) break;
        int found = count_above(m.value, count, i < count ? m.value[i] : 0.0f, lanes);
        if (i < count) above[t] = found;
        if (above[t] < k) m.list[above[t]] = m.candidate[i];
    }
    __syncthreads();
    bool equal = false;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) equal |= above[t] < k && m.list[above[t]] != m.candidate[candidate(t)];
    return !__syncthreads_or(equal);
}

// Where the i-th logit of a thread lies in the row.
struct Places {
    int first, stride, V;

    __device__ Places(int chunk, int chunks, int V)
        : first((chunk * kThreads + threadIdx.x) * 4), stride(chunks * 4 * kThreads), V(V) {}
    __device__ int operator()(int i) const { return first + i / 4 * stride + i % 4; }
};

// The k best of the chunk's logits to `m.list`; k of them reach the threshold. Where very many do, the threshold is the
// k-th best of the threads' best keys.
__device__ inline void select_logits(const float* row, const float (&x)[kEach], float threshold, Places id_at, int k,
                                     TopMemory& m) {
    uint32_t reach = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) reach |= uint32_t(x[i] >= threshold && id_at(i) < id_at.V) << i;
    static_assert(kEach == 32);
    int at = reach ? atomicAdd(&m.count, __popc(reach)) : 0;
    for (uint32_t left = reach; left && at < kFew; left &= left - 1, ++at) {
        int id = id_at(__ffs(left) - 1);
        float value = row[id];  // once more: registers have no index
        m.value[at] = value, m.candidate[at] = key_of(value, id);
    }
    __syncthreads();
    if (m.count <= kFew) {
        if (!rank_values(k, m)) rank_candidates(k, m);
        return;
    }
    auto key = [&](int i) { return id_at(i) < id_at.V ? key_of(x[i], id_at(i)) : 0; };
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = max(best, key(i));
    m.best[threadIdx.x] = best;
    __syncthreads();
    if (threadIdx.x == 0) m.count = 0;
    if (count_above(m.best, kThreads, best, 1) == k - 1) m.threshold = best;
    __syncthreads();
    uint64_t least = max(m.threshold, uint64_t(1));
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (key(i) >= least) m.candidate[atomicAdd(&m.count, 1)] = key(i);
    }
    __syncthreads();
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
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Places id_at(chunk, chunks, V);
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        float4 four = load_four<float4>(row, id_at(i), V, -INFINITY);
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
    float threshold = value_threshold(best, k, m);
    if (warp == kWarps - 1) {
        own = join_lanes(m.of_warp[lane % kWarps], kWarps);
        if (lane == 0) sums[chunk] = own;
    }
    select_logits(row, x, threshold, id_at, k, m);
    if (threadIdx.x < k) keys[threadIdx.x * chunks + chunk] = m.list[threadIdx.x];
}

}  // namespace kimi_fx::round
