// A warp's 16 rows of the drafter's attention over one tile after another, on mma.sync m16n8k16.
//
// A tile is 64 keys, then 64 values, rows of Head columns in bf16. Chunks of 16 bytes are swizzled by row, so that 8
// rows meet all banks.

#pragma once

#include "common/ptx.h"
#include "common/store.h"
#include "draft_tiles.h"

namespace kimi_fx::round {

template <int Head>
constexpr int kTileBytes = kPage * Head * 2;  // of keys, and of values

__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void load_transposed(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// Where a chunk of 8 columns lies in a tile.
template <int Head>
__device__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * Head * 2 + (chunk ^ row % 8) * 16;
}

// One warp's 16 rows: a lane has rows lane / 4 and 8 on, of each 8 columns two.
template <int Head>
struct WarpRows {
    uint32_t q[Head / 16][4];
    float o[Head / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY};  // the power that all else is relative to, within kSlack of the largest
    float sum[2] = {0, 0};                  // of this lane's keys

    // Rows past the last repeat it: they are computed and not written.
    __device__ void read(const DraftParams& p, int b, int kv, int first, int rows) {
        int lane = threadIdx.x % 32, group = p.H / p.KV;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = min(first + half * 8 + lane / 4, rows - 1);
            const __nv_bfloat16* from =
                p.q + ((int64_t(b) * p.S + row / group) * p.H + kv * group + row % group) * Head + lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < Head / 16; ++k) {
                q[k][half] = *reinterpret_cast<const uint32_t*>(from + k * 16);
                q[k][half + 2] = *reinterpret_cast<const uint32_t*>(from + k * 16 + 8);
            }
        }
    }

    // What was added up so far becomes relative to these powers.
    __device__ void decay(const float (&shift)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float scale = ptx::exp2_fast(top[half] - shift[half]);
            sum[half] *= scale;
#pragma unroll
            for (int n = 0; n < Head / 8; ++n) o[n][2 * half] *= scale, o[n][2 * half + 1] *= scale;
        }
    }

    // A tile, of which the lane's first row sees the keys from .x on and under .y of `seen`, its second of `below`.
    template <bool Masked>
    __device__ void attend(uint32_t tile, float scale_log2, int2 seen, int2 below) {
        int lane = threadIdx.x % 32;
        // tiles lie at multiples of 256 bytes, so the next two chunks are an exclusive or away
        uint32_t keys = chunk_at<Head>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        uint32_t values = chunk_at<Head>(tile + kTileBytes<Head>, lane % 16, lane / 16);
        float s[kPage / 8][4] = {};
#pragma unroll
        for (int k = 0; k < Head / 16; ++k) {
#pragma unroll
            for (int n = 0; n < kPage / 16; ++n) {
                uint32_t b[4];
                ptx::load_matrices(b, (keys ^ k * 32) + n * 16 * Head * 2);
                multiply(s[2 * n], q[k], b[0], b[1]);
                multiply(s[2 * n + 1], q[k], b[2], b[3]);
            }
        }
        float peak[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < kPage / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] *= scale_log2;
                int key = n * 8 + lane % 4 * 2 + i % 2;
                int2 range = i < 2 ? seen : below;
                if (Masked && (key < range.x || key >= range.y)) s[n][i] = -INFINITY;
                peak[i / 2] = fmaxf(peak[i / 2], s[n][i]);
            }
        }
        float shift[2];
        bool grown[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            peak[half] = fmaxf(peak[half], __shfl_xor_sync(~0u, peak[half], 1));
            peak[half] = fmaxf(peak[half], __shfl_xor_sync(~0u, peak[half], 2));
            grown[half] = peak[half] > top[half] + kSlack;
            if (!grown[half]) peak[half] = top[half];
            shift[half] = peak[half] == -INFINITY ? 0 : peak[half];
        }
        if (__any_sync(~0u, grown[0] || grown[1])) decay(shift);
        top[0] = peak[0], top[1] = peak[1];
#pragma unroll
        for (int n = 0; n < kPage / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[n][i] = ptx::exp2_fast(s[n][i] - shift[i / 2]);
                sum[i / 2] += s[n][i];
            }
        }
#pragma unroll
        for (int k = 0; k < kPage / 16; ++k) {
            uint32_t weight[4] = {pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                                  pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]),
                                  pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int n = 0; n < Head / 16; ++n) {
                uint32_t v[4];
                load_transposed(v, (values ^ n * 32) + k * 16 * Head * 2);
                multiply(o[2 * n], weight, v[0], v[1]);
                multiply(o[2 * n + 1], weight, v[2], v[3]);
            }
        }
    }

    __device__ void write(const DraftParams& p, int b, int kv, int split, int first, int rows) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float scale = total > 0 ? 1 / total : 0;
            int row = first + half * 8 + lane / 4;
            Partials to(p, b, kv, split, row);
            if (row < rows && lane % 4 == 0) *to.lse = top[half] + log2f(total);
#pragma unroll
            for (int n = 0; n < Head / 8; n += 4) {
                uint32_t pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    pairs[i] = pack_fp16(o[n + i][half * 2] * scale, o[n + i][half * 2 + 1] * scale);
                store_blocks(to.o + n * 8, pairs, lane, row < rows);
            }
        }
    }
};

}  // namespace kimi_fx::round
