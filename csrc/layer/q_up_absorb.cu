// Queries of the q latent, then into the latent, head by head; and beside them the tokens' pool rows, a warp a token.

#include "heads.h"
#include "pair.h"

namespace kimi_fx::layer {
namespace {

struct QUp : Plain {
    static constexpr bool kNormed = true;
    Shape shape;
    QUpParams p;

    __device__ int head_width() const { return p.nope_width + p.R; }
    template <class T>
    int count_tiles() const {
        return (p.H * (p.nope_width + p.R) + T::kRows - 1) / T::kRows;
    }
    template <class T>
    __device__ const __nv_bfloat16* weight(int tile, int row, int k) const {
        return p.w + int64_t(min(tile * T::kRows + row, p.H * head_width() - 1)) * p.q_lora + k;
    }
    template <class T>
    __device__ const __nv_bfloat16* input(int, int token, int k) const {
        return p.x + int64_t(token) * (p.q_lora + p.L + p.R) + k;
    }
    __device__ const __nv_bfloat16* norm() const { return p.q_norm; }

    template <class T>
    __device__ void finish(int tile, int token, int row, float scale, const Total<T>& total) const {
        int at = tile * T::kRows + row, head = at / head_width(), column = at % head_width();
        if (head >= p.H) return;
        float4 sum = times(total(row), scale);
        int64_t of = int64_t(token) * p.H + head;
        int turned = column - p.nope_width;
        if (turned < 0) {
            store_four(p.nope + of * p.nope_width + column, sum);
        } else {
            sum = rotate(sum, p.cos + token * p.R + turned, p.sin + token * p.R + turned);
            store_four(p.q + of * (p.L + p.R) + p.L + turned, sum);
        }
    }

    __host__ __device__ int extras() const { return (p.T + kWarps - 1) / kWarps; }
    template <class T>
    __device__ void extra(int block, uint4*) const {
        int lane = threadIdx.x % 32, token = block * kWarps + int(threadIdx.x / 32);
        if (token >= p.T) return;
        const __nv_bfloat16* latent = p.x + int64_t(token) * (p.q_lora + p.L + p.R) + p.q_lora;
        __nv_bfloat16* to = p.rows + int64_t(token) * (p.L + p.R);
        float square = 0;
#pragma unroll 4
        for (int i = 4 * lane; i < p.L; i += 128) square += squares_of_rounded(load_four(latent + i));
        scale_row<2>(to, latent, p.norm, p.L, inverse_rms(sum_of_lanes(square, 32), p.L, p.eps), lane, 32);
        for (int i = 4 * lane; i < p.R; i += 128) {
            float4 turned = rotate(load_four(latent + p.L + i), p.cos + token * p.R + i, p.sin + token * p.R + i);
            store_four(to + p.L + i, turned);
        }
    }
};

}  // namespace

cudaError_t launch_q_up_absorb(const QUpParams& p, const HeadParams& absorb, int32_t* counters, const Chip& chip) {
    QUp op;
    op.shape = {p.T, p.q_lora, 0, 0, 0, p.eps};
    op.p = p;
    return launch_dependent<16, 64>(op, heads<true>(absorb), counters, chip);
}

}  // namespace kimi_fx::layer
