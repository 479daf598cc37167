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
    unsigned row, along;
    __device__ explicit Place(unsigned at) : row(at / Across), along(at % Across) {}
    __device__ static unsigned of(unsigned row, unsigned along) { return row * Across + (along ^ row % 8); }
    __device__ unsigned swizzled() const { return of(row, along); }
};

// This thread's vectors of a tile's weights. Where they lie is worked out once: code that runs once a step stays short,
// since every multiprocessor must fetch it anew in every layer.
template <class T, class Op>
struct Weights {
    static constexpr int kAcross = Op::kTransposed ? T::kRows / 8 : T::kAcross, kOwn = T::kWeights / kThreads;
    const __nv_bfloat16* tile_at;
    int from[kOwn];  // beyond there
    int stride;      // from step to step
    int k;           // input of the first in a step

    __device__ Weights(const Op& op, int tile) {
        Place<kAcross> first(threadIdx.x);
        k = Op::kTransposed ? first.row : 8 * first.along;
        tile_at = op.template weight<T>(tile, 0, 0);
        stride = op.template weight<T>(tile, 0, T::kStep) - tile_at;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            Place<kAcross> place(threadIdx.x + i * kThreads);
            from[i] = (Op::kTransposed ? op.template weight<T>(tile, 8 * place.along, place.row)
                                       : op.template weight<T>(tile, place.row, k)) - tile_at;
        }
    }

    __device__ void copy(const Op& op, int step, uint4* stage, uint64_t policy) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            Place<kAcross> place(threadIdx.x + i * kThreads);
            int own = step * T::kStep + k + (Op::kTransposed ? i * (kThreads / kAcross) : 0);
            copy_once(stage + place.swizzled(), tile_at + from[i] + step * stride, own < op.shape.inputs, policy);
        }
    }
};

// This thread's vectors of the tokens: all of one column.
template <class T, class F>
__device__ void for_each_vector(F f) {
    constexpr int kVectors = T::kTokens * T::kAcross;
#pragma unroll
    for (int i = 0; i < (kVectors + kThreads - 1) / kThreads; ++i) {
        unsigned at = threadIdx.x + i * kThreads;
        if (kVectors % kThreads == 0 || at < kVectors) f(i, Place<T::kAcross>(at));
    }
}

template <class T, class Op>
struct Tokens {
    const __nv_bfloat16* from;
    int pitch;  // between two of this thread's
    int k;

    __device__ Tokens(const Op& op, int tile) {
        Place<T::kAcross> first(threadIdx.x);
        k = 8 * first.along;
        from = op.template input<T>(tile, first.row, k);
        pitch = op.template input<T>(tile, kThreads / T::kAcross, 0) - op.template input<T>(tile, 0, 0);
    }

    __device__ void copy(const Op& op, int step, uint4* stage) const {
        bool real = step * T::kStep + k < op.shape.inputs;
        for_each_vector<T>([&](int i, Place<T::kAcross> place) {
            const __nv_bfloat16* x = from + step * T::kStep + i * pitch;
            copy_vector(stage + T::kWeights + place.swizzled(), x, real && int(place.row) < op.shape.T);
        });
    }
};

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
    float squares[kOwn];
    uint4 next;  // weights of the step to come

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) squares[i] = 0;
    }

    template <class Op>
    __device__ void fetch(const Op& op, int step) {
        int k = step * T::kStep + threadIdx.x % T::kAcross * 8;
        next = k < op.shape.inputs ? *reinterpret_cast<const uint4*>(op.norm() + k) : uint4{};
    }

    template <class Op>
    __device__ void apply(const Op& op, int tile, int step, uint4* tokens, const float* scales) {
        const __nv_bfloat162* g = reinterpret_cast<const __nv_bfloat162*>(&next);
        for_each_vector<T>([&](int i, Place<T::kAcross> place) {
            uint4 vector = tokens[place.swizzled()];
            if constexpr (Op::kEarly) {
                vector = scaled(vector, next, scales[place.row]);
                op.keep(tile, place.row, step * T::kStep + 8 * place.along, vector);
                tokens[place.swizzled()] = vector;
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
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            unsigned at = threadIdx.x + i * kThreads;
            float sum = sum_of_lanes(squares[i], kLanes);
            if (at % kLanes != 0 || at >= kVectors) continue;
            unsigned token = at / T::kAcross;
            of_tokens[2 * token + at % T::kAcross / 32] = sum;
            if (T::kAcross <= 32) of_tokens[2 * token + 1] = 0;
        }
    }
};

}  // namespace kimi_fx::layer
