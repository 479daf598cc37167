// What a block of the cluster does for its request: fills its slice of a row and takes its part in every pass.
//
// Filters need no order of the row. What they keep is a prefix of it, so an id drawn from too many is the draw if it
// lies in the prefix; if it does not, nothing from it on does, and what lies before it is drawn from again, with the
// same noise. Long because every pass goes over the same slice in shared memory.

#pragma once

#include "cluster.h"
#include "draw.h"
#include "sample_and_walk.h"
#include "shortlist.h"
#include "top.h"

namespace kimi_fx::round {

struct Rule {
    float temperature, top_p, min_p, presence, frequency, repetition;
    int64_t top_k, remaining, min_remaining;
    int64_t stop[kMaxStops];
    NoiseKey noise;  // of the first token
};

struct WalkMemory {
    Exchange exchange;
    Shortlist shortlist;
    Rule rule;
    int drawn[kMaxRows];
    int known[kMaxAhead];
};

constexpr int kNothing = -1;  // no token: the row is not finite

// Every operation rounded on its own, as the reference does it.
__device__ inline float penalise(const Rule& r, float x, int counts, bool seen) {
    if (seen) x = x > 0 ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
    x = __fsub_rn(x, counts > 0 ? r.presence : 0.0f);
    return __fsub_rn(x, __fmul_rn(r.frequency, static_cast<float>(counts)));
}

// A thread's own copies, which it alone waits for.
__device__ inline void copy_four(float4* to, const float* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(ptx::shared_address(to)), "l"(from)
                 : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Masses are whole numbers of 2^-40: their sum does not depend on its order, and so not on the cluster's size.
__device__ inline uint64_t mass_of(float logit) { return __float2ull_rn(__expf(logit) * 0x1p40f); }

// A block's part of the walk of request b.
struct Walker {
    const WalkParams& p;
    WalkMemory& m;
    int b;
    float4* slice;  // of the row in hand, four ids each
    int first;      // the slice's first, in fours
    int fours;      // of the slice
    int share;      // of any block but the last
    bool penalised = false;
    bool biased = true;  // until the first row has shown otherwise
    int fetched = -1;    // the node whose row is on its way to the slice, or there
    int listed = -1;     // keys of the shortlist, which every block has, that a draw is from; -1: it is from the slices
    int turn = 0;

    template <int Unroll = 2, typename Visit>  // visit(four's index in the slice)
    __device__ void each_four(Visit visit) const {
#pragma unroll Unroll
        for (int i = threadIdx.x; i < fours; i += kWalkThreads) visit(i);
    }

    template <typename Visit>  // visit(logit, id)
    __device__ void each(Visit visit) const {
        if (listed >= 0) {
            uint64_t key = static_cast<int>(threadIdx.x) < listed ? m.shortlist.keys[threadIdx.x] : 0;
            if (key) visit(value_of(key), id_of(key));
            return;
        }
        each_four([&](int i) {
            float4 x = slice[i];
            int id = 4 * (first + i);
            visit(x.x, id), visit(x.y, id + 1), visit(x.z, id + 2), visit(x.w, id + 3);
        });
    }

    template <typename Op>
    __device__ uint64_t reduced(uint64_t x, Op of_warp) {
        return reduce(m.exchange, turn, x, of_warp, listed >= 0 ? 1 : cluster_size());
    }

    __device__ const float* row_of(int node) const { return p.logits + (int64_t(b) * p.N + node) * p.V; }

    // Starts the copy of a node's row.
    __device__ void fetch(int node) {
        const float* row = row_of(node);
        bool copied = p.V % 4 == 0 && !p.slices;
        each_four([&](int i) {
            if (copied) copy_four(slice + i, row + 4 * (first + i));
            else slice[i] = load_four<float4>(row, 4 * (first + i), p.V, -INFINITY);
        });
        fetched = node;
    }

    // The node's row after penalties, bias and the stop ids' mask; n tokens lie on the path.
    __device__ void load(int node, int n) {
        if (fetched != node) fetch(node);
        if (biased) find_bias();
        wait_for_copies();
        if (penalised) penalise_all();
        if (biased) add_bias();
        bool early = n < m.rule.min_remaining;
        if (early || (penalised && n)) {
            __syncthreads();
            correct(row_of(node), n, early);
            __syncthreads();
        }
    }

    __device__ void penalise_all() {
        int64_t state = int64_t(b) * p.V;
        each_four<1>([&](int i) {
            int id = 4 * (first + i);
            int4 counts = load_four<int4>(p.counts + state, id, p.V, 0);
            uchar4 seen = load_four<uchar4>(reinterpret_cast<const unsigned char*>(p.seen) + state, id, p.V,
                                            static_cast<unsigned char>(0));
            float4 x = slice[i];
            slice[i] = {penalise(m.rule, x.x, counts.x, seen.x), penalise(m.rule, x.y, counts.y, seen.y),
                        penalise(m.rule, x.z, counts.z, seen.z), penalise(m.rule, x.w, counts.w, seen.w)};
        });
    }

    __device__ float4 bias_of(int i) const {
        return load_four<float4>(p.bias + int64_t(b) * p.V, 4 * (first + i), p.V, 0.0f);
    }

    // Most requests have none, which is known before their row is there.
    __device__ void find_bias() {
        bool any = false;
#pragma unroll 5
        for (int i = threadIdx.x; i < fours; i += kWalkThreads) {
            float4 y = bias_of(i);
            any |= y.x != 0 || y.y != 0 || y.z != 0 || y.w != 0;
        }
        biased = __syncthreads_or(any);
    }

    __device__ void add_bias() {
        each_four([&](int i) {
            float4 y = bias_of(i), x = slice[i];
            slice[i] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        });
    }

    // Ids that the path or a stop changes, from their raw logits on: few, a thread each.
    __device__ void correct(const float* row, int n, bool early) {
        int thread = threadIdx.x;
        if (thread >= n + p.stops) return;
        int64_t id = thread < n ? m.drawn[thread] : m.rule.stop[thread - n], at = id - 4 * first;
        if (id < 0 || id >= p.V || at < 0 || at >= 4 * fours) return;
        int64_t state = int64_t(b) * p.V + id;
        float x = row[id];
        if (penalised) {
            int times = 0;
            for (int i = 0; i < n; ++i) times += m.drawn[i] == id;
            x = penalise(m.rule, x, p.counts[state] + times, p.seen[state] || times);
        }
        x = __fadd_rn(x, p.bias[state]);
        for (int i = 0; early && i < p.stops; ++i) {
            if (m.rule.stop[i] == id) x -= INFINITY;
        }
        reinterpret_cast<float*>(slice)[at] = x;
    }

    // The best key, above all numbers' where the row has NaN or +inf.
    __device__ uint64_t best() {
        float top = -INFINITY;
        int at = 4 * first;
        bool sound = true;
        each([&](float x, int id) {
            sound &= x < INFINITY;
            if (x > top) top = x, at = id;
        });
        return reduced(sound ? key_of(top, at) : ~uint64_t(0), largest);
    }

    // value(logit) added up over the keys from `least` on.
    template <typename Value>
    __device__ uint64_t sum(uint64_t least, Value value) {
        uint64_t own = 0;
        each([&](float x, int id) {
            if (key_of(x, id) >= least) own += value(x);
        });
        return reduced(own, total);
    }

    __device__ float mass(uint64_t least) { return __ull2float_rn(sum(least, mass_of)); }

    // The k-th best key.
    __device__ uint64_t cutoff(int64_t k, uint64_t top) {
        uint64_t low = 0, high = top + 1;
        if (k <= kWalkWarps * cluster_size()) {
            uint64_t own = 0;
            each([&](float x, int id) { own = max(own, key_of(x, id)); });
            low = m.shortlist.peak(own, static_cast<int>(k));
            each([&](float x, int id) {
                if (key_of(x, id) >= low) m.shortlist.add(key_of(x, id));
            });
            uint64_t found = m.shortlist.best(static_cast<int>(k), listed);
            if (found) return found;
        }
        for (;;) {
            uint64_t middle = low + (high - low) / 2;
            int64_t count = sum(middle, [](float) { return uint64_t(1); });
            if (count == k) return middle;
            (count > k ? low : high) = middle;
        }
    }

    // Of the path's next token, n tokens being drawn.
    __device__ NoiseKey noise_of(int n) const {
        NoiseKey noise = m.rule.noise;
        noise.index += n;
        return noise;
    }

    // The best of logit + noise among the keys from `least` on. The row's best has `bar`, and an id's noise is at most
    // -log(its uniform number): few need more than that.
    __device__ uint64_t noisiest(int n, float bar, uint64_t least) {
        NoiseKey noise = noise_of(n);
        uint64_t best = 0;
        auto visit = [&](float x, int id, uint32_t word) {
            float v = uniform(word);
            if (v > __expf(x - bar + 0.01f) || key_of(x, id) < least || expf(x) < m.rule.min_p) return;
            best = max(best, key_of(__fadd_rn(x, gumbel(v)), id));
        };
        if (listed >= 0) {
            each([&](float x, int id) { visit(x, id, word_of(philox(id / 4, noise), id % 4)); });
        } else {
            each_four<1>([&](int i) {
                uint4 words = philox(first + i, noise);
                float4 x = slice[i];
                int id = 4 * (first + i);
                visit(x.x, id, words.x), visit(x.y, id + 1, words.y);
                visit(x.z, id + 2, words.z), visit(x.w, id + 3, words.w);
            });
        }
        return reduced(best, largest);
    }

    // An id's key, from whichever block has it.
    __device__ uint64_t key_at(int id) {
        if (listed >= 0) {
            uint64_t own = 0;
            each([&](float x, int other) { own = other == id ? key_of(x, id) : own; });
            return reduced(own, largest);
        }
        if (p.slices) return key_of(reinterpret_cast<volatile float*>(slice)[id - 4 * first], id);
        int owner = id / 4 / share;
        uint32_t from = peer_address(slice, owner) + (id - 4 * owner * share) * sizeof(float);
        return key_of(__uint_as_float(load_from_peer(from)), id);
    }

    // The token of a node's row, n tokens being drawn.
    __device__ int token(int node, int n) {
        load(node, n);
        uint64_t top = best();
        if (!(fabsf(value_of(top)) < INFINITY)) return kNothing;
        if (!(m.rule.temperature > 0)) return id_of(top);
        int drawn = draw(top, n);
        listed = -1;
        return drawn;
    }

    // The keyed draw, given the row's best key.
    __device__ int draw(uint64_t best, int n) {
        float top = value_of(best), temperature = m.rule.temperature;
        int top_id = id_of(best);
        each_four([&](int i) {
            float4 x = slice[i];
            x = {x.x - top, x.y - top, x.z - top, x.w - top};
            if (temperature != 1) {
                x = {__fdiv_rn(x.x, temperature), __fdiv_rn(x.y, temperature), __fdiv_rn(x.z, temperature),
                     __fdiv_rn(x.w, temperature)};
            }
            slice[i] = x;
        });
        float bar = gumbel(uniform(word_of(philox(top_id / 4, noise_of(n)), top_id % 4)));
        uint64_t least = m.rule.top_k < p.V ? cutoff(m.rule.top_k, key_of(0, top_id)) : 1;
        float most = m.rule.top_p < 1 ? m.rule.top_p * mass(least) : INFINITY;
        for (;;) {
            int id = id_of(noisiest(n, bar, least));
            if (id == top_id || most == INFINITY) return id;
            least = key_at(id) + 1;
            if (mass(least) < most) return id;
        }
    }

    __device__ bool stops(int token) const {
        int lane = threadIdx.x % 32;
        return __any_sync(~0u, lane < p.stops && m.rule.stop[lane] == token);
    }
};

}  // namespace kimi_fx::round
