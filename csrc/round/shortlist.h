// The k-th best of a cluster's keys for small k: keys from the k-th best of the warps' best on, gathered and ranked.
//
// Every block holds the whole list and ranks it for itself.

#pragma once

#include <cstdint>

#include "cluster.h"
#include "top.h"

namespace kimi_fx::round {

struct Shortlist {
    uint64_t peaks[kMaxCluster * kWalkWarps];
    uint64_t keys[kWalkThreads];
    uint64_t found;
    uint32_t count;  // of keys, in block 0; 0 between uses

    // The k-th best of the warps' best keys, a thread's own being `best`; k at most the cluster's warps.
    __device__ uint64_t peak(uint64_t best, int k) {
        int size = cluster_size(), thread = threadIdx.x, lane = thread % 32;
        best = largest(best);
        if (lane < size) store_to_peer(peer_address(peaks + cluster_rank() * kWalkWarps + thread / 32, lane), best);
        cluster_sync();
        return ranked(peaks, size * kWalkWarps, k);
    }

    __device__ void add(uint64_t key) {
        uint32_t at = add_to_peer(peer_address(&count, 0), 1);
        if (at >= kWalkThreads) return;
        for (int r = 0; r < cluster_size(); ++r) store_to_peer(peer_address(keys + at, r), key);
    }

    // The k-th best of the keys added, whose number goes to `listed`; 0 where they were too many.
    __device__ uint64_t best(int k, int& listed) {
        cluster_sync();
        uint32_t added = load_from_peer(peer_address(&count, 0));
        cluster_sync();  // all have read the count
        if (cluster_rank() == 0 && threadIdx.x == 0) count = 0;
        if (added > kWalkThreads) return 0;
        listed = static_cast<int>(added);
        return ranked(keys, listed, k);
    }

    // 0 where there are fewer.
    __device__ uint64_t ranked(const uint64_t* values, int n, int k) {
        if (threadIdx.x == 0) found = 0;
        __syncthreads();
        int lanes = n <= kWalkThreads / 4 ? 4 : n <= kWalkThreads / 2 ? 2 : 1, c = threadIdx.x / lanes;
        uint64_t mine = c < n ? values[c] : 0;
        int above = count_above(values, n, mine, lanes);
        if (c < n && above == k - 1) found = mine;
        __syncthreads();
        uint64_t result = found;
        __syncthreads();
        return result;
    }
};

}  // namespace kimi_fx::round
