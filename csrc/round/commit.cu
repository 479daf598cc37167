// Accepted rows to their pages for all layers of target and drafter in one launch, then the state one step on.
//
// The state comes second because the copies read it. A layer of one kind, a request and a few of its rows are a block.

#include "commit.h"

#include <algorithm>

#include "launch.h"

namespace kimi_fx::round {
namespace {

constexpr int kPage = 64;
constexpr int kCopyThreads = 128;
constexpr int kRows = 8;   // of a block
constexpr int kAhead = 4;  // copies of a thread in flight

__device__ void copy_rows(const CommitParams& p, const Rows& r, int layer, bool node_order) {
    int b = blockIdx.y, first = blockIdx.z * kRows;
    int rows = static_cast<int>(min(p.kept[b] - first, int64_t(kRows)));
    int64_t start = p.length[b] + first;
    auto source = [&](int i) {
        int row = first + i / r.U;
        int64_t from = node_order ? p.path[int64_t(b) * p.A + row] : row;
        return r.rows + layer * r.layer_stride + b * r.request_stride + from * r.row_stride + i % r.U;
    };
    auto target = [&](int i) {
        int64_t at = start + i / r.U, page = p.page_table[int64_t(b) * p.table_width + at / kPage];
        return r.pool + ((layer * r.P + page) * kPage + at % kPage) * r.U + i % r.U;
    };
    for (int from = threadIdx.x; from < rows * r.U; from += kAhead * kCopyThreads) {
        uint4 x[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            int i = from + j * kCopyThreads;
            if (i < rows * r.U) x[j] = *source(i);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            int i = from + j * kCopyThreads;
            if (i < rows * r.U) *target(i) = x[j];
        }
    }
}

__global__ void __launch_bounds__(kCopyThreads) copy_kernel(CommitParams p) {
    begin();
    int layer = blockIdx.x;
    if (layer < p.target.layers) return copy_rows(p, p.target, layer, true);
    layer -= p.target.layers;
    if (layer < p.draft_k.layers) return copy_rows(p, p.draft_k, layer, false);
    copy_rows(p, p.draft_v, layer - p.draft_k.layers, false);
}

__global__ void __launch_bounds__(32) advance_kernel(CommitParams p) {
    begin();
    int b = blockIdx.x;
    int64_t count = p.count[b];
    const int64_t* tokens = p.tokens + int64_t(b) * p.emitted;
    for (int i = threadIdx.x; i < count; i += 32) {
        int64_t at = int64_t(b) * p.V + tokens[i];
        atomicAdd(p.counts + at, 1);
        p.seen[at] = true;
    }
    if (threadIdx.x) return;
    if (count) p.anchor[b] = tokens[count - 1];
    p.length[b] += static_cast<int32_t>(p.kept[b]);
    p.remaining[b] -= count;
    p.min_remaining[b] = max(p.min_remaining[b] - count, int64_t(0));
    p.active[b] = p.running[b] && p.finish[b] == 0;
}

}  // namespace

cudaError_t launch_commit(const CommitParams& params, int arch, cudaStream_t stream) {
    dim3 grid(params.target.layers + 2 * params.draft_k.layers, params.B, ceil_div(params.A, kRows));
    if (grid.x && grid.z) {
        cudaError_t error = launch_in_clusters(copy_kernel, grid, kCopyThreads, 0, 1, arch, stream, params);
        if (error != cudaSuccess) return error;
    }
    return launch_in_clusters(advance_kernel, params.B, 32, 0, 1, arch, stream, params);
}

}  // namespace kimi_fx::round
