// A warpgroup's 64 rows of the drafter's attention over one tile after another, on the warpgroup matrix unit (sm_90a).
//
// A tile is 64 keys and 64 values of 128 columns, each as two boxes of 64 columns (common/wgmma.h). Products are issued
// and later waited for by whoever walks over the tiles.

#pragma once

#include "common/ptx.h"
#include "common/store.h"
#include "common/wgmma.h"
#include "draft_tiles.h"

namespace kimi_fx::round {

constexpr float kLowest = -1e30f;  // stands for "nothing seen yet"; finite, so that differences are numbers

// A thread has two rows, `row` and row + 8, and of each 8 columns two.
struct WarpgroupRows {
    int lane, row, total;  // rows from `total` on repeat the last: they are computed and not written
    uint32_t q[8][4];
    float o[64] = {};
    float score[32];  // of the tile at hand; then its probabilities
    uint32_t probability[4][4];
    float top[2] = {kLowest, kLowest};  // the power that all else is relative to, within kSlack of the largest
    float sum[2] = {0, 0};              // of this thread's keys

    __device__ WarpgroupRows(const DraftParams& p, int b, int kv, int first, int rows)
        : lane(threadIdx.x % 32), row(first + threadIdx.x % 128 / 32 * 16 + lane / 4), total(rows) {
        int group = p.H / p.KV;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = min(row + 8 * h, total - 1), head = kv * group + r % group;
            const __nv_bfloat16* from = p.q + ((int64_t(b) * p.S + r / group) * p.H + head) * kWideHead + lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                q[k][h] = *reinterpret_cast<const uint32_t*>(from + k * 16);
                q[k][h + 2] = *reinterpret_cast<const uint32_t*>(from + k * 16 + 8);
            }
        }
    }

    __device__ void issue_scores(uint32_t keys) {
        uint64_t k = wgmma::along_rows(keys);
        wgmma::fence();
#pragma unroll
        for (int j = 0; j < 8; ++j) wgmma::scores(score, q[j], k + j / 4 * (wgmma::kBox >> 4) + j % 4 * 2, j > 0);
        wgmma::commit();
    }

    __device__ void issue_values(uint32_t values) {
        uint64_t v = wgmma::down_rows(values);
        wgmma::fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) wgmma::values(o, probability[j], v + (2048 >> 4) * j, true);
        wgmma::commit();
    }

    // Where the n-th of row h's 16 columns of scores lies.
    __device__ static constexpr int at(int n, int h) { return n / 2 * 4 + h * 2 + n % 2; }

    __device__ void scale(float scale_log2) {
#pragma unroll
        for (int i = 0; i < 32; ++i) score[i] *= scale_log2;
    }

    // Row h sees the tile's keys from .x on and under .y.
    __device__ void hide(int h, int2 seen) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            int key = n / 2 * 8 + lane % 4 * 2 + n % 2;
            if (key < seen.x || key >= seen.y) score[at(n, h)] = -INFINITY;
        }
    }

    // `factor`: what was added up so far becomes so many times as much.
    __device__ void softmax(float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -INFINITY;
#pragma unroll
            for (int n = 0; n < 16; ++n) most = fmaxf(most, score[at(n, h)]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            float next = most > top[h] + kSlack ? most : top[h];
            factor[h] = ptx::exp2_fast(top[h] - next);
            top[h] = next;
            float added = 0;
#pragma unroll
            for (int n = 0; n < 16; ++n) {
                float& x = score[at(n, h)];
                x = ptx::exp2_fast(x - next);
                added += x;
            }
            sum[h] = fmaf(sum[h], factor[h], added);
        }
    }

    // The last tile's values have been added: makes room for the next one's.
    __device__ void adopt(const float (&factor)[2]) {
        if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) probability[i / 4][i % 4] = pack_bf16(score[2 * i], score[2 * i + 1]);
    }

    // Two warpgroups that have the same rows and other tiles trade halves of the columns, so that each has half of the
    // columns' sums over all tiles: this one the half `kept`. Both must call it; `room` holds 72 floats a thread.
    template <int kept>
    __device__ void trade(float* room) {
        float *to = room + threadIdx.x % 128, *powers = to + 64 * 128;
#pragma unroll
        for (int i = 32 - 32 * kept; i < 64 - 32 * kept; ++i) to[i * 128] = o[i];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            powers[(4 * kept + h) * 128] = top[h], powers[(4 * kept + 2 + h) * 128] = sum[h];
        ptx::sync_threads(1, 256);
        float mine[2], other[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float power = powers[(4 - 4 * kept + h) * 128], next = fmaxf(top[h], power);
            mine[h] = ptx::exp2_fast(top[h] - next), other[h] = ptx::exp2_fast(power - next);
            top[h] = next;
            sum[h] = sum[h] * mine[h] + powers[(6 - 4 * kept + h) * 128] * other[h];
        }
#pragma unroll
        for (int i = 32 * kept; i < 32 + 32 * kept; ++i)
            o[i] = o[i] * mine[i / 2 % 2] + to[i * 128] * other[i / 2 % 2];
    }

    // The columns from `from` to `end`, in blocks of 8.
    template <int from, int end>
    __device__ void write(const DraftParams& p, int b, int kv, int split) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
            all += __shfl_xor_sync(~0u, all, 2);
            float scale = all > 0 ? 1 / all : 0;
            bool real = row + 8 * h < total;
            Partials to(p, b, kv, split, row + 8 * h);
            if (from == 0 && real && lane % 4 == 0) *to.lse = all > 0 ? top[h] + log2f(all) : -INFINITY;
#pragma unroll
            for (int n = from; n < end; n += 4) {
                uint32_t pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    pairs[i] = pack_fp16(o[(n + i) * 4 + h * 2] * scale, o[(n + i) * 4 + h * 2 + 1] * scale);
                store_blocks(to.o + n * 8, pairs, lane, real);
            }
        }
    }
};

}  // namespace kimi_fx::round
