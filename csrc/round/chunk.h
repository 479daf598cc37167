// How a row of logits is cut for top.h, as host and device agree on it.

#pragma once

#include "common/ceil_div.h"

namespace kimi_fx::round {

constexpr int kChunk = 8192;     // logits of a block
constexpr int kMaxChunks = 32;   // of a row: a lane each, where they are joined
constexpr int kMaxVocabulary = kChunk * kMaxChunks;

inline int row_chunks(int V) { return ceil_div(V, kChunk); }

}  // namespace kimi_fx::round
