// The plain products: of a normed input, and onto a residual.

#include "launch.h"
#include "linear.h"
#include "norm_rows.h"

namespace kimi_fx::layer {
namespace {

template <class Out, bool Normed>
struct NormLinear : Rows {
    static constexpr bool kNormed = Normed;
    const __nv_bfloat16* g;
    Out* out;

    __device__ const __nv_bfloat16* norm() const { return g; }
    template <class T>
    __device__ void finish(int tile, int token, int row, float scale, const Total<T>& total) const {
        int at = tile * T::kRows + row;
        if (at < rows) store_four(out + int64_t(token) * rows + at, times(total(row), scale));
    }
};

template <class Out, bool Normed>
NormLinear<Out, Normed> norm_linear(const LinearParams& p) {
    NormLinear<Out, Normed> op;
    op.shape = {p.T, p.inputs, 0, 0, 0, p.eps};
    op.x = Normed ? p.x : p.h, op.w = p.w, op.rows = p.rows, op.g = p.norm, op.out = static_cast<Out*>(p.out);
    return op;
}

// Up to 16 tokens narrow tiles only where wide ones leave multiprocessors without any: not for a vocabulary.
template <class Op>
cudaError_t launch_normed(const Op& op, const Chip& chip) {
    bool many = op.template count_tiles<Tile<16, 32>>() >= chip.blocks;
    return many ? launch_few<16, 32>(op, chip) : launch_few<16, 16>(op, chip);
}

template <class Out>
cudaError_t launch_as(const LinearParams& p, const Chip& chip) {
    if (p.T <= kFew) return launch_normed(norm_linear<Out, true>(p), chip);
    cudaError_t error = launch_norm_rows({p.x, p.norm, p.h, p.T, p.inputs, p.eps}, chip);
    if (error != cudaSuccess) return error;
    return launch_many(norm_linear<Out, false>(p), chip);
}

}  // namespace

cudaError_t launch_norm_linear(const LinearParams& p, const Chip& chip) {
    return p.wide ? launch_as<float>(p, chip) : launch_as<__nv_bfloat16>(p, chip);
}

cudaError_t launch_linear_add(const AddParams& p, const Chip& chip) {
    return p.T <= kFew ? launch_few<64, 64>(linear_add(p), chip) : launch_narrow(linear_add(p), chip);
}

}  // namespace kimi_fx::layer
