// What two products of one launch, the second reading what the first wrote, tell each other.

#pragma once

#include "launch.h"

namespace kimi_fx::layer {

template <class Op>
struct First : Op {
    int32_t* counters;  // [2] zero, and left so

    template <class T>
    __device__ void done(int) const {
        arrive(counters, 0);
    }
};

template <class Op>
struct Second : Op {
    int32_t* counters;
    int awaited;  // blocks of the first

    __device__ void ready() const { wait_until(counters, awaited); }
    template <class T>
    __device__ void done(int) const {
        if (arrive(counters + 1, Op::shape.tiles) && threadIdx.x < 2) counters[threadIdx.x] = 0;
    }
};

template <class Op1, class Op2>
cudaError_t launch_dependent(const Op1& one, const Op2& two, int32_t* counters, const Chip& chip) {
    return launch_pair(First<Op1>{one, counters}, Second<Op2>{two, counters, 0}, chip);
}

}  // namespace kimi_fx::layer
