// How a row of logits is cut for top.h, as host and device agree on it.

#pragma once

namespace kimi_fx::round {

constexpr int kChunk = 8192;     // logits of a block
constexpr int kMaxChunks = 32;   // of a row: a lane each, where they are joined
constexpr int kMaxVocabulary = kChunk * kMaxChunks;

inline int row_chunks(int V) { return (V + kChunk - 1) / kChunk; }

}  // namespace kimi_fx::round
