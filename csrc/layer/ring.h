// The ring of steps in shared memory: what copies weights and tokens into it, and norms the tokens there.

#pragma once

#include <cuda_bf16.h>

#include "intrinsics.h"
#include "tile.h"

namespace kimi_fx::layer {

// Vector `at` of a step: which row it is of, and which along the row. Vectors lie swizzled, so that eight rows meet all
// banks.
template <int Across>
struct Place {
    int row, along;
    __device__ explicit Place(int at) : row(at / Across), along(at % Across) {}
    __device__ static int of(int row, int along) { return row * Across + (along ^ row % 8); }
    __device__ int swizzled() const { return of(row, along); }
};

template <class T, class Op>
__device__ void copy_weights(const Op& op, int tile, int step, uint4* stage, uint64_t policy) {
    constexpr int kAcross = Op::kTransposed ? T::kRows / 8 : T::kAcross;
#pragma unroll
    for (int i = 0; i < T::kWeights / kThreads; ++i) {
        Place<kAcross> place(threadIdx.x + i * kThreads);
        int k = step * T::kStep + (Op::kTransposed ? place.row : 8 * place.along);
        bool real = k < op.shape.inputs;
        const __nv_bfloat16* from = op.template weight<T>(tile, Op::kTransposed ? 8 * place.along : place.row, real ? k : 0);
        copy_once(stage + place.swizzled(), from, real, policy);
    }
}

// This thread's vectors of the tokens: all of one column.
template <class T, class F>
__device__ void for_each_vector(F f) {
    constexpr int kVectors = T::kTokens * T::kAcross;
#pragma unroll
    for (int i = 0; i < (kVectors + kThreads - 1) / kThreads; ++i) {
        int at = threadIdx.x + i * kThreads;
        if (kVectors % kThreads == 0 || at < kVectors) f(i, Place<T::kAcross>(at));
    }
}

template <class T, class Op>
__device__ void copy_tokens(const Op& op, int tile, int step, uint4* stage) {
    for_each_vector<T>([&](int, Place<T::kAcross> place) {
        int k = step * T::kStep + 8 * place.along;
        bool real = place.row < op.shape.T && k < op.shape.inputs;
        copy(stage + T::kWeights + place.swizzled(), op.template input<T>(tile, real ? place.row : 0, real ? k : 0), real);
    });
}

// ---- the norm ----

__device__ inline float inverse_rms(float squares, int width, float eps) { return rsqrtf(squares / width + eps); }

__device__ inline float sum_of_lanes(float x, int lanes) {
    for (int d = lanes / 2; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// x * scale * g, eight of each.
__device__ inline uint4 scaled(uint4 x, uint4 g, float scale) {
    __nv_bfloat162* values = reinterpret_cast<__nv_bfloat162*>(&x);
    const __nv_bfloat162* weights = reinterpret_cast<const __nv_bfloat162*>(&g);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 two = __bfloat1622float2(values[i]), weight = __bfloat1622float2(weights[i]);
        values[i] = __floats2bfloat162_rn(two.x * scale * weight.x, two.y * scale * weight.y);
    }
    return x;
}

// Multiplies the vectors that this thread copied, and takes their squares along. A thread's column is the same in every
// step, and so are its tokens.
template <class T>
struct Norm {
    static constexpr int kOwn = (T::kTokens * T::kAcross + kThreads - 1) / kThreads;
    float squares[kOwn] = {};
    uint4 next;  // weights of the step to come

    // All of this block's, so that none of its steps waits for memory.
    template <class Op>
    __device__ static void warm_up(const Op& op, int first, int count) {
        int end = min((first + count) * T::kStep, op.shape.inputs);
        for (int k = first * T::kStep + 8 * threadIdx.x; k < end; k += 8 * kThreads) warm(op.norm() + k);
    }

    template <class Op>
    __device__ void fetch(const Op& op, int step) {
        int k = step * T::kStep + threadIdx.x % T::kAcross * 8;
        next = k < op.shape.inputs ? *reinterpret_cast<const uint4*>(op.norm() + k) : uint4{};
    }

    template <class Op>
    __device__ void apply(const Op& op, uint4* tokens, const float* scales) {
        const __nv_bfloat162* g = reinterpret_cast<const __nv_bfloat162*>(&next);
        for_each_vector<T>([&](int i, Place<T::kAcross> place) {
            uint4 vector = tokens[place.swizzled()];
            if constexpr (Op::kEarly) {
                tokens[place.swizzled()] = scaled(vector, next, scales[place.row]);
            } else {
                __nv_bfloat162* x = reinterpret_cast<__nv_bfloat162*>(&vector);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float2 two = __bfloat1622float2(x[j]);
                    squares[i] += two.x * two.x + two.y * two.y;
                    x[j] = __hmul2(x[j], g[j]);
                }
                tokens[place.swizzled()] = vector;
            }
        });
    }

    // Sums of squares of this block's inputs, two a token, of which the second may be zero.
    __device__ void store(float* of_tokens) const {
        constexpr int kLanes = T::kAcross < 32 ? T::kAcross : 32;
        constexpr int kVectors = T::kTokens * T::kAcross;
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            int at = threadIdx.x + i * kThreads;
            float sum = sum_of_lanes(squares[i], kLanes);
            if (lane % kLanes != 0 || at >= kVectors) continue;
            int token = at / T::kAcross;
            of_tokens[2 * token + at % T::kAcross / 32] = sum;
            if (T::kAcross <= 32) of_tokens[2 * token + 1] = 0;
        }
    }
};

}  // namespace kimi_fx::layer
