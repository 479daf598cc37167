// silu(gate) up of a normed input, as an MLP begins.

#include "launch.h"
#include "norm_rows.h"
#include "store.h"

namespace kimi_fx::layer {
namespace {

template <bool Normed>
struct GateUp : Plain {
    static constexpr bool kNormed = Normed;
    Shape shape;
    const __nv_bfloat16 *x, *g, *w;
    __nv_bfloat16* out;
    int I;

    template <class T>
    int count_tiles() const {
        return (2 * I + T::kRows - 1) / T::kRows;
    }
    template <class T>
    __device__ const __nv_bfloat16* weight(int tile, int row, int k) const {
        return w + int64_t(gate_up_row<T>(tile, row, I)) * shape.inputs + k;
    }
    template <class T>
    __device__ const __nv_bfloat16* input(int, int token, int k) const {
        return x + int64_t(token) * shape.inputs + k;
    }
    __device__ const __nv_bfloat16* norm() const { return g; }
    template <class T>
    __device__ void finish(int tile, int token, int row, float scale, const Total<T>& total) const {
        finish_gate_up<T>(out + int64_t(token) * I, tile, row, I, scale, total);
    }
};

template <bool Normed>
GateUp<Normed> gate_up(const GateUpParams& p) {
    GateUp<Normed> op;
    op.shape = {p.T, p.D, 0, 0, 0, p.eps};
    op.x = Normed ? p.x : p.h, op.g = p.norm, op.w = p.w, op.out = p.out, op.I = p.I;
    return op;
}

}  // namespace

cudaError_t launch_gate_up(const GateUpParams& p, const Chip& chip) {
    if (p.T <= kFew) return launch_few<16, 32>(gate_up<true>(p), chip);
    cudaError_t error = launch_norm_rows({p.x, p.norm, p.h, p.T, p.D, p.eps}, chip);
    if (error != cudaSuccess) return error;
    return launch_many(gate_up<false>(p), chip);
}

}  // namespace kimi_fx::layer
