// Products of four warps together on sm_90a: 64 rows of weights and 16 to 128 tokens, both from shared memory.

#pragma once

#include "../common/wgmma.h"
#include "intrinsics.h"

namespace kimi_fx::layer {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr bool kGroups = true;

// d += a b for a depth of 16.
__device__ inline void multiply(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_8 "}, %8, %9, p, 1, 1, 0, 0;\n}\n"
        : KIMI_FX_SUMS_8(0)
        : "l"(a), "l"(b));
}

__device__ inline void multiply(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_16 "}, %16, %17, p, 1, 1, 0, 0;\n}\n"
        : KIMI_FX_SUMS_16(0)
        : "l"(a), "l"(b));
}

__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b) { wgmma::scores(d, a, b, true); }

__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : KIMI_FX_SUMS_64(0)
        : "l"(a), "l"(b));
}

// `Deep` times 16 inputs from `a` and `b` on, of rows of 128 bytes.
template <int Deep, int Sums>
__device__ void multiply_group(float (&sums)[Sums], const uint4* a, const uint4* b) {
    uint32_t from_a = ptx::shared_address(a), from_b = ptx::shared_address(b);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < Deep; ++i)
        multiply(sums, wgmma::along_rows(from_a + 32 * i), wgmma::along_rows(from_b + 32 * i));
    wgmma::commit();
    wgmma::wait<0>();
}

// What this thread copied is seen by products of groups after the next barrier.
__device__ inline void show_groups() { ptx::fence_async(); }

#else

constexpr bool kGroups = false;

template <int Deep, int Sums>
__device__ void multiply_group(float (&)[Sums], const uint4*, const uint4*) {}

__device__ inline void show_groups() {}

#endif

}  // namespace kimi_fx::layer
