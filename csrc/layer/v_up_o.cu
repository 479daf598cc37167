// Values out of the latent, head by head, and all heads' through the output projection onto the residual.

#include "heads.h"
#include "linear.h"
#include "pair.h"

namespace kimi_fx::layer {

cudaError_t launch_v_up_o(const HeadParams& v_up, const AddParams& o, int32_t* counters, const Chip& chip) {
    return launch_dependent<32, 32>(heads<false>(v_up), linear_add(o), counters, chip);
}

}  // namespace kimi_fx::layer
