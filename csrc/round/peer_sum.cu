// The sum of an array over ranks that can store into each other's memory, the same bits on every rank.
//
// Push, then one flag: a block stores its pieces into every other rank's buffer, raises its flag there, waits for the
// flags of the same block of the others, and adds in the order of the ranks, in fp32. There is no second barrier, as
// calls alternate between two halves of the buffer: whoever stores into a half has seen all ranks begin the call
// before, and so end the one that last read it. A piece belongs to the same block in calls of every size, so blocks
// need not know of each other, and each counts its own calls.

#include "peer_sum.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "launch.h"

namespace kimi_fx::round {
namespace {

constexpr int kThreads = 256;
constexpr int kStride = kPeerBlocks * kThreads;  // of a thread's pieces, whatever the grid

__device__ uint32_t* epoch_of(uint8_t* buffer, int block) { return reinterpret_cast<uint32_t*>(buffer) + block; }

__device__ uint32_t* flag_of(uint8_t* buffer, int block, int from) {
    return epoch_of(buffer, kPeerBlocks) + block * kPeers + from;
}

__device__ void raise(uint32_t* flag, uint32_t epoch) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ uint32_t seen(const uint32_t* flag) {
    uint32_t epoch;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
    return epoch;
}

template <typename T>
struct Sum;

template <>
struct Sum<float> {
    float4 total{};
    __device__ void add(uint4 piece) {
        float4 x = reinterpret_cast<float4&>(piece);
        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
    }
    __device__ uint4 rounded() { return reinterpret_cast<uint4&>(total); }
};

template <>
struct Sum<__nv_bfloat162> {
    float2 total[4]{};
    __device__ void add(uint4 piece) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 x = __bfloat1622float2(reinterpret_cast<__nv_bfloat162*>(&piece)[j]);
            total[j].x += x.x, total[j].y += x.y;
        }
    }
    __device__ uint4 rounded() {
        uint4 piece;
#pragma unroll
        for (int j = 0; j < 4; ++j) reinterpret_cast<__nv_bfloat162*>(&piece)[j] = __float22bfloat162_rn(total[j]);
        return piece;
    }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) peer_sum_kernel(PeerSumParams p) {
    begin();
    int block = blockIdx.x, first = block * kThreads + threadIdx.x, pieces = static_cast<int>(p.pieces);
    uint8_t* own = p.buffers[p.rank];
    uint32_t epoch = *epoch_of(own, block) + 1;
    int64_t half = kPeerHeader + (epoch & 1) * p.ranks * p.capacity;  // bytes before this call's slots

    for (int step = 1; step < p.ranks; ++step) {
        int peer = p.rank + step < p.ranks ? p.rank + step : p.rank + step - p.ranks;
        uint4* slot = reinterpret_cast<uint4*>(p.buffers[peer] + half + p.rank * p.capacity);
        for (int i = first; i < pieces; i += kStride) slot[i] = p.x[i];
    }
    __syncthreads();  // the release below covers the whole block's stores
    int peer = threadIdx.x;
    if (peer < p.ranks && peer != p.rank) {
        raise(flag_of(p.buffers[peer], block, p.rank), epoch);
        while (int32_t(seen(flag_of(own, block, peer)) - epoch) < 0) {  // a peer may be one call ahead
        }
    }
    if (peer == p.rank) *epoch_of(own, block) = epoch;
    __syncthreads();

    for (int i = first; i < pieces; i += kStride) {
        Sum<T> sum;
        const uint8_t* slot = own + half;
#pragma unroll 4
        for (int from = 0; from < p.ranks; ++from, slot += p.capacity) {
            const uint4* held = from == p.rank ? p.x : reinterpret_cast<const uint4*>(slot);
            sum.add(held[i]);
        }
        p.out[i] = sum.rounded();
    }
}

}  // namespace

cudaError_t launch_peer_sum(const PeerSumParams& params, int arch, cudaStream_t stream) {
    int blocks = static_cast<int>(std::min<int64_t>(kPeerBlocks, (params.pieces + kThreads - 1) / kThreads));
    auto kernel = params.f32 ? peer_sum_kernel<float> : peer_sum_kernel<__nv_bfloat162>;
    return launch_overlapped(kernel, blocks, kThreads, 0, arch, stream, params);
}

}  // namespace kimi_fx::round
