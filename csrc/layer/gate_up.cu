// silu(gate) up of a normed input, as an MLP begins.

#include "launch.h"
#include "store.h"

namespace kimi_fx::layer {
namespace {

struct GateUp : Plain {
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

}  // namespace

cudaError_t launch_gate_up(const GateUpParams& p, const Chip& chip) {
    GateUp op;
    op.shape = {p.T, p.D, 0, 0, 0, p.eps};
    op.x = p.x, op.g = p.norm, op.w = p.w, op.out = p.out, op.I = p.I;
    return launch<16, 32, 1>(op, chip);
}

}  // namespace kimi_fx::layer
