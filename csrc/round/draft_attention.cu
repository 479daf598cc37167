// Grouped-query attention of the drafter's block on mma.sync m16n8k16, split over the context, for all chips and for
// heads of 64 or 128 columns; draft_wgmma.cu has a kernel that takes its place on sm_90 for 128. A second, overlapped
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

// Starts the copy of a tile's keys and values; rows that hold nothing become zeros, as the pool's may be NaN.
template <int Head>
__device__ void copy_tile(const DraftParams& p, const Cut& cut, int b, int kv, int tile, int page, uint32_t to) {
    constexpr int kChunks = Head / 8, kRows = kThreads / kChunks;  // rows at a time
    int chunk = threadIdx.x % kChunks;
    bool own = cut.own(tile);
    int valid = cut.valid(p, tile);
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
    auto page_of = [&](int t) { return t < end && !cut.own(t) ? pages[t] : 0; };
    uint32_t ring = ptx::shared_address(memory);
    auto place_of = [&](int t) { return ring + (t - split * cut.each) % kStages * 2 * kTileBytes<Head>; };
    auto copy = [&](int t, int page) {
        if (t < end) copy_tile<Head>(p, cut, b, kv, t, page, place_of(t));
        close_group();
    };
    for (int t = tile; t < tile + kStages - 1; ++t) copy(t, page_of(t));
    int page = page_of(tile + kStages - 1);  // of the tile to be copied next, read one tile ahead

    int group = p.H / p.KV, rows = p.S * group, first = (row_tile * kWarps + threadIdx.x / 32) * 16;
    WarpRows<Head> own;
    own.read(p, b, kv, first, rows);
    for (; tile < end; ++tile) {
        wait_groups<kStages - 2>();
        __syncthreads();  // the tile is there for all, and the one before it has been read by all
        copy(tile + kStages - 1, page);
        page = page_of(tile + kStages);
        if (cut.all_see_all(p, tile)) {
            own.template attend<false>(place_of(tile), p.scale_log2, {}, {});
            continue;
        }
        auto seen = [&](int half) { return cut.seen(p, tile, (first + threadIdx.x % 32 / 4 + half * 8) / group); };
        own.template attend<true>(place_of(tile), p.scale_log2, seen(0), seen(1));
    }
    own.write(p, b, kv, split, first, rows);
}

constexpr int kJoinThreads = 512;  // at most: four a split
constexpr int kEach = 8;           // a thread's partials, at most

template <typename Op>
__device__ float reduce(float x, int first, Op op) {
    for (int d = 16; d >= first; d /= 2) x = op(x, __shfl_xor_sync(~0u, x, d));
    return x;
}

// A block has one row. Groups of threads with eight columns each take every groups-th split, and every warp finds all
// splits' weights for itself.
template <int Head>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(DraftParams p) {
    constexpr int kLanes = Head / 8;
    static_assert(kMaxSplits * kLanes <= kEach * kJoinThreads);
    __shared__ float sums[kJoinThreads / 32][Head];
    begin();
    auto largest = [](float x, float y) { return fmaxf(x, y); };
    auto plus = [](float x, float y) { return x + y; };
    int thread = threadIdx.x, lane = thread % 32, groups = blockDim.x / kLanes;
    int group = p.H / p.KV, slot = blockIdx.x / p.H, head = blockIdx.x % p.H, b = blockIdx.y;
    int row = slot * group + head % group;
    Cut cut(p, b);
    int used = ceil_div(cut.tiles, cut.each);
    const float* lse = Partials(p, b, head / group, 0, row).lse;

    uint4 part[kEach];
    float power[kEach], all[kMaxSplits / 32];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        int i = thread / kLanes + j * groups;
        power[j] = i < used ? lse[i] : -INFINITY;
        part[j] = make_uint4(0, 0, 0, 0);
        if (i < used) part[j] = reinterpret_cast<const uint4*>(Partials(p, b, head / group, i, row).o)[thread % kLanes];
    }
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) all[j] = j * 32 + lane < used ? lse[j * 32 + lane] : -INFINITY;
    float top = -INFINITY, total = 0, sum[8] = {};
#pragma unroll
    for (float x : all) top = fmaxf(top, x);
    top = reduce(top, 1, largest);
#pragma unroll
    for (float x : all) total += exp2f(x - top);
    total = reduce(total, 1, plus);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        float weight = exp2f(power[j] - top) / total;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[k] += weight * __half2float(reinterpret_cast<const __half*>(&part[j])[k]);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        sum[k] = reduce(sum[k], kLanes, plus);
        if (lane < kLanes) sums[thread / 32][lane * 8 + k] = sum[k];
    }
    __syncthreads();
    for (int column = thread; column < Head; column += blockDim.x) {
        float x = 0;
        for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) x += sums[warp][column];
        p.out[((int64_t(b) * p.S + slot) * p.H + head) * Head + column] = __float2bfloat16(x);
    }
}

template <int Head>
cudaError_t launch_partials(const DraftParams& p, int arch, cudaStream_t stream) {
    constexpr int kBytes = kStages * 2 * kTileBytes<Head>;
    static_assert(kBytes <= 99 * 1024);
    cudaError_t error = cudaFuncSetAttribute(draft_kernel<Head>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    dim3 grid(p.splits, p.KV * ceil_div(p.S * (p.H / p.KV), 16 * kWarps), p.B);
    return launch_in_clusters(draft_kernel<Head>, grid, kThreads, kBytes, 1, arch, stream, p);
}

template <int Head>
cudaError_t launch_head(const DraftParams& p, int arch, cudaStream_t stream) {
    cudaError_t error =
        on_warpgroups(p, arch) ? launch_draft_wgmma(p, stream) : launch_partials<Head>(p, arch, stream);
    if (error != cudaSuccess) return error;
    int threads = std::clamp(ceil_div(4 * p.splits, 32) * 32, 32, kJoinThreads);
    return launch_in_clusters(join_kernel<Head>, dim3(p.S * p.H, p.B), threads, 0, 1, arch, stream, p);
}

}  // namespace

// As few waves of blocks, up to four, as leave no more of the chip idle than a tenth over the next choice.
int draft_splits(const DraftParams& p, int arch, int multiprocessors, int shared) {
    bool wide = on_warpgroups(p, arch);
    int resident = wide ? 1 : std::clamp(shared / (kStages * 2 * kTileBytes<128>), 1, kResident);
    int places = resident * multiprocessors;
    int blocks = p.B * p.KV * ceil_div(p.S * (p.H / p.KV), wide ? kWideRows : 16 * kWarps);  // of one split
    int splits = 1;
    float most = 0;
    for (int waves = 1; waves <= 4; ++waves) {
        int tried = std::max(waves * places / blocks, 1);
        float busy = float(tried * blocks) / (ceil_div(tried * blocks, places) * places);
        if (busy > most + 0.1f) splits = tried, most = busy;
    }
    return std::clamp(splits, 1, std::min(kMaxSplits, p.table_width + 1));
}

cudaError_t launch_draft_attention(const DraftParams& p, int arch, cudaStream_t stream) {
    return p.head == 64 ? launch_head<64>(p, arch, stream) : launch_head<128>(p, arch, stream);
}

}  // namespace kimi_fx::round
