// The routed experts for few tokens: gate|up, SiLU-mul and down in one persistent launch.
//
// A block is one warp that copies and eight that multiply. The first takes tasks from one list, gate|up of all items
// and then down, and streams their weights through a ring, across tasks and from gate|up into down, as weights depend
// on no result: memory stays busy while results are exchanged.
//
// Gate|up is cut over its inputs into pieces, whose fp32 sums go to memory. A block that begins with down of an item
// waits until all its pieces are there, adds them in order and keeps h in shared memory; several blocks do this same
// work, which costs less than another exchange. The first task of a block is its own number: the grid must be resident
// as a whole.

#include <algorithm>

#include "../common/overlap.h"
#include "launch.h"
#include "products.h"
#include "ring.h"

namespace kimi_fx::moe {
namespace {

// This warp's column over `stages`: activations from the ring, of down rows of h, I / 8 + 1 vectors each.
template <int NT, bool kDownward>
__device__ void multiply_stages(float (&sums)[4][NT][4], const Params& p, Ring<NT>& ring, int stages, bool real,
                                uint32_t h) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = kDownward ? p.I / 8 + 1 : kTokenRow;
    uint32_t words = (warp * 32 + lane) * 16, scales = (kScales + warp * 8 + lane / 4) * 16;
    uint32_t tokens = (lane % 8 * row + lane / 8) * 16 + (kDownward ? h : kTokens * 16);
#pragma unroll 1
    for (int s = 0; s < stages; ++s) {
        uint32_t slot = ring.wait();
        if (real) {
            Unit unit[2];
            uint4 b[2][NT];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    b[j][n] = load_matrices((kDownward ? 0 : slot) + tokens + (n * 8 * row + j * 4) * 16);
                }
                unit[j].low = load_shared(slot + words + 2 * j * kRow * 16);
                unit[j].high = load_shared(slot + words + (2 * j + 1) * kRow * 16);
                unit[j].scale = load_shared(slot + scales + j * (kRow / 4) * 16);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int n = 0; n < NT; ++n) scale_up(b[j][n]);
                multiply_unit<NT>(sums, unit[j], b[j]);
            }
        }
        if (kDownward) tokens += kInputs * 2;
        ring.release();
    }
#pragma unroll
    for (int i = 0; i < 16 * NT; ++i) (&sums[0][0][0])[i] *= kDown;
}

// ---- gate|up ----

template <int NT>
__device__ void gate_up(const Params& p, const Task& task, Ring<NT>& ring, int pairs) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (task.set * 4 + warp % 4) * kColumns;
    bool real = column < p.I;
    float sums[4][NT][4] = {};
    multiply_stages<NT, false>(sums, p, ring, task.stages, real, 0);
    if (!real) return;
    float* to = p.between + (int64_t(task.piece) * pairs + task.first) * (2 * p.I) + warp / 4 * p.I +
                column + lane / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int token = 8 * n + lane % 4 * 2 + r % 2;
            if (token < task.count) {
#pragma unroll
                for (int g = 0; g < 4; ++g) to[token * (2 * p.I) + g * 16 + r / 2 * 8] = sums[g][n][r];
            }
        }
    }
    __syncwarp();
    if (lane == 0) add_release(p.arrived(task.item));
}

// ---- down ----

__device__ uint32_t silu_mul(float gate0, float gate1, float up0, float up1) {
    __nv_bfloat162 h = __floats2bfloat162_rn(gate0 / (1 + __expf(-gate0)) * up0, gate1 / (1 + __expf(-gate1)) * up1);
    return reinterpret_cast<uint32_t&>(h);
}

__device__ void add(float4& sum, const float4& part) {
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
}

__device__ void add_lanes(float4& sum, int distance) {
    float4 other;
    other.x = __shfl_xor_sync(~0u, sum.x, distance);
    other.y = __shfl_xor_sync(~0u, sum.y, distance);
    other.z = __shfl_xor_sync(~0u, sum.z, distance);
    other.w = __shfl_xor_sync(~0u, sum.w, distance);
    add(sum, other);
}

// h of an item, rows of I / 8 + 1 vectors: a thread 4 columns. Four lanes have the same: `shares` of them a part of the
// pieces each, or every one other tokens.
template <int kAhead>
__device__ void add_pieces(const Params& p, const Task& task, uint2* h, int pairs, int shares) {
    int lane = threadIdx.x % 32, share = lane / 8, part = share % shares;
    for (int column = threadIdx.x / 32 * 8 + lane % 8; column < p.I / 4; column += 8 * kWarps) {
        for (int token = share / shares; token - share / shares < task.count; token += 4 / shares) {
            const float4* from = reinterpret_cast<const float4*>(p.between) +
                                 int64_t(task.first + min(token, task.count - 1)) * (p.I / 2) + column;
            float4 gate{}, up{};
            for (int piece = part; piece < task.pieces; piece += kAhead * shares) {
                float4 g[kAhead], u[kAhead];
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const float4* at = from + int64_t(piece + i * shares) * pairs * (p.I / 2);
                    bool real = piece + i * shares < task.pieces;
                    g[i] = real ? __ldcg(at) : float4{};
                    u[i] = real ? __ldcg(at + p.I / 4) : float4{};
                }
#pragma unroll
                for (int i = 0; i < kAhead; ++i) add(gate, g[i]), add(up, u[i]);
            }
            for (int distance = 8; distance < 8 * shares; distance *= 2) {
                add_lanes(gate, distance);
                add_lanes(up, distance);
            }
            if (part == 0 && token < task.count) {
                h[token * (p.I / 4 + 2) + column] = {silu_mul(gate.x, gate.y, up.x, up.y),
                                                     silu_mul(gate.z, gate.w, up.z, up.w)};
            }
        }
    }
}

__device__ void gather_h(const Params& p, const Task& task, uint2* h, int pairs) {
    if (threadIdx.x == 0) {
        while (load_acquire(p.arrived(task.item)) < task.pieces * (2 * p.I / kColumns)) {
        }
    }
    sync_threads(1, 32 * kWarps);  // nobody reads the last item's h any more
    if (task.pieces > 4) {
        add_pieces<8>(p, task, h, pairs, 4);
    } else {
        add_pieces<4>(p, task, h, pairs, 1);
    }
    sync_threads(1, 32 * kWarps);
}

// Neighbouring lanes swap, so that each has two columns of one token, and write them to the pairs' rows.
template <int NT>
__device__ void write_rows(const Params& p, int column, const int (&pair)[NT], const float (&sums)[4][NT][4]) {
    int lane = threadIdx.x % 32, odd = lane / 4 % 2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        __nv_bfloat16* to = p.rows + int64_t(pair[n]) * p.D + column + lane / 8 * 2;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float even = sums[g][n][2 * half], other = sums[g][n][2 * half + 1];
                float got = __shfl_xor_sync(~0u, odd ? even : other, 4);
                __nv_bfloat162 two = odd ? __floats2bfloat162_rn(got, other) : __floats2bfloat162_rn(even, got);
                if (pair[n] >= 0) *reinterpret_cast<__nv_bfloat162*>(to + g * 16 + half * 8) = two;
            }
        }
    }
}

template <int NT>
__device__ void down(const Params& p, const Task& task, Ring<NT>& ring, const uint4* h) {
    int lane = threadIdx.x % 32, pair[NT];  // of the token whose results this lane writes; -1: none
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int token = 8 * n + lane % 4 * 2 + lane / 4 % 2;
        pair[n] = token < task.count ? p.order[task.first + token] : -1;
    }
#pragma unroll 1
    for (int set = 0; set < task.sets; ++set) {
        int column = ((task.set + set) * kWarps + threadIdx.x / 32) * kColumns;
        float sums[4][NT][4] = {};
        multiply_stages<NT, true>(sums, p, ring, p.I / kInputs, column < p.D, shared_address(h));
        if (column < p.D) write_rows<NT>(p, column, pair, sums);
    }
}

#if __CUDA_ARCH__ == 900
template <int NT>
constexpr int kBlocks = NT == 1 ? 2 : 1;  // of a multiprocessor, as registers and shared memory go
#else
template <int NT>
constexpr int kBlocks = 1;
#endif

template <int NT>
__global__ void __launch_bounds__(kThreads, kBlocks<NT>) experts_kernel(Params p) {
    extern __shared__ uint4 memory[];
    __shared__ Barriers barriers;
    let_next_kernel_start();
    init_barriers(p, barriers);
    wait_for_previous_kernel();
    uint4* h = memory + p.stages * kSlot<NT>;  // [8 NT, I / 8 + 1]
    if (threadIdx.x / 32 == kWarps) {
        List list = list_tasks(p, reinterpret_cast<int*>(h + 8 * NT * (p.I / 8 + 1)), 8 * NT, true);
        stream<NT>(p, barriers, memory, list, [](const Task&, Rows<NT>&) {});
        return;
    }
    int pairs = p.offsets[p.E], complete = -1;  // an item whose h is here
    Ring<NT> ring{p, barriers, memory};
    for (Task task; (task = ring.task()).stages > 0;) {
        if (!task.sets) {
            gate_up<NT>(p, task, ring, pairs);
            continue;
        }
        if (complete != task.item) gather_h(p, task, reinterpret_cast<uint2*>(h), pairs);
        complete = task.item;
        down<NT>(p, task, ring, h);
    }
}

template <int NT>
int rest_bytes(const Params& p) {
    return 8 * NT * (p.I / 8 + 1) * int(sizeof(uint4)) + list_bytes(p);
}

}  // namespace

cudaError_t plan_few(Params& p, int device) {
    return p.tiles == 1 ? plan_ring<1>(p, device, experts_kernel<1>, 2, rest_bytes<1>(p))
                        : plan_ring<2>(p, device, experts_kernel<2>, 1, rest_bytes<2>(p));
}

int64_t few_between_size(const Params& p) {
    int64_t rows = int64_t(8 * p.tiles) * kPerBlock * p.blocks / sets_of(2 * p.I);  // of all pieces, if more than one
    return std::max(int64_t(p.T) * p.k, rows) * (2 * p.I);
}

cudaError_t launch_few(const Params& p, int arch, cudaStream_t stream) {
    auto kernel = p.tiles == 1 ? experts_kernel<1> : experts_kernel<2>;
    int shared = p.tiles == 1 ? ring_bytes<1>(p) + rest_bytes<1>(p) : ring_bytes<2>(p) + rest_bytes<2>(p);
    return launch_overlapped(kernel, p.blocks, kThreads, shared, arch, stream, p);
}

}  // namespace kimi_fx::moe
