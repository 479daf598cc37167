// The one-block kernel behind schedule.h: a prefix sum over pairs, then every record by binary search.

#include "schedule.h"

namespace kimi_fx::mla {
namespace {

constexpr int kThreads = 1024;

struct Shape {
    int N, H, M, row_tiles, pairs, blocks;
};

__device__ int cost(const Shape& s, const int32_t* length, int pair) {
    return ceil_div(length[pair / s.row_tiles], kPage) + tree_tiles(s.N, s.H, s.M, pair % s.row_tiles) + kPairCost;
}

// Inclusive sum over the block; `largest` becomes the maximum of all.
__device__ int scan(int value, int& largest) {
    __shared__ int sums[32], tops[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(~0u, value, d);
        if (lane >= d) value += below;
        largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    }
    if (lane == 31) sums[warp] = value, tops[warp] = largest;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) value += sums[w];
        largest = max(largest, tops[w]);
    }
    return value;
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(const int32_t* length, int32_t* schedule, Shape s) {
    extern __shared__ int start[];  // [pairs + 1] first unit of each pair
    __shared__ int total;
    int each = ceil_div(s.pairs, kThreads), first = min(s.pairs, static_cast<int>(threadIdx.x) * each);
    int last = min(s.pairs, first + each), sum = 0, largest = 0;
    for (int p = first; p < last; ++p) {
        int c = cost(s, length, p);
        sum += c, largest = max(largest, c);
    }
    int unit = scan(sum, largest) - sum;
    for (int p = first; p < last; ++p) {
        start[p] = unit;
        unit += cost(s, length, p);
    }
    if (threadIdx.x == kThreads - 1) total = unit, start[s.pairs] = unit;
    __syncthreads();

    int run = ceil_div(total, s.blocks), share = ceil_div(s.pairs, s.blocks);
    bool whole = share * largest <= run + run / 16 + kPairCost;
    int2* cuts = reinterpret_cast<int2*>(schedule + 4 * kMaxBlocks);
    for (int p = threadIdx.x; p < s.pairs; p += kThreads) {
        cuts[p] = whole ? make_int2(0, 0) : make_int2((start[p] + kPairCost) / run, (start[p + 1] - 1) / run);
    }
    int b = threadIdx.x;
    if (b >= s.blocks) return;
    int4 record = make_int4(0, 0, 0, 0);
    if (whole) {
        record = make_int4(b * share, 0, 1 << 30, min(s.pairs, (b + 1) * share));
    } else if (b * run < total) {
        int low = 0, high = s.pairs;  // the pair that holds unit b * run
        while (high - low > 1) {
            int middle = (low + high) / 2;
            (start[middle] <= b * run ? low : high) = middle;
        }
        int tile = b * run - start[low] - kPairCost;
        record = make_int4(low, max(tile, 0), run + min(tile, 0), s.pairs);
    }
    reinterpret_cast<int4*>(schedule)[b] = record;
}

}  // namespace

cudaError_t launch_schedule(const int32_t* length, int32_t* schedule, int B, int N, int H, int M, int blocks,
                            cudaStream_t stream) {
    int row_tiles = ceil_div(N * H, M);
    Shape shape{N, H, M, row_tiles, B * row_tiles, blocks};
    size_t bytes = (shape.pairs + 1) * sizeof(int);
    schedule_kernel<<<1, kThreads, bytes, stream>>>(length, schedule, shape);
    return cudaGetLastError();
}

}  // namespace kimi_fx::mla
