// The best-first draft tree in two launches: chunks of the vocabulary summarised by many blocks; then a block a depth
// joins its chunks' lists, and the last block of a request to arrive builds its tree.
//
// The tree is the best nodes there are, so it is found level by level and ordered at the end. Of a level's nodes in
// order, the i-th's child of rank r has (i + 1)(r + 1) - 1 better ones beside it: few can be among the budget's best.
// Fewer still reach a bound that enough nodes are known to reach. Keys compare as (score descending, depth, parent,
// rank), so the tree is the reference's for the same log-probabilities.

#include "build_tree.h"

#include "top.h"

namespace kimi_fx::round {
namespace {

constexpr int kFound = kMaxDepth * kMost + 1;  // nodes of all levels, at most

struct TreeMemory {
    TopMemory top;
    float gains[(kMaxDepth + 1) * (kMost + 1)];  // a row of k + 1 a depth and one more; -inf at the ends
    uint32_t place[kMaxNodes];  // of the tree's: depth << 16 | parent << 8 | rank
    float score[kMaxNodes];
};

// The nodes found, in the end of what a level leaves of its candidates' room.
struct Found {
    uint64_t* keys;
    uint32_t* link;  // the parent's place among them << 8 | rank

    __device__ explicit Found(TopMemory& m)
        : keys(m.candidate + kCandidates - kFound), link(reinterpret_cast<uint32_t*>(keys) - kFound) {}
};
static_assert(sizeof(uint64_t) * (kCandidates - kFound) - sizeof(uint32_t) * kFound >= 8 * 700);  // sum of 127 / i: 690

// Best last: the level's nodes by (score, parent, rank), and all nodes by (score, depth, place in the level).
__device__ uint64_t node_key(float score, uint32_t place) {
    return ~(uint64_t(__float_as_uint(score) & 0x7fffffff) << 32 | place);
}
__device__ float score_of(uint64_t key) { return 0.0f - __uint_as_float(uint32_t(~key >> 32)); }

__global__ void __launch_bounds__(kThreads) summarise_kernel(TreeParams p) {
    __shared__ TopMemory memory;
    begin();
    int chunk = blockIdx.x, depth = blockIdx.y, b = blockIdx.z;
    if (chunk == 0 && depth == 0 && threadIdx.x == 0) p.arrived[b] = 0;
    int chunks = gridDim.x;
    int64_t row = int64_t(b) * p.D + depth, at = row * chunks;
    summarise(p.logits + row * p.V, p.V, chunk, chunks, p.k, p.keys + at * p.k, static_cast<Sum*>(p.sums) + at, memory);
}

// A depth's tokens and log-probabilities, -inf where out of bounds.
__device__ void rank(const TreeParams& p, int depth, int b, int chunks, TopMemory& m) {
    int64_t row = int64_t(b) * p.D + depth, at = row * chunks;
    Sum whole = gather(p.keys + at * p.k, static_cast<const Sum*>(p.sums) + at, chunks, p.k, m);
    float total = whole.log();
    uint64_t* list = p.lists + row * (p.k + 1);
    int r = threadIdx.x;
    if (r < p.k) {
        uint64_t key = m.list[r];
        float value = key ? value_of(key) : -INFINITY;
        float gain = r < p.width[b] && value > -INFINITY ? fminf(value - total, 0.0f) : -INFINITY;
        list[r] = uint64_t(id_of(key)) << 32 | __float_as_uint(gain);
    }
    if (r == p.k) list[r] = __float_as_uint(total < INFINITY ? -INFINITY : NAN);
}

// A score that at least `most` nodes reach, by those beside the path of the best tokens; -inf where they are fewer.
__device__ float bound(int D, int k, int most, TreeMemory& m) {
    int thread = threadIdx.x;
    float* path = m.score;  // of the best tokens above a depth
    if (thread < D) {
        float sum = 0;
        for (int d = 0; d < thread; ++d) sum += m.gains[d * (k + 1)];
        path[thread] = sum;
    }
    __syncthreads();
    float best = -INFINITY;
    int depth = D ? thread % D : 0, rank = D ? thread / D : k;
    while (rank < k) {  // rank by rank over the threads, as the best have low ranks
        best = fmaxf(best, path[depth] + m.gains[depth * (k + 1) + rank]);
        depth += kThreads % D, rank += kThreads / D;
        if (depth >= D) depth -= D, ++rank;
    }
    return value_threshold(best, most, m.top);
}

// The keys of the level's nodes that can be among the `most` best, in any order, to `candidate`. The level above has
// `count` nodes, in order at `above`.
__device__ void expand(const float* gains, int k, int most, float bound, const uint64_t* above, int count,
                       TopMemory& m) {
    for (int i = threadIdx.x / 32; i < count; i += kThreads / 32) {
        float parent = score_of(above[i]);
        for (int r = threadIdx.x % 32; r < k && (i + 1) * (r + 1) <= most; r += 32) {
            float score = parent + gains[r];
            bool reaches = gains[r] > -INFINITY && score >= bound;
            if (reaches) m.candidate[atomicAdd(&m.count, 1)] = node_key(score, i << 8 | r);
        }
    }
}

// All nodes that can be in the tree, level by level, each level in order. Returns how many.
__device__ int find_nodes(int D, int k, int most, const Found& f, TreeMemory& m) {
    int thread = threadIdx.x, first = 0, end = 1;  // the level's
    float least = bound(D, k, most, m);
    if (thread == 0) f.keys[0] = node_key(0, 0), f.link[0] = 0;
    for (int depth = 0; depth < D && first < end; ++depth) {
        if (thread == 0) m.top.count = 0;
        __syncthreads();
        expand(m.gains + depth * (k + 1), k, most, least, f.keys + first, end - first, m.top);
        __syncthreads();
        int count = m.top.count;
        rank_all(m.top.candidate, count, [&](int c, int at) {
            if (at >= most) return;
            uint64_t key = m.top.candidate[c];
            uint32_t from = ~uint32_t(key);
            f.keys[end + at] = node_key(score_of(key), (depth + 1) << 16 | at);
            f.link[end + at] = (first + (from >> 8)) << 8 | (from & 0xff);
        });
        first = end, end += min(count, most);
        __syncthreads();
    }
    return end;
}

// The tree's nodes in order, of the `found` ones.
__device__ void order_nodes(int found, int budget, const Found& f, TreeMemory& m) {
    int* index = reinterpret_cast<int*>(m.top.candidate);
    rank_all(f.keys, found, [&](int i, int above) { index[i] = above; });
    __syncthreads();
    for (int i = threadIdx.x; i < found; i += kThreads) {
        if (index[i] > budget) continue;
        uint32_t depth = ~uint32_t(f.keys[i]) >> 16, parent = index[f.link[i] >> 8];
        m.place[index[i]] = depth << 16 | parent << 8 | (f.link[i] & 0xff);
        m.score[index[i]] = score_of(f.keys[i]);
    }
    __syncthreads();
}

__device__ void write_node(const TreeParams& p, int b, int i, int count, const TreeMemory& m) {
    bool valid = i < count;
    uint32_t place = valid ? m.place[i] : 0;
    int depth = place >> 16, rank = place & 0xff, parent = place >> 8 & 0xff;
    int64_t token = valid ? p.anchor[b] : 0, at = int64_t(b) * p.N + i;
    if (depth) token = __ldcg(p.lists + (int64_t(b) * p.D + depth - 1) * (p.k + 1) + rank) >> 32;
    uint64_t words[2] = {i < 64 ? uint64_t(1) << i : 0, i < 64 ? 0 : uint64_t(1) << (i - 64)};
    for (int d = depth, j = i; d > 0; --d) {
        j = m.place[j] >> 8 & 0xff;
        words[0] |= j < 64 ? uint64_t(1) << j : 0;
        words[1] |= j < 64 ? 0 : uint64_t(1) << (j - 64);
    }
    p.token[at] = token;
    p.parent[at] = depth ? parent : -1;
    p.depth[at] = depth;
    p.score[at] = valid ? m.score[i] : -INFINITY;
    p.ancestors[2 * at] = words[0];
    p.ancestors[2 * at + 1] = words[1];
    p.valid[at] = valid;
}

__global__ void __launch_bounds__(kThreads) build_kernel(TreeParams p, int chunks) {
    __shared__ TreeMemory m;
    begin();
    int b = blockIdx.y, stride = p.k + 1;
    if (p.D) {
        rank(p, blockIdx.x, b, chunks, m.top);
        if (!last_to_arrive(p.arrived + b, gridDim.x, m.top)) return;
    }
    bool unsound = false;
    for (int i = threadIdx.x; i < (p.D + 1) * stride; i += kThreads) {
        float gain = -INFINITY;
        if (i < p.D * stride) gain = __uint_as_float(uint32_t(__ldcg(p.lists + int64_t(b) * p.D * stride + i)));
        unsound |= isnan(gain);
        m.gains[i] = gain;
    }
    unsound = __syncthreads_or(unsound);
    int budget = unsound ? 0 : static_cast<int>(max(min(p.budget[b], int64_t(p.N - 1)), int64_t(0)));
    Found f(m.top);
    int found = find_nodes(p.D, p.k, max(budget, 1), f, m);
    order_nodes(found, budget, f, m);
    for (int i = threadIdx.x; i < p.N; i += kThreads) write_node(p, b, i, min(found, budget + 1), m);
}

}  // namespace

cudaError_t launch_build_tree(const TreeParams& params, int arch, cudaStream_t stream) {
    int chunks = row_chunks(params.V);
    if (params.D) {
        dim3 grid(chunks, params.D, params.B);
        cudaError_t error = launch_in_clusters(summarise_kernel, grid, kThreads, 0, 1, arch, stream, params);
        if (error != cudaSuccess) return error;
    }
    dim3 grid(std::max(params.D, 1), params.B);
    return launch_in_clusters(build_kernel, grid, kThreads, 0, 1, arch, stream, params, chunks);
}

}  // namespace kimi_fx::round
