// The two kernels behind route.h.

#include "route.h"

#include <algorithm>

#include "../common/ptx.h"
#include "../common/overlap.h"

namespace kimi_fx::moe {
namespace {

constexpr int kListWarps = 8;  // of a block, at most
constexpr int kAhead = 8;      // ids a lane has in flight

__device__ void begin() {
#if __CUDA_ARCH__ >= 900
    ptx::let_next_kernel_start();
    ptx::wait_for_previous_kernel();
#endif
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Grows with x, NaN above all as torch sorts it; among equals the lower id's is larger. No expert's is under 2^32.
__device__ uint64_t sort_key(float x, int id) {
    int32_t bits = __float_as_int(x);
    uint32_t high = x == x ? bits ^ (bits >> 31 | 1 << 31) : ~0u;
    return uint64_t(high) << 32 | ~uint32_t(id);
}

// How many of two keys are above `key`.
__device__ int above(const uint64_t* two, uint64_t key) {
    ulonglong2 other = *reinterpret_cast<const ulonglong2*>(two);
    return (other.x > key) + (other.y > key);
}

// 1 << team lanes share a candidate, at most 32 / K.
__global__ void __launch_bounds__(kMaxRouted) select_kernel(RouteParams p, int team) {
    __shared__ alignas(16) uint64_t keys[kMaxRouted];
    __shared__ alignas(16) uint64_t best[kMaxRouted / 32 * kMaxChosen];  // K of every warp, in its order
    __shared__ float scores[kMaxRouted], chosen[kMaxChosen];
    int token = blockIdx.x, e = threadIdx.x, warp = e / 32, candidates = blockDim.x / 32 * p.K;
    if (e == 0 && candidates % 2) best[candidates] = 0;
    begin();
    bool real = p.valid[token];
    uint64_t key = ~uint32_t(e);
    if (e < p.E) {
        scores[e] = sigmoid(p.logits[int64_t(token) * p.E + e]);
        key = sort_key(scores[e] + p.bias[e], e);
    }
    keys[e] = key;
    __syncwarp();
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 2) rank += above(keys + warp * 32 + i, key);
    if (rank < p.K) best[warp * p.K + rank] = key;
    __syncthreads();

    int c = e >> team, part = e & (1 << team) - 1;
    key = c < candidates ? best[c] : 0;
    rank = 0;
#pragma unroll 4
    for (int i = 2 * part; i < candidates; i += 2 << team) rank += above(best + i, key);
    for (int d = 1; d < 1 << team; d *= 2) rank += __shfl_xor_sync(~0u, rank, d);
    bool won = real && part == 0 && c < candidates && rank < p.K;
    int32_t* ids = p.ids + token * p.K;
    float* weights = p.weights + token * p.K;
    if (won) {
        ids[rank] = ~uint32_t(key);
        chosen[rank] = scores[~uint32_t(key)];
    }
    __syncthreads();
    if (won) {
        float sum = 1e-20f;
        for (int j = 0; j < p.K; ++j) sum += chosen[j];
        weights[rank] = chosen[rank] / sum * p.scale;
    }
    if (!real && e < p.K) ids[e] = -1, weights[e] = 0;
}

__global__ void __launch_bounds__(32 * kListWarps) list_kernel(RouteParams p) {
    __shared__ int lower[kListWarps], equal[kListWarps];
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = p.T * p.K;
    int run = (pairs + blockDim.x - 1) / blockDim.x * 32, first = warp * run, last = min(pairs, first + run);
    uint32_t mine = blockIdx.x, id[kAhead];
    auto load = [&](int at) {  // the pairs of kAhead steps; padding is expert E, what is past the end none
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            int pair = at + 32 * j + lane;
            id[j] = pair < last ? min(static_cast<uint32_t>(p.ids[pair]), static_cast<uint32_t>(p.E)) : ~0u;
        }
    };
    begin();
    int less = 0, same = 0;
    for (int at = first; at < last; at += 32 * kAhead) {
        load(at);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) less += id[j] < mine, same += id[j] == mine;
    }
    less = __reduce_add_sync(~0u, less), same = __reduce_add_sync(~0u, same);
    if (lane == 0) lower[warp] = less, equal[warp] = same;
    __syncthreads();
    int place = 0;
    for (int w = 0; w < warps; ++w) place += lower[w] + (w < warp ? equal[w] : 0);
    if (threadIdx.x == 0) p.offsets[blockIdx.x] = place;
    for (int at = first; at < last && same; at += 32 * kAhead) {
        load(at);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            uint32_t hits = __ballot_sync(~0u, id[j] == mine);
            if (id[j] == mine) p.order[place + __popc(hits & (1u << lane) - 1)] = at + 32 * j + lane;
            place += __popc(hits);
        }
    }
}

}  // namespace

cudaError_t launch_route(const RouteParams& p, int arch, cudaStream_t stream) {
    int threads = (p.E + 31) / 32 * 32, team = 0;
    while (2 * p.K << team <= 32) ++team;
    cudaError_t error = cudaSuccess;
    if (p.T > 0) error = launch_overlapped(select_kernel, p.T, threads, 0, arch, stream, p, team);
    if (error != cudaSuccess) return error;
    int warps = std::clamp(p.T * p.K / (32 * kAhead), 1, kListWarps);
    return launch_overlapped(list_kernel, p.E + 1, 32 * warps, 0, arch, stream, p);
}

}  // namespace kimi_fx::moe
