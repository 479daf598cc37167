// The kernels' launchers. All take their partials' room and the schedule in `params` and report launch errors.

#pragma once

#include "params.h"

namespace kimi_fx::mla {

// sm_80 and up. `shared` is what a block may opt into, in bytes.
cudaError_t launch_mma(const Params& params, int shared, int arch, cudaStream_t stream);

// sm_90a, row tiles of 64.
cudaError_t launch_wgmma(const Params& params, cudaStream_t stream);

}  // namespace kimi_fx::mla
