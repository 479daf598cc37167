// Products of plain rows of weights, and the one that adds to a residual.

#pragma once

#include "operators.h"
#include "store.h"

namespace kimi_fx::layer {

struct Rows : Plain {
    Shape shape;
    const __nv_bfloat16 *x, *w;
    int rows;

    template <class T>
    int count_tiles() const {
        return (rows + T::kRows - 1) / T::kRows;
    }
    template <class T>
    __device__ const __nv_bfloat16* weight(int tile, int row, int k) const {
        return w + int64_t(min(tile * T::kRows + row, rows - 1)) * shape.inputs + k;
    }
    template <class T>
    __device__ const __nv_bfloat16* input(int, int token, int k) const {
        return x + int64_t(token) * shape.inputs + k;
    }
};

struct LinearAdd : Rows {
    static constexpr bool kAdds = true;
    const __nv_bfloat16 *residual, *other;
    __nv_bfloat16* out;
    float* squares;

    struct Added {
        uint2 residual, other;
    };
    template <class T>
    __device__ Added added(int tile, int token, int row) const {
        int64_t at = int64_t(token) * rows + min(tile * T::kRows + row, rows - 4);
        Added found{};
        if (residual) found.residual = *reinterpret_cast<const uint2*>(residual + at);
        if (other) found.other = *reinterpret_cast<const uint2*>(other + at);
        return found;
    }

    template <class T>
    __device__ void finish(int tile, int token, int row, const Added& added, const Total<T>& total) const {
        static_assert(T::kRows % 32 == 0);
        int lane = threadIdx.x % 32;
        int64_t at = int64_t(token) * rows + tile * T::kRows + row;
        bool real = tile * T::kRows + row < rows;
        float4 sum = make_float4(0, 0, 0, 0);
        if (real) {
            sum = total(row);
            add(sum, as_four(added.residual));
            add(sum, as_four(added.other));
            store_four(out + at, sum);
        }
        if (squares == nullptr) return;
        float square = squares_of_rounded(sum);
        // Eight lanes have 32 rows
        for (int d = 4; d; d /= 2) square += __shfl_xor_sync(0xffu << (lane & 24), square, d);
        int piece = (tile * T::kRows + row) / 32, pieces = (rows + 31) / 32;
        if (lane % 8 == 0 && piece < pieces) squares[token * pieces + piece] = square;
    }
};

inline LinearAdd linear_add(const AddParams& p) {
    LinearAdd op;
    op.shape = {p.T, p.inputs, 0, 0, 0, 0};
    op.x = p.x, op.w = p.w, op.rows = p.rows;
    op.residual = p.residual, op.other = p.other, op.out = p.out, op.squares = p.squares;
    return op;
}

}  // namespace kimi_fx::layer
