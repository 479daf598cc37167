// Before the experts: counters to zero, the weights of padding pairs to zero.
//
// It lets the experts start once it knows that the router is done, so that they find their work and fetch weights
// meanwhile; they wait for it before they touch what it writes.

#include <algorithm>

#include "../common/overlap.h"
#include "asm.h"
#include "launch.h"

namespace kimi_fx::moe {
namespace {

constexpr int kPrepareThreads = 256;

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(Params p) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    int start = blockIdx.x * kPrepareThreads + threadIdx.x, stride = gridDim.x * kPrepareThreads;
    for (int i = start; i < p.counters; i += stride) p.arrived[i] = 0;
    for (int i = start, real = p.offsets[p.E]; i < p.T * p.k; i += stride) {
        int pair = p.order[i];
        p.pair_weights[pair] = i < real ? p.weights[pair] : 0.f;
    }
}

}  // namespace

cudaError_t launch_prepare(const Params& p, int arch, cudaStream_t stream) {
    int most = std::max(p.counters, p.T * p.k);
    int blocks = std::min((most + kPrepareThreads - 1) / kPrepareThreads, 2048);
    return launch_overlapped(prepare_kernel, blocks, kPrepareThreads, 0, arch, stream, p);
}

}  // namespace kimi_fx::moe
