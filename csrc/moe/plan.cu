// Which kernel takes a number of tokens, and the sizes of its scratch.

#include <algorithm>

#include "launch.h"

namespace kimi_fx::moe {

static bool many(const Params& p) { return p.tiles > 2; }

static int64_t most_items(const Params& p) {
    int64_t pairs = int64_t(p.T) * p.k;
    return std::min(pairs, p.E + pairs / (8 * p.tiles));
}

// What is faster at an expert's share of tokens, measured (kimi_fx/bench/LOG-moe.md).
cudaError_t plan(Params& p, int device) {
    int64_t share = int64_t(p.T) * p.k / p.E;
    p.tiles = share < 9 ? 1 : share < 15 ? 2 : 6;
    p.items = most_items(p);
    return many(p) ? plan_many(p, device) : plan_few(p, device);
}

int64_t between_size(const Params& p) {
    return many(p) ? (int64_t(p.T) * p.k * p.I + 1) / 2 : few_between_size(p);  // h is bf16
}

cudaError_t launch_experts(const Params& p, int arch, cudaStream_t stream) {
    return many(p) ? launch_many(p, arch, stream) : launch_few(p, arch, stream);
}

}  // namespace kimi_fx::moe
