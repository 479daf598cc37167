// How one block cuts its part of a product: some rows of weights, all tokens, the inputs in steps.
//
// Few tokens: a step is 16 KiB of weights, of which a warp takes 32 rows and 32 inputs at a time. Many: a step is 64
// inputs, and every four warps multiply 64 rows and all tokens at once, or half of them: nothing is left to be added. The ring holds as many steps as fit: a short one
// fits every chip, and two fit a multiprocessor of sm_90, so that clusters find room and the blocks that wait for others
// of their launch fill their rings beside these.

#pragma once

#include "operators.h"

namespace kimi_fx::layer {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRing = 96 * 1024;  // bytes that every chip has, sm_90 twice
constexpr int kMostStages = 8;
constexpr int kMostSplits = 8;  // blocks of a cluster

// `Together`: blocks of a multiprocessor, two of which have short rings.
template <int Tokens, int Rows, int Together = 2>
struct Tile {
    static constexpr bool kMany = Tokens > kFew;
    static constexpr int kTokens = Tokens, kRows = Rows, kTogether = Together;
    static constexpr int kSharing = Tokens == 16 && Rows > 16 ? 1 : Together;  // blocks that inputs are split for, as measured
    static constexpr int kStep = kMany ? 64 : 8192 / Rows;        // inputs
    static constexpr int kAlongRows = kMany ? Rows / 16 : Rows > 32 ? Rows / 32 : 1;  // warps
    static constexpr int kAlongTokens = kMany ? kWarps / kAlongRows : 1;
    static constexpr int kAlongInputs = kWarps / kAlongRows / kAlongTokens;
    static constexpr int kM = Rows / kAlongRows / 16;  // products of a warp, 16 x 8 each
    static constexpr int kN = Tokens / kAlongTokens / 8;
    static constexpr int kWeights = Rows * kStep / 8;  // vectors of 16 bytes of a step
    static constexpr int kStage = kWeights + Tokens * kStep / 8;
    static constexpr int kPitch = Rows + 4;  // floats between the sums of two tokens: lanes meet different banks
    static constexpr int kSums = kAlongInputs * Tokens * kPitch;
    static constexpr int kAcross = kStep / 8;  // vectors of a token's inputs in a step
    static_assert(kStep / 32 % kAlongInputs == 0 && kRing >= 32 * kStage && 4 * kSums <= kRing);
    static_assert(kThreads % kAcross == 0);
};

}  // namespace kimi_fx::layer
