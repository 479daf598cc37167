// Launches a product: the tile by the number of tokens, as many blocks a tile as keep the chip busy.

#pragma once

#include <algorithm>

#include "operators.h"
#include "skinny.h"

namespace kimi_fx::layer {

// Powers of two, so that a cluster's blocks share the tokens evenly; chips before sm_90 have no clusters.
inline int choose_splits(int tiles, int steps, const Chip& chip) {
    int splits = 1, most = chip.arch < 90 ? 1 : std::min(steps, kMostSplits);
    while (2 * splits <= most && 2 * splits * tiles <= chip.blocks) splits *= 2;
    return splits;
}

template <class T, class Op>
cudaError_t launch_tile(Op op, const Chip& chip) {
    int steps = (op.shape.inputs + T::kStep - 1) / T::kStep;
    op.shape.tiles = op.template count_tiles<T>();
    op.shape.splits = choose_splits(op.shape.tiles, steps, chip);
    int splits = op.shape.splits, extra = Op::kExtra ? (op.shape.T + splits - 1) / splits * splits : 0;
    int stages = std::min(T::kStages, (steps + splits - 1) / splits);
    int shared = std::max(16 * stages * T::kStage, 4 * T::kSums);
    if (shared > chip.shared) return cudaErrorInvalidConfiguration;
    auto kernel = skinny_kernel<T, Op>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = splits;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = op.shape.tiles * splits + extra;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = shared;
    config.stream = chip.stream;
    config.attrs = attributes;
    config.numAttrs = chip.arch < 90 ? 0 : splits > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, op);
}

// `Few` and `Some` are the rows of a tile at up to 8 and up to 16 tokens: 16 and 32 where inputs are many, else 64.
template <int Few, int Some, class Op>
cudaError_t launch(const Op& op, const Chip& chip) {
    int T = op.shape.T;
    if (T <= 8) return launch_tile<Tile<8, Few>>(op, chip);
    if (T <= 16) return launch_tile<Tile<16, Some>>(op, chip);
    if (T <= 32) return launch_tile<Tile<32, 64>>(op, chip);
    if (T <= 64) return launch_tile<Tile<64, 64>>(op, chip);
    return launch_tile<Tile<128, 64>>(op, chip);
}

}  // namespace kimi_fx::layer
