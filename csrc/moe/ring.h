// The ring of stages in shared memory that one warp of a block fills and eight empty.
//
// A stage is a set of columns x 64 inputs of weights, four rows of words of 16 inputs and two of scales, and the
// activations of these inputs. Where memory holds no more columns than the set, either is one run.

#pragma once

#include <algorithm>

#include "asm.h"
#include "list.h"

namespace kimi_fx::moe {

constexpr int kMaxStages = 16;
#if __CUDA_ARCH__ >= 900
constexpr int kFullArrivals = 1 + 32;  // the weights' bytes, and the lanes that copied activations
#else
constexpr int kFullArrivals = 32;
#endif

// Vectors of 16 bytes of a stage: words, scales, activations. A token's row is padded, so that 8 rows meet all banks.
constexpr int kRow = kWarps * 32;  // words of 16 inputs
constexpr int kScales = kInputs / 16 * kRow;
constexpr int kTokens = kScales + kInputs / kGroup * kRow / 4;
constexpr int kTokenRow = kInputs / 8 + 1;
template <int NT>
constexpr int kSlot = kTokens + 8 * NT * kTokenRow;

struct Barriers {
    uint64_t full[kMaxStages], empty[kMaxStages];
    Task tasks[kMaxStages];  // of a task's first stage
};

// A place in the ring that moves on: `parity` is that of the next phase to wait for.
struct Place {
    int slot = 0, parity;

    __device__ void move(const Params& p) {
        if (++slot == p.stages) slot = 0, parity ^= 1;
    }
};

__device__ inline void init_barriers(const Params& p, Barriers& b) {
    if (threadIdx.x < p.stages) {
        barrier_init(b.full + threadIdx.x, kFullArrivals);
        barrier_init(b.empty + threadIdx.x, kWarps);
        barrier_init_fence();
    }
    __syncthreads();
}

// ---- filled by one warp ----

__device__ inline void copy_run(uint4* to, const uint4* from, int vectors, uint64_t* barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    copy_bulk(to, from, vectors * 16, barrier, policy);
#else
    for (int v = 0; v < vectors; ++v) copy_vector(to + v, from + v);
#endif
}

// Weights of one matrix's set of columns, which are `runs` runs: gate and up, or one of down.
struct Weights {
    const uint4 *words, *scales;  // of the expert's first input
    int row;                      // vectors of 16 inputs' words; of a group's scales a quarter
    int runs, columns;            // of each run

    __device__ Weights(const Params& p, const Task& task, int set) {
        bool down = task.sets;
        int width = down ? p.D : p.I, inputs = down ? p.I : p.D;  // of a run, in memory
        runs = down ? 1 : 2;
        row = runs * width / 2;
        int first = set * (kWarps / runs);
        columns = min(kWarps / runs, width / kColumns - first);
        words = (down ? p.w2 : p.w13) + int64_t(task.expert) * (inputs / 16) * row + first * 32;
        scales = (down ? p.s2 : p.s13) + int64_t(task.expert) * (inputs / kGroup) * (row / 4) + first * 8;
    }

    __device__ int bytes() const { return runs * columns * (kTokens / kWarps * 16); }

    // A lane a run: rows of words, then of scales.
    __device__ void copy(int input, uint4* to, uint64_t* barrier, uint64_t policy) const {
        const uint4 *w = words + input / 16 * row, *s = scales + input / kGroup * (row / 4);
        int lane = threadIdx.x % 32;
        if (row == kRow) {
            if (lane == 0) copy_run(to, w, kScales, barrier, policy);
            if (lane == 1) copy_run(to + kScales, s, kTokens - kScales, barrier, policy);
            return;
        }
        int line = lane / runs, run = lane - line * runs, scale = line - kInputs / 16;
        if (scale < 0) {
            copy_run(to + lane * (kRow / runs), w + line * row + run * (row / 2), columns * 32, barrier, policy);
        } else if (scale < kInputs / kGroup) {
            copy_run(to + kScales + (scale * runs + run) * (kRow / 4 / runs), s + scale * (row / 4) + run * (row / 8),
                     columns * 8, barrier, policy);
        }
    }
};

// A lane's vectors of the tokens' activations: of every fourth token the same one.
template <int NT>
struct Rows {
    int pair[2 * NT];  // -1: no token
    const uint4* from[2 * NT];

    // Of x, whose rows the order tells.
    __device__ void ask(const Params& p, const Task& task) {
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            int token = threadIdx.x % 32 / 8 + 4 * i;
            pair[i] = token < task.count && !task.sets ? p.order[task.first + token] : -1;
        }
    }

    __device__ void find(const Params& p) {
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) from[i] = p.x + int64_t(max(pair[i], 0) / p.k) * (p.D / 8) + threadIdx.x % 8;
    }

    // Of neighbouring rows.
    __device__ void find(const Task& task, const uint4* first, int width) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            int token = lane / 8 + 4 * i;
            pair[i] = token < task.count ? token : -1;
            from[i] = first + int64_t(token) * width + lane % 8;
        }
    }

    __device__ void copy(int input, uint4* to) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            if (pair[i] >= 0) copy_vector(to + (lane / 8 + 4 * i) * kTokenRow + lane % 8, from[i] + input / 8);
        }
    }
};

// `begin_down(task, rows)` is called before the first activations of a task of down.
template <int NT, typename F>
__device__ void stream(const Params& p, Barriers& b, uint4* ring, const List& list, F begin_down) {
    int lane = threadIdx.x % 32, next = 0;
    uint64_t policy = read_once_policy();
    Place place{0, 1};
    for (int index = blockIdx.x; index < list.tasks; index = gridDim.x + __shfl_sync(~0u, next, 0)) {
        Task task = task_at(p, list, index);
        Rows<NT> rows;
        rows.ask(p, task);
        int each = task.sets ? p.I / kInputs : task.stages, step = task.sets ? 1 : task.pieces;
        Weights weights(p, task, task.set);
        Place first = place;
        for (int s = 0, set = task.set, at = task.piece; s < task.stages; ++s, at += step) {
            if (s == each) each += p.I / kInputs, at = 0, weights = Weights(p, task, ++set);
            uint4* slot = ring + place.slot * kSlot<NT>;
            uint64_t* full = b.full + place.slot;
            barrier_wait(b.empty + place.slot, place.parity);
            if (lane == 0) {
                if (s == 0) b.tasks[place.slot] = task;
                barrier_expect(full, weights.bytes());
            }
            __syncwarp();
            weights.copy(at * kInputs, slot, full, policy);
            if (s == 0) {
                rows.find(p);
                if (task.sets) begin_down(task, rows);
            }
            rows.copy(at * kInputs, slot + kTokens);
            barrier_arrive_after_copies(full);
            place.move(p);
        }
        // Tasks of down are waited for: another is only taken once this one has begun.
        if (task.sets && task.stages <= p.stages) barrier_wait(b.empty + first.slot, first.parity ^ 1);
        if (lane == 0) next = add_relaxed(p.queue());
    }
    barrier_wait(b.empty + place.slot, place.parity);
    if (lane == 0) b.tasks[place.slot].stages = 0;
    __syncwarp();
    barrier_arrive(b.full + place.slot);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_arrive(b.full + place.slot);
#endif
}

// ---- emptied by the others ----

template <int NT>
struct Ring {
    const Params& p;
    Barriers& b;
    uint4* ring;
    uint32_t address = shared_address(ring);
    Place place{0, 0};

    // The next stage's address.
    __device__ uint32_t wait() {
        barrier_wait(b.full + place.slot, place.parity);
        return address + place.slot * (kSlot<NT> * 16);
    }

    __device__ const uint4* slot() const { return ring + place.slot * kSlot<NT>; }

    // The task that begins there.
    __device__ Task task() {
        wait();
        return b.tasks[place.slot];
    }

    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(b.empty + place.slot);
        place.move(p);
    }
};

// ---- host ----

template <int NT>
int ring_bytes(const Params& p) {
    return p.stages * kSlot<NT> * int(sizeof(uint4));
}

inline int list_bytes(const Params& p) { return 2 * (p.E + 1) * int(sizeof(int)); }

// Blocks and stages where `rest` more bytes are needed: as many blocks a multiprocessor as are wanted if registers
// suffice and each gets three stages, else fewer.
template <int NT>
cudaError_t plan_ring(Params& p, int device, void (*kernel)(Params), int wanted, int rest) {
    auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        cudaDeviceGetAttribute(&value, which, device);
        return value;
    };
    int slot = kSlot<NT> * int(sizeof(uint4)), fixed = rest + int(sizeof(Barriers));
    int room = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    cudaError_t error = cudaSuccess;
    for (p.blocks = 0; wanted > 0 && !error; --wanted) {
        int share = std::min(room / wanted - 1024, most);  // the driver keeps 1 KiB a block
        p.stages = std::min((share - fixed) / slot, kMaxStages);
        if (p.stages < (wanted > 1 ? 3 : 1)) continue;
        int shared = ring_bytes<NT>(p) + rest;
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (!error) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&p.blocks, kernel, kThreads, shared);
        if (p.blocks >= wanted) break;
    }
    p.blocks *= attribute(cudaDevAttrMultiProcessorCount);
    return !error && p.blocks == 0 ? cudaErrorInvalidConfiguration : error;
}

}  // namespace kimi_fx::moe
