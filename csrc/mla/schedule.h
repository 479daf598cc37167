// The work list of tree-verify attention: made on the device once a round, walked by every layer's kernel.
//
// Where pairs are no more than blocks, all are cut after the same number of KV tiles and each block gets one part:
// row tiles of one request then read the same KV tiles at the same time, and the L2 serves all but the first.
// Where they are more, every block gets as many whole pairs.
//
// Where either would last much longer than an equal share, pairs stand in a line, request-major; each takes kPairCost
// units, then one unit a KV tile. Block b owns `run` consecutive units, so it may end one pair, do some whole and begin
// another.
//
// A pair that lies in one block is written to `out`. Of a pair cut over blocks b0..b1 each block leaves a partial: b0
// in slot 2 * b0 + 1, the others in slot 2 * b; combine.cu adds them in the order of b.
//
// The tensor, int32: kMaxBlocks records {pair, tile, units, last pair + 1}, then for each pair {b0, b1}.

#pragma once

#include "../common/ceil_div.h"
#include "params.h"

namespace kimi_fx::mla {

constexpr int kMaxBlocks = 256;
constexpr int kPairCost = 2;   // loading q and writing the output, in KV tiles
constexpr int kMaxTree = 128;  // nodes of a tree at most; more are a causal chunk

// Rows of a row tile, from static shape alone.
__host__ __device__ inline int row_tile(int N, int H) { return N * H <= 16 ? 16 : N * H <= 32 ? 32 : 64; }

// KV tiles of the tree's own rows that row tile `t` looks at. A long causal chunk stops at its last row's node.
__host__ __device__ inline int tree_tiles(int N, int H, int M, int t) {
    int rows = N <= kMaxTree || (t + 1) * M > N * H ? N * H : (t + 1) * M;
    return (rows - 1) / H / kPage + 1;
}

// Elements of the tensor for a shape.
inline int64_t schedule_size(int64_t B, int N, int H) {
    return 4 * kMaxBlocks + 2 * B * ceil_div(N * H, row_tile(N, H));
}

// One kernel, one block.
cudaError_t launch_schedule(const int32_t* length, int32_t* schedule, int B, int N, int H, int M, int blocks,
                            cudaStream_t stream);

// Adds up the partials of pairs that were cut. Overlaps the end of the kernel before it where the device can.
cudaError_t launch_combine(const Params& params, int arch, cudaStream_t stream);

#ifdef __CUDACC__

struct Piece {     // consecutive KV tiles of one pair
    int request;   // b
    int row;       // first row of the row tile
    int length;    // tokens of the prefix
    int prefix;    // KV tiles of the prefix
    int tile;      // first KV tile; tiles from `prefix` on are the tree's own rows
    int end;       // past the last
    int slot;      // where the partial goes; -1: the whole pair is here, write `out`
};

// A block's run: `Walk walk(params, blockIdx.x); while (walk.next(params, piece)) ...`
struct Walk {
    int pair, tile, units, until, block;

    __device__ Walk(const Params& p, int block) : block(block) {
        int4 record = reinterpret_cast<const int4*>(p.schedule)[block];
        pair = record.x, tile = record.y, units = record.z, until = record.w;
    }

    __device__ bool next(const Params& p, Piece& piece) {
        if (units <= 0 || pair >= until) return false;
        int row_tiles = ceil_div(p.N * p.H, p.M), t = pair % row_tiles;
        piece.request = pair / row_tiles;
        piece.row = t * p.M;
        piece.length = p.length[piece.request];
        piece.prefix = ceil_div(piece.length, kPage);
        int tiles = piece.prefix + tree_tiles(p.N, p.H, p.M, t);
        if (tile >= tiles) return false;  // a schedule of other lengths
        piece.tile = tile;
        piece.end = min(tiles, tile + units);
        piece.slot = tile == 0 ? (piece.end == tiles ? -1 : 2 * block + 1) : 2 * block;
        units -= piece.end - tile + kPairCost;
        tile = 0;
        ++pair;
        return true;
    }
};

#endif

}  // namespace kimi_fx::mla
