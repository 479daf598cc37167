// The plain products: of a normed input, and onto a residual.

#include "launch.h"
#include "linear.h"

namespace kimi_fx::layer {
namespace {

template <class Out>
struct NormLinear : Rows {
    const __nv_bfloat16* g;
    Out* out;

    __device__ const __nv_bfloat16* norm() const { return g; }
    template <class T>
    __device__ void finish(int tile, int token, int row, float scale, const Total<T>& total) const {
        int at = tile * T::kRows + row;
        if (at < rows) store_four(out + int64_t(token) * rows + at, times(total(row), scale));
    }
};

template <class Out>
cudaError_t launch_as(const LinearParams& p, const Chip& chip) {
    NormLinear<Out> op;
    op.shape = {p.T, p.inputs, 0, 0, 0, p.eps};
    op.x = p.x, op.w = p.w, op.rows = p.rows, op.g = p.norm, op.out = static_cast<Out*>(p.out);
    return launch<16, 32, 2>(op, chip);
}

}  // namespace

cudaError_t launch_norm_linear(const LinearParams& p, const Chip& chip) {
    return p.wide ? launch_as<float>(p, chip) : launch_as<__nv_bfloat16>(p, chip);
}

cudaError_t launch_linear_add(const AddParams& p, const Chip& chip) { return launch<64, 64, 1>(linear_add(p), chip); }

}  // namespace kimi_fx::layer
