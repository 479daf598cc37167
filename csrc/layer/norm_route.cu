// The router's logits and the shared expert's gate|up in one product of the same normed input, which a block for each
// token beside them writes for the routed experts. The logits read that very input, rounded: 1 / rms comes first.
//
// A token's block then waits for the logits and chooses; the last of them makes the work list. Blocks start in their
// order and those that wait come last, so whom they wait for is always under way.

#include "choose.h"
#include "launch.h"
#include "store.h"

namespace kimi_fx::layer {
namespace {

struct Route : Plain {
    static constexpr bool kEarly = true, kExtra = true;
    Shape shape;
    RouteParams p;

    template <class T>
    __host__ __device__ int router_tiles() const {
        return (p.E + T::kRows - 1) / T::kRows;
    }
    template <class T>
    int count_tiles() const {
        return router_tiles<T>() + (2 * p.I + T::kRows - 1) / T::kRows;
    }
    template <class T>
    __device__ const __nv_bfloat16* weight(int tile, int row, int k) const {
        int past = tile - router_tiles<T>();
        if (past < 0) return p.router + int64_t(min(tile * T::kRows + row, p.E - 1)) * p.D + k;
        return p.gate_up + int64_t(gate_up_row<T>(past, row, p.I)) * p.D + k;
    }
    template <class T>
    __device__ const __nv_bfloat16* input(int, int token, int k) const {
        return p.x + int64_t(token) * p.D + k;
    }
    __device__ const __nv_bfloat16* norm() const { return p.norm; }

    // For all lanes of a warp.
    __device__ float scale(int token) const {
        float sum = 0;
        for (int i = threadIdx.x % 32; i < p.pieces; i += 32) sum += p.squares[token * p.pieces + i];
        return inverse_rms(sum_of_lanes(sum, 32), p.D, shape.eps);
    }

    template <class T>
    __device__ void finish(int tile, int token, int row, float, const Total<T>& total) const {
        int past = tile - router_tiles<T>();
        if (past >= 0) return finish_gate_up<T>(p.shared + int64_t(token) * p.I, past, row, p.I, 1, total);
        int expert = tile * T::kRows + row;
        if (expert < p.E) store_four(p.logits + int64_t(token) * p.E + expert, total(row));
    }

    template <class T>
    __device__ void done(int tile) const {
        if (tile < router_tiles<T>()) arrive(p.counters, 0);
    }

    template <class T>
    __device__ void extra(int token, uint4* room) const {
        int64_t at = int64_t(token) * p.D;
        scale_row(p.h + at, p.x + at, p.norm, p.D, scale(token));
        wait_until(p.counters, router_tiles<T>() * shape.splits);
        choose_experts(p, token, room);
        if (!arrive(p.counters + 1, p.T)) return;
        if (threadIdx.x < 2) p.counters[threadIdx.x] = 0;
        list_pairs(p, room);
    }
};

}  // namespace

cudaError_t launch_norm_route(const RouteParams& p, const Chip& chip) {
    Route op;
    op.shape = {p.T, p.D, 0, 0, p.eps};
    op.p = p;
    return launch<16, 32>(op, chip);
}

}  // namespace kimi_fx::layer
