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
//   kNormed, norm()  the norm's weights over the inputs. x * norm is rounded as it enters the product, and 1 / rms joins
//                    the sums; where `kEarly`, `scale(token)` gives 1 / rms before and joins there, `Lanes` threads a
//                    token, and `keep` may store what enters
//   finish           four neighbouring sums of a token are complete
//   kAdds, added     what is added to them, which `finish` is given, is asked for before the product
//   extras, extra    how many blocks follow those of tiles, and what each does, in shared memory of `room` bytes
//   ready, done      what a tile's block waits for before it reads tokens, and what it does when its sums are stored,
//                    with what `ready` gave
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
    int32_t stages;  // steps that the ring holds
    float eps;       // of the norm
};

// What an operator does without.
struct Plain {
    static constexpr bool kTransposed = false, kNormed = false, kEarly = false, kAdds = false;
    struct Added {};
    __device__ const __nv_bfloat16* norm() const { return nullptr; }
    template <int Lanes>
    __device__ float scale(int) const {
        return 1;
    }
    __device__ int ready() const { return 0; }
    __device__ void done(int) const {}
    __host__ __device__ int extras() const { return 0; }
    int room() const { return 0; }
    template <class T>
    __device__ void extra(int, uint4*) const {}
};

// 1 / rms of a token whose squares the cluster's blocks summed.
template <class Op>
__device__ float inverse_rms_of(const Op& op, const float2* squares) {
    float2 parts[kMostSplits];
    float sum = 0;
#pragma unroll
    for (int rank = 0; rank < kMostSplits; ++rank) {
        if (rank < op.shape.splits) parts[rank] = load_peer(squares, rank, op.shape.splits);
    }
#pragma unroll
    for (int rank = 0; rank < kMostSplits; ++rank) {
        if (rank < op.shape.splits) sum += parts[rank].x + parts[rank].y;
    }
    return inverse_rms(sum, op.shape.inputs, op.shape.eps);
}

// What a thread of a tile's block finishes: four neighbouring sums of every kApart-th token of the block's own.
template <class T, class Op>
struct Share {
    static constexpr int kAcross = T::kRows / 4, kApart = kThreads / kAcross;
    static constexpr int kMost = (T::kTokens + kApart - 1) / kApart, kAdded = Op::kAdds ? kMost : 1;
    int tile, row, first, end;
    typename Op::Added added[kAdded];

    __device__ Share(const Op& op, int tile, int rank) : tile(tile) {
        int tokens = T::kTokens / op.shape.splits;
        row = threadIdx.x % kAcross * 4;
        first = rank * tokens + threadIdx.x / kAcross;
        end = min((rank + 1) * tokens, op.shape.T);
    }

    __device__ void ask(const Op& op) {
        if constexpr (Op::kAdds) {
#pragma unroll
            for (int i = 0; i < kMost; ++i) {
                if (first + i * kApart < end) added[i] = op.template added<T>(tile, first + i * kApart, row);
            }
        }
    }

    __device__ void finish(const Op& op, const float* sums, const float* squares) const {
#pragma unroll(kAdded)
        for (int i = 0; i < kMost; ++i) {
            int token = first + i * kApart;
            if (token >= end) break;
            Total<T> total{sums, token, op.shape.splits};
            if constexpr (Op::kAdds) {
                op.template finish<T>(tile, token, row, added[i], total);
            } else if constexpr (Op::kNormed && !Op::kEarly) {
                float scale = inverse_rms_of(op, reinterpret_cast<const float2*>(squares) + token);
                op.template finish<T>(tile, token, row, scale, total);
            } else {
                op.template finish<T>(tile, token, row, 1, total);
            }
        }
    }
};

// 1 / rms of every token, by several threads each.
template <class T, class Op>
__device__ void scale_tokens(const Op& op, float* scales) {
    constexpr int kLanes = kThreads / T::kTokens;
    int token = threadIdx.x / kLanes;
    float scale = op.template scale<kLanes>(min(token, op.shape.T - 1));
    if (threadIdx.x % kLanes == 0) scales[token] = token < op.shape.T ? scale : 0.f;
    __syncthreads();
}

// ---- the kernels ----

// One block of a product: of a tile, or a token's own.
template <class T, class Op>
__device__ void run_block(const Op& op, int block, uint4* ring) {
    __shared__ alignas(8) float of_tokens[2 * T::kTokens];  // 1 / rms where it is known early, else sums of squares
    int tile = block / op.shape.splits, rank = block % op.shape.splits;
    if (tile >= op.shape.tiles) {
        wait_for_previous_kernel();
        int extra = block - op.shape.tiles * op.shape.splits;
        if (extra < op.extras()) op.template extra<T>(extra, ring);
        return;
    }
    int steps = (op.shape.inputs + T::kStep - 1) / T::kStep;
    int first = steps * rank / op.shape.splits, count = steps * (rank + 1) / op.shape.splits - first;
    uint64_t policy = ptx::read_once_policy();
    Weights<T, Op> weights(op, tile);
    Tokens<T, Op> tokens(op, tile);
    int ahead = count <= op.shape.stages ? count : op.shape.stages - 1;
#pragma unroll 1
    for (int s = 0; s < min(ahead, count); ++s) weights.copy(op, first + s, ring + s * T::kStage, policy);
    Norm<T> norm;
    Share<T, Op> share(op, tile, rank);
    if (Op::kNormed) norm.fetch(op, first);
    wait_for_previous_kernel();
    share.ask(op);
    int given = op.ready();
#pragma unroll 1
    for (int s = 0; s < ahead; ++s) {
        if (s < count) tokens.copy(op, first + s, ring + s * T::kStage);
        close_group();
    }
    if (Op::kEarly) scale_tokens<T>(op, of_tokens);
    norm.clear();
    Sums<T> sums;
    clear<T>(sums);
    uint4 *now = ring, *free = ring + ahead * T::kStage, *end = ring + op.shape.stages * T::kStage;
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
        wait_for_groups(ahead - 1);
        if (Op::kNormed) {
            norm.apply(op, tile, first + s, now + T::kWeights, of_tokens);
            if (s + 1 < count) norm.fetch(op, first + s + 1);
        }
        if (by_groups<T, Op::kTransposed>()) show_groups();
        __syncthreads();
        if (s + ahead < count) {
            weights.copy(op, first + s + ahead, free, policy);
            tokens.copy(op, first + s + ahead, free);
        }
        close_group();
        multiply_step<T, Op::kTransposed>(sums, now, now + T::kWeights);
        free = now;
        now = now + T::kStage == end ? ring : now + T::kStage;
    }

    __syncthreads();  // the ring becomes room for the sums
    float* room = reinterpret_cast<float*>(ring);
    store_sums<T>(sums, room);
    if (Op::kNormed && !Op::kEarly) norm.store(of_tokens);
    __syncthreads();
    add_warps<T>(room);
    sync_cluster(op.shape.splits);
    share.finish(op, room, of_tokens);
    op.done(given);
    if (op.shape.splits > 1) sync_cluster(op.shape.splits);  // the others may still read
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
template <class T>
constexpr int kTogether = T::kTogether;
#else
template <class T>
constexpr int kTogether = 1;
#endif

template <class T, class Op>
__global__ void __launch_bounds__(kThreads, kTogether<T>) skinny_kernel(const __grid_constant__ Op op) {
    extern __shared__ __align__(1024) uint4 ring[];
    run_block<T>(op, blockIdx.x, ring);
}

// `second` is split as `first` is, or not at all: then its blocks are on their own, whatever the cluster.
template <class First, class Op1, class Second, class Op2>
__global__ void __launch_bounds__(kThreads, kTogether<First>)
    pair_kernel(const __grid_constant__ Op1 one, const __grid_constant__ Op2 two, int blocks) {
    extern __shared__ __align__(1024) uint4 ring[];
    int block = blockIdx.x;
    if (block < blocks) {
        run_block<First>(one, block, ring);
    } else if (block < blocks + two.shape.tiles * two.shape.splits) {
        run_block<Second>(two, block - blocks, ring);
    } else {
        wait_for_previous_kernel();
    }
}

}  // namespace kimi_fx::layer
