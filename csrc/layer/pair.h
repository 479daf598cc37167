// What two products of one launch, the second reading what the first wrote, tell each other.

#pragma once

#include "launch.h"

namespace kimi_fx::layer {

template <class Op>
struct First : Op {
    int32_t* counters;  // [2] zero, and left so

    __device__ void done(int) const { arrive(counters); }
};

template <class Op>
struct Second : Op {
    int32_t* counters;
    int awaited;  // blocks of the first

    // Whoever goes on as the last leaves zeros: nobody waits any more. That it is the last is known in time for `done`.
    __device__ int ready() const {
        wait_until(counters, awaited);
        return threadIdx.x == 0 ? ptx::add_relaxed(counters + 1) : 0;
    }
    __device__ void done(int before) const {
        if (threadIdx.x == 0 && before == Op::shape.tiles * Op::shape.splits - 1) counters[0] = counters[1] = 0;
    }
};

template <int Rows1, int Rows2, class Op1, class Op2>
cudaError_t launch_dependent(const Op1& one, const Op2& two, int32_t* counters, const Chip& chip) {
    return launch_pair<Rows1, Rows2>(First<Op1>{one, counters}, Second<Op2>{two, counters, 0}, chip);
}

}  // namespace kimi_fx::layer
