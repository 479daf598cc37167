// Launches a kernel that may start while the one before it ends (programmatic dependent launch, sm_90 and up).
//
// The kernel must wait (griddepcontrol.wait) in every block before it touches memory, on any path, so that whoever
// waits for it waits for all that came before.

#pragma once

#include <cuda_runtime.h>

namespace kimi_fx {

template <typename... Expected, typename... Given>
cudaError_t launch_overlapped(void (*kernel)(Expected...), int blocks, int threads, int shared, int arch,
                              cudaStream_t stream, const Given&... arguments) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = arch >= 90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace kimi_fx
