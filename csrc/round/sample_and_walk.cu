// Sampling and the walk: a cluster of blocks takes a request from its root to where it ends. Where requests are few,
// other clusters have drawn from its first nodes before, all at once: a node's path is known without a walk.
//
// Only the rows of these nodes and of those on the way are read. A row lies in the cluster's shared memory, a slice a
// block, and everything asked of it is a pass over the slices and one exchange: the best id, the draw, a count, a mass
// (walker.h). What top-k leaves goes on as a list that every block has.

#include "sample_and_walk.h"

#include "walker.h"

namespace kimi_fx::round {
namespace {

#if __CUDA_ARCH__ >= 1200
constexpr int kResident = 1;  // blocks of a multiprocessor, as its shared memory allows
#else
constexpr int kResident = 2;
#endif

enum Finish { kRuns, kStop, kLength, kNonFinite };  // kimi_fx/ops/sample_and_walk.py

// The node's first child that holds the token; -1: none. By every warp for itself.
__device__ int child(const int2* nodes, int N, int node, int token) {
    for (int from = 0; from < N; from += 32) {
        int j = from + threadIdx.x % 32;
        bool found = j > node && j < N && nodes[j].x == token && nodes[j].y == node;
        unsigned mask = __ballot_sync(~0u, found);
        if (mask) return from + __ffs(mask) - 1;
    }
    return -1;
}

__device__ void read_rule(const WalkParams& p, int b, Rule& r) {
    r.temperature = p.temperature[b], r.top_p = p.top_p[b], r.min_p = p.min_p[b];
    r.presence = p.presence[b], r.frequency = p.frequency[b], r.repetition = p.repetition[b];
    r.top_k = p.top_k[b], r.remaining = p.remaining[b], r.min_remaining = p.min_remaining[b];
    r.noise.seed[0] = p.seed[2 * b], r.noise.seed[1] = p.seed[2 * b + 1];
    r.noise.index = p.position[b] + 1, r.noise.sample = p.sample[b];
}

// The tree's tokens and parents, then this block's slice of a row.
struct Dynamic {
    int2* nodes;
    float4* slice;

    __device__ Dynamic(float4* memory, int N)
        : nodes(reinterpret_cast<int2*>(memory)), slice(memory + ceil_div(N * sizeof(int2), 16)) {}
};

// A request's part in a cluster, which holds its tree and its rule; the copy of the row of `node` is on its way. Rows
// are those of scratch where slices lie there.
__device__ Walker begin_request(const WalkParams& p, int b, int row, int node, const Dynamic& dynamic, WalkMemory& m) {
    int blocks = cluster_size(), rank = cluster_rank(), thread = threadIdx.x;
    int fours = ceil_div(p.V, 4), share = ceil_div(fours, blocks), first = min(rank * share, fours);
    float4* slice = p.slices ? reinterpret_cast<float4*>(p.slices) + int64_t(row) * fours + first : dynamic.slice;
    Walker walker{p, m, b, slice, first, min(share, fours - first), share};
    if (node >= 0) walker.fetch(node);
    for (int i = thread; i < p.N; i += kWalkThreads) {
        dynamic.nodes[i] = make_int2(p.token[int64_t(b) * p.N + i], p.parent[int64_t(b) * p.N + i]);
    }
    if (thread < p.ahead) m.known[thread] = p.drawn[b * p.ahead + thread];
    if (thread < p.stops) m.rule.stop[thread] = p.stop_ids[b * p.stops + thread];
    if (thread == 0) read_rule(p, b, m.rule), m.shortlist.count = 0;
    cluster_sync();  // from here every block of the cluster is there to be written to
    walker.penalised = m.rule.presence != 0 || m.rule.frequency != 0 || m.rule.repetition != 1;
    return walker;
}

// How many tokens lie on the path to a node, which are put in `drawn`; -1: no walk comes to it.
__device__ int path_to(const int2* nodes, int node, int* drawn) {
    int n = 0;
    for (int j = node; j > 0; ++n) {
        int parent = nodes[j].y;
        if (parent < 0 || parent >= j) return -1;
        j = parent;
    }
    if (threadIdx.x == 0 && n <= kMaxRows) {
        for (int j = node, i = n; i > 0; j = nodes[j].y) drawn[--i] = nodes[j].x;
    }
    return n;
}

// A cluster draws from one of the first nodes, as a walk that comes there would.
__global__ void __launch_bounds__(kWalkThreads, kResident) draw_kernel(WalkParams p) {
    extern __shared__ float4 memory[];
    __shared__ WalkMemory m;
    begin();
    int cluster = blockIdx.x / cluster_size(), b = cluster / p.ahead, node = cluster % p.ahead;
    if (!p.active[b]) return;
    Dynamic dynamic(memory, p.N);
    Walker walker = begin_request(p, b, cluster, node, dynamic, m);
    int n = path_to(dynamic.nodes, node, m.drawn);
    if (n < 0 || n >= p.A || n >= m.rule.remaining) return wait_for_copies();
    int token = walker.token(node, n);
    if (cluster_rank() == 0 && threadIdx.x == 0) p.drawn[blockIdx.x / cluster_size()] = token;
}

// What was not drawn ahead is drawn when the walk is there.
__global__ void __launch_bounds__(kWalkThreads, kResident) walk_kernel(WalkParams p) {
    extern __shared__ float4 memory[];
    __shared__ WalkMemory m;
    begin();
    int b = blockIdx.x / cluster_size(), rank = cluster_rank(), thread = threadIdx.x;
    bool active = p.active[b];
    Dynamic dynamic(memory, p.N);
    Walker walker = begin_request(p, b, b, active && !p.ahead ? 0 : -1, dynamic, m);
    int n = 0, finish = kRuns;
    for (int node = active ? 0 : -1; node >= 0 && n < p.A;) {
        int token = node < p.ahead ? m.known[node] : walker.token(node, n);
        if (token < 0) {
            finish = kNonFinite;
            break;
        }
        if (thread == 0) {
            m.drawn[n] = token;
            if (rank == 0) p.tokens[int64_t(b) * p.A + n] = token, p.path[int64_t(b) * p.A + n] = node;
        }
        ++n;
        finish = walker.stops(token) ? kStop : n == m.rule.remaining ? kLength : kRuns;
        if (finish != kRuns) break;
        node = child(dynamic.nodes, p.N, node, token);
    }
    if (rank) return;
    for (int i = n + thread; i < p.A; i += kWalkThreads) {
        p.tokens[int64_t(b) * p.A + i] = -1, p.path[int64_t(b) * p.A + i] = 0;
    }
    for (int i = thread; i < p.A; i += kWalkThreads) p.arrived[int64_t(b) * p.A + i] = 0;
    if (thread == 0) p.count[b] = n, p.finish[b] = finish;
}

// A large cluster lies in one of sm_90's 8 groups of multiprocessors: one of them must have so many, and few requests
// must leave room for it.
int blocks_of(int B, int arch, int multiprocessors) {
    if (arch < 90) return 1;
    return arch == 90 && multiprocessors > 8 * (kMaxCluster - 1) && B < 4 ? kMaxCluster : kPortableCluster;
}

int shared_bytes(int V, int N, int blocks, bool slices) {
    return ceil_div(N * sizeof(int2), 16) * 16 + (slices ? ceil_div(ceil_div(V, 4), blocks) * 16 : 0);
}

template <typename Kernel>
cudaError_t launch_clusters(Kernel kernel, int clusters, int blocks, int bytes, int arch, cudaStream_t stream,
                            const WalkParams& p) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && blocks > kPortableCluster) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (error != cudaSuccess) return error;
    return launch_in_clusters(kernel, clusters * blocks, kWalkThreads, bytes, blocks, arch, stream, p);
}

}  // namespace

// On half the multiprocessors: from there on clusters wait for each other's rows.
int nodes_ahead(int B, int N, int arch, int multiprocessors) {
    int clusters = multiprocessors / 2 / (arch < 90 ? 1 : kPortableCluster);
    int ahead = std::min({clusters / B, N, kMaxAhead});
    return ahead < kFewestAhead ? 0 : ahead;
}

bool slices_spill(int B, int V, int N, int shared, int arch, int multiprocessors) {
    int blocks = nodes_ahead(B, N, arch, multiprocessors) && arch >= 90 ? kPortableCluster
                                                                         : blocks_of(B, arch, multiprocessors);
    return shared_bytes(V, N, blocks, true) + int(sizeof(WalkMemory)) > shared;
}

cudaError_t launch_walk(const WalkParams& p, int arch, int multiprocessors, cudaStream_t stream) {
    if (p.ahead) {
        int blocks = arch < 90 ? 1 : kPortableCluster, bytes = shared_bytes(p.V, p.N, blocks, !p.slices);
        cudaError_t error = launch_clusters(draw_kernel, p.B * p.ahead, blocks, bytes, arch, stream, p);
        if (error != cudaSuccess) return error;
    }
    int blocks = p.ahead == p.N ? 1 : blocks_of(p.B, arch, multiprocessors);
    int bytes = shared_bytes(p.V, p.N, blocks, !p.slices && p.ahead < p.N);
    return launch_clusters(walk_kernel, p.B, blocks, bytes, arch, stream, p);
}

}  // namespace kimi_fx::round
