// A warp's rows of the drafter's attention over one tile after another, on mma.sync m16n8k16.
//
// A tile is 64 keys, then 64 values, rows of Head columns in bf16. Chunks of 16 bytes are swizzled by row, so that 8
// rows meet all banks.

#pragma once

#include "draft_attention.h"

#include "common/ptx.h"

namespace kimi_fx::round {

constexpr int kPage = 64;  // keys of a page, and of a tile

template <int Head>
constexpr int kTileBytes = kPage * Head * 2;  // of keys, and of values

__device__ inline void multiply(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ inline void load_transposed(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ inline uint32_t pack(float x, float y) {
    __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t*>(&two);
}

// Where a chunk of 8 columns lies in a tile.
template <int Head>
__device__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * Head * 2 + (chunk ^ row % 8) * 16;
}

// A lane's part of 16 rows of q from `first` on, of which 16 columns. Rows past the last repeat it: they are computed and
// not written.
template <int Head>
__device__ uint4 query(const DraftParams& p, int b, int kv, int first, int rows, int k) {
    int lane = threadIdx.x % 32, group = p.H / p.KV;
    auto from = [&](int half) {
        int row = min(first + half * 8 + lane / 4, rows - 1);
        int64_t at = ((int64_t(b) * p.S + row / group) * p.H + kv * group + row % group) * Head + k * 16 + lane % 4 * 2;
        return reinterpret_cast<const uint32_t*>(p.q + at);
    };
    return make_uint4(from(0)[0], from(1)[0], from(0)[4], from(1)[4]);
}

// One warp's 16 Blocks rows, which see 64 / Blocks keys at a time: a lane has of each block of rows lane / 4 and 8 on, of
// each 8 columns two. Registers hold q for one block; for more it lies in shared memory, as query() gives it.
template <int Head, int Blocks>
struct WarpRows {
    static constexpr int kKeys = kPage / Blocks;
    static constexpr int kFloats = Blocks * (Head / 2 + 4);  // of a lane: what `give` and `take` hand on
    static constexpr int kSteps = Head / 16;

    uint4 q[Blocks == 1 ? kSteps : 1];
    const uint4* held;  // [Blocks, kSteps, 32]
    float o[Blocks][Head / 8][4] = {};
    float top[Blocks][2], sum[Blocks][2] = {};  // sum: of this lane's keys

    __device__ explicit WarpRows(const uint4* held) : held(held) {
#pragma unroll
        for (int m = 0; m < Blocks; ++m) top[m][0] = top[m][1] = -INFINITY;
    }

    __device__ uint4 query_at(int m, int k) const {
        return Blocks == 1 ? q[k] : held[(m * kSteps + k) * 32 + threadIdx.x % 32];
    }

    // A tile. Where it is `masked`, the lane's row of a block and half sees its keys from bounds(m, half).x on and under
    // .y.
    template <typename Bounds>
    __device__ void attend(uint32_t tile, float scale_log2, bool masked, Bounds bounds) {
#pragma unroll 1
        for (int first = 0; first < kPage; first += kKeys) {
            attend_some(tile + first * Head * 2, first, scale_log2, masked, bounds);
        }
    }

    // Keys, a tile's from `first` on, and their values a tile's bytes on.
    template <typename Bounds>
    __device__ void attend_some(uint32_t tile, int first, float scale_log2, bool masked, Bounds bounds) {
        int lane = threadIdx.x % 32;
        // tiles lie at multiples of 256 bytes, so the next two chunks are an exclusive or away
        uint32_t keys = chunk_at<Head>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        uint32_t values = chunk_at<Head>(tile + kTileBytes<Head>, lane % 16, lane / 16);
        float s[Blocks][kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint4 a[Blocks];
#pragma unroll
            for (int m = 0; m < Blocks; ++m) a[m] = query_at(m, k);
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32_t b[4];
                ptx::load_matrices(b, (keys ^ k * 32) + n * 16 * Head * 2);
#pragma unroll
                for (int m = 0; m < Blocks; ++m) {
                    multiply(s[m][2 * n], a[m], b[0], b[1]);
                    multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][n][i] *= scale_log2;
            }
        }
        if (masked) hide(s, first, bounds);
        bool decays = false;
        float decay[Blocks][2];
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                decay[m][half] = weigh(s[m], m, half);
                decays |= decay[m][half] != 1;
            }
        }
        if (__any_sync(~0u, decays)) {
#pragma unroll
            for (int m = 0; m < Blocks; ++m) {
#pragma unroll
                for (int n = 0; n < Head / 8; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) o[m][n][i] *= decay[m][i / 2];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            uint4 weight[Blocks];
#pragma unroll
            for (int m = 0; m < Blocks; ++m) {
                const auto &x = s[m][2 * k], &y = s[m][2 * k + 1];
                weight[m] = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3]));
            }
#pragma unroll
            for (int n = 0; n < Head / 16; ++n) {
                uint32_t v[4];
                load_transposed(v, (values ^ n * 32) + k * 16 * Head * 2);
#pragma unroll
                for (int m = 0; m < Blocks; ++m) {
                    multiply(o[m][2 * n], weight[m], v[0], v[1]);
                    multiply(o[m][2 * n + 1], weight[m], v[2], v[3]);
                }
            }
        }
    }

    template <typename Bounds>
    __device__ void hide(float (&s)[Blocks][kKeys / 8][4], int first, Bounds bounds) const {
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int2 seen = bounds(m, half);
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; ++i) {
                        int key = first + n * 8 + threadIdx.x % 4 * 2 + i % 2;
                        if (key < seen.x || key >= seen.y) s[m][n][i] = -INFINITY;
                    }
                }
            }
        }
    }

    // Scores of a row's half become weights; by how much what came before them shrinks.
    __device__ float weigh(float (&s)[kKeys / 8][4], int m, int half) {
        float peak = top[m][half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) peak = fmaxf(peak, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        float shift = peak == -INFINITY ? 0 : peak, decay = ptx::exp2_fast(top[m][half] - shift);
        top[m][half] = peak;
        sum[m][half] *= decay;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) {
                s[n][i] = ptx::exp2_fast(s[n][i] - shift);
                sum[m][half] += s[n][i];
            }
        }
        return decay;
    }

    // Hands the lane's part on to `take` of a warp that has the same rows and other keys: float i of a lane lies at
    // 32 i + lane.
    __device__ void give(float* to) const {
        to += threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to[32 * (4 * m + half)] = top[m][half], to[32 * (4 * m + 2 + half)] = sum[m][half];
            }
#pragma unroll
            for (int n = 0; n < Head / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[32 * (4 * Blocks + (m * Head / 8 + n) * 4 + i)] = o[m][n][i];
            }
        }
    }

    __device__ void take(const float* from) {
        from += threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
            float own[2], other[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float theirs = from[32 * (4 * m + half)], peak = fmaxf(top[m][half], theirs);
                float shift = peak == -INFINITY ? 0 : peak;
                own[half] = ptx::exp2_fast(top[m][half] - shift), other[half] = ptx::exp2_fast(theirs - shift);
                sum[m][half] = sum[m][half] * own[half] + from[32 * (4 * m + 2 + half)] * other[half];
                top[m][half] = peak;
            }
#pragma unroll
            for (int n = 0; n < Head / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float theirs = from[32 * (4 * Blocks + (m * Head / 8 + n) * 4 + i)];
                    o[m][n][i] = o[m][n][i] * own[i / 2] + theirs * other[i / 2];
                }
            }
        }
    }

    __device__ void write(const DraftParams& p, int64_t slot, int first, int rows) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < Blocks; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float total = sum[m][half] + __shfl_xor_sync(~0u, sum[m][half], 1);
                total += __shfl_xor_sync(~0u, total, 2);
                float scale = total > 0 ? 1 / total : 0;
                int row = first + m * 16 + half * 8 + lane / 4;
                if (row >= rows) continue;
                if (lane % 4 == 0) p.partial_lse[slot * rows + row] = top[m][half] + log2f(total);
                float* to = p.partial_o + (slot * rows + row) * Head + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < Head / 8; ++n) {
                    *reinterpret_cast<float2*>(to + n * 8) =
                        make_float2(o[m][n][half * 2] * scale, o[m][n][half * 2 + 1] * scale);
                }
            }
        }
    }
};

}  // namespace kimi_fx::round
