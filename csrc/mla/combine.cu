// Adds up the partials of the pairs that the schedule cut over blocks, in the order of the blocks.
//
// A block has one row and some of its columns; Groups threads share a column and take every Groups-th partial.

#include "launch.h"
#include "overlap.h"
#include "schedule.h"

namespace kimi_fx::mla {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 8;  // partials a thread has in flight before it knows their weights

__device__ float block_reduce(float value, bool maximum) {
    __shared__ float of_warp[kThreads / 32];
    for (int d = 16; d; d /= 2) {
        float other = __shfl_xor_sync(~0u, value, d);
        value = maximum ? fmaxf(value, other) : value + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
    for (int w = 1; w < kThreads / 32; ++w) value = maximum ? fmaxf(value, of_warp[w]) : value + of_warp[w];
    return value;
}

template <int Groups>
__global__ void __launch_bounds__(kThreads) combine_kernel(Params p) {
    constexpr int kColumns = kThreads / Groups;  // threads along the columns, four columns each
    constexpr int kParts = kLatent / 4 / kColumns;
    __shared__ float weight[kMaxBlocks];
    __shared__ float4 sums[Groups][kColumns];
    int row = blockIdx.x / kParts, part = blockIdx.x % kParts, height = p.N * p.H;
    int request = row / height, row_tiles = ceil_div(height, p.M);
    int r = row % height % p.M, pair = request * row_tiles + row % height / p.M;
    int2 cut = reinterpret_cast<const int2*>(p.schedule + 4 * kMaxBlocks)[pair];
    int parts = cut.y - cut.x + 1;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // by all: whoever waits for this grid waits for both
#endif
    if (parts == 1) return;
    int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
    const float* partial = p.partial_o + (part * kColumns + column) * 4;
    auto slot = [&](int i) { return int64_t(2 * (cut.x + i) + (i == 0)) * p.M + r; };
    auto load = [&](int i) { return *reinterpret_cast<const float4*>(partial + slot(i) * kLatent); };
    float lse = threadIdx.x < parts ? p.partial_lse[slot(threadIdx.x)] : -INFINITY;
    float4 ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (group + j * Groups < parts) ahead[j] = load(group + j * Groups);
    }
    float top = block_reduce(lse, true);
    float share = exp2f(lse - top);
    weight[threadIdx.x] = share;
    float total = block_reduce(share, false);

    float4 sum = make_float4(0, 0, 0, 0);
    auto add = [&](float4 o, int i) {
        float w = weight[i];
        sum.x += w * o.x, sum.y += w * o.y, sum.z += w * o.z, sum.w += w * o.w;
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (group + j * Groups < parts) add(ahead[j], group + j * Groups);
    }
#pragma unroll 4
    for (int i = group + kAhead * Groups; i < parts; i += Groups) add(load(i), i);
    sums[group][column] = sum;
    __syncthreads();
    if (group) return;
#pragma unroll
    for (int g = 1; g < Groups; ++g) {
        float4 o = sums[g][column];
        sum.x += o.x, sum.y += o.y, sum.z += o.z, sum.w += o.w;
    }
    __nv_bfloat162 two[2] = {__floats2bfloat162_rn(sum.x / total, sum.y / total),
                             __floats2bfloat162_rn(sum.z / total, sum.w / total)};
    __nv_bfloat16* out = p.out + int64_t(row) * kLatent + (part * kColumns + column) * 4;
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(two);
}

}  // namespace

cudaError_t launch_combine(const Params& params, int arch, cudaStream_t stream) {
    int rows = params.B * params.N * params.H;
    auto launch = [&](auto kernel, int parts) {
        return launch_overlapped(kernel, rows * parts, kThreads, 0, arch, stream, params);
    };
    if (rows <= 16) return launch(combine_kernel<16>, 8);  // few rows have many partials each
    if (rows <= 64) return launch(combine_kernel<8>, 4);
    if (rows <= 128) return launch(combine_kernel<4>, 2);
    return launch(combine_kernel<2>, 1);
}

}  // namespace kimi_fx::mla
