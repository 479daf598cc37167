// How many pieces of b cover a.

#pragma once

#include <cuda_runtime.h>

namespace kimi_fx {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace kimi_fx
