// Launches a product, or two: the tile by the number of tokens, as many blocks a tile as keep the chip busy.

#pragma once

#include <algorithm>

#include "../common/overlap.h"
#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

constexpr int kSpare = 3 * 1024;  // of shared memory, for what is not the ring's

// Powers of two, so that a cluster's blocks share the tokens evenly; chips before sm_90 have no clusters. Not all
// multiprocessors can be had for clusters of more than two.
inline int choose_splits(int tiles, int steps, int blocks, const Chip& chip) {
    int splits = 1, most = chip.arch < 90 ? 1 : std::min(steps, kMostSplits);
    while (2 * splits <= most && 2 * splits * tiles <= blocks - (splits > 1 ? blocks / 16 : 0)) splits *= 2;
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

// `two` reads what `one` wrote, which it learns from `counters`. All blocks of both are under way together, so that those
// of `two` fill their rings meanwhile; these are as many as leave room for one of each of the first's tiles.
template <class T1, class T2, class Op1, class Op2>
cudaError_t launch_tiles(Op1 one, Op2 two, const Chip& chip) {
    plan<T1>(one, chip);
    plan<T2>(two, chip);
    int all = 2 * kRing <= chip.shared ? 2 * chip.blocks : chip.blocks, steps = count_steps<T2>(two);
    two.shape.splits = choose_splits(two.shape.tiles, std::max(1, steps / 8), all - one.shape.tiles, chip);
    int rest = all - two.shape.tiles * two.shape.splits;
    one.shape.splits = two.shape.splits > 1 ? two.shape.splits
                                            : choose_splits(one.shape.tiles, count_steps<T1>(one), rest, chip);
    two.awaited = one.shape.tiles * one.shape.splits;
    int splits = one.shape.splits, blocks = count_blocks<T1>(one);
    int followers = (two.shape.tiles * two.shape.splits + splits - 1) / splits * splits;
    int shared = std::max(shared_bytes<T1>(one), shared_bytes<T2>(two));
    return launch_blocks(pair_kernel<T1, Op1, T2, Op2>, blocks + followers, splits, shared, chip, one, two, blocks);
}

// `Few` and `Some` are the rows of a tile at up to 8 and up to 16 tokens: as few as 16 where inputs are many, else 64.
template <int Few, int Some, class Op>
cudaError_t launch_few(const Op& op, const Chip& chip) {
    return op.shape.T <= 8 ? launch_tile<Tile<8, Few>>(op, chip) : launch_tile<Tile<16, Some>>(op, chip);
}

template <class Op>
cudaError_t launch_narrow(const Op& op, const Chip& chip) {
    if (op.shape.T <= 32) return launch_tile<Tile<32, 64>>(op, chip);
    if (op.shape.T <= 64) return launch_tile<Tile<64, 64>>(op, chip);
    return launch_tile<Tile<128, 64>>(op, chip);
}

// Tiles of 128 rows halve how often the tokens are read, where there are enough of them for all multiprocessors.
template <class Op>
cudaError_t launch_many(const Op& op, const Chip& chip) {
    bool enough = op.template count_tiles<Tile<64, 128>>() * kMostSplits >= chip.blocks;
    if (chip.arch < 90 || !enough) return launch_narrow(op, chip);
    if (op.shape.T <= 32) return launch_tile<Tile<32, 128>>(op, chip);
    return op.shape.T <= 64 ? launch_tile<Tile<64, 128>>(op, chip) : launch_tile<Tile<128, 128>>(op, chip);
}

// `First` and `Second` are the rows of both tiles at up to 8 tokens, up to 16 those of the first are at least 32.
template <int First, int Second, class Op1, class Op2>
cudaError_t launch_pair(const Op1& one, const Op2& two, const Chip& chip) {
    int T = one.shape.T;
    if (T <= 8) return launch_tiles<Tile<8, First>, Tile<8, Second>>(one, two, chip);
    if (T <= 16) return launch_tiles<Tile<16, 32>, Tile<16, Second>>(one, two, chip);
    if (T <= 32) return launch_tiles<Tile<32, 64>, Tile<32, 64>>(one, two, chip);
    if (T <= 64) return launch_tiles<Tile<64, 64>, Tile<64, 64>>(one, two, chip);
    return launch_tiles<Tile<128, 64>, Tile<128, 64>>(one, two, chip);
}

}  // namespace kimi_fx::layer
