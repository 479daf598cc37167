// The best-first draft tree in two launches: chunks of the vocabulary summarised by many blocks; then a block a
// request, in which a warp a depth merges its chunks' lists while one more builds the tree from what they have so far.
//
// A node has one child that could be next, as children come in the order of their ranks: the frontier has a place a
// node, and the warp holds it in registers. Its best by (score descending, depth, parent, rank) is two reductions away,
// so the tree is the reference's for the same log-probabilities.

#include "build_tree.h"

#include "merge.h"
#include "top.h"

namespace kimi_fx::round {
namespace {

struct TreeMemory {
    float gains[(kMaxDepth + 1) * (kMost + 1)];  // a row of k + 1 a depth and one more; -inf at the ends
    int token[kMaxDepth * kMost];
    uint32_t tag[kMaxNodes];  // of the tree's nodes
    float score[kMaxNodes];
    uint32_t built;
    int count;
};

constexpr uint32_t kUnknown = 0x7fffffff;  // what stands for a log-probability until it is known

__global__ void __launch_bounds__(kThreads, kSummaries) summarise_kernel(TreeParams p) {
    __shared__ TopMemory memory;
    begin();
    int chunk = blockIdx.x, depth = blockIdx.y, b = blockIdx.z, chunks = gridDim.x;
    int64_t row = int64_t(b) * p.D + depth, at = row * chunks;
    Sum* sums = static_cast<Sum*>(p.sums) + at;
    summarise(p.logits + row * p.V, p.V, chunk, chunks, p.k, p.keys + at * p.k, sums, memory);
}

// A depth's tokens and log-probabilities one after another, -inf after the last; by its warp.
__device__ void rank(Merge& merge, float total, int width, int depth, int k, TreeMemory& m) {
    using namespace ptx;
    uint32_t impossible = ordered(-INFINITY), least = __float_as_uint(-INFINITY);
    uint32_t built = kept(shared_address(&m.built));
    uint32_t gain = kept(shared_address(m.gains + depth * (k + 1))), token = kept(shared_address(m.token + depth * k));
    for (int r = 0; r < width; ++r, gain += sizeof(float), token += sizeof(int)) {
        if (r % 8 == 7 && __any_sync(~0u, load_word(built))) return;  // as one: lanes may look at different times
        uint32_t top = merge.next([&](uint64_t key) {
            float value = value_of(key);
            store_word(token, id_of(key));
            store_word(gain, value > -INFINITY ? __float_as_uint(fminf(value - total, 0.0f)) : least);
        });
        if (top <= impossible) break;
    }
    if (threadIdx.x % 32 == 0) store_word(gain, least);
}

// Grows with the score, which is at most 0; 0 for -inf.
__device__ uint32_t order_of(float score) { return 0x7f800000 - (__float_as_uint(score) & 0x7fffffff); }
__device__ float score_of(uint32_t order) { return 0.0f - __uint_as_float(0x7f800000 - order); }

// What orders equal scores: the depth, as the place of the parent's gains, then the parent, then the rank.
__device__ uint32_t tag_of(int row, int parent) { return row << 14 | parent << 7; }
__device__ int row_of(uint32_t tag) { return tag >> 14; }
__device__ int parent_of(uint32_t tag) { return tag >> 7 & 127; }
__device__ int rank_of(uint32_t tag) { return tag & 127; }

// The tree of at most `budget` nodes under the root, by one warp, of which a lane has `Each` places of the frontier.
template <int Each>
__device__ void grow(int budget, int k, TreeMemory& m) {
    using namespace ptx;
    int lane = threadIdx.x % 32, count = 1;
    uint32_t gains = kept(shared_address(m.gains)), scores = kept(shared_address(m.score));
    uint32_t tags = kept(shared_address(m.tag)), down = kept(k + 1), gain = kUnknown;
    while (gain == kUnknown) gain = load_word(gains);
    uint32_t best = order_of(0.0f + __uint_as_float(gain)), of = tag_of(0, 0), order[Each], tag[Each];
#pragma unroll
    for (int q = 0; q < Each; ++q) order[q] = 0, tag[q] = ~0u;
    if (lane == 0) order[0] = best, tag[0] = of, store_word(scores, 0);
    for (; best && count <= budget; ++count) {
        __syncwarp();
        uint32_t row = row_of(of), next = gains + 4 * (row + rank_of(of) + 1), child = gains + 4 * (row + down);
        float above = __uint_as_float(load_word(scores + 4 * parent_of(of))), score = score_of(best);
        uint32_t next_gain, child_gain;
        do next_gain = load_word(next), child_gain = load_word(child);
        while (next_gain == kUnknown || child_gain == kUnknown);
        if (lane == 0) store_word(scores + 4 * count, __float_as_uint(score)), store_word(tags + 4 * count, of);
        uint32_t next_order = order_of(above + __uint_as_float(next_gain));
        uint32_t child_order = order_of(score + __uint_as_float(child_gain)), child_tag = tag_of(row + down, count);
        best = 0;
#pragma unroll
        for (int q = 0; q < Each; ++q) {
            if (tag[q] == of) order[q] = next_order, ++tag[q];
            if (count == lane + 32 * q) order[q] = child_order, tag[q] = child_tag;
            best = max(best, order[q]);
        }
        best = __reduce_max_sync(~0u, best);
        of = ~0u;
#pragma unroll
        for (int q = 0; q < Each; ++q) of = order[q] == best ? min(of, tag[q]) : of;
        of = __reduce_min_sync(~0u, of);
    }
    if (lane == 0) m.count = count, store_word(shared_address(&m.built), 1);
}

__device__ void write_node(const TreeParams& p, int b, int i, const TreeMemory& m) {
    bool valid = i < m.count, below = valid && i > 0;
    uint32_t tag = below ? m.tag[i] : 0;
    int depth = below ? row_of(tag) / (p.k + 1) + 1 : 0;
    int64_t at = int64_t(b) * p.N + i;
    uint64_t words[2] = {};
    auto add = [&](int j) {
        words[0] |= j < 64 ? uint64_t(1) << j : 0;
        words[1] |= j < 64 ? 0 : uint64_t(1) << (j - 64);
    };
    add(i);
    for (int d = depth, j = i; d > 0; --d) add(j = parent_of(m.tag[j]));
    p.token[at] = below ? m.token[(depth - 1) * p.k + rank_of(tag)] : valid ? p.anchor[b] : 0;
    p.parent[at] = below ? parent_of(tag) : -1;
    p.depth[at] = depth;
    p.score[at] = valid ? m.score[i] : -INFINITY;
    p.ancestors[2 * at] = words[0];
    p.ancestors[2 * at + 1] = words[1];
    p.valid[at] = valid;
}

// D warps that merge and one that builds.
__global__ void __launch_bounds__(32 * (kMaxDepth + 1)) build_kernel(TreeParams p, int chunks) {
    extern __shared__ uint64_t held[];
    __shared__ TreeMemory m;
    begin();
    int b = blockIdx.x, depth = threadIdx.x / 32, first = p.D * (p.k + 1);
    for (int i = threadIdx.x; i < first; i += blockDim.x) m.gains[i] = __uint_as_float(kUnknown);
    if (threadIdx.x == 0) m.gains[first] = -INFINITY;
    if (threadIdx.x == 0) m.built = 0;
    bool merges = depth < p.D, unsound = false;
    int64_t at = (int64_t(b) * p.D + depth) * chunks;
    int budget = static_cast<int>(max(min(p.budget[b], int64_t(p.N - 1)), int64_t(0)));
    float total = 0;
    if (merges) {
        total = sum_of(static_cast<const Sum*>(p.sums) + at, chunks).log();
        unsound = !(total < INFINITY);
    }
    if (__syncthreads_or(unsound)) budget = 0;
    if (merges && budget) {
        Merge merge(p.keys + at * p.k, p.k, chunks, held + depth * (kHeld + 1) * chunks);
        int width = static_cast<int>(max(min(p.width[b], int64_t(p.k)), int64_t(0)));
        rank(merge, total, width, depth, p.k, m);
    }
    if (!merges && budget) {
        if (p.N <= 32) grow<1>(budget, p.k, m);
        else if (p.N <= 64) grow<2>(budget, p.k, m);
        else grow<4>(budget, p.k, m);
    }
    if (!merges && !budget) m.score[0] = 0, m.count = 1;
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
