// Grouped-query attention of the drafter's block on mma.sync m16n8k16, split over the context; a second, overlapped
// launch adds up the splits in their order.
//
// A block has 64 rows, a warp 16 of them and every key of a tile. Tiles of 64 keys and values come in by cp.async,
// kStages deep, and both products read them where they lie (warp_rows.h). Blocks of the same keys and other rows run
// side by side, and the L2 serves the second.

#include "draft_attention.h"

#include <algorithm>

#include "launch.h"
#include "warp_rows.h"

namespace kimi_fx::round {
namespace {

constexpr int kStages = 3;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
#if __CUDA_ARCH__ >= 1200
constexpr int kResident = 1;  // blocks of a multiprocessor, as its shared memory allows
#else
constexpr int kResident = 2;
#endif

// A request's tiles and how many a split takes.
struct Cut {
    int length, page;  // committed tokens; the first page any slot sees
    int tiles, each;

    __device__ Cut(const DraftParams& p, int b) {
        length = p.length[b];
        page = p.window ? max(length - p.window + 1, 0) / kPage : 0;
        tiles = ceil_div(length, kPage) - page + 1;
        each = ceil_div(tiles, p.splits);
    }
};

// Starts the copy of a tile's keys and values; rows that hold nothing become zeros, as the pool's may be NaN.
template <int Head>
__device__ void copy_tile(const DraftParams& p, const Cut& cut, int b, int kv, int tile, int page, uint32_t to) {
    constexpr int kChunks = Head / 8, kRows = kThreads / kChunks;  // rows at a time
    int chunk = threadIdx.x % kChunks;
    bool own = tile == cut.tiles - 1;
    int valid = own ? p.S : cut.length - (cut.page + tile) * kPage;
    int64_t row = own ? int64_t(b) * p.S : int64_t(page) * kPage, column = kv * Head + chunk * 8;
    int64_t stride = int64_t(p.KV) * Head, v_stride = own ? p.v_stride : stride;
    const __nv_bfloat16* keys = (own ? p.k : p.pool_k) + row * stride + column;
    const __nv_bfloat16* values = (own ? p.v : p.pool_v) + row * v_stride + column;
#pragma unroll 8
    for (int i = threadIdx.x / kChunks; i < kPage; i += kRows) {
        int from = i < valid ? i : 0, bytes = i < valid ? 16 : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(chunk_at<Head>(to, i, chunk)),
                     "l"(keys + from * stride), "r"(bytes));
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         chunk_at<Head>(to + kTileBytes<Head>, i, chunk)),
                     "l"(values + from * v_stride), "r"(bytes));
    }
}

__device__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
__device__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

template <int Head>
__global__ void __launch_bounds__(kThreads, kResident) draft_kernel(DraftParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    begin();
    int split = blockIdx.x, kv = blockIdx.y % p.KV, row_tile = blockIdx.y / p.KV, b = blockIdx.z;
    Cut cut(p, b);
    int tile = split * cut.each, end = min(tile + cut.each, cut.tiles);
    if (tile >= end) return;

    const int32_t* pages = p.page_table + int64_t(b) * p.table_width + cut.page;
    auto page_of = [&](int t) { return t < end && t < cut.tiles - 1 ? pages[t] : 0; };
    uint32_t ring = ptx::shared_address(memory);
    auto place_of = [&](int t) { return ring + (t - split * cut.each) % kStages * 2 * kTileBytes<Head>; };
    auto copy = [&](int t, int page) {
        if (t < end) copy_tile<Head>(p, cut, b, kv, t, page, place_of(t));
        close_group();
    };
    for (int t = tile; t < tile + kStages - 1; ++t) copy(t, page_of(t));
    int page = page_of(tile + kStages - 1);  // of the tile to be copied next, read one tile ahead

    int rows = p.S * (p.H / p.KV), first = (row_tile * kWarps + threadIdx.x / 32) * 16;
    WarpRows<Head> own;
    own.read(p, b, kv, first, rows);
    for (; tile < end; ++tile) {
        wait_groups<kStages - 2>();
        __syncthreads();  // the tile is there for all, and the one before it has been read by all
        copy(tile + kStages - 1, page);
        page = page_of(tile + kStages);
        bool last = tile == cut.tiles - 1;
        int start = last ? cut.length : (cut.page + tile) * kPage, valid = last ? p.S : cut.length - start;
        if (!last && valid >= kPage && (!p.window || cut.length + p.S - 1 - start < p.window)) {
            own.template attend<false>(place_of(tile), p.scale_log2, {}, {});
            continue;
        }
        auto low = [&](int own) { return p.window ? own - p.window + 1 : 0; };
        auto high = [&](int own) { return min(valid, p.causal ? own + 1 : p.window ? own + p.window : valid); };
        int row = first + threadIdx.x % 32 / 4, group = p.H / p.KV;
        int2 place = make_int2(cut.length - start + row / group, cut.length - start + (row + 8) / group);
        own.template attend<true>(place_of(tile), p.scale_log2, make_int2(low(place.x), low(place.y)),
                                  make_int2(high(place.x), high(place.y)));
    }
    own.write(p, (int64_t(b) * p.KV + kv) * p.splits + split, first, rows);
}

constexpr int kJoinThreads = 512;  // at most: four a split
constexpr int kAhead = 8;  // partials a thread has in flight before it knows their weights

__device__ float block_reduce(float value, bool maximum) {
    __shared__ float of_warp[kJoinThreads / 32];
    auto op = [&](float x, float y) { return maximum ? fmaxf(x, y) : x + y; };
    for (int d = 16; d; d /= 2) value = op(value, __shfl_xor_sync(~0u, value, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) value = op(value, of_warp[w]);
    return value;
}

// A block has one row; groups of threads with four columns each take every groups-th split.
template <int Head>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(DraftParams p) {
    constexpr int kColumns = Head / 4;
    __shared__ float weight[kMaxSplits];
    __shared__ float4 sums[kJoinThreads / kColumns][kColumns];
    begin();
    int groups = blockDim.x / kColumns;
    int group = p.H / p.KV, rows = p.S * group, b = blockIdx.y;
    int slot = blockIdx.x / p.H, head = blockIdx.x % p.H, row = slot * group + head % group;
    Cut cut(p, b);
    int used = ceil_div(cut.tiles, cut.each), thread = threadIdx.x;
    int64_t first = (int64_t(b) * p.KV + head / group) * p.splits;
    int column = thread % kColumns, start = thread / kColumns;
    auto load = [&](int i) {
        return *reinterpret_cast<const float4*>(p.partial_o + ((first + i) * rows + row) * Head + column * 4);
    };
    float lse = thread < used ? p.partial_lse[(first + thread) * rows + row] : -INFINITY;
    float4 ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (start + j * groups < used) ahead[j] = load(start + j * groups);
    }
    float top = block_reduce(lse, true), share = exp2f(lse - top);
    if (thread < used) weight[thread] = share;
    float total = block_reduce(share, false);

    float4 sum = make_float4(0, 0, 0, 0);
    auto add = [&](float4 o, float w) { sum.x += w * o.x, sum.y += w * o.y, sum.z += w * o.z, sum.w += w * o.w; };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (start + j * groups < used) add(ahead[j], weight[start + j * groups]);
    }
#pragma unroll 4
    for (int i = start + kAhead * groups; i < used; i += groups) add(load(i), weight[i]);
    sums[thread / kColumns][column] = sum;
    __syncthreads();
    if (thread >= kColumns) return;
    for (int g = 1; g < groups; ++g) {
        float4 o = sums[g][column];
        sum.x += o.x, sum.y += o.y, sum.z += o.z, sum.w += o.w;
    }
    uint2 four = {pack(sum.x / total, sum.y / total), pack(sum.z / total, sum.w / total)};
    *reinterpret_cast<uint2*>(p.out + ((int64_t(b) * p.S + slot) * p.H + head) * Head + column * 4) = four;
}

int row_tiles(int S, int H, int KV) { return ceil_div(S * (H / KV), 16 * kWarps); }

template <int Head>
cudaError_t launch_head(const DraftParams& p, int arch, cudaStream_t stream) {
    constexpr int kBytes = kStages * 2 * kTileBytes<Head>;
    static_assert(kBytes <= 99 * 1024);
    cudaError_t error = cudaFuncSetAttribute(draft_kernel<Head>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    dim3 grid(p.splits, p.KV * row_tiles(p.S, p.H, p.KV), p.B);
    error = launch_in_clusters(draft_kernel<Head>, grid, kThreads, kBytes, 1, arch, stream, p);
    if (error != cudaSuccess) return error;
    int threads = std::clamp(ceil_div(4 * p.splits, 32) * 32, 32, kJoinThreads);
    static_assert(kMaxSplits <= kJoinThreads);
    return launch_in_clusters(join_kernel<Head>, dim3(p.S * p.H, p.B), threads, 0, 1, arch, stream, p);
}

}  // namespace

int draft_splits(int B, int S, int H, int KV, int table_width, int multiprocessors, int shared) {
    int resident = std::clamp(shared / (kStages * 2 * kTileBytes<128>), 1, kResident);
    int splits = resident * multiprocessors / (B * KV * row_tiles(S, H, KV));
    return std::clamp(splits, 1, std::min(kMaxSplits, table_width + 1));
}

cudaError_t launch_draft_attention(const DraftParams& p, int arch, cudaStream_t stream) {
    return p.head == 64 ? launch_head<64>(p, arch, stream) : launch_head<128>(p, arch, stream);
}

}  // namespace kimi_fx::round
