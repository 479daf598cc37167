// Sampling and the walk in one launch: a cluster of blocks takes a request from its root to where it ends.
//
// Only the rows on the way are read. A row lies in the cluster's shared memory, a slice a block, and everything asked
// of it is a pass over the slices and one exchange: the best id, the draw, a count, a mass (walker.h).

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
    for (int i = 0; i < p.stops; ++i) r.stop[i] = p.stop_ids[b * p.stops + i];
    r.noise.seed[0] = p.seed[2 * b], r.noise.seed[1] = p.seed[2 * b + 1];
    r.noise.index = p.position[b] + 1, r.noise.sample = p.sample[b];
}

__global__ void __launch_bounds__(kWalkThreads, kResident) walk_kernel(WalkParams p) {
    extern __shared__ float4 dynamic[];
    __shared__ WalkMemory m;
    begin();
    int blocks = cluster_size(), rank = cluster_rank(), b = blockIdx.x / blocks, thread = threadIdx.x;
    int fours = ceil_div(p.V, 4), share = ceil_div(fours, blocks), first = min(rank * share, fours);
    int2* nodes = reinterpret_cast<int2*>(dynamic + (p.slices ? 0 : share));
    for (int i = thread; i < p.N; i += kWalkThreads) {
        nodes[i] = make_int2(p.token[int64_t(b) * p.N + i], p.parent[int64_t(b) * p.N + i]);
    }
    if (thread == 0) read_rule(p, b, m.rule), m.shortlist.count = 0;
    cluster_sync();  // from here every block of the cluster is there to be written to
    const Rule& r = m.rule;
    float4* slice = p.slices ? reinterpret_cast<float4*>(p.slices) + int64_t(b) * fours + first : dynamic;
    bool penalised = r.presence != 0 || r.frequency != 0 || r.repetition != 1;
    Walker walker{p, m, b, slice, first, min(share, fours - first), share, penalised};

    int n = 0, finish = kRuns;
    for (int node = p.active[b] ? 0 : -1; node >= 0 && n < p.A;) {
        walker.load(node, n);
        uint64_t best = walker.best();
        if (!(fabsf(value_of(best)) < INFINITY)) {
            finish = kNonFinite;
            break;
        }
        int token = r.temperature > 0 ? walker.draw(best, n) : id_of(best);
        if (thread == 0) {
            m.drawn[n] = token;
            if (rank == 0) p.tokens[int64_t(b) * p.A + n] = token, p.path[int64_t(b) * p.A + n] = node;
        }
        ++n;
        finish = walker.stops(token) ? kStop : n == r.remaining ? kLength : kRuns;
        if (finish != kRuns) break;
        node = child(nodes, p.N, node, token);
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

int shared_bytes(int V, int N, int blocks, bool spill) {
    return (spill ? 0 : ceil_div(ceil_div(V, 4), blocks) * 16) + N * sizeof(int2);
}

}  // namespace

bool slices_spill(int B, int V, int N, int shared, int arch, int multiprocessors) {
    return shared_bytes(V, N, blocks_of(B, arch, multiprocessors), false) + int(sizeof(WalkMemory)) > shared;
}

cudaError_t launch_walk(const WalkParams& p, int arch, int multiprocessors, cudaStream_t stream) {
    int blocks = blocks_of(p.B, arch, multiprocessors), bytes = shared_bytes(p.V, p.N, blocks, p.slices);
    cudaError_t error = cudaFuncSetAttribute(walk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && blocks > kPortableCluster) {
        error = cudaFuncSetAttribute(walk_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (error != cudaSuccess) return error;
    return launch_in_clusters(walk_kernel, p.B * blocks, kWalkThreads, bytes, blocks, arch, stream, p);
}

}  // namespace kimi_fx::round
