// What host and device agree on for tree-verify MLA attention. Letters: kimi_fx/graphs/__init__.py.
//
// Row r = node * H + head of one request; a row tile is M consecutive rows, a KV tile 64 tokens (one page).
// A request's KV tiles are its prefix pages, ceil(length / 64) of them, then those of the tree's own rows.
// A pair is one (request, row tile); schedule.h cuts the list of all pairs' KV tiles into equal runs, one a block.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::mla {

constexpr int kPage = 64;     // tokens of a page, and of a KV tile
constexpr int kLatent = 512;  // L: value columns
constexpr int kRope = 64;     // R
constexpr int kRow = 576;     // L + R: key columns

struct Params {
    const __nv_bfloat16* q;     // [B, N, H, 576]
    const __nv_bfloat16* pool;  // [P, 64, 576]
    const int32_t* page_table;  // [B, table_width]
    const int32_t* length;      // [B]
    const __nv_bfloat16* rows;  // [B, N, 576]
    const uint64_t* ancestors;  // [B, N, 2], self included; null: causal among the N
    const int32_t* schedule;    // schedule.h
    __half* partial_o;          // [2 * blocks, M, 512] normalised, saturated
    float* partial_lse;         // [2 * blocks, M] base 2; -inf: nothing seen
    __nv_bfloat16* out;         // [B, N, H, 512]
    int32_t table_width;
    int32_t B, N, H;
    int32_t M;         // rows of a row tile
    int32_t blocks;    // of the persistent grid
    float scale_log2;  // scale * log2(e)
};

}  // namespace kimi_fx::mla
