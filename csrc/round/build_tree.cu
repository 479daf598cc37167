// The best-first draft tree in two launches: chunks of the vocabulary summarised by many blocks; then a block a
// request, in which a warp a depth merges its chunks' lists while one more builds the tree from what they have so far.
//
// A node has one child that could be next, as children come in the order of their ranks: the frontier has a place a
// node, and the warp holds it in registers. Its best by (score descending, depth, parent, rank) is two reductions away,
// so the tree is the reference's for the same log-probabilities. A child whose log-probability is yet to come counts as
// the best of all, so that only then is anything waited for.

#include "build_tree.h"

#include "merge.h"
#include "top.h"

namespace kimi_fx::round {
namespace {

// A node's cost is its score negated: at least 0, so that costs are ordered as their bits are.
struct TreeMemory {
    float steps[(kMaxDepth + 1) * (kMost + 1)];  // what a token adds: a row of k + 1 a depth, then one; inf at the ends
    int token[kMaxDepth * kMost];
    uint32_t tag[kMaxNodes];  // of the tree's nodes
    float cost[kMaxNodes];
    uint32_t built;
    int count;
};

constexpr float kUnknown = -INFINITY;  // a step before it is known: its node comes first, and is looked at again

__global__ void __launch_bounds__(kThreads, kSummaries) summarise_kernel(TreeParams p) {
    __shared__ TopMemory memory;
    begin();
    int chunk = blockIdx.x, depth = blockIdx.y, b = blockIdx.z, chunks = gridDim.x;
    int64_t row = int64_t(b) * p.D + depth, at = row * chunks;
    Sum* sums = static_cast<Sum*>(p.sums) + at;
    summarise(p.logits + row * p.V, p.V, chunk, chunks, p.k, p.keys + at * p.k, sums, memory);
}

// A depth's tokens and their negated log-probabilities one after another, inf after the last; by its warp.
__device__ void rank(Merge& merge, float total, int width, int depth, int k, TreeMemory& m) {
    using namespace ptx;
    uint32_t impossible = ordered(-INFINITY), built = kept(shared_address(&m.built));
    uint32_t step = kept(shared_address(m.steps + depth * (k + 1))), token = kept(shared_address(m.token + depth * k));
    for (int r = 0; r < width; ++r, step += sizeof(float), token += sizeof(int)) {
        if (r % 8 == 7 && __any_sync(~0u, load_word(built))) return;  // as one: lanes may look at different times
        uint32_t top = merge.next([&](bool own, uint64_t key) {
            float value = value_of(key), cost = value > -INFINITY ? fmaxf(total - value, 0.0f) : INFINITY;
            if (own) store_word(token, id_of(key)), store_word(step, __float_as_uint(cost));
        });
        if (top <= impossible) break;
    }
    store_word(step, __float_as_uint(INFINITY));
}

// What orders equal costs, depth and parent; then where the token's step lies, in bytes.
constexpr int kDepthAt = 21, kParentAt = 14, kStepMask = (1 << kParentAt) - 1;
static_assert(sizeof(TreeMemory::steps) <= kStepMask);

// The tree of at most `budget` nodes under the root, by one warp. A lane has the children of `Each` nodes, of which the
// next is the frontier's. Places of nodes that are yet to come go along with the root's: its child there counts once.
template <int Each>
__device__ void grow(int budget, int k, TreeMemory& m) {
    using namespace ptx;
    int lane = threadIdx.x % 32, count = 1;
    uint32_t row = kept((k + 1) * sizeof(float));
    uint32_t steps = kept(shared_address(m.steps)), costs = kept(shared_address(m.cost));
    uint32_t tags = kept(shared_address(m.tag)), tag[Each];
    float parent[Each], cost[Each];  // of the lane's nodes, and of their next children
    auto step = [&](uint32_t at) { return __uint_as_float(load_word(steps + at)); };
#pragma unroll
    for (int q = 0; q < Each; ++q) parent[q] = 0, cost[q] = INFINITY, tag[q] = 0;
    if (lane == 0) cost[0] = kUnknown;
    store_word(costs, 0);
    for (; count <= budget; ++count) {
        int best;
        while (true) {
            best = __float_as_int(cost[0]);
#pragma unroll
            for (int q = 1; q < Each; ++q) best = min(best, __float_as_int(cost[q]));
            best = __reduce_min_sync(~0u, best);
            if (best >= 0) break;
#pragma unroll
            for (int q = 0; q < Each; ++q) {
                if (cost[q] < 0) cost[q] = parent[q] + step(tag[q] & kStepMask);
            }
        }
        if (best == __float_as_int(INFINITY)) break;
        uint32_t of = ~0u;
#pragma unroll
        for (int q = 0; q < Each; ++q) of = __float_as_int(cost[q]) == best ? min(of, tag[q]) : of;
        of = __reduce_min_sync(~0u, of);
        uint32_t down = (of >> kDepthAt) + 1, below = down * row;
        float next = step((of & kStepMask) + sizeof(float)), first = step(below), own = __int_as_float(best);
        store_word(costs + 4 * count, best), store_word(tags + 4 * count, of);
        first += own, below |= down << kDepthAt | count << kParentAt;
#pragma unroll
        for (int q = 0; q < Each; ++q) {
            if (tag[q] == of) cost[q] = parent[q] + next, tag[q] += sizeof(float);
            if (count == lane + 32 * q) parent[q] = own, cost[q] = first, tag[q] = below;
        }
    }
    if (lane == 0) m.count = count, store_word(shared_address(&m.built), 1);
}

__device__ void write_node(const TreeParams& p, int b, int i, const TreeMemory& m) {
    bool valid = i < m.count, below = valid && i > 0;
    uint32_t tag = below ? m.tag[i] : 0, row = tag >> kDepthAt;
    uint32_t rank = (tag & kStepMask) / sizeof(float) - row * (p.k + 1);
    auto parent_of = [](uint32_t tag) -> int { return tag >> kParentAt & (kMaxNodes - 1); };
    int depth = below ? row + 1 : 0;
    int64_t at = int64_t(b) * p.N + i;
    uint64_t words[2] = {};
    auto add = [&](int j) {
        words[0] |= j < 64 ? uint64_t(1) << j : 0;
        words[1] |= j < 64 ? 0 : uint64_t(1) << (j - 64);
    };
    add(i);
    for (int d = depth, j = i; d > 0; --d) add(j = parent_of(m.tag[j]));
    p.token[at] = below ? m.token[row * p.k + rank] : valid ? p.anchor[b] : 0;
    p.parent[at] = below ? parent_of(tag) : -1;
    p.depth[at] = depth;
    p.score[at] = valid ? 0.0f - m.cost[i] : -INFINITY;
    p.ancestors[2 * at] = words[0];
    p.ancestors[2 * at + 1] = words[1];
    p.valid[at] = valid;
}

// D warps that merge and one that builds.
__global__ void __launch_bounds__(32 * (kMaxDepth + 1)) build_kernel(TreeParams p, int chunks) {
    extern __shared__ uint64_t held[];
    __shared__ TreeMemory m;
    int b = blockIdx.x, depth = threadIdx.x / 32, last = p.D * (p.k + 1);
    for (int i = threadIdx.x; i <= last; i += blockDim.x) m.steps[i] = i < last ? kUnknown : INFINITY;
    if (threadIdx.x == 0) m.built = 0;
    begin();
    bool merges = depth < p.D;
    int64_t at = (int64_t(b) * p.D + depth) * chunks;
    int budget = static_cast<int>(max(min(p.budget[b], int64_t(p.N - 1)), int64_t(0)));
    int width = static_cast<int>(max(min(p.width[b], int64_t(p.k)), int64_t(0)));
    Sum sum = sum_of(static_cast<const Sum*>(p.sums) + at, merges ? chunks : 0);
    Merge merge(p.keys + at * p.k, p.k, merges ? chunks : 0, held + depth * (kHeld + 1) * chunks);
    float total = join_lanes(sum).log();
    if (__syncthreads_or(!(total < INFINITY))) budget = 0;
    if (merges && budget) rank(merge, total, width, depth, p.k, m);
    if (!merges) {
        if (p.N <= 32) grow<1>(budget, p.k, m);
        else if (p.N <= 64) grow<2>(budget, p.k, m);
        else grow<4>(budget, p.k, m);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.N; i += blockDim.x) write_node(p, b, i, m);
}

}  // namespace

cudaError_t launch_build_tree(const TreeParams& params, int arch, cudaStream_t stream) {
    int chunks = row_chunks(params.V);
    if (params.D) {
        dim3 grid(chunks, params.D, params.B);
        cudaError_t error = launch_in_clusters(summarise_kernel, grid, kThreads, 0, 1, arch, stream, params);
        if (error != cudaSuccess) return error;
    }
    constexpr int kMostBytes = kMaxDepth * (kHeld + 1) * kMaxChunks * sizeof(uint64_t);
    static_assert(kMostBytes + sizeof(TreeMemory) <= 99 * 1024);
    int bytes = params.D * (kHeld + 1) * chunks * sizeof(uint64_t);
    cudaError_t error = cudaFuncSetAttribute(build_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
    if (error != cudaSuccess) return error;
    return launch_in_clusters(build_kernel, params.B, 32 * (params.D + 1), bytes, 1, arch, stream, params, chunks);
}

}  // namespace kimi_fx::round
