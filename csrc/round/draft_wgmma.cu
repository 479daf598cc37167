// Grouped-query attention of the drafter's block on the warpgroup matrix unit (sm_90a), heads of 128 columns:
// mma.sync's rate is the limit where 16 slots have 8 heads to a key head. Other chips and heads of 64 columns take
// draft_attention.cu's kernel; its second launch adds up the splits of both, which are in half precision, saturated at
// 65,504 (draft_attention.h).
//
// A block has a split's tiles and up to 128 rows. The first warp of a third warpgroup copies the tiles into a ring. The
// two others have 64 rows each and every tile; or, where one has room for all rows, every second tile each, and at the
// end they add up their sums. A tile's values are multiplied while the next tile's scores are; that this should go on
// during the softmax, as it is written, the assembler of CUDA 13.0 does not grant: it waits before it.

#include "common/tensor_map.h"
#include "draft_attention.h"
#include "draft_tiles.h"
#include "launch.h"
#include "warpgroup_rows.h"

namespace kimi_fx::round {
namespace {

constexpr int kRows = kWideRows / 2;  // of a warpgroup
constexpr int kStages = 6;  // even: where warpgroups take turns, each has stages of its own
constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;

struct Maps {
    CUtensorMap pool_k, pool_v, k, v;
};

using Box = __nv_bfloat16[64 * 64];

struct Tile {
    Box k[2], v[2];
};

struct Shared {
    Tile ring[kStages];
    uint64_t full[kStages], empty[kStages];
    uint64_t landed;  // the one page that is not full, before its rows that hold nothing are cleared
};

// What a block does: rows from `first` on of a request's `rows` at one key head, `tiles` tiles from `tile` on.
struct Work {
    int b, kv, split, rows, first, tile, tiles;
    Cut cut;

    __device__ explicit Work(const DraftParams& p)
        : b(blockIdx.z), kv(blockIdx.y % p.KV), split(blockIdx.x), rows(p.S * (p.H / p.KV)), cut(p, b) {
        first = blockIdx.y / p.KV * 2 * kRows;
        tile = split * cut.each;
        tiles = min(cut.each, cut.tiles - tile);
    }
};

// Whether a tile is read by both warpgroups.
__device__ bool shared_tiles(const DraftParams& p) {
    return p.S * (p.H / p.KV) - static_cast<int>(blockIdx.y) / p.KV * 2 * kRows > kRows;
}

__device__ void copy_tile(const CUtensorMap& keys, const CUtensorMap& values, Tile& to, uint32_t full, int x, int z) {
    ptx::barrier_expect(full, sizeof(Tile));
#pragma unroll
    for (int box = 0; box < 2; ++box) {
        ptx::load_box(keys, ptx::shared_address(to.k[box]), full, x + 64 * box, 0, z);
        ptx::load_box(values, ptx::shared_address(to.v[box]), full, x + 64 * box, 0, z);
    }
}

// The tail of the last page may hold anything, and 0 * NaN is NaN.
__device__ void clear_unused(Tile& tile, int valid) {
    int chunks = (kPage - valid) * 8;
    for (int i = threadIdx.x % 32; i < 2 * chunks; i += 32)
        reinterpret_cast<uint4*>(tile.v[i / chunks])[valid * 8 + i % chunks] = make_uint4(0, 0, 0, 0);
    ptx::fence_async();
    __syncwarp();
}

__device__ void copy_tiles(const Maps& maps, const DraftParams& p, const Work& work, Shared& s) {
    const Cut& cut = work.cut;
    const int32_t* pages = p.page_table + int64_t(work.b) * p.table_width + cut.page + work.tile;
    int lane = threadIdx.x % 32, page = 0, column = work.kv * kWideHead;
    int partial = cut.length % kPage ? cut.tiles - 2 - work.tile : -1;
    for (int i = 0; i < work.tiles; ++i) {
        bool own = cut.own(work.tile + i);
        int stage = i % kStages;
        if (i % 32 == 0) page = i + lane < work.tiles && !cut.own(work.tile + i + lane) ? pages[i + lane] : 0;
        int from = __shfl_sync(~0u, page, i % 32);
        ptx::barrier_wait(ptx::shared_address(&s.empty[stage]), i / kStages % 2 ^ 1);
        if (lane == 0) {
            uint32_t full = ptx::shared_address(i == partial ? &s.landed : &s.full[stage]);
            copy_tile(own ? maps.k : maps.pool_k, own ? maps.v : maps.pool_v, s.ring[stage], full, column,
                      own ? work.b : from);
        }
        __syncwarp();
    }
    if (partial < 0 || partial >= work.tiles) return;
    ptx::barrier_wait(ptx::shared_address(&s.landed), 0);
    clear_unused(s.ring[partial % kStages], cut.length % kPage);
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.full[partial % kStages]));
}

// A warpgroup's walk over the tiles. Where tiles are shared, the warpgroups take turns to issue their products, so that
// each has its softmax while the other multiplies.
__device__ void attend(const DraftParams& p, const Work& work, WarpgroupRows& rows, Shared& s, bool shared) {
    int warpgroup = threadIdx.x / 128, step = shared ? 1 : 2, i = shared ? 0 : warpgroup;
    float factor[2];
    auto issue_scores = [&](int i) {
        ptx::barrier_wait(ptx::shared_address(&s.full[i % kStages]), i / kStages % 2);
        rows.issue_scores(ptx::shared_address(s.ring[i % kStages].k));
    };
    auto issue_values = [&](int i) { rows.issue_values(ptx::shared_address(s.ring[i % kStages].v)); };
    auto softmax = [&](int i) {
        rows.scale(p.scale_log2);
        if (!work.cut.all_see_all(p, work.tile + i)) {
            for (int h = 0; h < 2; ++h)
                rows.hide(h, work.cut.seen(p, work.tile + i, (rows.row + 8 * h) / (p.H / p.KV)));
        }
        rows.softmax(factor);
    };
    if (i >= work.tiles) return;
    issue_scores(i);
    wgmma::wait<0>();
    softmax(i);
    rows.adopt(factor);
    for (; i + step < work.tiles; i += step) {
        if (shared && (warpgroup == 1 || i > 0)) ptx::sync_threads(2 + warpgroup, kMathThreads);
        issue_scores(i + step);
        issue_values(i);
        if (shared && (warpgroup == 0 || i + 2 < work.tiles)) ptx::arrive_threads(3 - warpgroup, kMathThreads);
        wgmma::wait<1>();
        softmax(i + step);
        wgmma::wait<0>();
        if (rows.lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.empty[i % kStages]));
        rows.adopt(factor);
    }
    issue_values(i);
    wgmma::wait<0>();
}

__device__ void math(const DraftParams& p, const Work& work, Shared& s, bool shared) {
    int warpgroup = threadIdx.x / 128;
    WarpgroupRows rows(p, work.b, work.kv, work.first + (shared ? warpgroup * kRows : 0), work.rows);
    attend(p, work, rows, s, shared);
    if (shared) return rows.write<0, 16>(p, work.b, work.kv, work.split);
    float* room = reinterpret_cast<float*>(s.ring);
    ptx::sync_threads(1, kMathThreads);  // nobody reads the ring any more
    if (warpgroup == 0) {
        rows.trade<0>(room);
        rows.write<0, 8>(p, work.b, work.kv, work.split);
    } else {
        rows.trade<1>(room);
        rows.write<8, 16>(p, work.b, work.kv, work.split);
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    draft_wgmma_kernel(const __grid_constant__ Maps maps, const DraftParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    bool shared = shared_tiles(p);
    if (threadIdx.x == 0) {
        for (uint64_t& barrier : s.full) ptx::barrier_init(ptx::shared_address(&barrier), 1);
        for (uint64_t& barrier : s.empty) ptx::barrier_init(ptx::shared_address(&barrier), shared ? 8 : 4);
        ptx::barrier_init(ptx::shared_address(&s.landed), 1);
        ptx::barrier_init_fence();
        for (const CUtensorMap* map : {&maps.pool_k, &maps.pool_v, &maps.k, &maps.v}) ptx::prefetch_map(*map);
    }
    __syncthreads();
    begin();
    Work work(p);
    if (work.tiles <= 0) return;
    if (threadIdx.x < kMathThreads) {
        ptx::grow_registers<232>();
        math(p, work, s, shared);
    } else {
        ptx::shrink_registers<40>();
        if (threadIdx.x < kMathThreads + 32) copy_tiles(maps, p, work, s);
    }
#endif
}

}  // namespace

cudaError_t launch_draft_wgmma(const DraftParams& p, cudaStream_t stream) {
    static_assert(kStages % 2 == 0 && sizeof(Shared) <= 227 * 1024);
    constexpr int kPages = 1 << 25;  // the pool's size is not known here; page ids are in range
    uint64_t row = uint64_t(p.KV) * kWideHead;
    Maps maps;
    if (!encode_rows(maps.pool_k, p.pool_k, row, row, kPage, kPages) ||
        !encode_rows(maps.pool_v, p.pool_v, row, row, kPage, kPages) ||
        !encode_rows(maps.k, p.k, row, row, p.S, p.B) || !encode_rows(maps.v, p.v, row, p.v_stride, p.S, p.B))
        return cudaErrorInvalidValue;
    cudaError_t error =
        cudaFuncSetAttribute(draft_wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (error != cudaSuccess) return error;
    dim3 grid(p.splits, p.KV * ceil_div(p.S * (p.H / p.KV), 2 * kRows), p.B);
    return launch_in_clusters(draft_wgmma_kernel, grid, kThreads, sizeof(Shared), 1, 90, stream, maps, p);
}

}  // namespace kimi_fx::round
