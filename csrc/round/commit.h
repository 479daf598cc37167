// The write of a round: what host and device agree on. Letters: kimi_fx/graphs/__init__.py.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx::round {

// Rows of one kind, copied in pieces of 16 bytes: U of them a row. Strides are in such pieces.
struct Rows {
    uint4* pool;        // [layers, P, 64, U]
    const uint4* rows;  // [layers, B, n, U], a row in one piece
    int64_t P, layer_stride, request_stride, row_stride;
    int32_t layers, U;
};

struct CommitParams {
    Rows target, draft_k, draft_v;  // the target's rows lie in node order, the drafter's in path order
    int64_t* anchor;         // [B]
    int32_t* length;         // [B]
    bool* active;            // [B]
    int32_t* counts;         // [B, V]
    bool* seen;              // [B, V]
    int64_t* remaining;      // [B]
    int64_t* min_remaining;  // [B]
    const int32_t* page_table;  // [B, table_width]
    const int64_t* path;        // [B, A]
    const int64_t* kept;        // [B]
    const int64_t* tokens;      // [B, emitted]
    const int64_t* count;       // [B]
    const int64_t* finish;      // [B]
    const bool* running;        // [B]
    int32_t B, A, V, table_width, emitted;
};

cudaError_t launch_commit(const CommitParams& params, int arch, cudaStream_t stream);

}  // namespace kimi_fx::round
