// Adds up the partials of the pairs that the schedule cut over blocks, in the order of the blocks.
//
// Eight columns a thread. A block has Rows rows, or a part of the columns of one; Groups threads share a column and take
// every Groups-th partial.

#include <cuda_fp16.h>

#include "../common/overlap.h"
#include "../common/store.h"
#include "launch.h"
#include "schedule.h"

namespace kimi_fx::mla {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 8;  // partials a thread has in flight

// What a thread has seen of its columns: sum and total are relative to 2^top, which none added later exceeds.
struct Seen {
    float top = -INFINITY, total = 0, sum[8] = {};

    __device__ void rise(float to) {
        if (to == top) return;
        float factor = exp2f(top - to);
        top = to;
        total *= factor;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] *= factor;
    }

    __device__ void add(uint4 values, float lse) {
        float weight = lse == -INFINITY ? 0.f : exp2f(lse - top);
        total += weight;
        const __half2* pairs = reinterpret_cast<const __half2*>(&values);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 two = __half22float2(pairs[i]);
            sum[2 * i] = fmaf(weight, two.x, sum[2 * i]);
            sum[2 * i + 1] = fmaf(weight, two.y, sum[2 * i + 1]);
        }
    }

    __device__ void add(const Seen& other) {
        float factor = exp2f(other.top - top);
        total = fmaf(factor, other.total, total);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fmaf(factor, other.sum[i], sum[i]);
    }
};

template <int Groups, int Rows>
__global__ void __launch_bounds__(kThreads, 3) combine_kernel(Params p) {
    constexpr int kColumns = kThreads / Groups / Rows;  // threads along the columns
    constexpr int kParts = kLatent / 8 / kColumns;      // blocks a row
    static_assert(Rows == 1 || kParts == 1);
    __shared__ Seen of_groups[Rows][Groups][kColumns];
    int thread = threadIdx.x, column = thread % kColumns, group = thread / kColumns % Groups;
    int of_block = thread / kColumns / Groups, row = blockIdx.x / kParts * Rows + of_block, height = p.N * p.H;
    int request = row / height, r = row % height % p.M;
    int pair = request * ceil_div(height, p.M) + row % height / p.M;
    int2 cut = make_int2(0, 0);
    if (row < p.B * height) cut = reinterpret_cast<const int2*>(p.schedule + 4 * kMaxBlocks)[pair];
    int parts = cut.y > cut.x ? cut.y - cut.x + 1 : 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // by all: whoever waits for this grid waits for both
#endif
    int first_column = (blockIdx.x % kParts * kColumns + column) * 8;
    auto slot = [&](int i) { return int64_t(2 * (cut.x + i) + (i == 0)) * p.M + r; };
    auto load = [&](int i) { return *reinterpret_cast<const uint4*>(p.partial_o + slot(i) * kLatent + first_column); };
    Seen seen;
    for (int first = group; first < parts; first += kAhead * Groups) {
        uint4 values[kAhead];
        float lse[kAhead], most = seen.top;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            int i = first + j * Groups;
            values[j] = i < parts ? load(i) : make_uint4(0, 0, 0, 0);
            lse[j] = i < parts ? p.partial_lse[slot(i)] : -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) most = fmaxf(most, lse[j]);
        seen.rise(most);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) seen.add(values[j], lse[j]);
    }
    if constexpr (Groups > 1) {
        of_groups[of_block][group][column] = seen;
        __syncthreads();
        if (group) return;
        const auto& others = of_groups[of_block];
        float most = seen.top;
#pragma unroll
        for (int g = 1; g < Groups; ++g) most = fmaxf(most, others[g][column].top);
        seen.rise(most);
#pragma unroll
        for (int g = 1; g < Groups; ++g) seen.add(others[g][column]);
    }
    if (!parts) return;
    float* sum = seen.sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] /= seen.total;
    uint4 out = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                           pack_bf16(sum[6], sum[7]));
    *reinterpret_cast<uint4*>(p.out + int64_t(row) * kLatent + first_column) = out;
}

}  // namespace

cudaError_t launch_combine(const Params& params, int arch, cudaStream_t stream) {
    int rows = params.B * params.N * params.H;
    auto launch = [&](auto kernel, int blocks) {
        return launch_overlapped(kernel, blocks, kThreads, 0, arch, stream, params);
    };
    if (rows <= 16) return launch(combine_kernel<16, 1>, 4 * rows);  // few rows have many partials each
    if (rows <= 64) return launch(combine_kernel<8, 1>, 2 * rows);
    if (rows <= 512) return launch(combine_kernel<4, 1>, rows);
    if (rows <= 1024) return launch(combine_kernel<2, 2>, ceil_div(rows, 2));
    return launch(combine_kernel<1, 4>, ceil_div(rows, 4));
}

}  // namespace kimi_fx::mla
