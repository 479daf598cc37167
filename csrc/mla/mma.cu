// Tree-verify MLA attention on mma.sync m16n8k16 (sm_80 and up): row tiles of 16, 32 or 64 rows.
//
// KV rows come in T at a time, into a ring of padded rows that serve both products: by warps of their own, or where
// registers leave no room for them (M > 16) by the 8 math warps. The scores' 576 columns are split over 4 warps,
// each with its part of q in registers; the parts meet in shared memory, where each warp does the softmax of M / 8
// rows. For the values the warps share the 512 columns. One file holds the three tile sizes, hence its length.

#include <algorithm>

#include "../common/overlap.h"
#include "../common/store.h"
#include "launch.h"
#include "schedule.h"

namespace kimi_fx::mla {
namespace {

constexpr int kMathWarps = 8;
constexpr int kMathThreads = 32 * kMathWarps;
constexpr int kStride = kRow + 8;  // elements of a padded row: 73 chunks of 16 bytes, so 8 rows meet all banks
constexpr int kSplits = 4;         // warps that share a score's columns
constexpr int kSteps = kRow / kSplits / 16;
constexpr int kMaxStages = 5;

template <int M, int T>
struct Tile {
    static constexpr int kRowWarps = M == 16 ? 1 : 2;
    static constexpr int kRowBlocks = M / kRowWarps / 16;  // of a warp, 16 rows each
    static constexpr int kColumnWarps = 8 / kRowWarps;
    static constexpr int kTokens = T / (kColumnWarps / kSplits);  // of a warp, in the scores
    static constexpr int kColumns = kLatent / kColumnWarps;       // of a warp, in the values
    static constexpr int kScoreStride = T + 8;                    // floats
    static constexpr int kWeightStride = T + 8;                   // bf16
    static constexpr int kPasses = M / 8 * T / 32;                // softmax rows of a lane
    static constexpr int kLoaders = M == 16 ? 4 : 0;              // warps that only load
    static constexpr int kParts = kLoaders ? kLoaders : kMathWarps;  // warps that share the copy of a step
    static constexpr int kThreads = kMathThreads + 32 * kLoaders;
    static constexpr int kWeightBytes = M * kWeightStride * sizeof(__nv_bfloat16);
    static constexpr int kScoreBytes = kWeightBytes + (kSplits * M * kScoreStride + 2 * M) * sizeof(float);
    static constexpr int kStageBytes = T * kStride * sizeof(__nv_bfloat16);
};

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

#if __CUDA_ARCH__ >= 900 && !defined(KIMI_FX_NO_BULK)
#define KIMI_FX_BULK 1  // rows by the copy engine; else cp.async, 16 bytes a lane
#endif

__device__ void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
#ifdef KIMI_FX_BULK
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
    }
}

__device__ void arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

__device__ void sync_math() { asm volatile("bar.sync 1, %0;" ::"n"(kMathThreads) : "memory"); }

__device__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ void load_transposed(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// T tokens of a KV tile: how many hold something, and where the tree's own rows begin.
struct Span {
    int valid;
    int node;  // of the first token among the tree's own rows; -1: prefix
};

// The place of a step in the ring: stage, and which time round.
struct Place {
    int stage = 0, parity = 0;

    __device__ void advance(int stages) {
        stage = stage + 1 == stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

template <int T>
__device__ int steps_of(const Piece& piece) {
    return (piece.end - piece.tile) * (kPage / T);
}

template <int T>
__device__ Span span_of(const Params& p, const Piece& piece, int step) {
    int tile = piece.tile + step / (kPage / T), offset = step % (kPage / T) * T;
    int node = (tile - ceil_div(piece.length, kPage)) * kPage + offset;
    if (node >= 0) return {p.N - node, node};
    return {piece.length - tile * kPage - offset, -1};
}

// Copies a warp's part of the KV rows of a piece, step by step.
template <int T, int Parts>
struct Loader {
    static constexpr int kRows = T / Parts;
    const Params& p;
    const Piece& piece;
    uint32_t ring, full;  // shared addresses of the stages and of their barriers
    int pages = 0;        // of 32 tiles, one a lane

    // Steps in order: every 32 tiles the lanes fetch the next pages. Rows that hold nothing are left to clear_unused.
    __device__ void copy(int step, int stage) {
        Span s = span_of<T>(p, piece, step);
        int tile = step / (kPage / T), lane = threadIdx.x % 32, at = piece.tile + tile + lane;
        int first = threadIdx.x / 32 % Parts * kRows;
        if (step % (kPage / T * 32) == 0 && at * kPage < piece.length) {
            pages = p.page_table[int64_t(piece.request) * p.table_width + at];
        }
        int64_t row = s.node >= 0 ? int64_t(piece.request) * p.N + s.node
                                  : int64_t(__shfl_sync(~0u, pages, tile % 32)) * kPage + step % (kPage / T) * T;
        const __nv_bfloat16* from = (s.node >= 0 ? p.rows : p.pool) + (row + first) * kRow;
        uint32_t to = ring + (stage * T + first) * kStride * 2, barrier = full + stage * 8;
        int valid = s.valid <= 0 ? 0 : max(min(s.valid - first, kRows), 0);
#ifdef KIMI_FX_BULK
        constexpr int kBytes = kRow * sizeof(__nv_bfloat16);
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(valid * kBytes)
                         : "memory");
        }
        __syncwarp();
        if (lane < valid) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    to + lane * kStride * 2),
                "l"(from + lane * kRow), "r"(kBytes), "r"(barrier)
                : "memory");
        }
#else
#pragma unroll 4
        for (int i = lane; i < valid * (kRow / 8); i += 32) {
            int row = i / (kRow / 8), column = i % (kRow / 8) * 8;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + (row * kStride + column) * 2),
                         "l"(from + row * kRow + column));
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
    }
};

// Rows of a step that hold nothing become zeros, as the pool's may be NaN. By the math warps, which meet before they
// read them.
template <int T>
__device__ void clear_unused(uint32_t kv, int valid) {
    if (valid >= T) return;
    uint32_t at = kv + valid * kStride * 2 + threadIdx.x * 16;
    for (; at < kv + T * kStride * 2; at += kMathThreads * 16) {
        asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0) : "memory");
    }
#ifdef KIMI_FX_BULK
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The i-th piece of this block, walked anew for each: few pieces, and no registers to keep the walk in.
__device__ bool piece_at(const Params& p, int i, Piece& piece) {
    Walk walk(p, blockIdx.x);
    bool more = walk.next(p, piece);
    for (; more && i > 0; --i) more = walk.next(p, piece);
    return more;
}

template <int M, int T>
__global__ void __launch_bounds__(Tile<M, T>::kThreads, 1) mma_kernel(Params p, int stages) {
    using S = Tile<M, T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[2][kMaxStages];
    __nv_bfloat16* weights = reinterpret_cast<__nv_bfloat16*>(memory);          // [M][kWeightStride]
    float* scores = reinterpret_cast<float*>(memory + S::kWeightBytes);         // [kSplits][M][kScoreStride]
    float* decay = scores + kSplits * M * S::kScoreStride;                      // [M]
    float* top = decay + M;                                                     // [M] running maximum
    uint32_t ring = shared_address(memory + S::kScoreBytes);
    uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#ifdef KIMI_FX_BULK
    constexpr int kArrivals = S::kParts;
#else
    constexpr int kArrivals = 32 * S::kParts;
#endif
    if (threadIdx.x < stages) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(full + threadIdx.x * 8), "n"(kArrivals));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty + threadIdx.x * 8), "n"(kMathWarps));
#ifdef KIMI_FX_BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif

    Piece piece;
    Loader<T, S::kParts> loader{p, piece, ring, full};
    Place place;
    if (S::kLoaders && warp >= kMathWarps) {
        for (int i = 0; piece_at(p, i, piece); ++i) {
            for (int step = 0; step < steps_of<T>(piece); ++step) {
                wait(empty + place.stage * 8, place.parity ^ 1);
                loader.copy(step, place.stage);
                place.advance(stages);
            }
        }
        return;
    }

    int row_warp = warp / S::kColumnWarps, column_warp = warp % S::kColumnWarps;
    int split = column_warp % kSplits, token_group = column_warp / kSplits;
    int first_row = row_warp * S::kRowBlocks * 16;
    int height = p.N * p.H;
    for (int i = 0; piece_at(p, i, piece); ++i) {
        int steps = steps_of<T>(piece);
        if (!S::kLoaders) {
            sync_math();
            Place ahead = place;
            for (int step = 0; step < min(stages - 1, steps); ++step, ahead.advance(stages)) {
                loader.copy(step, ahead.stage);
            }
        }

        uint32_t q[S::kRowBlocks][kSteps][4];
#pragma unroll
        for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = piece.row + first_row + m * 16 + half * 8 + lane / 4;
                const __nv_bfloat16* from =
                    p.q + (int64_t(piece.request) * height + row) * kRow + split * (kRow / kSplits) + lane % 4 * 2;
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    q[m][k][half] = row < height ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
                    q[m][k][half + 2] = row < height ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
                }
            }
        }

        float o[S::kRowBlocks][S::kColumns / 8][4] = {};
        float sum[S::kPasses] = {};  // of this lane's tokens
        // the softmax rows of this lane: soft_row + i * 32 / T
        int soft_row = warp * (M / 8) + lane / T, token = lane % T;
        if (token == 0) {
            for (int i = 0; i < S::kPasses; ++i) top[soft_row + i * (32 / T)] = -INFINITY;
        }

        for (int step = 0; step < steps; ++step) {
            if (!S::kLoaders && step + stages - 1 < steps) {
                sync_math();  // the step before has been read
                loader.copy(step + stages - 1, place.stage == 0 ? stages - 1 : place.stage - 1);
            }
            uint32_t kv = ring + place.stage * S::kStageBytes, read = S::kLoaders ? empty + place.stage * 8 : 0;
            Span source = span_of<T>(p, piece, step);
            if (source.valid > 0) clear_unused<T>(kv, source.valid);  // what was there has been read: two syncs ago
            wait(full + place.stage * 8, place.parity);
            place.advance(stages);
            if (source.valid <= 0) {
                if (S::kLoaders && lane == 0) arrive(read);
                continue;
            }
            if (source.valid < T) sync_math();

            // which of this step's tokens softmax row i sees; early, as it may be a load, where registers allow
            auto sight = [&](int i) -> uint32_t {
                uint32_t sees = source.valid >= 32 ? ~0u : (1u << source.valid) - 1;
                if (source.node < 0) return sees;
                int node = min((piece.row + soft_row + i * (32 / T)) / p.H, p.N - 1);
                if (p.ancestors) {
                    const uint32_t* bits = reinterpret_cast<const uint32_t*>(p.ancestors);
                    int64_t at = (int64_t(piece.request) * p.N + node) * 4 + source.node / 32;
                    return sees & bits[at] >> (source.node % 32);
                }
                int causal = node - source.node + 1;
                return causal >= 32 ? sees : causal <= 0 ? 0 : sees & (1u << causal) - 1;
            };
            uint32_t sees[S::kPasses];
            if (M < 64) {
#pragma unroll
                for (int i = 0; i < S::kPasses; ++i) sees[i] = sight(i);
            }

            {  // this warp's part of the scores
                float s[S::kRowBlocks][S::kTokens / 8][4] = {};
                uint32_t at = kv + ((token_group * S::kTokens + lane % 8 + lane / 16 * 8) * kStride +
                                    split * (kRow / kSplits) + lane / 8 % 2 * 8) * 2;
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
#pragma unroll
                    for (int n = 0; n < S::kTokens / 16; ++n) {
                        uint32_t b[4];
                        load_matrices(b, at + (n * 16 * kStride + k * 16) * 2);
#pragma unroll
                        for (int m = 0; m < S::kRowBlocks; ++m) {
                            multiply(s[m][2 * n], q[m][k], b[0], b[1]);
                            multiply(s[m][2 * n + 1], q[m][k], b[2], b[3]);
                        }
                    }
                }
                float* to = scores + (split * M + first_row + lane / 4) * S::kScoreStride +
                            token_group * S::kTokens + lane % 4 * 2;
#pragma unroll
                for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
                    for (int n = 0; n < S::kTokens / 8; ++n) {
                        float* cell = to + m * 16 * S::kScoreStride + n * 8;
                        *reinterpret_cast<float2*>(cell) = make_float2(s[m][n][0], s[m][n][1]);
                        *reinterpret_cast<float2*>(cell + 8 * S::kScoreStride) = make_float2(s[m][n][2], s[m][n][3]);
                    }
                }
            }
            sync_math();

#pragma unroll
            for (int i = 0; i < S::kPasses; ++i) {
                int row = soft_row + i * (32 / T);
                float s = 0;
#pragma unroll
                for (int k = 0; k < kSplits; ++k) s += scores[(k * M + row) * S::kScoreStride + token];
                s = (M < 64 ? sees[i] : sight(i)) >> token & 1 ? s * p.scale_log2 : -INFINITY;
                float peak = s;
#pragma unroll
                for (int d = T / 2; d; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
                float before = top[row];
                peak = fmaxf(peak, before);
                float shift = peak == -INFINITY ? 0 : peak;
                float weight = exp2_fast(s - shift), scale = exp2_fast(before - shift);
                sum[i] = sum[i] * scale + weight;
                weights[row * S::kWeightStride + token] = __float2bfloat16(weight);
                __syncwarp();
                if (token == 0) decay[row] = scale, top[row] = peak;
            }
            sync_math();

            float scale[S::kRowBlocks][2];
            bool change = false;
#pragma unroll
            for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    scale[m][half] = decay[first_row + m * 16 + half * 8 + lane / 4];
                    change |= scale[m][half] != 1;
                }
            }
            if (__any_sync(~0u, change)) {
#pragma unroll
                for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
                    for (int n = 0; n < S::kColumns / 8; ++n) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) o[m][n][i] *= scale[m][i / 2];
                    }
                }
            }
            uint32_t at = kv + ((lane % 16) * kStride + column_warp * S::kColumns + lane / 16 * 8) * 2;
#pragma unroll
            for (int k = 0; k < T / 16; ++k) {
                uint32_t weight[S::kRowBlocks][4];
#pragma unroll
                for (int m = 0; m < S::kRowBlocks; ++m) {
                    const __nv_bfloat16* row = weights + (first_row + m * 16 + lane % 16) * S::kWeightStride;
                    load_matrices(weight[m], shared_address(row + k * 16 + lane / 16 * 8));
                }
#pragma unroll
                for (int n = 0; n < S::kColumns / 16; ++n) {
                    uint32_t v[4];
                    load_transposed(v, at + (k * 16 * kStride + n * 16) * 2);
#pragma unroll
                    for (int m = 0; m < S::kRowBlocks; ++m) {
                        multiply(o[m][2 * n], weight[m], v[0], v[1]);
                        multiply(o[m][2 * n + 1], weight[m], v[2], v[3]);
                    }
                }
            }
            __syncwarp();
            if (S::kLoaders && lane == 0) arrive(read);
        }

        // the row's total goes where its decay was; what a row saw nothing of stays zero
        sync_math();
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            int row = soft_row + i * (32 / T);
#pragma unroll
            for (int d = T / 2; d; d /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
            if (token == 0) {
                decay[row] = sum[i] > 0 ? 1 / sum[i] : 0;
                if (piece.slot >= 0) p.partial_lse[int64_t(piece.slot) * M + row] = top[row] + log2f(sum[i]);
            }
        }
        sync_math();
#pragma unroll
        for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = first_row + m * 16 + half * 8 + lane / 4, column = column_warp * S::kColumns;
                bool real = piece.row + row < height;
                float scale = decay[row];
                __half* partial = p.partial_o + (int64_t(piece.slot) * M + row) * kLatent + column;
                __nv_bfloat16* out =
                    p.out + (int64_t(piece.request) * height + piece.row + row) * kLatent + column;
#pragma unroll
                for (int n = 0; n < S::kColumns / 8; n += 4) {
                    uint32_t pairs[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        float x = o[m][n + k][half * 2] * scale, y = o[m][n + k][half * 2 + 1] * scale;
                        pairs[k] = piece.slot < 0 ? pack_bf16(x, y) : pack_fp16(x, y);
                    }
                    void* to = piece.slot < 0 ? static_cast<void*>(out + n * 8) : partial + n * 8;
                    store_blocks(to, pairs, lane, real);
                }
            }
        }
    }
}

constexpr int kSlack = 1024;  // static shared memory, rounded up

// As many stages as the shared memory holds.
template <int M, int T>
cudaError_t launch_tile(const Params& params, int shared, int arch, cudaStream_t stream) {
    using S = Tile<M, T>;
    int stages = std::min(kMaxStages, (shared - kSlack - S::kScoreBytes) / S::kStageBytes);
    int bytes = S::kScoreBytes + stages * S::kStageBytes;
    cudaError_t error = cudaFuncSetAttribute(mma_kernel<M, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    return launch_overlapped(mma_kernel<M, T>, params.blocks, S::kThreads, bytes, arch, stream, params, stages);
}

// Two stages of every tile fit the smallest chip, sm_120 with 99 KiB.
static_assert(Tile<16, 32>::kScoreBytes + 2 * Tile<16, 32>::kStageBytes + kSlack <= 99 * 1024);
static_assert(Tile<32, 32>::kScoreBytes + 2 * Tile<32, 32>::kStageBytes + kSlack <= 99 * 1024);
static_assert(Tile<64, 16>::kScoreBytes + 2 * Tile<64, 16>::kStageBytes + kSlack <= 99 * 1024);

}  // namespace

cudaError_t launch_mma(const Params& params, int shared, int arch, cudaStream_t stream) {
    switch (params.M) {
        case 16: return launch_tile<16, 32>(params, shared, arch, stream);
        case 32: return launch_tile<32, 32>(params, shared, arch, stream);
        default: return launch_tile<64, 16>(params, shared, arch, stream);
    }
}

}  // namespace kimi_fx::mla
