// The router's logits and the shared expert's gate|up in one product of the same normed input, which the routed experts
// read too: few tokens are normed as they enter it, many before it. The logits read that very input, rounded.
//
// Blocks beside the product choose, a warp a token; the last of them makes the work list. They wait for values, not for
// counts: a logit or a choice is there when it is not zero, and whoever reads it leaves zero. Blocks start in their order
// and those that wait come last, so whom they wait for is always under way.

#include "choose.h"
#include "launch.h"
#include "norm_rows.h"
#include "store.h"

namespace kimi_fx::layer {
namespace {

// -0 for 0, which is no logit.
__device__ inline float no_zero(float x) { return x == 0 ? -0.f : x; }

__device__ inline float4 no_zero(float4 v) { return make_float4(no_zero(v.x), no_zero(v.y), no_zero(v.z), no_zero(v.w)); }

template <bool Normed>
struct Route : Plain {
    static constexpr bool kNormed = Normed, kEarly = Normed;
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
        return (Normed ? p.x : p.h) + int64_t(token) * p.D + k;
    }
    __device__ const __nv_bfloat16* norm() const { return p.norm; }

    // The first tile's blocks have all inputs.
    __device__ void keep(int tile, int token, int k, uint4 values) const {
        if (tile == 0 && token < p.T && k < p.D) *reinterpret_cast<uint4*>(p.h + int64_t(token) * p.D + k) = values;
    }

    // By `Lanes` neighbouring threads of a warp.
    template <int Lanes>
    __device__ float scale(int token) const {
        constexpr int kAtOnce = 4;
        const float* of = p.squares + token * p.pieces;
        int fours = p.pieces % 4 == 0 ? p.pieces / 4 : 0, lane = threadIdx.x % Lanes;
        float sum = 0;
#pragma unroll 1
        for (int from = lane; from < fours; from += Lanes * kAtOnce) {  // all loads under way together
            float4 v[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                bool own = from + i * Lanes < fours;
                v[i] = own ? reinterpret_cast<const float4*>(of)[from + i * Lanes] : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
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
        if (expert < p.E) show(reinterpret_cast<float4*>(p.logits + int64_t(token) * p.E + expert), no_zero(total(row)));
    }

    // Warps of a block that choose: as many as have room.
    __host__ __device__ int choosers() const { return p.E <= kMostRouted / 2 ? kWarps : kWarps / 2; }
    __host__ __device__ int extras() const { return p.T <= kFew ? 1 : (p.T + choosers() - 1) / choosers(); }
    int room() const { return choosers() * Scratch::bytes(p.E) + List::bytes(p); }

    // A warp a token, or more where that saves an exchange.
    template <class T>
    __device__ void extra(int block, uint4* ring) const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = Scratch::bytes(p.E) / 16;
        Scratch room(ring + warp * vectors, p.E);
        List list(p, ring + choosers() * vectors);
        Pairs pairs(p.K);
        int first = warp < choosers() ? block * choosers() + warp : p.T, apart = extras() * choosers();
        bool alone = extras() == 1;
        list.clear();
        __syncthreads();
#pragma unroll 1
        for (int token = first; token < p.T; token += apart) {
            Choice choice = choose_experts(p, token, room);
            int pair = token * p.K + lane;
            if (lane >= p.K) continue;
            if (alone) {
                list.note(pair, token, choice.id);
            } else {
                show(p.shown + pair, choice.id + 2);
            }
            p.ids[pair] = choice.id, p.weights[pair] = choice.weight;
        }
        if (block < extras() - 1) return;
        if (!alone) gather_chosen(p, pairs, list);
        __syncthreads();
        list_pairs(p, pairs, list);
    }
};

template <bool Normed>
Route<Normed> route(const RouteParams& p) {
    Route<Normed> op;
    op.shape = {p.T, p.D, 0, 0, 0, p.eps};
    op.p = p;
    return op;
}

}  // namespace

cudaError_t launch_norm_route(const RouteParams& p, const Chip& chip) {
    if (p.T <= kFew) return launch_few<16, 32>(route<true>(p), chip);
    cudaError_t error = launch_norm_rows({p.x, p.norm, p.h, p.T, p.D, p.eps}, chip);
    if (error != cudaSuccess) return error;
    return launch_many(route<false>(p), chip);
}

}  // namespace kimi_fx::layer
