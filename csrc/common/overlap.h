// Launches a kernel that may start while the one before it ends (programmatic dependent launch, sm_90 and up), in
// clusters where asked.
//
// The kernel must wait (griddepcontrol.wait) in every block before it touches memory, on any path, so that whoever
// waits for it waits for all that came before.

#pragma once

#include <cuda_runtime.h>

#include <cstdlib>

namespace kimi_fx {

// KIMI_FX_OVERLAP=0 in the environment: no launch overlaps the one before, to see what that is worth.
inline bool overlapping() {
    const char* word = std::getenv("KIMI_FX_OVERLAP");
    return word == nullptr || *word != '0';
}

template <typename... Expected, typename... Given>
cudaError_t launch_in_clusters(void (*kernel)(Expected...), dim3 grid, int threads, int shared, int cluster, int arch,
                               cudaStream_t stream, const Given&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = overlapping();
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

template <typename... Expected, typename... Given>
cudaError_t launch_overlapped(void (*kernel)(Expected...), int blocks, int threads, int shared, int arch,
                              cudaStream_t stream, const Given&... arguments) {
    return launch_in_clusters(kernel, blocks, threads, shared, 1, arch, stream, arguments...);
}

}  // namespace kimi_fx
