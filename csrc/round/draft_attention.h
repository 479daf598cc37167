// The drafter's attention: what host and device agree on. Letters: kimi_fx/graphs/__init__.py.
//
// The G = H / KV query heads that share a key head are rows beside the slots: row = slot * G + head. A request's KV
// tiles are the pages any slot sees, then one of the block's own keys; they are cut into equal runs, one a split.
//
// A split's partial is its rows' weighted mean of the values, in half precision: half the bytes to write and to read
// again. A mean beyond 65,504 becomes 65,504, also where one split has all tiles.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::round {

constexpr int kMaxSplits = 256;
constexpr int kMaxSlots = 64;  // S: the block's own keys are one tile

struct DraftParams {
    const __nv_bfloat16* q;       // [B, S, H, head]
    const __nv_bfloat16* pool_k;  // [P, 64, KV, head]
    const __nv_bfloat16* pool_v;  // [P, 64, KV, head]
    const int32_t* page_table;    // [B, table_width]
    const int32_t* length;        // [B]
    const __nv_bfloat16* k;       // [B, S, KV, head]
    const __nv_bfloat16* v;       // [B, S, KV, head], v_stride elements from slot to slot
    __half* partial_o;            // scratch [B, KV, splits, S * G, head] normalised, saturated
    float* partial_lse;           // scratch [B, KV, S * G, splits] base 2; -inf: nothing seen
    __nv_bfloat16* out;           // [B, S, H, head]
    int64_t v_stride;
    int32_t table_width, B, S, H, KV, head;
    int32_t window;  // 0: none
    int32_t splits;
    bool causal;
    float scale_log2;  // scale * log2(e)
};

constexpr int kWideHead = 128, kWideRows = 128;  // columns and a block's rows of draft_wgmma.cu

inline bool on_warpgroups(const DraftParams& p, int arch) { return arch == 90 && p.head == kWideHead; }

// How many splits fill this many multiprocessors, each with so many bytes of shared memory. Of `params` it takes sizes.
int draft_splits(const DraftParams& params, int arch, int multiprocessors, int shared);

// head 64 or 128.
cudaError_t launch_draft_attention(const DraftParams& params, int arch, cudaStream_t stream);

// Its first kernel where `on_warpgroups`: the splits' partials.
cudaError_t launch_draft_wgmma(const DraftParams& params, cudaStream_t stream);

}  // namespace kimi_fx::round
