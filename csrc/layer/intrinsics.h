// The instructions the products of few rows are made of: copies ahead, matrix operands, a cluster's shared memory.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../common/ptx.h"

namespace kimi_fx::layer {

// ---- order of kernels ----

// The next kernel's blocks then start beside this one's, and fill their rings. Any earlier they would take room and
// memory's time from the kernel before.
__device__ inline void wait_for_previous_kernel() {
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();
}

// ---- copies from global to shared memory ----

// 16 bytes, or zeros where `real` is false; nothing is read then.
__device__ inline void copy_once(uint4* to, const void* from, bool real, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(ptx::shared_address(to)),
                 "l"(from), "r"(real ? 16 : 0), "l"(policy)
                 : "memory");
}

__device__ inline void copy_vector(uint4* to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx::shared_address(to)), "l"(from),
                 "r"(real ? 16 : 0)
                 : "memory");
}

__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `open` of this thread's groups are under way.
__device__ inline void wait_for_groups(int open) {
    switch (open) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 6;" ::: "memory");
    }
}

// ---- counters that blocks of one kernel share ----

// For all threads of a block, whose earlier writes are seen by whoever sees the count.
__device__ inline void arrive(int32_t* counter) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(counter);
}

__device__ inline void wait_until(const int32_t* counter, int value) {
    if (threadIdx.x == 0) {
        while (ptx::load_acquire(counter) != value) {
        }
    }
    __syncthreads();
}

// ---- values that tell that they are there: zero is none ----

__device__ inline float4 look(const float4* at) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ inline int look(const int32_t* at) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ inline void show(float4* at, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

__device__ inline void show(int32_t* at, int v) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// ---- products ----

// Four 8 x 8 matrices, lane l pointing at row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], const uint4* row) {
    ptx::load_matrices(r, ptx::shared_address(row));
}

// Two matrices, of which the lanes 0 to 15 point at rows.
__device__ inline void load_matrices(uint32_t (&r)[2], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(ptx::shared_address(row))
                 : "memory");
}

__device__ inline void load_transposed(uint32_t (&r)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx::shared_address(row))
                 : "memory");
}

// d += a b, m16n8k16.
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- a cluster ----

// Every block's earlier writes to its shared memory are seen by all of the cluster afterwards.
__device__ inline void sync_cluster(int blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

__device__ inline uint32_t peer_address(const void* mine, int rank, int blocks) {
    uint32_t address = ptx::shared_address(mine);
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

// What block `rank` has where this one has `mine`. Volatile, so it stays behind the cluster's barrier.
__device__ inline float4 load_peer(const float4* mine, int rank, int blocks) {
    uint32_t address = peer_address(mine, rank, blocks);
    float4 v;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
#endif
    return v;
}

__device__ inline float2 load_peer(const float2* mine, int rank, int blocks) {
    uint32_t address = peer_address(mine, rank, blocks);
    float2 v;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
#else
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
#endif
    return v;
}

}  // namespace kimi_fx::layer
