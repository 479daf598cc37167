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
//   extras, extra    how many blocks follow those of tiles, and what each does, in shared memory of `room` bytes
//   ready, done      what a tile's block waits for before it reads tokens, and what it does when its sums are stored
//
// Two products may share a launch, the second reading what the first wrote: its blocks fill their rings, then wait for
// the first one's to be done. Blocks start in their order, so whom they wait for is always under way.

#pragma once

#include "sums.h"

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
    static constexpr bool kTransposed = false, kEarly = false;
    __device__ const __nv_bfloat16* norm() const { return nullptr; }
    __device__ float scale(int) const { return 1; }
    __device__ void ready() const {}
    template <class T>
    __device__ void done(int) const {}
    __host__ __device__ int extras() const { return 0; }
    int room() const { return 0; }
    template <class T>
    __device__ void extra(int, uint4*) const {}
};

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
    if (tile >= op.shape.tiles) {
        wait_for_previous_kernel();
        int extra = block - op.shape.tiles * op.shape.splits;
        if (extra < op.extras()) op.template extra<T>(extra, ring);
        return;
    }
    int steps = (op.shape.inputs + T::kStep - 1) / T::kStep;
    int first = steps * rank / op.shape.splits, count = steps * (rank + 1) / op.shape.splits - first;
    bool normed = op.norm() != nullptr;
    uint64_t policy = read_once_policy();
    auto stage = [&](int step) { return ring + step % T::kStages * T::kStage; };
    for (int s = 0; s < T::kStages - 1 && s < count; ++s) copy_weights<T>(op, tile, first + s, stage(s), policy);
    Norm<T> norm;
    if (normed) norm.warm_up(op, first, count), norm.fetch(op, first);
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

// Blocks of a multiprocessor: what its shared memory has room for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kTogether = kRing <= 96 * 1024 ? 2 : 1;
#else
constexpr int kTogether = 1;
#endif

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
