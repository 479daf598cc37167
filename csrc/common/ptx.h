// Thin names for PTX: order of kernels, counters in memory, and of sm_90 alone barriers in shared memory, the tensor copy
// engine and fences. Addresses of shared memory are 32-bit, as the instructions take them.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace kimi_fx::ptx {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// For what is worth a register in a short loop: the compiler cannot compute it anew each time.
__device__ inline uint32_t kept(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Words of shared memory that other warps write or read meanwhile.
__device__ inline uint32_t load_word(uint32_t from) {
    uint32_t x;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

__device__ inline void store_word(uint32_t to, uint32_t x) {
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// ---- mbarrier ----

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over. A fresh barrier counts as having just ended a phase of parity 1.
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\nbra again;\nready:\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- barriers among some of a block's warps ----

__device__ inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts these threads in without waiting for the others.
__device__ inline void arrive_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- tensor copies ----

// The box at (x, y, z) into shared memory.
__device__ inline void load_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// A map is read a microsecond sooner where it was asked for ahead.
__device__ inline void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- ordering ----

// Orders this thread's plain accesses to shared memory before later ones by the copy engine and the tensor cores.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Kernels of other chips do not overlap.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- counters in memory ----

// How many came before.
__device__ inline int add_relaxed(int32_t* counter) {
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ inline void add_release(int32_t* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline int load_acquire(const int32_t* counter) {
    int seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}

// ---- copies ----

__device__ inline uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// ---- registers between warps ----

template <int kRegisters>
__device__ inline void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- 8 x 8 matrices between registers and shared memory ----

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ inline void store_matrices(const uint32_t (&r)[4], uint32_t to) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- arithmetic ----

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace kimi_fx::ptx
