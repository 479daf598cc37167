// How one block cuts its part of a product: some rows of weights, all tokens, the inputs in steps.
//
// A step is 16 KiB of weights (8 where tokens are many) and the tokens' same inputs; the ring holds as many steps as
// fit. Warps share a step by rows of weights first (32 each), by tokens where these are over 64, then by inputs, of
// which a warp takes 32 at a time. A short ring fits every chip, and two fit a multiprocessor of sm_90, so that the
// next kernel's blocks can fill theirs while this one's work. Many tokens take the room that weights under way need:
// then the ring is as long as the chip allows, but where there are more tiles than multiprocessors.

#pragma once

namespace kimi_fx::layer {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRing = 96 * 1024;   // bytes that every chip has, sm_90 twice
constexpr int kMostStages = 8;
constexpr int kFew = 16;  // tokens that leave the ring to the weights
constexpr int kMostSplits = 8;  // blocks of a cluster

// `Together`: blocks of a multiprocessor, two of which have short rings.
template <int Tokens, int Rows, int Together = Tokens <= kFew ? 2 : 1>
struct Tile {
    static constexpr int kTokens = Tokens, kRows = Rows, kTogether = Together;
    static constexpr int kSharing = Tokens == 16 ? 1 : Together;  // blocks that inputs are split for, as measured
    static constexpr int kStep = Tokens > 64 ? 64 : 8192 / Rows;  // inputs
    static constexpr int kAlongRows = Rows > 32 ? Rows / 32 : 1;  // warps
    static constexpr int kAlongTokens = Tokens > 64 ? 2 : 1;
    static constexpr int kAlongInputs = kThreads / 32 / (kAlongRows * kAlongTokens);
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
