// A row's chunks' lists become one, best first: a lane has a chunk, and the warp takes the best of their heads, again
// and again.

#pragma once

#include "top.h"

namespace kimi_fx::round {

constexpr int kHeld = 16;  // first keys of a list in shared memory; few go deeper

__device__ inline uint64_t load_key(uint32_t from) {
    uint64_t key;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(key) : "r"(from) : "memory");
    return key;
}

struct Merge {
    const uint64_t* keys;  // [k, chunks]
    int k, chunks, taken = 0;
    uint32_t held = 0, row;  // the lane's key to fetch next in shared memory, [kHeld + 1, chunks], 0 past the k-th
    uint64_t head = 0, after = 0;  // the lane's next two keys: a step need not wait for the second

    __device__ Merge(const uint64_t* keys, int k, int chunks, uint64_t* room)
        : keys(keys), k(k), chunks(chunks), row(ptx::kept(chunks * sizeof(uint64_t))) {
        int lane = threadIdx.x % 32;
        if (lane >= chunks) return;
#pragma unroll
        for (int r = 0; r <= kHeld; ++r) {
            room[r * chunks + lane] = r < k ? __ldcg(keys + r * chunks + lane) : 0;
        }
        head = room[lane], after = room[chunks + lane];
        held = ptx::shared_address(room + lane) + 2 * row;
    }

    // The lane that has the next key takes it; every lane calls visit(whether it does, its head), which should not
    // branch. All get the key's value, `ordered`; 0 past the last, which none takes.
    template <typename Visit>
    __device__ uint32_t next(Visit visit) {
        uint32_t high = head >> 32, top = __reduce_max_sync(~0u, high);
        bool own = high == top && top;
        unsigned holders = __ballot_sync(~0u, own);
        if (holders & (holders - 1)) own &= uint32_t(head) == __reduce_max_sync(~0u, own ? uint32_t(head) : 0);
        visit(own, head);
        if (own) head = after, ++taken;
        if (own && taken < kHeld) after = load_key(held), held += row;
        if (own && taken >= kHeld) after = taken + 1 < k ? __ldcg(keys + (taken + 1) * chunks + threadIdx.x % 32) : 0;
        return top;
    }
};

// The exponentials of a lane's chunk; joined by `join_lanes`, they are the row's.
__device__ inline Sum sum_of(const Sum* sums, int chunks) {
    int lane = threadIdx.x % 32;
    return lane < chunks ? Sum{__ldcg(&sums[lane].top), __ldcg(&sums[lane].sum)} : Sum{-INFINITY, 0};
}

}  // namespace kimi_fx::round
