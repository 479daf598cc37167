// The launchers of the routed experts, to be called in this order on one stream, and the sizes their scratch takes.

#pragma once

#include <cstdint>

#include "params.h"

namespace kimi_fx::moe {

// Fills tiles, blocks, stages and items from T, k, E, D, I for the device.
cudaError_t plan(Params& params, int device);

// Length of `between`.
int64_t between_size(const Params& params);

// The rows of every pair.
cudaError_t launch_experts(const Params& params, int arch, cudaStream_t stream);

// The weighted sum over a token's pairs; counters back to zero.
cudaError_t launch_weighted_sum(const Params& params, int arch, cudaStream_t stream);

// ---- the two kernels behind these: experts.cu, up to 2 tiles of tokens an item, and prefill.cu with 6 ----

cudaError_t plan_few(Params& params, int device);
cudaError_t plan_many(Params& params, int device);
int64_t few_between_size(const Params& params);
cudaError_t launch_few(const Params& params, int arch, cudaStream_t stream);
cudaError_t launch_many(const Params& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::moe
