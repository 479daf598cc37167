// The launchers of the routed experts, to be called in this order on one stream, and the sizes their scratch takes.

#pragma once

#include <cstdint>

#include "params.h"

namespace kimi_fx::moe {

// Fills tiles, blocks and counters from T, k, E, D, I for the current device.
cudaError_t plan(Params& params, int multiprocessors);

inline int64_t partial_size(const Params& p) {
    return int64_t(kPerWarp) * p.blocks * kWarps * 8 * p.tiles * 2 * kColumns;
}

// `ready` and `queue`, where `arrived` lies.
void place_counters(Params& params);

// Counters to zero, weights of padding pairs to zero.
cudaError_t launch_prepare(const Params& params, int arch, cudaStream_t stream);

// h and the rows of every pair.
cudaError_t launch_experts(const Params& params, int arch, cudaStream_t stream);

// The weighted sum over a token's pairs.
cudaError_t launch_weighted_sum(const Params& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::moe
