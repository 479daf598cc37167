// The routed experts on mma.sync m16n8k16: gate|up, SiLU-mul and down in one persistent launch.
//
// Every warp is on its own. It takes tasks from one list, gate|up of all items and then down, and copies the weights of
// the steps ahead into a ring in shared memory, across tasks and from gate|up into down, as weights depend on no
// result: memory stays busy while results are exchanged. A step is two Marlin tiles of one group each: gate and up of
// a group, or two groups of down. Weights are the 16-row operand. Groups of 32 inputs are summed with the codes as they
// are and their fp32 sums scaled, so a weight means q * scale, not yet rounded to bf16.
//
// Gate|up of 64 columns is cut over its inputs into pieces. Each leaves its fp32 sums; the last to arrive adds them in
// order and writes h, so who comes last changes nothing. Down waits until all columns of its item have arrived. The
// first task of a warp is its own number: the grid must be resident as a whole.
//
// Long because gate|up and down are tasks of one stream of weights.

#include <algorithm>

#include "../common/overlap.h"
#include "launch.h"
#include "list.h"
#include "products.h"

namespace kimi_fx::moe {
namespace {

// Vectors of 16 bytes of a step: words, scales and, of gate|up, activations.
constexpr int kScales = 4 * 32, kTokens = kScales + 2 * 8;

template <int NT>
constexpr int kStep = kTokens + 32 * NT;
template <int NT>
constexpr int kDepth = NT == 1 ? 4 : 3;  // steps of a ring: 88 and 78 KiB a block

// ---- weights ----

__device__ uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ void copy_async(uint4* to, const uint4* from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "l"(policy)
                 : "memory");
}

__device__ void copy_async(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}

// A warp's ring of steps, filled kDepth - 1 steps ahead, and the tasks they belong to. After its first task, whose
// copies begin before the counters are known to be zero, a warp asks for the next one a task ahead.
template <int NT>
struct Ring {
    const Params& p;
    const List& list;
    uint4* steps;  // [kDepth, kStep]
    Task* tasks;   // [kDepth]
    uint64_t policy;
    int slot = 0;
    int begun = 0, taken = 0;    // tasks whose copies, and whose products, have begun
    int left = 0, columns = 0;   // still to copy: steps of this column; columns of down, 0: gate|up
    int asked = 0;               // in lane 0 the number of the task after that one; -1 in all: there is none
    const uint4 *words = nullptr, *scales = nullptr;  // of the next step to copy
    int token[NT];                                    // vector of x likewise; -1: no token

    __device__ Ring(const Params& p, const List& list, uint4* steps, Task* tasks)
        : p(p), list(list), steps(steps), tasks(tasks), policy(read_once_policy()) {
        begin(blockIdx.x * kWarps + threadIdx.x / 32);
        int filled = 0;
        for (; filled < kDepth<NT> - 1 && left > 0; ++filled) copy(filled);
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
        ask();
        for (; filled < kDepth<NT> - 1; ++filled) copy(filled);
    }

    __device__ bool take(Task& task) {
        __syncwarp();
        if (taken == begun) return false;
        task = tasks[taken++ % kDepth<NT>];
        return true;
    }

    // The next step's vectors. All lanes may read them until the call after.
    __device__ const uint4* next() {
        asm volatile("cp.async.wait_group %0;" ::"n"(kDepth<NT> - 2) : "memory");
        __syncwarp();
        copy(slot == 0 ? kDepth<NT> - 1 : slot - 1);
        const uint4* step = steps + slot * kStep<NT>;
        slot = slot + 1 == kDepth<NT> ? 0 : slot + 1;
        return step;
    }

    __device__ void ask() {
        if (threadIdx.x % 32 == 0) {
            asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(asked) : "l"(p.queue) : "memory");
        }
    }

    __device__ void begin(int index) {
        if (index >= list.tasks) return;
        Task task = task_at(p, list, index);
        int lane = threadIdx.x % 32;
        if (lane == 0) tasks[begun % kDepth<NT>] = task;
        ++begun;
        left = task.steps;
        columns = task.columns;
        int row = columns ? p.D / 2 : p.I, group = columns ? 0 : group_of(p, list, task.piece);
        int64_t inputs = int64_t(task.expert) * (columns ? p.I : p.D) + group * kGroup;
        words = (columns ? p.w2 : p.w13) + inputs / 16 * row + task.column * 32 + lane;
        scales = (columns ? p.s2 : p.s13) + inputs / kGroup * (row / 4) + task.column * 8 + lane % 8 +
                 lane / 8 * (columns ? p.D / 8 : p.I / 8);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            bool none = columns || lane / 4 + 8 * n >= task.count;
            int row = none ? 0 : p.order[task.first + lane / 4 + 8 * n] / p.k;
            token[n] = none ? -1 : row * (p.D / 8) + group * 4 + lane % 4;
        }
    }

    __device__ void copy(int to) {
        if (left == 0 && asked >= 0) {
            int index = gridDim.x * kWarps + __shfl_sync(~0u, asked, 0);
            begin(index);
            if (index < list.tasks) {
                ask();
            } else {
                asked = -1;
            }
        }
        if (left > 0) {
            int lane = threadIdx.x % 32;
            int row = columns ? p.D / 2 : p.I, second = columns ? p.D : p.I / 2;
            uint4* step = steps + to * kStep<NT>;
            copy_async(step + lane, words, policy);
            copy_async(step + 32 + lane, words + row, policy);
            copy_async(step + 64 + lane, words + second, policy);
            copy_async(step + 96 + lane, words + second + row, policy);
            if (lane < 16) copy_async(step + kScales + lane, scales, policy);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (token[n] >= 0) copy_async(step + kTokens + 32 * n + (lane ^ lane / 8), p.x + token[n]);
                if (token[n] >= 0) token[n] += 4;
            }
            words += columns ? 2 * p.D : 2 * p.I;
            scales += (columns ? p.D : p.I) / 4;
            if (--left == 0 && columns > 1) {
                --columns;
                left = p.I / (2 * kGroup);
                words += 32 - left * 2 * p.D;
                scales += 8 - left * (p.D / 4);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

// The 8 NT tokens x 32 inputs of a step of gate|up. Copies laid them out as 8 rows of 4 vectors, vector j of a row at
// j ^ row / 2, so that 8 rows meet all banks.
template <int NT>
__device__ void load_tokens(uint4 (&b)[NT], const uint4* tokens) {
    int lane = threadIdx.x % 32, row = lane % 8;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const uint4* from = tokens + 32 * n + (row * 4 + lane / 8 ^ row / 2);  // row / 2 < 4
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[n].x), "=r"(b[n].y), "=r"(b[n].z), "=r"(b[n].w)
                     : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
                     : "memory");
    }
}

// ---- gate|up ----

// Sums of a piece over its groups, [count, 128] fp32. What is not cut only passes through its warp's room.
template <int NT>
__device__ float* partial_of(const Params& p, const List& list, const Task& task, int piece) {
    int column = task.item * (p.I / kColumns) + task.column;
    int room = list.pieces > 1 ? column * list.pieces + piece : blockIdx.x * kWarps + threadIdx.x / 32;
    return p.partial + int64_t(room) * (8 * NT * 2 * kColumns);
}

__device__ int arrive(int32_t* counter) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    }
    return __shfl_sync(~0u, before, 0);
}

__device__ void wait_until(const int32_t* counter, int value) {
    if (threadIdx.x % 32 == 0) {
        int seen;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < value);
    }
    __syncwarp();
}

__device__ uint32_t silu_mul(float gate0, float gate1, float up0, float up1) {
    __nv_bfloat162 h = __floats2bfloat162_rn(gate0 / (1 + __expf(-gate0)) * up0, gate1 / (1 + __expf(-gate1)) * up1);
    return reinterpret_cast<uint32_t&>(h);
}

// Adds the pieces of 64 columns and writes h: lanes 0..15 hold gate, 16..31 up, 4 columns each.
template <int NT>
__device__ void write_h(const Params& p, const List& list, const Task& task) {
    constexpr int kRows = NT, kPieces = 16 / NT;  // at a time
    constexpr int kSize = 8 * NT * kColumns / 2;   // of a piece's sums, in vectors
    int lane = threadIdx.x % 32;
    const float4* from = reinterpret_cast<const float4*>(partial_of<NT>(p, list, task, 0)) + lane;
    for (int token = 0; token < task.count; token += kRows) {
        float4 sum[kRows] = {};
        for (int piece = 0; piece < list.pieces; piece += kPieces) {
            float4 part[kPieces][kRows] = {};
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
#pragma unroll
                for (int t = 0; t < kRows; ++t) {
                    if (piece + i < list.pieces && token + t < task.count) {
                        part[i][t] = __ldcg(from + (piece + i) * kSize + (token + t) * 32);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
#pragma unroll
                for (int t = 0; t < kRows; ++t) {
                    sum[t].x += part[i][t].x;
                    sum[t].y += part[i][t].y;
                    sum[t].z += part[i][t].z;
                    sum[t].w += part[i][t].w;
                }
            }
        }
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
            float4 gate = sum[t], up;
            up.x = __shfl_down_sync(~0u, gate.x, 16);
            up.y = __shfl_down_sync(~0u, gate.y, 16);
            up.z = __shfl_down_sync(~0u, gate.z, 16);
            up.w = __shfl_down_sync(~0u, gate.w, 16);
            if (lane < 16 && token + t < task.count) {
                // Columns 4 lane .. 4 lane + 3: group lane / 8, vectors 2 (lane % 2) and the next, word lane / 2 % 4.
                int64_t group = int64_t(task.first + token + t) * (p.I / kGroup) + task.column * 2 + lane / 8;
                uint32_t* to = reinterpret_cast<uint32_t*>(p.h_fragments + group * 4 + lane % 2 * 2) + lane / 2 % 4;
                to[0] = silu_mul(gate.x, gate.y, up.x, up.y);
                to[4] = silu_mul(gate.z, gate.w, up.z, up.w);
            }
        }
    }
}

template <int NT>
__device__ void gate_up(const Params& p, const List& list, const Task& task, Ring<NT>& ring) {
    int lane = threadIdx.x % 32;
    float gate[4][NT][4] = {}, up[4][NT][4] = {};
    for (int s = 0; s < task.steps; ++s) {
        const uint4* step = ring.next();
        uint4 b[NT];
        load_tokens<NT>(b, step + kTokens);
        float offset[NT][4];
        offset_of<NT>(offset, b);
        multiply_tile<NT>(gate, step, step + kScales, b, offset);
        multiply_tile<NT>(up, step + 64, step + kScales + 8, b, offset);
    }

    float* part = partial_of<NT>(p, list, task, task.piece);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            int token = 8 * n + lane % 4 * 2 + r % 2;
            float* to = part + token * 2 * kColumns + r / 2 * 8 + lane / 4;
            if (token < task.count) {
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    to[g * 16] = gate[g][n][r];
                    to[g * 16 + kColumns] = up[g][n][r];
                }
            }
        }
    }
    if (arrive(p.arrived + task.item * (p.I / kColumns) + task.column) < list.pieces - 1) return;
    write_h<NT>(p, list, task);
    arrive(p.ready + task.item);
}

// ---- down ----

// The vectors of h a lane feeds: of tokens lane / 4 + 8 n, zeros where there is none.
template <int NT>
struct Rows {
    const uint4* h;
    int offset[NT];  // -1: no token

    __device__ void load(uint4 (&b)[2][NT], int step) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (offset[n] < 0) continue;
            b[0][n] = h[offset[n] + step * 8];
            b[1][n] = h[offset[n] + step * 8 + 4];
        }
    }
};

// Neighbouring lanes swap, so that each has two columns of one token, and write them to the pairs' rows.
template <int NT>
__device__ void write_rows(const Params& p, const int (&pair)[NT], int column, const float (&sums)[4][NT][4]) {
    int lane = threadIdx.x % 32, odd = lane / 4 % 2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        __nv_bfloat16* to = p.rows + int64_t(pair[n]) * p.D + column * kColumns + lane / 8 * 2;
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
__device__ void down(const Params& p, const Task& task, Ring<NT>& ring) {
    int lane = threadIdx.x % 32;
    Rows<NT> rows{p.h_fragments, {}};
    int pair[NT];  // of the token whose results this lane writes; -1: none
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int token = lane / 4 + 8 * n, written = lane % 4 * 2 + lane / 4 % 2 + 8 * n;
        rows.offset[n] = token < task.count ? (task.first + token) * (p.I / 8) + lane % 4 : -1;
        pair[n] = written < task.count ? p.order[task.first + written] : -1;
    }
    uint4 b[2][NT] = {}, ahead[2][NT] = {};
    rows.load(ahead, 0);
    for (int column = 0; column < task.columns; ++column) {
        float sums[4][NT][4] = {};
        for (int s = 0; s < task.steps; ++s) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                b[0][n] = ahead[0][n];
                b[1][n] = ahead[1][n];
            }
            rows.load(ahead, s + 1 < task.steps ? s + 1 : 0);
            const uint4* step = ring.next();
            float offset[NT][4];
            offset_of<NT>(offset, b[0]);
            multiply_tile<NT>(sums, step, step + kScales, b[0], offset);
            offset_of<NT>(offset, b[1]);
            multiply_tile<NT>(sums, step + 64, step + kScales + 8, b[1], offset);
        }
        write_rows<NT>(p, pair, task.column + column, sums);
    }
}

template <int NT>
__global__ void __launch_bounds__(kThreads, NT == 1 ? 2 : 1) experts_kernel(Params p) {
    extern __shared__ uint4 memory[];
    __shared__ Task tasks[kWarps][kDepth<NT>];
    __shared__ List list;
    list_tasks<NT>(p, list, reinterpret_cast<int*>(memory + kWarps * kDepth<NT> * kStep<NT>));
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int warp = threadIdx.x / 32;
    Ring<NT> ring(p, list, memory + warp * kDepth<NT> * kStep<NT>, tasks[warp]);
    int complete = -1;  // an item whose h is known to be
    for (Task task; ring.take(task);) {
        if (!task.columns) {
            gate_up<NT>(p, list, task, ring);
            continue;
        }
        if (task.item != complete) wait_until(p.ready + task.item, p.I / kColumns);
        complete = task.item;
        down<NT>(p, task, ring);
    }
}

template <int NT>
int shared_bytes(const Params& p) {
    return kWarps * kDepth<NT> * kStep<NT> * int(sizeof(uint4)) + 2 * (p.E + 1) * int(sizeof(int));
}

template <int NT>
cudaError_t resident(const Params& p, int& blocks) {
    int shared = shared_bytes<NT>(p);
    cudaError_t error = cudaFuncSetAttribute(experts_kernel<NT>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, experts_kernel<NT>, kThreads, shared);
}

}  // namespace

static int64_t most_items(const Params& p) {
    int64_t pairs = int64_t(p.T) * p.k;
    return std::min(pairs, p.E + pairs / (8 * p.tiles));
}

cudaError_t plan(Params& p, int multiprocessors) {
    p.tiles = int64_t(p.T) * p.k < 7 * p.E ? 1 : 2;  // reading a tenth of the experts twice, from L2, costs less
    p.counters = most_items(p) * (p.I / kColumns + 1) + 1;
    cudaError_t error = p.tiles == 1 ? resident<1>(p, p.blocks) : resident<2>(p, p.blocks);
    p.blocks *= multiprocessors;
    return error;
}

void place_counters(Params& p) {
    p.ready = p.arrived + most_items(p) * (p.I / kColumns);
    p.queue = p.ready + most_items(p);
}

cudaError_t launch_experts(const Params& p, int arch, cudaStream_t stream) {
    auto kernel = p.tiles == 1 ? experts_kernel<1> : experts_kernel<2>;
    int shared = p.tiles == 1 ? shared_bytes<1>(p) : shared_bytes<2>(p);
    return launch_overlapped(kernel, p.blocks, kThreads, shared, arch, stream, p);
}

}  // namespace kimi_fx::moe
