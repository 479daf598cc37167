// The experts' list of work: tasks in one order that every block finds for itself from the router's offsets.

#pragma once

#include "params.h"

namespace kimi_fx::moe {

constexpr int kPerBlock = 3;      // tasks of gate|up a block at most, about
constexpr int kShortest = 14;     // stages of such a task, unless that leaves blocks without one
constexpr int kMaxPieces = 32;    // of gate|up
constexpr int kDownPerBlock = 2;  // tasks of down a block at least, about
constexpr int kMaxSets = 4;       // of a task of down

// A set of columns is what eight warps multiply at once: of gate|up 4 x 64 of gate and the same of up, of down 8 x 64.
struct alignas(16) Task {
    int item, expert;
    int stages;         // 0: no more work
    int set, sets;      // first set of columns; of down how many, 0: gate|up
    int piece, pieces;  // which part of the inputs: of stages this one and every `pieces` on
    int first, count;   // tokens order[first, first + count)
};

// Kept by the warp that copies.
struct List {
    int *offsets, *starts;  // [E+1] in shared memory: the router's, and items of the experts before e
    int pieces;             // of gate|up
    int sets;               // of a task of down
    int gate_up;            // tasks before the first of down
    int tasks;
};

__host__ __device__ inline int sets_of(int width) { return (width / kColumns + kWarps - 1) / kWarps; }

// Of gate|up, so that a block has about a whole number of tasks.
__host__ __device__ inline int pieces_of(int columns, int stages, int blocks) {
    int rounds = max(min(stages * columns / (kShortest * blocks), kPerBlock), 1);
    return max(min(min(rounds * blocks / columns, stages), kMaxPieces), 1);
}

// By one warp. Items of at most `most` tokens; gate|up cut over its inputs or whole.
__device__ inline List list_tasks(const Params& p, int* room, int most, bool cut) {
    constexpr int kRuns = 12;  // of 32 experts, at a time
    int lane = threadIdx.x % 32, items = 0;
    List list{room, room + p.E + 1};
    for (int base = lane; base - lane < p.E; base += 32 * kRuns) {
        int value[kRuns], mine[kRuns], upto[kRuns];
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            value[i] = p.offsets[min(base + 32 * i, p.E)];
            mine[i] = p.offsets[min(base + 32 * i + 1, p.E)];
        }
#pragma unroll
        for (int i = 0; i < kRuns; ++i) upto[i] = mine[i] = (mine[i] - value[i] + most - 1) / most;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
#pragma unroll
            for (int i = 0; i < kRuns; ++i) {
                int other = __shfl_up_sync(~0u, upto[i], d);
                if (lane >= d) upto[i] += other;
            }
        }
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            int e = base + 32 * i;
            if (e < p.E) list.offsets[e] = value[i], list.starts[e] = items + upto[i] - mine[i];
            items += __shfl_sync(~0u, upto[i], 31);
        }
    }
    if (lane == 0) list.offsets[p.E] = p.offsets[p.E], list.starts[p.E] = items;
    __syncwarp();
    int columns = max(items * sets_of(2 * p.I), 1), down = sets_of(p.D), blocks = gridDim.x;
    list.pieces = cut ? pieces_of(columns, p.D / kInputs, blocks) : 1;
    list.sets = max(min(items * down / (kDownPerBlock * blocks), kMaxSets), 1);
    list.gate_up = items * sets_of(2 * p.I) * list.pieces;
    list.tasks = list.gate_up + items * ((down + list.sets - 1) / list.sets);
    return list;
}

// Tasks of one expert stand together, and what its items share closest, so that weights read twice come from L2.
__device__ inline Task task_at(const Params& p, const List& list, int index) {
    bool down = index >= list.gate_up;
    int sets = sets_of(down ? p.D : 2 * p.I), parts = down ? (sets + list.sets - 1) / list.sets : sets * list.pieces;
    if (down) index -= list.gate_up;
    int item = index / parts, lane = threadIdx.x % 32, each = (p.E + 31) / 32;
    // The last expert whose items start at `item` or before: of 32 runs of experts, then within the run.
    auto last = [&](int e, bool exists) {
        return __popc(__ballot_sync(~0u, exists && list.starts[exists ? e : 0] <= item)) - 1;
    };
    int run = last(lane * each, lane * each < p.E) * each;
    int expert = run + last(run + lane, lane < each && run + lane < p.E);
    int items = list.starts[expert + 1] - list.starts[expert];
    index -= list.starts[expert] * parts;
    int part = items == 1 ? index : index / items, tile = index - part * items;
    // Tokens are dealt evenly to an expert's items, in eights.
    int offset = list.offsets[expert], tokens = list.offsets[expert + 1] - offset;
    int size = ((tokens + items - 1) / items + 7) / 8 * 8, skip = tile * size;
    Task task{};
    task.item = list.starts[expert] + tile;
    task.expert = expert;
    task.first = offset + skip;
    task.count = min(size, tokens - skip);
    task.pieces = list.pieces;
    if (down) {
        task.set = part * list.sets;
        task.sets = min(list.sets, sets - task.set);
        task.stages = task.sets * (p.I / kInputs);
    } else {
        task.piece = part / sets;
        task.set = part - task.piece * sets;
        task.stages = (p.D / kInputs - task.piece + list.pieces - 1) / list.pieces;
    }
    return task;
}

}  // namespace kimi_fx::moe
