// A row's chunks' lists become one, best first: a lane has a chunk, and the warp takes the best of their heads, again
// and again.

#pragma once

#include "top.h"

namespace kimi_fx::round {

constexpr int kHeld = 16;  // first keys of a list in shared memory; few go deeper

struct Merge {
    const uint64_t* keys;  // [k, chunks]
    int k, chunks, taken = 0;
    uint32_t held;  // where the lane's head lies in shared memory, [kHeld + 1, chunks]; 0 past the k-th
    uint64_t head = 0;

    __device__ Merge(const uint64_t* keys, int k, int chunks, uint64_t* room)
        : keys(keys), k(k), chunks(chunks), held(ptx::kept(ptx::shared_address(room + threadIdx.x % 32))) {
        int lane = threadIdx.x % 32;
        if (lane >= chunks) return;
#pragma unroll
        for (int r = 0; r <= kHeld; ++r) {
            room[r * chunks + lane] = r < k ? __ldcg(keys + r * chunks + lane) : 0;
        }
        head = room[lane];
    }

    // The lane that has the next key takes it and calls visit(key). All lanes get its value, `ordered`; 0 past the
    // last.
    template <typename Visit>
    __device__ uint32_t next(Visit visit) {
        uint32_t high = head >> 32, top = __reduce_max_sync(~0u, high);
        unsigned holders = __ballot_sync(~0u, high == top);
        bool own = high == top && top;
        if (holders & (holders - 1)) own &= uint32_t(head) == __reduce_max_sync(~0u, own ? uint32_t(head) : 0);
        if (own) {
            visit(head);
            held += chunks * sizeof(uint64_t);
            if (++taken <= kHeld) {
                asm volatile("ld.shared.u64 %0, [%1];" : "=l"(head) : "r"(held) : "memory");
            } else {
                head = taken < k ? __ldcg(keys + taken * chunks + threadIdx.x % 32) : 0;
            }
        }
        return top;
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
