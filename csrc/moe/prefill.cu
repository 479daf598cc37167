// The routed experts for many tokens: gate|up, SiLU-mul and down in one persistent launch, up to 48 tokens an item.
//
// The list, the ring and its filling are those of experts.cu, but activations matter more than weights here: a block's
// warps share them, of down too, and weights become bf16(q * scale) in registers once for all tokens. Every warp sums
// over all inputs. Of gate|up it has 32 columns of both, so SiLU-mul needs no exchange; down waits until its item's h
// is complete.

#include "../common/overlap.h"
#include "launch.h"
#include "ring.h"

namespace kimi_fx::moe {
namespace {

// A word's four pairs as bf16(q * scale): `scales` holds that of rows 0..7 and that of rows 8..15.
__device__ void dequantise(uint32_t (&a)[4], uint32_t word, uint32_t scales) {
    uint32_t low = __byte_perm(scales, 0, 0x1010), high = __byte_perm(scales, 0, 0x3232);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t q = fma_pairs(codes(word >> (i % 2 * 8 + i / 2 * 4)), 0x3f803f80, 0xc308c308);  // 128 + code - 136
        a[i] = fma_pairs(q, i % 2 ? high : low, 0x80008000);
    }
}

// Four blocks of 16 columns x 16 inputs, a word each, times the item's tokens, two tiles of 8 at a time.
template <int NT>
__device__ void multiply_row(float (&sums)[4][NT][4], const uint32_t (&words)[4], const uint32_t (&scales)[4],
                             uint32_t tokens, int count) {
    uint32_t a[4][4];
#pragma unroll
    for (int g = 0; g < 4; ++g) dequantise(a[g], words[g], scales[g]);
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        if (8 * n >= count) break;
        uint4 b = load_matrices(tokens + ((8 * n + lane / 16 * 8 + lane % 8) * kTokenRow + lane / 8 % 2) * 16);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            multiply(sums[g][n], a[g], b.x, b.y, sums[g][n]);
            multiply(sums[g][n + 1], a[g], b.z, b.w, sums[g][n + 1]);
        }
    }
}

// Neighbouring lanes swap, so that each has two columns of one token: blocks of 16 columns from `to` in its row.
template <int kBlocks>
__device__ void write_row(__nv_bfloat16* to, const float (&sums)[4][4], bool write) {
    int lane = threadIdx.x % 32, odd = lane / 4 % 2;
#pragma unroll
    for (int g = 0; g < kBlocks; ++g) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float even = sums[g][2 * half], other = sums[g][2 * half + 1];
            float got = __shfl_xor_sync(~0u, odd ? even : other, 4);
            __nv_bfloat162 two = odd ? __floats2bfloat162_rn(got, other) : __floats2bfloat162_rn(even, got);
            if (write) *reinterpret_cast<__nv_bfloat162*>(to + g * 16 + half * 8 + lane / 8 * 2) = two;
        }
    }
}

__device__ float silu_mul(float gate, float up) { return gate / (1 + __expf(-gate)) * up; }

// A warp's 32 columns of gate and of up: two words of each vector.
template <int NT>
__device__ void gate_up(const Params& p, const Task& task, Ring<NT>& ring) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp % 4, half = warp / 4;
    int first = (task.set * 4 + column) * kColumns;
    bool real = first < p.I;
    float sums[4][NT][4] = {};  // gate, gate, up, up
    auto two = [&](const uint4* at) { return reinterpret_cast<const uint2*>(at)[half]; };
#pragma unroll 1
    for (int s = 0; s < task.stages; ++s) {
        uint32_t at = ring.wait();
        const uint4* slot = ring.slot();
#pragma unroll 1
        for (int j = 0; j < (real ? kInputs / kGroup : 0); ++j) {
            const uint4* scale = slot + kScales + j * (kRow / 4) + column * 8 + lane / 4;
            uint2 s0 = two(scale), s1 = two(scale + kRow / 8);
            for (int r = 0; r < 2; ++r) {
                const uint4* word = slot + (2 * j + r) * kRow + column * 32 + lane;
                uint2 w0 = two(word), w1 = two(word + kRow / 2);
                multiply_row<NT>(sums, {w0.x, w0.y, w1.x, w1.y}, {s0.x, s0.y, s1.x, s1.y},
                                 at + (kTokens + 4 * j + 2 * r) * 16, task.count);
            }
        }
        ring.release();
    }
    if (!real) return;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (8 * n >= task.count) break;
        float h[4][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            h[i / 4][i % 4] = silu_mul(sums[i / 4][n][i % 4], sums[i / 4 + 2][n][i % 4]);
        }
        int token = 8 * n + lane % 4 * 2 + lane / 4 % 2;
        __nv_bfloat16* to = reinterpret_cast<__nv_bfloat16*>(p.between) + int64_t(task.first + token) * p.I;
        write_row<2>(to + first + half * 32, h, token < task.count);
    }
    __syncwarp();
    if (lane == 0) add_release(p.arrived(task.item));
}

template <int NT>
__device__ void down(const Params& p, const Task& task, Ring<NT>& ring) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int set = 0; set < task.sets; ++set) {
        int column = ((task.set + set) * kWarps + warp) * kColumns;
        float sums[4][NT][4] = {};
#pragma unroll 1
        for (int s = 0; s < p.I / kInputs; ++s) {
            uint32_t at = ring.wait();
        const uint4* slot = ring.slot();
#pragma unroll 1
            for (int j = 0; j < (column < p.D ? kInputs / kGroup : 0); ++j) {
                uint4 scale = slot[kScales + j * (kRow / 4) + warp * 8 + lane / 4];
                for (int r = 0; r < 2; ++r) {
                    uint4 word = slot[(2 * j + r) * kRow + warp * 32 + lane];
                    multiply_row<NT>(sums, {word.x, word.y, word.z, word.w}, {scale.x, scale.y, scale.z, scale.w},
                                     at + (kTokens + 4 * j + 2 * r) * 16, task.count);
                }
            }
            ring.release();
        }
        if (column >= p.D) continue;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (8 * n >= task.count) break;
            float row[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) row[i / 4][i % 4] = sums[i / 4][n][i % 4];
            int token = 8 * n + lane % 4 * 2 + lane / 4 % 2;
            int64_t pair = token < task.count ? p.order[task.first + token] : 0;
            write_row<4>(p.rows + pair * p.D + column, row, token < task.count);
        }
    }
}

template <int NT>
__global__ void __launch_bounds__(kThreads) prefill_kernel(Params p) {
    extern __shared__ uint4 memory[];
    __shared__ Barriers barriers;
    let_next_kernel_start();
    init_barriers(p, barriers);
    wait_for_previous_kernel();
    if (threadIdx.x / 32 == kWarps) {
        List list = list_tasks(p, reinterpret_cast<int*>(memory + p.stages * kSlot<NT>), 8 * NT, false);
        stream<NT>(p, barriers, memory, list, [&](const Task& task, Rows<NT>& rows) {
            if (threadIdx.x % 32 == 0) {
                while (load_acquire(p.arrived(task.item)) < p.I / 32) {
                }
            }
            __syncwarp();
            rows.find(task, reinterpret_cast<const uint4*>(p.between) + int64_t(task.first) * (p.I / 8), p.I / 8);
        });
        return;
    }
    Ring<NT> ring{p, barriers, memory};
    for (Task task; (task = ring.task()).stages > 0;) {
        if (task.sets) {
            down<NT>(p, task, ring);
        } else {
            gate_up<NT>(p, task, ring);
        }
    }
}

constexpr int kTiles = 6;  // 8-token tiles of an item at most

}  // namespace

cudaError_t plan_many(Params& p, int device) {
    return plan_ring<kTiles>(p, device, prefill_kernel<kTiles>, 1, list_bytes(p));
}

cudaError_t launch_many(const Params& p, int arch, cudaStream_t stream) {
    int shared = ring_bytes<kTiles>(p) + list_bytes(p);
    return launch_overlapped(prefill_kernel<kTiles>, p.blocks, kThreads, shared, arch, stream, p);
}

}  // namespace kimi_fx::moe
