// The sum over ranks through each other's memory: what host and device agree on.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::round {

constexpr int kPeerBlocks = 128;     // at most; all fit the device at once
constexpr int kPeers = 64;           // at most
constexpr int kPeerHeader = 1 << 16;  // bytes of a buffer before its halves: epochs, flags

// A rank's buffer: epochs [128] u32 | flags [128, 64] u32 | from byte 65536 on two halves [ranks, capacity] bytes.
struct PeerSumParams {
    const uint4* x;           // [pieces] 16 bytes each
    uint4* out;               // [pieces]
    uint8_t* const* buffers;  // [ranks] of every rank, zero at first, as this device addresses them
    int64_t pieces, capacity;
    int32_t rank, ranks;
    bool f32;  // else bf16
};

cudaError_t launch_peer_sum(const PeerSumParams& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::round
