// Launches a product, or two: the tile by the number of tokens, as many blocks a tile as keep the chip busy.

#pragma once

#include <algorithm>

#include "../common/overlap.h"
#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

constexpr int kSpare = 3 * 1024;  // of shared memory, for what is not the ring's

// Powers of two, so that a cluster's blocks share the tokens evenly; chips before sm_90 have no clusters.
inline int choose_splits(int tiles, int steps, int blocks, const Chip& chip) {
    int splits = 1, most = chip.arch < 90 ? 1 : std::min(steps, kMostSplits);
    while (2 * splits <= most && 2 * splits * tiles <= blocks) splits *= 2;
    return splits;
}

template <class T, class Op>
int count_steps(const Op& op) {
    return (op.shape.inputs + T::kStep - 1) / T::kStep;
}

// Blocks of a product and those that follow, up to a multiple of the cluster.
template <class T, class Op>
int count_blocks(const Op& op) {
    int splits = op.shape.splits;
    return (op.shape.tiles + (op.extras() + splits - 1) / splits) * splits;
}

template <class T, class Op>
int shared_bytes(const Op& op) {
    int steps = (count_steps<T>(op) + op.shape.splits - 1) / op.shape.splits;
    return std::max({16 * std::min(op.shape.stages, steps) * T::kStage, 4 * T::kSums, op.room()});
}

template <class Kernel, class... Given>
cudaError_t launch_blocks(Kernel kernel, int blocks, int cluster, int shared, const Chip& chip,
                          const Given&... arguments) {
    if (shared > chip.shared) return cudaErrorInvalidConfiguration;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return launch_in_clusters(kernel, blocks, kThreads, shared, cluster, chip.arch, chip.stream, arguments...);
}

template <class T, class Op>
void plan(Op& op, const Chip& chip) {
    bool two = T::kTogether == 2 && 2 * kRing <= chip.shared;
    op.shape.tiles = op.template count_tiles<T>();
    op.shape.splits = choose_splits(op.shape.tiles, count_steps<T>(op), chip.blocks * (two ? T::kSharing : 1), chip);
    int ring = T::kTogether == 2 ? kRing : std::max(kRing, chip.shared - kSpare);
    op.shape.stages = std::min(ring / (16 * T::kStage), kMostStages);
}

template <class T, class Op>
cudaError_t launch_tile(Op op, const Chip& chip) {
    plan<T>(op, chip);
    return launch_blocks(skinny_kernel<T, Op>, count_blocks<T>(op), op.shape.splits, shared_bytes<T>(op), chip, op);
}

// `two` reads what `one` wrote, which it learns from `counters`.
template <class T1, class T2, class Op1, class Op2>
cudaError_t launch_tiles(Op1 one, Op2 two, const Chip& chip) {
    plan<T1>(one, chip);
    plan<T2>(two, chip);
    two.shape.splits = 1;
    two.awaited = one.shape.tiles * one.shape.splits;
    int splits = one.shape.splits, blocks = count_blocks<T1>(one);
    int all = blocks + (two.shape.tiles + splits - 1) / splits * splits;
    int shared = std::max(shared_bytes<T1>(one), shared_bytes<T2>(two));
    return launch_blocks(pair_kernel<T1, Op1, T2, Op2>, all, splits, shared, chip, one, two, blocks);
}

// Tiles of 128 rows halve how often the tokens are read, where there are enough of them, and no more than one round.
inline bool worth_wide_tiles(int rows, const Chip& chip) {
    return chip.arch >= 90 && rows >= chip.blocks * 128 / kMostSplits && rows <= chip.blocks * 64;
}

// `Few` and `Some` are the rows of a tile at up to 8 and up to 16 tokens: 16 and 32 where inputs are many, else 64.
// `Together`: blocks of a multiprocessor at more, two where tiles may be many; these may then have 128 rows.
template <int Few, int Some, int Together, class Op>
cudaError_t launch(const Op& op, const Chip& chip) {
    constexpr int kMany = Together == 2 ? 128 : 64;
    int T = op.shape.T;
    if (T <= 8) return launch_tile<Tile<8, Few>>(op, chip);
    if (T <= 16) return launch_tile<Tile<16, Some>>(op, chip);
    if (T <= 32) return launch_tile<Tile<32, 64, Together>>(op, chip);
    bool wide = Together == 2 && worth_wide_tiles(op.template count_tiles<Tile<64, 64>>() * 64, chip);
    if (T <= 64) {
        return wide ? launch_tile<Tile<64, kMany, Together>>(op, chip) : launch_tile<Tile<64, 64, Together>>(op, chip);
    }
    return wide ? launch_tile<Tile<128, kMany, Together>>(op, chip) : launch_tile<Tile<128, 64, Together>>(op, chip);
}

// The first has many inputs, the second few.
template <class Op1, class Op2>
cudaError_t launch_pair(const Op1& one, const Op2& two, const Chip& chip) {
    int T = one.shape.T;
    if (T <= 8) return launch_tiles<Tile<8, 16>, Tile<8, 64>>(one, two, chip);
    if (T <= 16) return launch_tiles<Tile<16, 32>, Tile<16, 64>>(one, two, chip);
    if (T <= 32) return launch_tiles<Tile<32, 64>, Tile<32, 64>>(one, two, chip);
    if (T <= 64) return launch_tiles<Tile<64, 64>, Tile<64, 64>>(one, two, chip);
    return launch_tiles<Tile<128, 64>, Tile<128, 64>>(one, two, chip);
}

}  // namespace kimi_fx::layer
