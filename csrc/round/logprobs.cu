// Log-probabilities of the rows a walk accepted, raw, and their 20 best: a block a chunk of a row, and the last of a
// row's blocks to arrive joins them.
//
// Every row has its blocks, whether it was accepted or not: those without work leave at once.

#include "sample_and_walk.h"

#include "merge.h"
#include "top.h"

namespace kimi_fx::round {
namespace {

__global__ void __launch_bounds__(kThreads, kSummaries) logprobs_kernel(WalkParams p, int k) {
    __shared__ TopMemory memory;
    begin();
    int chunk = blockIdx.x, chunks = gridDim.x, a = blockIdx.y, b = blockIdx.z, i = threadIdx.x;
    int64_t at = int64_t(b) * p.A + a;
    float* logprob = p.logprob + at;
    int64_t* ids = p.top_ids + at * kAlternatives;
    float* logprobs = p.top_logprobs + at * kAlternatives;
    if (a >= p.count[b] || p.logprobs[b] < 0) {
        if (chunk == 0 && i == 0) *logprob = 0;
        if (chunk == 0 && i < kAlternatives) ids[i] = 0, logprobs[i] = 0;
        return;
    }
    const float* row = p.logits + (int64_t(b) * p.N + p.path[at]) * p.V;
    uint64_t* keys = p.keys + at * chunks * k;
    Sum* sums = static_cast<Sum*>(p.sums) + at * chunks;
    summarise(row, p.V, chunk, chunks, k, keys, sums, memory);
    if (!last_to_arrive(p.arrived + at, chunks, memory)) return;

    if (i >= 32) return;
    Sum whole = join_lanes(sum_of(sums, chunks));
    Merge merge(keys, k, chunks, memory.candidate);
    memory.list[i] = 0;
    __syncwarp();
    for (int r = 0; r < k; ++r) {
        merge.next([&](bool own, uint64_t key) {
            if (own) memory.list[r] = key;
        });
    }
    __syncwarp();
    uint64_t own = memory.list[i];
    auto of = [&](float x) { return x - whole.top - logf(whole.sum); };
    if (i == 0) *logprob = of(row[p.tokens[at]]);
    if (i >= kAlternatives) return;
    ids[i] = own ? id_of(own) : -1;
    logprobs[i] = own ? of(value_of(own)) : 0;
}

}  // namespace

cudaError_t launch_logprobs(const WalkParams& params, int arch, cudaStream_t stream) {
    dim3 grid(row_chunks(params.V), params.A, params.B);
    int k = std::min(kAlternatives, params.V);
    return launch_in_clusters(logprobs_kernel, grid, kThreads, 0, 1, arch, stream, params, k);
}

}  // namespace kimi_fx::round
