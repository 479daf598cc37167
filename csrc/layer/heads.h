// Every head's values times its own matrix: queries into the latent (absorption), attended latents out of it.

#pragma once

#include "operators.h"
#include "store.h"

namespace kimi_fx::layer {

template <bool Transposed>
struct Heads : Plain {
    static constexpr bool kTransposed = Transposed;
    Shape shape;
    HeadParams p;

    template <class T>
    __host__ __device__ int tiles_of_head() const {
        return (p.rows + T::kRows - 1) / T::kRows;
    }
    template <class T>
    int count_tiles() const {
        return p.H * tiles_of_head<T>();
    }
    template <class T>
    __device__ const __nv_bfloat16* weight(int tile, int row, int k) const {
        int head = tile / tiles_of_head<T>();
        int at = min(tile % tiles_of_head<T>() * T::kRows + row, p.rows - (Transposed ? 8 : 1));
        const __nv_bfloat16* w = p.w + int64_t(head) * p.rows * p.inputs;
        return Transposed ? w + int64_t(k) * p.rows + at : w + int64_t(at) * p.inputs + k;
    }
    template <class T>
    __device__ const __nv_bfloat16* input(int tile, int token, int k) const {
        return p.x + (int64_t(token) * p.H + tile / tiles_of_head<T>()) * p.inputs + k;
    }
    template <class T>
    __device__ void finish(int tile, int token, int row, float, const Total<T>& total) const {
        int head = tile / tiles_of_head<T>(), at = tile % tiles_of_head<T>() * T::kRows + row;
        if (at < p.rows) store_four(p.out + (int64_t(token) * p.H + head) * p.pitch + at, total(row));
    }
};

template <bool Transposed>
Heads<Transposed> heads(const HeadParams& p) {
    Heads<Transposed> op;
    op.shape = {p.T, p.inputs, 0, 0, 0, 0};
    op.p = p;
    return op;
}

}  // namespace kimi_fx::layer
