// A product of few rows: y[t, m] = sum over k of x[t, k] w[m, k] for 1 to 128 tokens, the weights read once.
//
// Weights are the 16-row operand of mma.sync m16n8k16, tokens the 8-row one. A cluster of blocks has one tile of rows,
// each block a part of the inputs; more rows a tile and more blocks a cluster mean that fewer blocks read the tokens.
// Weights depend on no kernel, so the ring is filled with them before the wait for the kernel before; then come the
// tokens. Sums of warps and blocks are added in a fixed order through shared memory, the cluster's blocks dealing the
// tokens among themselves.
//
// An operator `Op` says what a product reads and where its sums go:
//
//   shape            tokens, inputs, tiles and blocks a tile
//   kTransposed      weights lie as [inputs, rows]
//   weight, input    where 8 weights of a tile's row lie, and 8 values of a token
//   norm()           the norm's weights over the inputs, or null. x * norm is rounded as it enters the product, and
//                    1 / rms joins the sums; where `kEarly`, `scale(token)` gives 1 / rms before and joins there.
//   finish           four neighbouring sums of a token are complete
//   kExtra, extra    whether each token has a block of its own after those of tiles, and what that does
//   ready, done      what a tile's block waits for before it reads tokens, and what it does when its sums are stored
//
// Two products may share a launch, the second reading what the first wrote: its blocks fill their rings, then wait for
// the first one's to be done. Blocks start in their order, so whom they wait for is always under way.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "intrinsics.h"
#include "tile.h"

namespace kimi_fx::layer {

struct Shape {
    int32_t T;       // tokens
    int32_t inputs;  // of the product, a multiple of 8
    int32_t tiles;
    int32_t splits;  // blocks a tile, each with a part of the inputs
    float eps;       // of the norm
};

// What an operator does without.
struct Plain {
    static constexpr bool kTransposed = false, kEarly = false, kExtra = false;
    __device__ const __nv_bfloat16* norm() const { return nullptr; }
    __device__ float scale(int) const { return 1; }
    __device__ void ready() const {}
    template <class T>
    __device__ void done(int) const {}
    template <class T>
    __device__ void extra(int, uint4*) const {}
};

__device__ inline float sum_of_lanes(float x, int lanes) {
    for (int d = lanes / 2; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// ---- the ring ----

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

// Multiplies the vectors that this thread copied, and takes their squares along. A thread's column is the same in every
// step, and so are its tokens.
template <class T>
struct Norm {
    static constexpr int kOwn = (T::kTokens * T::kAcross + kThreads - 1) / kThreads;
    float squares[kOwn] = {};
    uint4 next;  // weights of the step to come

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
            __nv_bfloat162* x = reinterpret_cast<__nv_bfloat162*>(&vector);
            float scale = Op::kEarly ? scales[place.row] : 1.f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 two = __bfloat1622float2(x[j]);
                if constexpr (Op::kEarly) {
                    float2 weight = __bfloat1622float2(g[j]);
                    x[j] = __floats2bfloat162_rn(two.x * scale * weight.x, two.y * scale * weight.y);
                } else {
                    squares[i] += two.x * two.x + two.y * two.y;
                    x[j] = __hmul2(x[j], g[j]);
                }
            }
            tokens[place.swizzled()] = vector;
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

// ---- products ----

template <class T>
using Sums = float[T::kM][T::kN][4];

// A warp's share of a step: every kAlongInputs-th 32 of its inputs.
template <class T, bool Transposed>
__device__ void multiply_step(Sums<T>& sums, const uint4* weights, const uint4* tokens) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = warp % T::kAlongRows * (16 * T::kM), rest = warp / T::kAlongRows;
    int token = rest % T::kAlongTokens * (8 * T::kN), part = rest / T::kAlongTokens;
    int first = lane / 8 % 2, second = lane / 16, in_matrix = lane % 8;  // of the lane's matrix of a, and its row
#pragma unroll
    for (int i = 0; i < T::kStep / 32 / T::kAlongInputs; ++i) {
        int k = (i * T::kAlongInputs + part) * 4;  // in vectors
#pragma unroll
        for (int half = 0; half < 2; ++half, k += 2) {
            uint32_t a[T::kM][4];
#pragma unroll
            for (int m = 0; m < T::kM; ++m) {
                if constexpr (Transposed) {
                    int input = 8 * (k + second) + in_matrix;
                    load_transposed(a[m], weights + Place<T::kRows / 8>::of(input, row / 8 + 2 * m + first));
                } else {
                    int r = row + 16 * m + 8 * first + in_matrix;
                    load_matrices(a[m], weights + Place<T::kAcross>::of(r, k + second));
                }
            }
#pragma unroll
            for (int n = 0; n < T::kN; ++n) {
                uint32_t b[2];
                load_matrices(b, tokens + Place<T::kAcross>::of(token + 8 * n + in_matrix, k + first));
#pragma unroll
                for (int m = 0; m < T::kM; ++m) multiply(sums[m][n], a[m], b);
            }
        }
    }
}

template <class T>
__device__ void store_sums(const Sums<T>& sums, float* to) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = warp % T::kAlongRows * (16 * T::kM), rest = warp / T::kAlongRows;
    int token = rest % T::kAlongTokens * (8 * T::kN), part = rest / T::kAlongTokens;
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
        for (int n = 0; n < T::kN; ++n) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                int t = part * T::kTokens + token + 8 * n + lane % 4 * 2 + r % 2;
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
    for (int at = threadIdx.x; at < T::kTokens * T::kRows / 4; at += kThreads) {
        float4* to = reinterpret_cast<float4*>(sums + at / (T::kRows / 4) * T::kPitch) + at % (T::kRows / 4);
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
        float4 sum = load_peer(mine, 0, blocks);
        for (int rank = 1; rank < blocks; ++rank) add(sum, load_peer(mine, rank, blocks));
        return sum;
    }
};

__device__ inline float inverse_rms(float squares, int width, float eps) { return rsqrtf(squares / width + eps); }

template <class T, class Op>
__device__ void finish_tokens(const Op& op, int tile, int rank, const float* sums, const float* squares) {
    int share = T::kTokens / op.shape.splits, first = rank * share;
    for (int at = threadIdx.x; at < share * (T::kRows / 4); at += kThreads) {
        int token = first + at / (T::kRows / 4), row = at % (T::kRows / 4) * 4;
        if (token >= op.shape.T) continue;
        float scale = 1;
        if (!Op::kEarly && op.norm() != nullptr) {
            float sum = 0;
            for (int r = 0; r < op.shape.splits; ++r) {
                sum += load_peer(squares + 2 * token, r, op.shape.splits);
                sum += load_peer(squares + 2 * token + 1, r, op.shape.splits);
            }
            scale = inverse_rms(sum, op.shape.inputs, op.shape.eps);
        }
        op.template finish<T>(tile, token, row, scale, Total<T>{sums, token, op.shape.splits});
    }
}

// ---- the kernels ----

// One block of a product: of a tile, or a token's own.
template <class T, class Op>
__device__ void run_block(const Op& op, int block, uint4* ring) {
    __shared__ float of_tokens[2 * T::kTokens];  // 1 / rms where it is known early, else sums of squares
    int tile = block / op.shape.splits, rank = block % op.shape.splits;
    if (Op::kExtra && tile >= op.shape.tiles) {
        wait_for_previous_kernel();
        int token = block - op.shape.tiles * op.shape.splits;
        if (token < op.shape.T) op.template extra<T>(token, ring);
        return;
    }
    int steps = (op.shape.inputs + T::kStep - 1) / T::kStep;
    int first = steps * rank / op.shape.splits, count = steps * (rank + 1) / op.shape.splits - first;
    bool normed = op.norm() != nullptr;
    uint64_t policy = read_once_policy();
    auto stage = [&](int step) { return ring + step % T::kStages * T::kStage; };
    for (int s = 0; s < T::kStages - 1 && s < count; ++s) copy_weights<T>(op, tile, first + s, stage(s), policy);
    Norm<T> norm;
    if (normed) norm.fetch(op, first);
    wait_for_previous_kernel();
    op.ready();
    for (int s = 0; s < T::kStages - 1; ++s) {
        if (s < count) copy_tokens<T>(op, tile, first + s, stage(s));
        close_group();
    }
    if (Op::kEarly) {
        for (int t = threadIdx.x / 32; t < T::kTokens; t += kThreads / 32) {
            float scale = t < op.shape.T ? op.scale(t) : 0.f;
            if (threadIdx.x % 32 == 0) of_tokens[t] = scale;
        }
        __syncthreads();
    }

    Sums<T> sums = {};
    for (int s = 0; s < count; ++s) {
        wait_for_groups<T::kStages - 2>();
        uint4* now = stage(s);
        if (normed) {
            norm.apply(op, now + T::kWeights, of_tokens);
            if (s + 1 < count) norm.fetch(op, first + s + 1);
        }
        __syncthreads();
        int ahead = s + T::kStages - 1;
        if (ahead < count) {
            copy_weights<T>(op, tile, first + ahead, stage(ahead), policy);
            copy_tokens<T>(op, tile, first + ahead, stage(ahead));
        }
        close_group();
        multiply_step<T, Op::kTransposed>(sums, now, now + T::kWeights);
    }

    __syncthreads();  // the ring becomes room for the sums
    float* room = reinterpret_cast<float*>(ring);
    store_sums<T>(sums, room);
    if (normed && !Op::kEarly) norm.store(of_tokens);
    __syncthreads();
    add_warps<T>(room);
    sync_cluster(op.shape.splits);
    finish_tokens<T>(op, tile, rank, room, of_tokens);
    op.template done<T>(tile);
    if (op.shape.splits > 1) sync_cluster(op.shape.splits);  // the others may still read
}

constexpr int kTogether = kRing <= 96 * 1024 ? 2 : 1;  // blocks of a multiprocessor

template <class T, class Op>
__global__ void __launch_bounds__(kThreads, kTogether) skinny_kernel(const __grid_constant__ Op op) {
    extern __shared__ uint4 ring[];
    let_next_kernel_start();
    run_block<T>(op, blockIdx.x, ring);
}

// `second` is not split: its blocks are on their own, whatever the cluster.
template <class First, class Op1, class Second, class Op2>
__global__ void __launch_bounds__(kThreads, kTogether)
    pair_kernel(const __grid_constant__ Op1 one, const __grid_constant__ Op2 two, int blocks) {
    extern __shared__ uint4 ring[];
    let_next_kernel_start();
    int block = blockIdx.x;
    if (block < blocks) {
        run_block<First>(one, block, ring);
    } else if (block < blocks + two.shape.tiles) {
        run_block<Second>(two, block - blocks, ring);
    } else {
        wait_for_previous_kernel();
    }
}

}  // namespace kimi_fx::layer
