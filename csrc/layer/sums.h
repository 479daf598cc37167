// From a step in shared memory to sums in registers, and from those of all warps and blocks to one.

#pragma once

#include "groups.h"
#include "ring.h"

namespace kimi_fx::layer {

template <class T>
using Sums = float[T::kM][T::kN][4];

template <class T>
__device__ void clear(Sums<T>& sums) {
#pragma unroll
    for (int i = 0; i < T::kM * T::kN * 4; ++i) sums[i / 4 / T::kN][i / 4 % T::kN][i % 4] = 0;
}

// Four warps multiply at once on sm_90a.
template <class T, bool Transposed>
__device__ constexpr bool by_groups() {
    return kGroups && T::kMany && !Transposed;
}

// The share of four warps together: 64 rows, all inputs.
template <class T>
__device__ void multiply_by_groups(Sums<T>& sums, const uint4* weights, const uint4* tokens) {
    unsigned group = threadIdx.x / 128, rows = T::kRows / 64;
    const uint4* a = weights + group % rows * (64 * T::kAcross);
    const uint4* b = tokens + group / rows * (8 * T::kN * T::kAcross);
    multiply_group<T::kStep / 16>(reinterpret_cast<float(&)[4 * T::kN]>(sums), a, b);
}

// A warp's share of a step: some rows, and every kAlongInputs-th 32 inputs or some tokens.
template <class T, bool Transposed>
__device__ void multiply_step(Sums<T>& sums, const uint4* weights, const uint4* tokens) {
    if constexpr (by_groups<T, Transposed>()) return multiply_by_groups<T>(sums, weights, tokens);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned row = warp % T::kAlongRows * (16 * T::kM), others = warp / T::kAlongRows;
    unsigned part = others % T::kAlongInputs, token = others / T::kAlongInputs * (8 * T::kN);
    unsigned first = lane / 8 % 2, second = lane / 16, in_matrix = lane % 8;  // of the lane's matrix of a, and its row
#pragma unroll
    for (int i = 0; i < T::kStep / 32 / T::kAlongInputs; ++i) {
        unsigned k = (i * T::kAlongInputs + part) * 4;  // in vectors
#pragma unroll
        for (int half = 0; half < 2; ++half, k += 2) {
            uint32_t a[T::kM][4];
#pragma unroll
            for (int m = 0; m < T::kM; ++m) {
                if constexpr (Transposed) {
                    unsigned input = 8 * (k + second) + in_matrix;
                    load_transposed(a[m], weights + Place<T::kRows / 8>::of(input, row / 8 + 2 * m + first));
                } else {
                    unsigned r = row + 16 * m + 8 * first + in_matrix;
                    load_matrices(a[m], weights + Place<T::kAcross>::of(r, k + second));
                }
            }
            constexpr int kTogether = T::kN > 1 ? 2 : 1;
#pragma unroll
            for (int n = 0; n < T::kN; n += kTogether) {
                uint32_t b[2 * kTogether];
                unsigned t = token + 8 * n + (kTogether > 1 ? 8 * second : 0) + in_matrix;
                load_matrices(b, tokens + Place<T::kAcross>::of(t, k + first));
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
#pragma unroll
                    for (int m = 0; m < T::kM; ++m) multiply(sums[m][n + j], a[m], b[2 * j], b[2 * j + 1]);
                }
            }
        }
    }
}

template <class T>
__device__ void store_sums(const Sums<T>& sums, float* to) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned row = warp % T::kAlongRows * (16 * T::kM), others = warp / T::kAlongRows;
    unsigned token = others % T::kAlongInputs * T::kTokens + others / T::kAlongInputs * (8 * T::kN);
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
        for (int n = 0; n < T::kN; ++n) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned t = token + 8 * n + lane % 4 * 2 + r % 2;
                to[t * T::kPitch + row + 16 * m + r / 2 * 8 + lane / 4] = sums[m][n][r];
            }
        }
    }
}

__device__ inline void add(float4& sum, const float4& x) {
    sum.x += x.x;
    sum.y += x.y;
    sum.z += x.z;
    sum.w += x.w;
}

// Four sums of a token and their neighbours: over the warps of this block, kept in the first one's place.
template <class T>
__device__ void add_warps(float* sums) {
    if (T::kAlongInputs == 1) return;
    constexpr unsigned kAcross = T::kRows / 4;
#pragma unroll 1
    for (unsigned at = threadIdx.x; at < T::kTokens * kAcross; at += kThreads) {
        int token = at / kAcross, row = at % kAcross * 4;
        float4* to = reinterpret_cast<float4*>(sums + token * T::kPitch + row);
        float4 sum = *to;
#pragma unroll
        for (int w = 1; w < T::kAlongInputs; ++w) add(sum, to[w * T::kTokens * T::kPitch / 4]);
        *to = sum;
    }
}

// Sums over the cluster's blocks, as `Op::finish` asks for them.
template <class T>
struct Total {
    const float* sums;  // of this block
    int token, blocks;

    __device__ float4 operator()(int row) const {
        const float4* mine = reinterpret_cast<const float4*>(sums + token * T::kPitch + row);
        float4 parts[kMostSplits], sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int rank = 0; rank < kMostSplits; ++rank) {
            if (rank < blocks) parts[rank] = load_peer(mine, rank, blocks);
        }
#pragma unroll
        for (int rank = 0; rank < kMostSplits; ++rank) {
            if (rank < blocks) add(sum, parts[rank]);
        }
        return sum;
    }
};

}  // namespace kimi_fx::layer
