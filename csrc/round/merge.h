// A row's chunks' lists become one, best first: a lane has a chunk, and the warp takes the best of their heads again and
// again.

#pragma once

#include "top.h"
#include "warp.h"

namespace kimi_fx::round {

constexpr int kHeld = 16;  // first keys of a list in shared memory; few go deeper

struct Merge {
    const uint64_t* keys;  // [k, chunks]
    uint64_t* held;        // [kHeld, chunks] in shared memory
    int k, chunks, taken = 0;
    uint64_t head = 0;

    __device__ Merge(const uint64_t* keys, int k, int chunks, uint64_t* held)
        : keys(keys), held(held), k(k), chunks(chunks) {
        int lane = threadIdx.x % 32;
        if (lane >= chunks) return;
        head = __ldcg(keys + lane);
#pragma unroll
        for (int r = 1; r < kHeld; ++r) {
            if (r < k) held[r * chunks + lane] = __ldcg(keys + r * chunks + lane);
        }
    }

    // 0 past the last.
    __device__ uint64_t next() {
        uint64_t best = largest(head);
        if (head == best && best) {
            int at = ++taken * chunks + threadIdx.x % 32;
            head = taken >= k ? 0 : taken < kHeld ? held[at] : __ldcg(keys + at);
        }
        return best;
    }
};

// The row's exponentials, of its chunks'; for all lanes of a warp.
__device__ inline Sum sum_of(const Sum* sums, int chunks) {
    int lane = threadIdx.x % 32;
    Sum own{-INFINITY, 0};
    if (lane < chunks) own = {__ldcg(&sums[lane].top), __ldcg(&sums[lane].sum)};
    return join_lanes(own);
}

}  // namespace kimi_fx::round
