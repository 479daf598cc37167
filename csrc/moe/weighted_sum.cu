// After the experts: out[t] = sum over slots of weight * row, in slot order in fp32; 8 columns a thread. Counters, which
// nobody reads any more, back to zero.

#include <algorithm>

#include "../common/overlap.h"
#include "asm.h"
#include "launch.h"

namespace kimi_fx::moe {
namespace {

constexpr int kSumThreads = 128;
constexpr int kAhead = 8;  // rows a thread has in flight

__global__ void __launch_bounds__(kSumThreads) weighted_sum_kernel(Params p) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int vectors = p.D / 8, i = blockIdx.x * kSumThreads + threadIdx.x;
    for (int c = i; c < counters_size(p); c += gridDim.x * kSumThreads) p.counters[c] = 0;
    if (i >= p.T * vectors) return;
    int t = i / vectors, column = i - t * vectors;
    float sum[8] = {};
    for (int slot = 0; slot < p.k; slot += kAhead) {
        float weight[kAhead];
        uint4 row[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            int64_t pair = int64_t(t) * p.k + min(slot + a, p.k - 1);
            weight[a] = slot + a < p.k ? p.weights[pair] : 0.f;
            row[a] = __ldcg(reinterpret_cast<const uint4*>(p.rows) + pair * vectors + column);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            if (weight[a] == 0.f) continue;  // padding pairs have no row
            const __nv_bfloat162* two = reinterpret_cast<const __nv_bfloat162*>(&row[a]);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float2 value = __bfloat1622float2(two[c]);
                sum[2 * c] += weight[a] * value.x;
                sum[2 * c + 1] += weight[a] * value.y;
            }
        }
    }
    __nv_bfloat162 out[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) out[c] = __floats2bfloat162_rn(sum[2 * c], sum[2 * c + 1]);
    reinterpret_cast<uint4*>(p.out)[i] = reinterpret_cast<uint4&>(out);
}

}  // namespace

cudaError_t launch_weighted_sum(const Params& p, int arch, cudaStream_t stream) {
    int blocks = (int64_t(p.T) * (p.D / 8) + kSumThreads - 1) / kSumThreads;
    return launch_overlapped(weighted_sum_kernel, blocks, kSumThreads, 0, arch, stream, p);
}

}  // namespace kimi_fx::moe
