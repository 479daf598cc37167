// A cluster of blocks that works on one request: what they exchange through each other's shared memory.
//
// sm_80 has no clusters: there a request has one block, and all of this is that block's own.

#pragma once

#include <cstdint>

#include "common/ptx.h"
#include "warp.h"

namespace kimi_fx::round {

constexpr int kWalkThreads = 512;
constexpr int kWalkWarps = kWalkThreads / 32;
constexpr int kPortableCluster = 8;  // blocks that any chip with clusters takes
constexpr int kMaxCluster = 16;

__device__ inline int cluster_rank() {
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

__device__ inline int cluster_size() {
    int size = 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}

// Every block's earlier writes, to any block's shared memory, are seen by all afterwards.
__device__ inline void cluster_sync() {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The address of `p`, which lies in shared memory, in another block.
__device__ inline uint32_t peer_address(const void* p, int rank) {
    uint32_t address = ptx::shared_address(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

__device__ inline void store_to_peer(uint32_t address, uint64_t x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
#else
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
#endif
}

__device__ inline uint32_t load_from_peer(uint32_t address) {
    uint32_t x;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
#else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
#endif
    return x;
}

__device__ inline uint32_t add_to_peer(uint32_t address, uint32_t x) {
    uint32_t before;
#if __CUDA_ARCH__ >= 900
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x) : "memory");
#else
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x) : "memory");
#endif
    return before;
}

struct Exchange {  // two of each: the next reduction's are written while the last one's are read
    uint64_t of_warp[2][kWalkWarps];
    uint64_t of_block[2][kMaxCluster];
};

// One value for all threads of the cluster, of `size` blocks, or of the block, 1: `of_warp` is `largest` or `total`, to
// which 0 is nothing. `turn` is 0 before the first.
template <typename Op>
__device__ uint64_t reduce(Exchange& e, int& turn, uint64_t x, Op of_warp, int size) {
    int lane = threadIdx.x % 32;
    x = of_warp(x);
    if (lane == 0) e.of_warp[turn][threadIdx.x / 32] = x;
    __syncthreads();
    if (size == 1 || threadIdx.x < 32) x = of_warp(lane < kWalkWarps ? e.of_warp[turn][lane] : 0);
    if (size > 1) {
        if (static_cast<int>(threadIdx.x) < size) {
            store_to_peer(peer_address(&e.of_block[turn][cluster_rank()], threadIdx.x), x);
        }
        cluster_sync();
        x = of_warp(lane < size ? e.of_block[turn][lane] : 0);
    }
    turn ^= 1;
    return x;
}

}  // namespace kimi_fx::round
