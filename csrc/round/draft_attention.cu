// Grouped-query attention of the drafter's block on mma.sync m16n8k16, split over the context; a second, overlapped
// launch adds up the splits in their order.
//
// Four warps have 64 rows, one 16 of them and every key of a tile. Where shared memory holds two rings, rows may be twice
// as many and a block is two such teams: they take every other tile of its split and add up what they have at the end. Tiles of 64
// keys and values come in by cp.async, kStages deep, and both products read them where they lie (warp_rows.h).

#include "draft_attention.h"

#include <algorithm>

#include "launch.h"
#include "warp_rows.h"

namespace kimi_fx::round {
namespace {

constexpr int kStages = 3;
constexpr int kWarps = 4;  // of a team
constexpr int kThreads = 32 * kWarps;

template <int Head>
constexpr int kRingBytes = kStages * 2 * kTileBytes<Head>;

template <int Head, int Blocks>
constexpr int kQueryBytes = Blocks == 1 ? 0 : kWarps * 16 * Blocks * Head * 2;

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
    int thread = threadIdx.x % kThreads, chunk = thread % kChunks;
    bool own = tile == cut.tiles - 1;
    int valid = own ? p.S : cut.length - (cut.page + tile) * kPage;
    int64_t row = own ? int64_t(b) * p.S : int64_t(page) * kPage, column = kv * Head + chunk * 8;
    int64_t stride = int64_t(p.KV) * Head, v_stride = own ? p.v_stride : stride;
    const __nv_bfloat16* keys = (own ? p.k : p.pool_k) + row * stride + column;
    const __nv_bfloat16* values = (own ? p.v : p.pool_v) + row * v_stride + column;
#pragma unroll 2
    for (int i = thread / kChunks; i < kPage; i += kRows) {
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

template <int Head, int Blocks, int Teams>
__global__ void __launch_bounds__(kThreads* Teams, 1) draft_kernel(DraftParams p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    begin();
    int split = blockIdx.x, kv = blockIdx.y % p.KV, row_tile = blockIdx.y / p.KV, b = blockIdx.z;
    Cut cut(p, b);
    int end = min((split + 1) * cut.each, cut.tiles);
    if (split * cut.each >= end) return;

    int team = threadIdx.x / kThreads, warp = threadIdx.x / 32 % kWarps, stage = 0;
    const int32_t* pages = p.page_table + int64_t(b) * p.table_width + cut.page;
    auto page_of = [&](int t) { return t < end && t < cut.tiles - 1 ? pages[t] : 0; };
    uint32_t ring = ptx::shared_address(memory) + team * kRingBytes<Head>;
    auto place_of = [&](int stage) { return ring + stage * 2 * kTileBytes<Head>; };
    auto copy = [&](int t, int page, int stage) {
        if (t < end) copy_tile<Head>(p, cut, b, kv, t, page, place_of(stage));
        close_group();
    };
    int tile = split * cut.each + team;
    for (int i = 0; i < kStages - 1; ++i) copy(tile + i * Teams, page_of(tile + i * Teams), i);
    constexpr int kNext = (kStages - 1) * Teams;
    int page = page_of(tile + kNext);  // of the tile to be copied next, read one tile ahead

    int rows = p.S * (p.H / p.KV), first = (row_tile * kWarps + warp) * 16 * Blocks;
    uint4* queries = reinterpret_cast<uint4*>(memory + Teams * kRingBytes<Head>) + warp * kQueryBytes<Head, Blocks> / 64;
    WarpRows<Head, Blocks> own(queries);
#pragma unroll
    for (int k = 0; k < own.kSteps; ++k) {
        if constexpr (Blocks == 1) own.q[k] = query<Head>(p, b, kv, first, rows, k);
        for (int m = team; Blocks > 1 && m < Blocks; m += Teams) {  // both teams have the same rows
            queries[(m * own.kSteps + k) * 32 + threadIdx.x % 32] = query<Head>(p, b, kv, first + 16 * m, rows, k);
        }
    }
    if (Blocks > 1) __syncthreads();
    for (; tile < end; tile += Teams) {
        wait_groups<kStages - 2>();
        ptx::sync_threads(1 + team, kThreads);  // the tile is there for all, and the one before it has been read by all
        copy(tile + kNext, page, stage == 0 ? kStages - 1 : stage - 1);
        page = page_of(tile + kNext + Teams);
        uint32_t at = place_of(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        bool last = tile == cut.tiles - 1;
        int start = last ? cut.length : (cut.page + tile) * kPage, valid = last ? p.S : cut.length - start;
        bool masked = last || valid < kPage || (p.window && cut.length + p.S - 1 - start >= p.window);
        own.attend(at, p.scale_log2, masked, [&](int m, int half) {
            int row = first + m * 16 + half * 8 + threadIdx.x % 32 / 4;
            int place = cut.length - start + row / (p.H / p.KV);
            int high = p.causal ? place + 1 : p.window ? place + p.window : valid;
            return make_int2(p.window ? place - p.window + 1 : 0, min(valid, high));
        });
    }
    if constexpr (Teams == 2) {
        float* handed = reinterpret_cast<float*>(memory) + warp * 32 * own.kFloats;
        static_assert(kWarps * 32 * own.kFloats * 4 <= Teams * kRingBytes<Head>);
        __syncthreads();
        if (team == 1) own.give(handed);
        __syncthreads();
        if (team == 1) return;
        own.take(handed);
    }
    own.write(p, (int64_t(b) * p.KV + kv) * p.splits + split, first, rows);
}

constexpr int kJoinThreads = 512;
constexpr int kAhead = 4;  // partials a thread has in flight before it knows their weights

__device__ float block_reduce(float value, bool maximum) {
    __shared__ float of_warp[kJoinThreads / 32];
    auto op = [&](float x, float y) { return maximum ? fmaxf(x, y) : x + y; };
    for (int d = 16; d; d /= 2) value = op(value, __shfl_xor_sync(~0u, value, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
    for (int w = 1; w < kJoinThreads / 32; ++w) value = op(value, of_warp[w]);
    return value;
}

// A block has one row; Groups of threads with four columns each take every Groups-th split.
template <int Head>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(DraftParams p) {
    constexpr int kColumns = Head / 4, kGroups = kJoinThreads / kColumns;
    __shared__ float weight[kMaxSplits];
    __shared__ float4 sums[kGroups][kColumns];
    begin();
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
        if (start + j * kGroups < used) ahead[j] = load(start + j * kGroups);
    }
    float top = block_reduce(lse, true), share = exp2f(lse - top);
    if (thread < kMaxSplits) weight[thread] = share;
    float total = block_reduce(share, false);

    float4 sum = make_float4(0, 0, 0, 0);
    auto add = [&](float4 o, float w) { sum.x += w * o.x, sum.y += w * o.y, sum.z += w * o.z, sum.w += w * o.w; };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (start + j * kGroups < used) add(ahead[j], weight[start + j * kGroups]);
    }
#pragma unroll 4
    for (int i = start + kAhead * kGroups; i < used; i += kGroups) add(load(i), weight[i]);
    sums[thread / kColumns][column] = sum;
    __syncthreads();
    if (thread >= kColumns) return;
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
        float4 o = sums[g][column];
        sum.x += o.x, sum.y += o.y, sum.z += o.z, sum.w += o.w;
    }
    uint2 four = {pack(sum.x / total, sum.y / total), pack(sum.z / total, sum.w / total)};
    *reinterpret_cast<uint2*>(p.out + ((int64_t(b) * p.S + slot) * p.H + head) * Head + column * 4) = four;
}

// As the shared memory of a block allows.
int teams_of(int shared) { return shared >= 2 * kRingBytes<128> + kQueryBytes<128, 2> ? 2 : 1; }

int row_blocks(int S, int H, int KV, int shared) { return teams_of(shared) == 2 && S * (H / KV) > 16 * kWarps ? 2 : 1; }

int row_tiles(int S, int H, int KV, int shared) {
    return ceil_div(S * (H / KV), 16 * kWarps * row_blocks(S, H, KV, shared));
}

template <int Head, int Blocks, int Teams>
cudaError_t launch_kernels(const DraftParams& p, int shared, int arch, cudaStream_t stream) {
    constexpr int kBytes = Teams * kRingBytes<Head> + kQueryBytes<Head, Blocks>;
    static_assert(kBytes <= (Teams == 1 ? 99 : 227) * 1024);
    auto kernel = draft_kernel<Head, Blocks, Teams>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    dim3 grid(p.splits, p.KV * row_tiles(p.S, p.H, p.KV, shared), p.B);
    error = launch_in_clusters(kernel, grid, kThreads * Teams, kBytes, 1, arch, stream, p);
    if (error != cudaSuccess) return error;
    return launch_in_clusters(join_kernel<Head>, dim3(p.S * p.H, p.B), kJoinThreads, 0, 1, arch, stream, p);
}

template <int Head>
cudaError_t launch_head(const DraftParams& p, int shared, int arch, cudaStream_t stream) {
    if (teams_of(shared) == 1) return launch_kernels<Head, 1, 1>(p, shared, arch, stream);
    bool tall = row_blocks(p.S, p.H, p.KV, shared) == 2;
    return tall ? launch_kernels<Head, 2, 2>(p, shared, arch, stream)
                : launch_kernels<Head, 1, 2>(p, shared, arch, stream);
}

}  // namespace

int draft_splits(int B, int S, int H, int KV, int table_width, int multiprocessors, int shared) {
    int splits = multiprocessors / (B * KV * row_tiles(S, H, KV, shared));
    return std::clamp(splits, 1, std::min(kMaxSplits, table_width + 1));
}

cudaError_t launch_draft_attention(const DraftParams& p, int shared, int arch, cudaStream_t stream) {
    return p.head == 64 ? launch_head<64>(p, shared, arch, stream) : launch_head<128>(p, shared, arch, stream);
}

}  // namespace kimi_fx::round
