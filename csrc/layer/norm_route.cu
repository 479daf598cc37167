// The router's logits and the shared expert's gate|up in one product of the same normed input, which blocks beside
// them write for the routed experts, a warp a token. The logits read that very input, rounded: 1 / rms comes first.
//
// These then wait for the logits and choose; the last of them makes the work list. Blocks start in their
// order and those that wait come last, so whom they wait for is always under way.

#include "choose.h"
#include "launch.h"
#include "store.h"

namespace kimi_fx::layer {
namespace {

struct Route : Plain {
    static constexpr bool kEarly = true;
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

    // By `Lanes` neighbouring threads of a warp.
    template <int Lanes>
    __device__ float scale(int token) const {
        const float* of = p.squares + token * p.pieces;
        int fours = p.pieces % 4 == 0 ? p.pieces / 4 : 0, lane = threadIdx.x % Lanes;
        float sum = 0;
#pragma unroll(Lanes < 16 ? 7 : 1)
        for (int i = lane; i < fours; i += Lanes) {
            float4 v = reinterpret_cast<const float4*>(of)[i];
            sum += (v.x + v.y) + (v.z + v.w);
        }
#pragma unroll 1
        for (int i = 4 * fours + lane; i < p.pieces; i += Lanes) sum += of[i];
        return inverse_rms(sum_of_lanes(sum, Lanes), p.D, shape.eps);
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

    __host__ __device__ int extras() const { return (p.T + kWarps - 1) / kWarps; }
    int room() const { return 20 * (p.E + 1) + 4 + 8 * kWarps * rounded(p.E); }

    // A warp a token.
    template <class T>
    __device__ void extra(int block, uint4* ring) const {
        uint32_t* visits = reinterpret_cast<uint32_t*>(ring);
        int* starts = reinterpret_cast<int*>(visits + (p.E + 1) * kWords);
        uint64_t* keys = reinterpret_cast<uint64_t*>(starts + (p.E + 2) / 2 * 2);
        int warp = threadIdx.x / 32, token = block * kWarps + warp;
#pragma unroll 1
        for (int i = threadIdx.x; i < (p.E + 1) * kWords; i += kThreads) visits[i] = 0;
        if (token < p.T) {
            int64_t at = int64_t(token) * p.D;
            scale_row<4>(p.h + at, p.x + at, p.norm, p.D, scale<32>(token), threadIdx.x % 32, 32);
        }
        wait_until(p.counters, router_tiles<T>() * shape.splits);
        if (token < p.T) choose_experts(p, token, keys + warp * rounded(p.E));
        if (!arrive(p.counters + 1, extras())) return;
        if (threadIdx.x < 2) p.counters[threadIdx.x] = 0;
        list_pairs(p, visits, starts);
    }
};

}  // namespace

cudaError_t launch_norm_route(const RouteParams& p, const Chip& chip) {
    Route op;
    op.shape = {p.T, p.D, 0, 0, 0, p.eps};
    op.p = p;
    return launch<16, 32, 1>(op, chip);
}

}  // namespace kimi_fx::layer
