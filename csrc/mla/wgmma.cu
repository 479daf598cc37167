// Tree-verify MLA attention on the warpgroup matrix unit (sm_90a): 64 rows a block, 64 KV tokens a step.
//
// The first warp of a third warpgroup copies KV tiles into two buffers, in boxes of 64 columns, each with a barrier of
// its own. The two math warpgroups take turns: warpgroup w owns every second tile of a piece and its buffer, computes
// its scores and softmax, and hands P on through shared memory; both multiply each P with their own 256 value columns.
// The first warpgroup takes its own P, then the other's. The second takes the first's P while it does its softmax,
// then its own. A box is copied over as soon as nobody needs it: rope columns after the scores, each half of the
// value columns after its warpgroup's product.
//
// Both warpgroups scale P by one running maximum, handed on with P from tile to tile. It follows the true maximum
// only where that is more than 2^kSlack times larger, so the outputs in registers are rarely rescaled.
//
// Row tiles of one request should walk the same KV tiles at the same time: what one of them brought into the L2 serves
// the others. Long because the loader and both warpgroups hand on the same barriers and are read together.

#include "../common/overlap.h"
#include "../common/ptx.h"
#include "../common/store.h"
#include "../common/tensor_map.h"
#include "../common/wgmma.h"
#include "launch.h"
#include "params.h"
#include "schedule.h"

namespace kimi_fx::mla {

namespace {

constexpr int kRows = 64;             // of a block
constexpr int kBoxes = kRow / 64;     // of a row, 64 columns each; the last holds the rope columns
constexpr int kRopeBox = kBoxes - 1;
constexpr int kHalfBoxes = 4;         // of one warpgroup's value columns
constexpr int kHalf = 64 * kHalfBoxes;
constexpr int kStages = 2;            // KV buffers, by owner
constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;
constexpr float kSlack = 8.f;         // base 2
constexpr float kLowest = -1e30f;     // stands for "nothing seen yet"; finite, so that differences are numbers
constexpr float kHidden = -INFINITY;

struct Maps {
    CUtensorMap q, pool, rows;
};

using Box = __nv_bfloat16[64 * 64];

struct Shared {
    Box q[kBoxes];  // the rope box is kept in registers and its place taken by the second P
    Box kv[kStages][kBoxes];
    Box p;
    uint64_t q_full[kBoxes], q_empty;
    uint64_t kv_full[kStages][kBoxes];
    uint64_t kv_empty[kStages][3];  // first half, second half, rope
    uint64_t p_full[2];             // by owner
    float top[2][kRows];            // the running maximum after a tile, by owner
    float sum[2][kRows];
};

// Where the 16 bytes `chunk` of row `row` lie in a box with the 128-byte swizzle.
__device__ inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// The order in which the owner `w` of a tile reads its boxes: rope, its own half, then the half that is freed last.
__device__ inline int box_at(int i, int w) { return i == 0 ? kRopeBox : (w * kHalfBoxes + i - 1) & 7; }

// ---- the copying warp ----

struct Loader {
    const Maps& maps;
    Shared& s;
    int lane;
    int free_parity = 3;  // bit by buffer: the parity of the phase to wait for
    int pieces = 0;

    __device__ void load_piece(const Params& p, const Piece& piece) {
        const int32_t* table = p.page_table + int64_t(piece.request) * p.table_width;
        int next_pages = page_at(table, piece, piece.tile + lane), pages = 0;
        for (int tile = piece.tile; tile < piece.end; ++tile) {
            int t = tile - piece.tile;
            if (t % 32 == 0) {
                pages = next_pages;
                next_pages = page_at(table, piece, tile + 32 + lane);
            }
            int page = __shfl_sync(~0u, pages, t % 32);
            load_tile(piece, tile, page, t);
        }
        ++pieces;
    }

    __device__ int page_at(const int32_t* table, const Piece& piece, int tile) {
        return tile < min(piece.end, piece.prefix) ? __ldg(table + tile) : 0;
    }

    __device__ void load_tile(const Piece& piece, int tile, int page, int t) {
        int w = t % 2, parity = free_parity >> w & 1;
        free_parity ^= 1 << w;
        if (t == 0) ptx::barrier_wait(ptx::shared_address(&s.q_empty), (pieces & 1) ^ 1);
        for (int i = 0; i < kBoxes; ++i) {
            int box = box_at(i, w);
            if (i % kHalfBoxes == 1 || i == 0)
                ptx::barrier_wait(ptx::shared_address(&s.kv_empty[w][box / kHalfBoxes]), parity);
            if (lane == 0) {
                if (t == 0) load_q(piece, box);
                load_kv(piece, tile, page, w, box);
            }
            __syncwarp();
        }
    }

    __device__ void load_q(const Piece& piece, int box) {
        uint32_t full = ptx::shared_address(&s.q_full[box]);
        ptx::barrier_expect(full, sizeof(Box));
        ptx::load_box(maps.q, ptx::shared_address(s.q[box]), full, box * 64, piece.row, piece.request);
    }

    __device__ void load_kv(const Piece& piece, int tile, int page, int stage, int box) {
        uint32_t full = ptx::shared_address(&s.kv_full[stage][box]);
        bool own = tile >= piece.prefix;
        const CUtensorMap& map = own ? maps.rows : maps.pool;
        int token = own ? (tile - piece.prefix) * kPage : 0;
        ptx::barrier_expect(full, sizeof(Box));
        ptx::load_box(map, ptx::shared_address(s.kv[stage][box]), full, box * 64, token, own ? piece.request : page);
    }
};

// ---- a math warpgroup ----

template <int w>
struct Math {
    const Params& p;
    Shared& s;
    int warp, lane;  // warp of the four, lane
    int row;         // of the block's 64, the first of this thread's two: row and row + 8
    int owned = 0, followed = 0, pieces = 0;  // own tiles, tiles of the other warpgroup and pieces so far

    float (&o)[128];
    uint32_t q_rope[4][4];
    float top[2], sum[2];

    __device__ Math(const Params& p, Shared& s, float (&o)[128], int thread)
        : p(p), s(s), warp(thread / 32 % 4), lane(thread % 32), row(warp * 16 + lane / 4), o(o) {}

    __device__ void attend(const Piece& piece) {
        start();
        int tiles = piece.end - piece.tile, t = w;
        for (; t < tiles; t += 2) {
            float score[32];
            uint32_t probability[4][4];
            float factor[2];
            clear_unused(piece, t);
            issue_scores(score, t < 2);
            uint64_t seen[2];
            bool masked = visible(piece, t, seen);
            if constexpr (w == 1) {
                follow_other();
                issue_values();
                wgmma::wait<1>();
            } else {
                wgmma::wait<0>();
            }
            release(w, 2);
            if (masked) hide(score, seen);
            softmax(score, probability, factor);
            if constexpr (w == 1) {
                wgmma::wait<0>();
                release(w ^ 1, w);
            }
            publish(probability);
            rescale(factor);
            issue_own_values(probability);
            wgmma::wait<0>();
            release(w, w);
            ++owned;
            if (w == 0 && t + 1 < tiles) add_other();
        }
        if (w == 1 && t == tiles) add_other();
        finish(piece);
        ++pieces;
    }

    // The other warpgroup's last P into this one's columns.
    __device__ void add_other() {
        follow_other();
        issue_values();
        wgmma::wait<0>();
        release(w ^ 1, w);
    }

    __device__ void start() {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.f;
        ptx::barrier_wait(ptx::shared_address(&s.q_full[kRopeBox]), pieces & 1);
        for (int h = 0; h < 2; ++h) top[h] = kLowest, sum[h] = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::load_matrices(q_rope[k], ptx::shared_address(s.q[kRopeBox]) + fragment(k));
    }

    // Byte offset, in a box, of this lane's row address of the 16 x 16 fragment at depth 16 k.
    __device__ int fragment(int k) const { return swizzled(warp * 16 + lane % 16, 2 * k + lane / 16); }

    __device__ void release(int stage, int part) {
        if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.kv_empty[stage][part]));
    }

    // The tail of the last page may hold anything, and 0 * NaN is NaN.
    __device__ void clear_unused(const Piece& piece, int t) {
        int valid = piece.length - (piece.tile + t) * kPage;
        if (valid >= kPage || piece.tile + t >= piece.prefix) return;
        for (int box = 0; box < kBoxes; ++box) wait_box(box);
        int chunks = (kPage - valid) * 8;
        for (int i = warp * 32 + lane; i < chunks * kBoxes; i += 128) {
            char* box = reinterpret_cast<char*>(s.kv[w][i / chunks]) + valid * 128;
            *reinterpret_cast<uint4*>(box + i % chunks * 16) = make_uint4(0, 0, 0, 0);
        }
        ptx::fence_async();
        ptx::sync_threads(2 + w, 128);
    }

    __device__ void wait_box(int box) {
        ptx::barrier_wait(ptx::shared_address(&s.kv_full[w][box]), owned & 1);
    }

    __device__ void issue_scores(float (&score)[32], bool wait_q) {
        uint64_t q = wgmma::along_rows(ptx::shared_address(s.q[0]));
        uint64_t kv = wgmma::along_rows(ptx::shared_address(s.kv[w][0]));
        wait_box(kRopeBox);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma::scores(score, q_rope[k], kv + kRopeBox * (wgmma::kBox >> 4) + 2 * k, k > 0);
#pragma unroll
        for (int i = 1; i < kBoxes; ++i) {
            int box = box_at(i, w);
            if (wait_q) ptx::barrier_wait(ptx::shared_address(&s.q_full[box]), pieces & 1);
            wait_box(box);
            wgmma::fence();
            int at = box * (wgmma::kBox >> 4);
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma::scores(score, q + at + 2 * k, kv + at + 2 * k, true);
        }
        wgmma::commit();
    }

    // Waits for the P of the other warpgroup's tile and adopts its maximum.
    __device__ void follow_other() {
        ptx::barrier_wait(ptx::shared_address(&s.p_full[w ^ 1]), followed++ & 1);
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float next = s.top[w ^ 1][row + 8 * h];
            factor[h] = ptx::exp2_fast(top[h] - next);
            top[h] = next;
            sum[h] *= factor[h];
        }
        rescale(factor);
    }

    __device__ void rescale(const float (&factor)[2]) {
        if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
    }

    __device__ uint32_t probabilities(int owner) { return ptx::shared_address(owner == 0 ? s.p : s.q[kRopeBox]); }

    __device__ uint64_t half_of(int stage) {
        return wgmma::down_rows(ptx::shared_address(s.kv[stage][0]) + w * kHalfBoxes * wgmma::kBox);
    }

    __device__ void issue_values() {
        uint64_t a = wgmma::along_rows(probabilities(w ^ 1)), b = half_of(w ^ 1);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma::values(o, a + 2 * k, b + (2048 >> 4) * k, true);
        wgmma::commit();
    }

    __device__ void issue_own_values(const uint32_t (&probability)[4][4]) {
        uint64_t b = half_of(w);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma::values(o, probability[k], b + (2048 >> 4) * k, true);
        wgmma::commit();
    }

    // Whether tile t hides anything; then bit c of seen[h]: this thread's row h sees the tile's token c.
    __device__ bool visible(const Piece& piece, int t, uint64_t (&seen)[2]) {
        int tile = piece.tile + t, own = tile - piece.prefix;
        int valid = own < 0 ? piece.length - tile * kPage : p.N - own * kPage;
        uint64_t used = valid >= kPage ? ~0ull : (1ull << valid) - 1;
        seen[0] = seen[1] = used;
        if (own < 0) return valid < kPage;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int node = min(piece.row + row + 8 * h, p.N * p.H - 1) / p.H;
            int last = node - own * kPage;
            if (p.ancestors != nullptr)
                seen[h] &= __ldg(p.ancestors + (int64_t(piece.request) * p.N + node) * 2 + own);
            else
                seen[h] &= last >= 63 ? ~0ull : last < 0 ? 0ull : (2ull << last) - 1;
        }
        return true;
    }

    __device__ void hide(float (&score)[32], const uint64_t (&seen)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint64_t mine = seen[h] >> (lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (!(mine >> (i / 2 * 8 + i % 2) & 1)) score[i / 2 * 4 + h * 2 + i % 2] = kHidden;
        }
    }

    __device__ void softmax(float (&score)[32], uint32_t (&probability)[4][4], float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = kHidden;
#pragma unroll
            for (int i = 0; i < 16; ++i) most = fmaxf(most, score[i / 2 * 4 + h * 2 + i % 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * p.scale_log2;
            float next = most > top[h] + kSlack ? most : top[h];
            factor[h] = ptx::exp2_fast(top[h] - next);
            top[h] = next;
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& x = score[i / 2 * 4 + h * 2 + i % 2];
                x = ptx::exp2_fast(fmaf(x, p.scale_log2, -next));
                total += x;
            }
            sum[h] = fmaf(sum[h], factor[h], total);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            __nv_bfloat162 pair = __floats2bfloat162_rn(score[2 * i], score[2 * i + 1]);
            probability[i / 4][i % 4] = reinterpret_cast<uint32_t&>(pair);
        }
    }

    __device__ void publish(const uint32_t (&probability)[4][4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::store_matrices(probability[k], probabilities(w) + fragment(k));
        if (lane % 4 == 0) {
            s.top[w][row] = top[0];
            s.top[w][row + 8] = top[1];
        }
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.p_full[w]));
    }

    __device__ void finish(const Piece& piece) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if (lane % 4 == 0) s.sum[w][row + 8 * h] = sum[h];
        }
        ptx::sync_threads(1, kMathThreads);
        for (int h = 0; h < 2; ++h) sum[h] += s.sum[w ^ 1][row + 8 * h];
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.q_empty));

        int rows = p.N * p.H;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = row + 8 * h;
            bool real = piece.row + r < rows;
            float inverse = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
            if (piece.slot < 0) {
                write<pack_bf16>(p.out + (int64_t(piece.request) * rows + piece.row + r) * kLatent, h, inverse, real);
            } else {
                int64_t slot_row = int64_t(piece.slot) * p.M + r;
                write<pack_fp16>(p.partial_o + slot_row * kLatent, h, inverse, real);
                if (real && w == 0 && lane % 4 == 0)
                    p.partial_lse[slot_row] = sum[h] > 0.f ? top[h] + log2f(sum[h]) : kHidden;
            }
        }
    }

    // Row h of this thread's two, its half of the columns.
    template <uint32_t (*pack)(float, float), typename T>
    __device__ void write(T* to, int h, float factor, bool real) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                pairs[k] = pack(o[4 * (i + k) + 2 * h] * factor, o[4 * (i + k) + 2 * h + 1] * factor);
            store_blocks(to + w * kHalf + 8 * i, pairs, lane, real);
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) wgmma_kernel(const __grid_constant__ Maps maps, const Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int thread = threadIdx.x;
    if (thread == 0) {
        for (uint64_t& barrier : s.q_full) ptx::barrier_init(ptx::shared_address(&barrier), 1);
        ptx::barrier_init(ptx::shared_address(&s.q_empty), kMathThreads / 32);
        for (int stage = 0; stage < kStages; ++stage) {
            for (uint64_t& barrier : s.kv_full[stage]) ptx::barrier_init(ptx::shared_address(&barrier), 1);
            for (uint64_t& barrier : s.kv_empty[stage]) ptx::barrier_init(ptx::shared_address(&barrier), 4);
        }
        for (uint64_t& barrier : s.p_full) ptx::barrier_init(ptx::shared_address(&barrier), 4);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();

    Piece piece;
    Walk walk(p, blockIdx.x);
    if (thread < kMathThreads) {
        ptx::grow_registers<240>();
        float o[128];
        if (thread < 128) {
            Math<0> math(p, s, o, thread);
            while (walk.next(p, piece)) math.attend(piece);
        } else {
            Math<1> math(p, s, o, thread);
            while (walk.next(p, piece)) math.attend(piece);
        }
    } else {
        ptx::shrink_registers<24>();
        if (thread < kMathThreads + 32) {
            Loader loader{maps, s, thread % 32};
            while (walk.next(p, piece)) loader.load_piece(p, piece);
        }
    }
#endif
}

}  // namespace

cudaError_t launch_wgmma(const Params& p, cudaStream_t stream) {
    constexpr int kPages = 1 << 25;  // the pool's size is not known here; page ids are in range
    Maps maps;
    if (!encode_rows(maps.q, p.q, kRow, kRow, uint64_t(p.N) * p.H, p.B) ||
        !encode_rows(maps.pool, p.pool, kRow, kRow, kPage, kPages) ||
        !encode_rows(maps.rows, p.rows, kRow, kRow, p.N, p.B))
        return cudaErrorInvalidValue;
    cudaError_t error = cudaFuncSetAttribute(wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    if (error != cudaSuccess) return error;
    return launch_overlapped(wgmma_kernel, p.blocks, kThreads, sizeof(Shared), 90, stream, maps, p);
}

}  // namespace kimi_fx::mla
