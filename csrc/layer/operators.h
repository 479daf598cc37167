// The launchers of a layer's products, attention and routed experts aside. Letters: kimi_fx/graphs/__init__.py.
//
// Every width is a multiple of 8, T is at most 128, and all matrices lie row by row.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::layer {

constexpr int kMostTokens = 128;
constexpr int kFew = 16;           // tokens that are normed on their way into the product
constexpr int kMostRouted = 1024;  // experts
constexpr int kMostChosen = 32;    // of them for a token

struct Chip {
    int arch;    // 90: compute capability 9.0
    int blocks;  // multiprocessors
    int shared;  // bytes a block may opt into
    cudaStream_t stream;
};

// h = norm(x), rounded.
struct NormParams {
    const __nv_bfloat16* x;     // [T, width]
    const __nv_bfloat16* norm;  // [width]
    __nv_bfloat16* h;           // [T, width]
    int T, width;
    float eps;
};

// out = norm(x) w.
struct LinearParams {
    const __nv_bfloat16* x;     // [T, inputs]
    const __nv_bfloat16* norm;  // [inputs]
    const __nv_bfloat16* w;     // [rows, inputs]
    __nv_bfloat16* h;           // [T, inputs] norm(x), where tokens are many
    void* out;                  // [T, rows] bf16, or f32 where `wide`
    int T, inputs, rows;
    float eps;
    bool wide;
};
cudaError_t launch_norm_linear(const LinearParams& params, const Chip& chip);

// out = x w + residual + other, either of which may be null.
struct AddParams {
    const __nv_bfloat16* x;         // [T, inputs]
    const __nv_bfloat16* w;         // [rows, inputs]
    const __nv_bfloat16* residual;  // [T, rows]
    const __nv_bfloat16* other;     // [T, rows]
    __nv_bfloat16* out;             // [T, rows]
    float* squares;                 // [T, rows / 32, up] sums of squares of every 32 of `out`; may be null
    int T, inputs, rows;
};
cudaError_t launch_linear_add(const AddParams& params, const Chip& chip);

// out = silu(gate) up, both of norm(x).
struct GateUpParams {
    const __nv_bfloat16* x;     // [T, D]
    const __nv_bfloat16* norm;  // [D]
    const __nv_bfloat16* w;     // [2, I, D]
    __nv_bfloat16* h;           // [T, D] norm(x), where tokens are many
    __nv_bfloat16* out;         // [T, I]
    int T, D, I;
    float eps;
};
cudaError_t launch_gate_up(const GateUpParams& params, const Chip& chip);

// Each head's values times its own matrix.
struct HeadParams {
    const __nv_bfloat16* x;  // [T, H, inputs]
    const __nv_bfloat16* w;  // [H, rows, inputs]; where they absorb, [H, inputs, rows]
    __nv_bfloat16* out;      // [T, H, pitch], of which the first `rows`
    int T, H, inputs, rows, pitch;
};

// Queries of norm(q latent), rotated where they rotate, and the pool rows of norm(latent) and the rotated key.
struct QUpParams {
    const __nv_bfloat16* x;       // [T, q_lora + L + R] before their norms
    const __nv_bfloat16* q_norm;  // [q_lora]
    const __nv_bfloat16* norm;    // [L]
    const __nv_bfloat16* w;       // [H, nope + R, q_lora]
    const float* cos;             // [T, R]
    const float* sin;             // [T, R], signed
    __nv_bfloat16* nope;          // [T, H, nope]
    __nv_bfloat16* q;             // [T, H, L + R], of which the last R
    __nv_bfloat16* rows;          // [T, L + R]
    int T, H, q_lora, L, R, nope_width;
    float eps;
};

// `absorb` reads `nope` and writes the rest of `q`, `o` reads what `v_up` wrote. `counters`: [2] zero, and left so.
cudaError_t launch_q_up_absorb(const QUpParams& q_up, const HeadParams& absorb, int32_t* counters, const Chip& chip);
cudaError_t launch_v_up_o(const HeadParams& v_up, const AddParams& o, int32_t* counters, const Chip& chip);

// norm(x), the router's choice and work list, and the shared expert's silu(gate) up.
struct RouteParams {
    const __nv_bfloat16* x;        // [T, D]
    const float* squares;          // [T, pieces] whose sum is that of x's squares
    const __nv_bfloat16* norm;     // [D]
    const __nv_bfloat16* router;   // [E, D]
    const float* bias;             // [E], chooses but does not weigh
    const __nv_bfloat16* gate_up;  // [2, I, D]
    const bool* valid;             // [T]
    __nv_bfloat16* h;              // [T, D]
    float* logits;                 // [T, E] zero, and left so
    __nv_bfloat16* shared;         // [T, I]
    int32_t* ids;                  // [T, K] best first, -1: padding
    float* weights;                // [T, K]
    int32_t* order;                // [T * K] pairs (token * K + slot) by expert, padding last
    int32_t* offsets;              // [E + 1]
    int32_t* shown;                // [T, K] zero, and left so
    int T, D, E, I, K, pieces;
    float scale, eps;
};
cudaError_t launch_norm_route(const RouteParams& params, const Chip& chip);

}  // namespace kimi_fx::layer
