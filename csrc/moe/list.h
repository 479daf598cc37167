// The experts' list of work: tasks in one order that every block finds for itself from the router's offsets.

#pragma once

#include "params.h"

namespace kimi_fx::moe {

constexpr int kThreads = 32 * kWarps;
constexpr int kShortest = 7;  // steps of a task of gate|up
constexpr int kLongest = 16;  // steps of a task of down, about

// What a warp does next, in its ring: written as it starts to copy the weights.
struct alignas(16) Task {
    int item, expert;
    int column;        // in units of 64
    int columns;       // of down; 0: 64 columns of gate and the same of up
    int piece, steps;  // of gate|up: which part of the groups, and their number
    int first, count;  // tokens order[first, first + count)
};

// Lives in shared memory beside the rings.
struct List {
    int* offsets;  // [E+1]
    int* starts;   // [E+1] items of the experts before e
    int pieces;    // of a column of gate|up
    int columns;   // of a task of down, in units of 64
    int gate_up;   // tasks before the first of down
    int tasks;
};

// All threads of the block. Pieces are such that a warp has kPerWarp or fewer, of kShortest steps at least.
template <int NT>
__device__ void list_tasks(const Params& p, List& list, int* room) {
    __shared__ int of_warp[kWarps];
    if (threadIdx.x == 0) list = {room, room + p.E + 1};
    __syncthreads();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int e = threadIdx.x; e <= p.E; e += kThreads) list.offsets[e] = p.offsets[e];
    __syncthreads();
    auto items_of = [&](int e) { return (list.offsets[e + 1] - list.offsets[e] + 8 * NT - 1) / (8 * NT); };
    int each = (p.E + kThreads - 1) / kThreads, begin = min(int(threadIdx.x) * each, p.E);
    int end = min(begin + each, p.E), mine = 0;
    for (int e = begin; e < end; ++e) mine += items_of(e);
    int upto = mine;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) of_warp[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += of_warp[w];
    for (int e = begin, start = upto - mine; e < end; ++e) {
        list.starts[e] = start;
        start += items_of(e);
    }
    if (threadIdx.x == kThreads - 1) {
        list.starts[p.E] = upto;
        int items = upto, warps = gridDim.x * kWarps, columns = max(items * (p.I / kColumns), 1), out = p.D / kColumns;
        list.pieces = max(min(kPerWarp * warps / columns, p.D / kGroup / kShortest), 1);
        list.columns = max(min(items * out / (2 * warps), kLongest / (p.I / kColumns)), 1);
        list.gate_up = items * (p.I / kColumns) * list.pieces;
        list.tasks = list.gate_up + items * ((out + list.columns - 1) / list.columns);
    }
    __syncthreads();
}

__device__ inline int group_of(const Params& p, const List& list, int piece) {
    return p.D / kGroup * piece / list.pieces;
}

// Tasks of one expert stand together, and what its items share closest, so that weights read twice come from L2.
__device__ inline Task task_at(const Params& p, const List& list, int index) {
    bool down = index >= list.gate_up;
    int columns = (down ? p.D : p.I) / kColumns;
    int each = down ? (columns + list.columns - 1) / list.columns : columns * list.pieces;  // tasks of an item
    if (down) index -= list.gate_up;
    int low = 0, high = p.E, item = index / each;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (list.starts[middle] <= item ? low : high) = middle;
    }
    int items = list.starts[low + 1] - list.starts[low];
    index -= list.starts[low] * each;
    int rest = index / items, tile = index - rest * items;
    // Tokens are dealt evenly to an expert's items, in eights.
    int offset = list.offsets[low], tokens = list.offsets[low + 1] - offset;
    int size = ((tokens + items - 1) / items + 7) / 8 * 8, skip = tile * size;
    int part = down ? 0 : rest / columns, first = rest * list.columns;
    return {list.starts[low] + tile,
            low,
            down ? first : rest - part * columns,
            down ? min(list.columns, columns - first) : 0,
            part,
            down ? p.I / (2 * kGroup) : group_of(p, list, part + 1) - group_of(p, list, part),
            offset + skip,
            min(size, tokens - skip)};
}

}  // namespace kimi_fx::moe
