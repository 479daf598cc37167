// The one-block kernel behind schedule.h: sums over pairs, the choice of the cut, then every record.

#include "schedule.h"

namespace kimi_fx::mla {
namespace {

constexpr int kThreads = 1024;
constexpr int kWaste = 8;  // an even cut may be longer than the line's by this part of it

struct Shape {
    int N, H, M, row_tiles, pairs, blocks;
};

__device__ int tiles_of(const Shape& s, const int32_t* length, int pair) {
    return ceil_div(length[pair / s.row_tiles], kPage) + tree_tiles(s.N, s.H, s.M, pair % s.row_tiles);
}

__device__ int sum_over_warp(int value) {
    for (int d = 16; d; d /= 2) value += __shfl_xor_sync(~0u, value, d);
    return value;
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
    __syncthreads();  // a scan before this one has been read
    if (lane == 31) sums[warp] = value, tops[warp] = largest;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) value += sums[w];
        largest = max(largest, tops[w]);
    }
    return value;
}

// The fewest KV tiles after which to cut every pair so that the parts are no more than the blocks. By one warp, for
// pairs <= blocks; `start` has the line's units.
__device__ int even_cut(const Shape& s, const int* start, int largest) {
    int low = 1, high = largest;
    while (low < high) {
        int middle = (low + high) / 2, parts = 0;
        for (int p = threadIdx.x % 32; p < s.pairs; p += 32)
            parts += ceil_div(start[p + 1] - start[p] - kPairCost, middle);
        if (sum_over_warp(parts) <= s.blocks)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Blocks take the parts in order of pairs, then tiles.
__device__ void cut_evenly(const Shape& s, const int* start, int cut, int4* records, int2* cuts) {
    int p = threadIdx.x, unused = 0;
    int tiles = p < s.pairs ? start[p + 1] - start[p] - kPairCost : 0, parts = ceil_div(tiles, cut);
    int past = scan(parts, unused), block = past - parts;
    for (int i = 0; i < parts; ++i) records[block + i] = make_int4(p, i * cut, min(cut, tiles - i * cut), p + 1);
    if (p < s.pairs) cuts[p] = make_int2(block, past - 1);
    __shared__ int used;
    if (p == s.pairs - 1) used = past;
    __syncthreads();
    if (p >= used && p < kMaxBlocks) records[p] = make_int4(0, 0, 0, 0);
}

__device__ int4 run_of_line(const Shape& s, const int* start, int run, int block) {
    if (block * run >= start[s.pairs]) return make_int4(0, 0, 0, 0);
    int low = 0, high = s.pairs;  // the pair that holds the run's first unit
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (start[middle] <= block * run ? low : high) = middle;
    }
    int tile = block * run - start[low] - kPairCost;
    return make_int4(low, max(tile, 0), run + min(tile, 0), s.pairs);
}

__global__ void __launch_bounds__(kThreads) schedule_kernel(const int32_t* length, int32_t* schedule, Shape s) {
    extern __shared__ int start[];  // [pairs + 1] first unit of each pair
    __shared__ int cut;
    int each = ceil_div(s.pairs, kThreads), first = min(s.pairs, static_cast<int>(threadIdx.x) * each);
    int last = min(s.pairs, first + each), sum = 0, largest = 0;
    for (int p = first; p < last; ++p) {
        int tiles = tiles_of(s, length, p);
        sum += tiles + kPairCost, largest = max(largest, tiles);
    }
    int unit = scan(sum, largest) - sum;
    for (int p = first; p < last; ++p) {
        start[p] = unit;
        unit += tiles_of(s, length, p) + kPairCost;
    }
    if (threadIdx.x == kThreads - 1) start[s.pairs] = unit;
    __syncthreads();
    bool few = s.pairs <= s.blocks;
    if (few && threadIdx.x < 32) cut = even_cut(s, start, largest);
    __syncthreads();

    int run = ceil_div(start[s.pairs], s.blocks), share = ceil_div(s.pairs, s.blocks);
    int even = few ? cut + kPairCost : share * (largest + kPairCost);
    bool line = even > run + run / kWaste + kPairCost;
    int4* records = reinterpret_cast<int4*>(schedule);
    int2* cuts = reinterpret_cast<int2*>(schedule + 4 * kMaxBlocks);
    if (few && !line) return cut_evenly(s, start, cut, records, cuts);
    for (int p = threadIdx.x; p < s.pairs; p += kThreads)
        cuts[p] = line ? make_int2((start[p] + kPairCost) / run, (start[p + 1] - 1) / run) : make_int2(0, 0);
    int b = threadIdx.x;
    if (b >= kMaxBlocks) return;
    bool used = b < s.blocks;
    records[b] = line && used ? run_of_line(s, start, run, b)
                              : make_int4(b * share, 0, used ? 1 << 30 : 0, min(s.pairs, (b + 1) * share));
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
