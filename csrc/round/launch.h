// How kernels of the round begin: each calls `begin` in every block before it touches global memory, so that whoever
// waits for it waits for all that came before.

#pragma once

#include "common/ceil_div.h"
#include "common/overlap.h"
#include "common/ptx.h"

namespace kimi_fx::round {

__device__ inline void begin() {
    ptx::let_next_kernel_start();
    ptx::wait_for_previous_kernel();
}

}  // namespace kimi_fx::round
