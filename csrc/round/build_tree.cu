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

constexpr int kPlaces = kMaxNodes / 32;  // of the frontier, a lane's

struct TreeMemory {
    volatile float gains[(kMaxDepth + 1) * (kMost + 1)];  // a row of k + 1 a depth and one more; -inf at the ends
    int token[kMaxDepth * kMost];
    uint32_t place[kMaxNodes];  // of the tree's: depth << 16 | parent << 8 | rank
    volatile float score[kMaxNodes];
    volatile bool built;
    int count;
};

// What stands for a log-probability until it is known.
__device__ float unknown() { return __int_as_float(0x7fffffff); }
__device__ bool known(float gain) { return __float_as_int(gain) != 0x7fffffff; }

__global__ void __launch_bounds__(kThreads) summarise_kernel(TreeParams p) {
    __shared__ TopMemory memory;
    begin();
    int chunk = blockIdx.x, depth = blockIdx.y, b = blockIdx.z, chunks = gridDim.x;
    int64_t row = int64_t(b) * p.D + depth, at = row * chunks;
    Sum* sums = static_cast<Sum*>(p.sums) + at;
    summarise(p.logits + row * p.V, p.V, chunk, chunks, p.k, p.keys + at * p.k, sums, memory);
}

// A depth's tokens and log-probabilities one after another, -inf after the last; by its warp.
__device__ void rank(Merge& merge, float total, int width, int depth, int k, TreeMemory& m) {
    volatile float* gains = m.gains + depth * (k + 1);
    for (int r = 0; r < k && !m.built; ++r) {
        uint64_t key = r < width ? merge.next() : 0;
        float value = key ? value_of(key) : -INFINITY;
        if (threadIdx.x % 32 == 0) {
            m.token[depth * k + r] = id_of(key);
            gains[r] = value > -INFINITY ? fminf(value - total, 0.0f) : -INFINITY;
        }
        if (value == -INFINITY) return;
    }
    if (threadIdx.x % 32 == 0) gains[k] = -INFINITY;
}

// Grows with the score, which is at most 0; 0 for -inf.
__device__ uint32_t order_of(float score) { return 0x7f800000 - (__float_as_uint(score) & 0x7fffffff); }
__device__ float score_of(uint32_t order) { return 0.0f - __uint_as_float(0x7f800000 - order); }

// The tree of at most `budget` nodes under the root, by one warp. Tags are depth << 14 | parent << 7 | rank of the parent
// and its next child.
__device__ void grow(int budget, int k, TreeMemory& m) {
    int lane = threadIdx.x % 32, count = 1;
    uint32_t order[kPlaces] = {}, tag[kPlaces] = {};
    auto gain_at = [&](int depth, int rank) { return m.gains + depth * (k + 1) + rank; };
    auto put = [&](int place, uint32_t new_order, uint32_t new_tag) {
#pragma unroll
        for (int q = 0; q < kPlaces; ++q) {
            if (place == lane + 32 * q) order[q] = new_order, tag[q] = new_tag;
        }
    };
    auto wait_for = [](volatile float* gain, float seen) {
        while (!known(seen)) seen = *gain;
        return seen;
    };
    if (lane == 0) m.place[0] = 0, m.score[0] = 0;
    uint32_t best = order_of(0.0f + wait_for(m.gains, unknown())), of = 0;
    put(0, best, of);
    for (; best && count <= budget; ++count) {
        int depth = of >> 14, parent = of >> 7 & 127, rank = of & 127;
        volatile float *next = gain_at(depth, rank + 1), *child = gain_at(depth + 1, 0);
        float next_gain = *next, child_gain = *child, above = m.score[parent], score = score_of(best);
        put(parent, 0, 0);
        uint32_t others = __reduce_max_sync(~0u, max(max(order[0], order[1]), max(order[2], order[3])));
        if (lane == 0) m.place[count] = (depth + 1) << 16 | parent << 8 | rank, m.score[count] = score;
        uint32_t next_order = order_of(above + wait_for(next, next_gain));
        uint32_t child_order = order_of(score + wait_for(child, child_gain));
        put(parent, next_order, of + 1);
        put(count, child_order, (depth + 1) << 14 | count << 7);
        best = max(others, max(next_order, child_order));
        uint32_t own = ~0u;
#pragma unroll
        for (int q = 0; q < kPlaces; ++q) own = order[q] == best ? min(own, tag[q]) : own;
        of = __reduce_min_sync(~0u, own);
        __syncwarp();
    }
    if (lane == 0) m.count = count, m.built = true;
}
static_assert(kPlaces == 4);

__device__ void write_node(const TreeParams& p, int b, int i, const TreeMemory& m) {
    bool valid = i < m.count;
    uint32_t place = valid ? m.place[i] : 0;
    int depth = place >> 16, rank = place & 0xff, parent = place >> 8 & 0xff;
    int64_t at = int64_t(b) * p.N + i;
    uint64_t words[2] = {i < 64 ? uint64_t(1) << i : 0, i < 64 ? 0 : uint64_t(1) << (i - 64)};
    for (int d = depth, j = i; d > 0; --d) {
        j = m.place[j] >> 8 & 0xff;
        words[0] |= j < 64 ? uint64_t(1) << j : 0;
        words[1] |= j < 64 ? 0 : uint64_t(1) << (j - 64);
    }
    p.token[at] = !valid ? 0 : depth ? m.token[(depth - 1) * p.k + rank] : p.anchor[b];
    p.parent[at] = depth ? parent : -1;
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
    for (int i = threadIdx.x; i <= first; i += blockDim.x) m.gains[i] = i < first ? unknown() : -INFINITY;
    if (threadIdx.x == 0) m.built = false;
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
        Merge merge(p.keys + at * p.k, p.k, chunks, held + depth * kHeld * chunks);
        int width = static_cast<int>(max(min(p.width[b], int64_t(p.k)), int64_t(0)));
        rank(merge, total, width, depth, p.k, m);
    }
    if (!merges && budget) grow(budget, p.k, m);
    if (!merges && !budget && threadIdx.x % 32 == 0) m.place[0] = 0, m.score[0] = 0, m.count = 1;
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
    constexpr int kMostBytes = kMaxDepth * kHeld * kMaxChunks * sizeof(uint64_t);
    static_assert(kMostBytes + sizeof(TreeMemory) <= 99 * 1024);
    int bytes = params.D * kHeld * chunks * sizeof(uint64_t);
    cudaError_t error = cudaFuncSetAttribute(build_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
    if (error != cudaSuccess) return error;
    return launch_in_clusters(build_kernel, params.B, 32 * (params.D + 1), bytes, 1, arch, stream, params, chunks);
}

}  // namespace kimi_fx::round
