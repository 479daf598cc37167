// How a request's keys are cut into tiles, and which of a tile's keys a slot sees.

#pragma once

#include "common/ceil_div.h"
#include "draft_attention.h"

namespace kimi_fx::round {

constexpr int kPage = 64;  // keys of a page, and of a tile

constexpr float kSlack = 8;  // a power may grow by so many factors of two before the rows' sums are scaled anew

// A request's tiles and how many a split takes.
struct Cut {
    int length, page;  // committed tokens; the first page any slot sees
    int tiles, each;

    __device__ Cut(const DraftParams& p, int b) {
        length = p.length[b];
        page = p.window ? max(length - p.window + 1, 0) / kPage : 0;
        tiles = ceil_div(length, kPage) - page + 1;
        each = ceil_div(tiles, p.splits);
    }

    __device__ bool own(int tile) const { return tile == tiles - 1; }

    __device__ int start(int tile) const { return own(tile) ? length : (page + tile) * kPage; }

    // Rows of the tile that hold keys, if it is less than kPage.
    __device__ int valid(const DraftParams& p, int tile) const { return own(tile) ? p.S : length - start(tile); }

    __device__ bool all_see_all(const DraftParams& p, int tile) const {
        return !own(tile) && valid(p, tile) >= kPage && (!p.window || length + p.S - 1 - start(tile) < p.window);
    }

    // The slot sees the tile's keys from .x on and under .y.
    __device__ int2 seen(const DraftParams& p, int tile, int slot) const {
        int place = length + slot - start(tile), end = valid(p, tile);
        return make_int2(p.window ? place - p.window + 1 : 0,
                         min(end, p.causal ? place + 1 : p.window ? place + p.window : end));
    }
};

// Where a split's partials of a row at one key head lie.
struct Partials {
    __half* o;
    float* lse;

    __device__ Partials(const DraftParams& p, int b, int kv, int split, int row) {
        int64_t rows = p.S * (p.H / p.KV), pair = int64_t(b) * p.KV + kv;
        o = p.partial_o + ((pair * p.splits + split) * rows + row) * p.head;
        lse = p.partial_lse + (pair * rows + row) * p.splits + split;
    }
};

}  // namespace kimi_fx::round
