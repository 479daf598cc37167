// The norm of many tokens before a product of them, a block a token. The product's weights are read meanwhile.

#pragma once

#include "launch.h"
#include "store.h"

namespace kimi_fx::layer {

constexpr int kHeld = 4;  // vectors of a thread that it keeps from sum to product

__device__ inline float squares_of(uint4 v) {
    const __nv_bfloat162* x = reinterpret_cast<const __nv_bfloat162*>(&v);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 two = __bfloat1622float2(x[i]);
        sum += two.x * two.x + two.y * two.y;
    }
    return sum;
}

static __global__ void __launch_bounds__(kThreads) norm_rows_kernel(const __grid_constant__ NormParams p) {
    __shared__ float of_warps[kWarps];
    int vectors = p.width / 8, first = threadIdx.x;
    const uint4* x = reinterpret_cast<const uint4*>(p.x + int64_t(blockIdx.x) * p.width);
    const uint4* norm = reinterpret_cast<const uint4*>(p.norm);
    uint4* h = reinterpret_cast<uint4*>(p.h + int64_t(blockIdx.x) * p.width);
    uint4 weights[kHeld], values[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) weights[i] = norm[min(first + i * kThreads, vectors - 1)];
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) values[i] = x[min(first + i * kThreads, vectors - 1)];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum += first + i * kThreads < vectors ? squares_of(values[i]) : 0.f;
#pragma unroll 1
    for (int at = first + kHeld * kThreads; at < vectors; at += kThreads) sum += squares_of(x[at]);
    sum = sum_of_lanes(sum, 32);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    float scale = inverse_rms(sum_of_lanes(of_warps[threadIdx.x % kWarps], kWarps), p.width, p.eps);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        int at = first + i * kThreads;
        if (at < vectors) h[at] = scaled(values[i], weights[i], scale);
    }
#pragma unroll 1
    for (int at = first + kHeld * kThreads; at < vectors; at += kThreads) h[at] = scaled(x[at], norm[at], scale);
}

static cudaError_t launch_norm_rows(const NormParams& p, const Chip& chip) {
    return launch_blocks(norm_rows_kernel, p.T, 1, 0, chip, p);
}

}  // namespace kimi_fx::layer
