// What a block of the cluster does for its request: fills its slice of a row and takes its part in every pass.
//
// Filters need no order of the row. What they keep is a prefix of it, so an id drawn from too many is the draw if it
// lies in the prefix; if it does not, nothing from it on does, and what lies before it is drawn from again, with the
// same noise.

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
};

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
    bool penalised;
    bool biased = true;  // until the first row has shown otherwise
    int turn = 0;

    template <typename Visit>  // visit(four's index in the slice)
    __device__ void each_four(Visit visit) const {
        for (int i = threadIdx.x; i < fours; i += kWalkThreads) visit(i);
    }

    template <typename Visit>  // visit(logit, id)
    __device__ void each(Visit visit) const {
        each_four([&](int i) {
            float4 x = slice[i];
            int id = 4 * (first + i);
            visit(x.x, id), visit(x.y, id + 1), visit(x.z, id + 2), visit(x.w, id + 3);
        });
    }

    // The node's row after penalties, bias and the stop ids' mask; n tokens lie on the path.
    __device__ void load(int node, int n) {
        const float* row = p.logits + (int64_t(b) * p.N + node) * p.V;
        bool copied = p.V % 4 == 0 && !p.slices;
        each_four([&](int i) {
            if (copied) copy_four(slice + i, row + 4 * (first + i));
            else slice[i] = load_four<float4>(row, 4 * (first + i), p.V, -INFINITY);
        });
        wait_for_copies();
        if (penalised) penalise_all();
        if (biased) add_bias();
        bool early = n < m.rule.min_remaining;
        if (early || (penalised && n)) {
            __syncthreads();
            correct(row, n, early);
            __syncthreads();
        }
    }

    __device__ void penalise_all() {
        int64_t state = int64_t(b) * p.V;
        each_four([&](int i) {
            int id = 4 * (first + i);
            int4 counts = load_four<int4>(p.counts + state, id, p.V, 0);
            uchar4 seen = load_four<uchar4>(reinterpret_cast<const unsigned char*>(p.seen) + state, id, p.V,
                                            static_cast<unsigned char>(0));
            float4 x = slice[i];
            slice[i] = {penalise(m.rule, x.x, counts.x, seen.x), penalise(m.rule, x.y, counts.y, seen.y),
                        penalise(m.rule, x.z, counts.z, seen.z), penalise(m.rule, x.w, counts.w, seen.w)};
        });
    }

    __device__ void add_bias() {
        bool any = false;
#pragma unroll 5
        for (int i = threadIdx.x; i < fours; i += kWalkThreads) {
            float4 y = load_four<float4>(p.bias + int64_t(b) * p.V, 4 * (first + i), p.V, 0.0f), x = slice[i];
            any |= y.x != 0 || y.y != 0 || y.z != 0 || y.w != 0;
            slice[i] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        }
        biased = __syncthreads_or(any);
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
        return reduce(m.exchange, turn, sound ? key_of(top, at) : ~uint64_t(0), largest);
    }

    // value(logit) added up over the keys from `least` on.
    template <typename Value>
    __device__ uint64_t sum(uint64_t least, Value value) {
        uint64_t own = 0;
        each([&](float x, int id) {
            if (key_of(x, id) >= least) own += value(x);
        });
        return reduce(m.exchange, turn, own, total);
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
            uint64_t found = m.shortlist.best(static_cast<int>(k));
            if (found) return found;
        }
        for (;;) {
            uint64_t middle = low + (high - low) / 2;
            int64_t count = sum(middle, [](float) { return uint64_t(1); });
            if (count == k) return middle;
            (count > k ? low : high) = middle;
        }
    }

    // The best of logit + noise among the keys from `least` on. The row's best has `bar`, and an id's noise is at most
    // -log(its uniform number): few need more than that.
    __device__ uint64_t noisiest(const NoiseKey& noise, float bar, uint64_t least) {
        uint64_t best = 0;
        each_four([&](int i) {
            uint4 words = philox(first + i, noise);
            float4 four = slice[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x = j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w, v = uniform(word_of(words, j));
                int id = 4 * (first + i) + j;
                if (v > __expf(x - bar + 0.01f)) continue;
                if (key_of(x, id) < least || expf(x) < m.rule.min_p) continue;
                best = max(best, key_of(__fadd_rn(x, gumbel(v)), id));
            }
        });
        return reduce(m.exchange, turn, best, largest);
    }

    // An id's scaled logit, from whichever block has it.
    __device__ float at(int id) const {
        if (p.slices) return reinterpret_cast<volatile float*>(slice)[id - 4 * first];
        int owner = id / 4 / share;
        return __uint_as_float(load_from_peer(peer_address(slice, owner) + (id - 4 * owner * share) * sizeof(float)));
    }

    // The keyed draw of the path's next token, n tokens being drawn, given the row's best key.
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
        NoiseKey noise = m.rule.noise;
        noise.index += n;
        float bar = gumbel(uniform(word_of(philox(top_id / 4, noise), top_id % 4)));
        uint64_t least = m.rule.top_k < p.V ? cutoff(m.rule.top_k, key_of(0, top_id)) : 1;
        float most = m.rule.top_p < 1 ? m.rule.top_p * mass(least) : INFINITY;
        for (;;) {
            int id = id_of(noisiest(noise, bar, least));
            if (id == top_id || most == INFINITY) return id;
            least = key_of(at(id), id) + 1;
            if (mass(least) < most) return id;
        }
    }

    __device__ bool stops(int token) const {
        int lane = threadIdx.x % 32;
        return __any_sync(~0u, lane < p.stops && m.rule.stop[lane] == token);
    }
};

}  // namespace kimi_fx::round
