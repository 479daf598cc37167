// Launches a kernel of the round that may start while the one before it ends, and in clusters where asked.
//
// The kernel calls `begin` first, in every block, so that whoever waits for it waits for all that came before.

#pragma once

#include <cuda_runtime.h>

#include "common/ptx.h"

namespace kimi_fx::round {

template <typename... Expected, typename... Given>
cudaError_t launch(void (*kernel)(Expected...), dim3 grid, int threads, int shared, int cluster, int arch,
                   cudaStream_t stream, const Given&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = arch < 90 ? 0 : cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
    ptx::let_next_kernel_start();
    ptx::wait_for_previous_kernel();
#endif
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace kimi_fx::round
