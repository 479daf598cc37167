// What operators do with four neighbouring sums of a token.

#pragma once

#include "skinny.h"

namespace kimi_fx::layer {

__device__ inline void store_four(__nv_bfloat16* to, float4 v) {
    __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(to) = make_uint2(reinterpret_cast<uint32_t&>(low), reinterpret_cast<uint32_t&>(high));
}

__device__ inline void store_four(float* to, float4 v) { *reinterpret_cast<float4*>(to) = v; }

__device__ inline float4 as_four(uint2 words) {
    float2 low = __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(words.x));
    float2 high = __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(words.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ inline float4 load_four(const __nv_bfloat16* from) { return as_four(*reinterpret_cast<const uint2*>(from)); }

__device__ inline float4 times(float4 v, float s) { return make_float4(v.x * s, v.y * s, v.z * s, v.w * s); }

// What four values have once more rounded.
__device__ inline float squares_of_rounded(float4 v) {
    float2 low = __bfloat1622float2(__floats2bfloat162_rn(v.x, v.y));
    float2 high = __bfloat1622float2(__floats2bfloat162_rn(v.z, v.w));
    return low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
}

__device__ inline float silu_mul(float gate, float up) { return gate / (1 + __expf(-gate)) * up; }

__device__ inline float4 silu_mul(float4 gate, float4 up) {
    return make_float4(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y), silu_mul(gate.z, up.z), silu_mul(gate.w, up.w));
}

// A tile of gate|up has half of its rows of gate and the same rows of up. The row of [2, I, …] that row `row` is.
template <class T>
__device__ int gate_up_row(int tile, int row, int I) {
    int half = T::kRows / 2, inner = min(tile * half + row % half, I - 1);
    return row / half * I + inner;
}

template <class T>
__device__ void finish_gate_up(__nv_bfloat16* to, int tile, int row, int I, float scale, const Total<T>& total) {
    int half = T::kRows / 2, inner = tile * half + row;
    if (row >= half || inner >= I) return;
    store_four(to + inner, silu_mul(times(total(row), scale), times(total(row + half), scale)));
}

// Rotates two neighbouring pairs; cos and signed sin have an angle for each element.
__device__ inline float4 rotate(float4 v, const float* cos, const float* sin) {
    float4 c = *reinterpret_cast<const float4*>(cos), s = *reinterpret_cast<const float4*>(sin);
    return make_float4(v.x * c.x + v.y * s.x, v.y * c.y + v.x * s.y, v.z * c.z + v.w * s.z, v.w * c.w + v.z * s.w);
}

// x * scale * weight, by `threads` threads of which this is one, each with several vectors under way.
template <int kAtOnce>
__device__ void scale_row(__nv_bfloat16* to, const __nv_bfloat16* x, const __nv_bfloat16* weight, int width,
                                 float scale, int thread, int threads) {
#pragma unroll 1
    for (int from = 8 * thread; from < width; from += 8 * threads * kAtOnce) {
        uint4 values[kAtOnce], weights[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int at = min(from + 8 * threads * i, width - 8);
            values[i] = *reinterpret_cast<const uint4*>(x + at);
            weights[i] = *reinterpret_cast<const uint4*>(weight + at);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int at = from + 8 * threads * i;
            if (at < width) *reinterpret_cast<uint4*>(to + at) = scaled(values[i], weights[i], scale);
        }
    }
}

}  // namespace kimi_fx::layer
