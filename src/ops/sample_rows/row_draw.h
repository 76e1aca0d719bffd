// How a token is drawn from a row of logits, as plain values that mean the same on every device,
// and the arithmetic that all implementations share. All sums are sums of integers, and everything
// else is one fixed sequence of IEEE operations per token: whoever follows the law gets the same
// token and the same sums bit for bit, in whatever order and on however many threads it goes over
// the row.
//
// The law, for a row of raw logits x:
//   1. y = x with edits: -infinity where the mask has no bit, then per edit bias, repetition
//   penalty
//      and penalty, then -infinity for excluded tokens.
//   2. Greedy: the largest y, the lowest id among equals (+0 and -0 are equal).
//   3. Otherwise mass(i) = floor(exp((y_i - max y) * inverse_temperature) * 2^40). Tokens in the
//   order
//      of y descending, then id ascending, stay while the mass before them is at most
//      floor(top_p * sum of masses), and the first top_k of them; and only those of at least
//      min_mass. Those that stay own consecutive intervals of [0, total) in the order of ids; the
//      token is the one whose interval holds floor(random * total / 2^64).
// docs/sampling.md says what users see of it.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "ops/sample_rows/exponential.h"

namespace deepinfer {

// One token's change to its logit, in this order.
struct RowEdit {
  int32_t token = 0;
  float bias = 0.0f;        // added
  float repetition = 1.0f;  // divides a positive logit, multiplies others
  float penalty = 0.0f;     // subtracted
};

// What a drawn row reports beside its token, for log-probabilities.
enum class RowReport : int32_t {
  kNothing = 0,
  kRaw = 1,     // of the softmax of the raw logits
  kEdited = 2,  // of the softmax of the edited logits
  kDrawn = 3,   // of the masses that the token was drawn from; not for greedy draws
};

// One draw. Lists are ranges of arrays that all draws of a batch share.
struct RowDraw {
  int32_t logit_row = 0;
  // Where the token is written for the next step: an index into the sampled tokens, or -1.
  int32_t slot = -1;
  // At least 0: nothing is drawn, this token is reported on. There are no edits then, and no
  // kDrawn.
  int32_t given_token = -1;
  int32_t greedy = 0;
  RowReport report = RowReport::kNothing;
  int32_t top_k = 0;  // 0: all
  double inverse_temperature = 1.0;
  double top_p = 1.0;     // 1: all
  uint64_t min_mass = 1;  // at least 1
  uint64_t random = 0;    // uniform over 64 bits
  int32_t mask = -1;      // row of the masks: a bit per token, or -1
  int32_t edits_begin = 0;
  int32_t edits_end = 0;  // each token at most once
  int32_t excluded_begin = 0;
  int32_t excluded_end = 0;
  int32_t ends_begin = 0;  // tokens that end the sequence
  int32_t ends_end = 0;
  int32_t padding = 0;
};
static_assert(sizeof(RowDraw) == 88);

enum class RowStatus : int32_t {
  kDrawn = 0,
  kBadLogit = 1,     // `token` is the first whose logit is NaN or +infinity, `logit` that value
  kNothingLeft = 2,  // every edited logit is -infinity
};

// The result of one draw.
struct SampledRow {
  int32_t token = -1;
  RowStatus status = RowStatus::kDrawn;
  int32_t ends = 0;  // 1: the token is among those that end the sequence
  // What the draw's report says. `rank` is 1 + the number of tokens with a larger logit.
  int32_t rank = 0;
  float logit = 0.0f;    // of the token
  float largest = 0.0f;  // of the row
  // kRaw, kEdited: the sum of SoftmaxMass over all tokens. kDrawn: the kept tokens' total mass.
  uint64_t sum = 0;
  uint64_t mass = 0;  // kDrawn: of the token
};
static_assert(sizeof(SampledRow) == 40);

// 2^20 tokens of either mass stay below 2^63.
inline constexpr int64_t kMaxSampledVocab = int64_t{1} << 20;
inline constexpr double kUnitMass = 0x1p40;
inline constexpr double kUnitSoftmaxMass = 0x1p43;
// exp(x) rounds to no mass of either kind below this.
inline constexpr double kNoMassBelow = -31.0;

// `exponential` = ExpNonPositive of (y - max y) * inverse_temperature, or of x - max x.
constexpr uint64_t DrawMass(double exponential) {
  return static_cast<uint64_t>(static_cast<int64_t>(exponential * kUnitMass));
}
// To the nearest, so that the errors of many tokens cancel: 1e-11 of a sum.
constexpr uint64_t SoftmaxMass(double exponential) {
  return static_cast<uint64_t>(static_cast<int64_t>(exponential * kUnitSoftmaxMass + 0.5));
}

// Ascending with the logit; -0 counts as +0. Not for NaN.
constexpr uint32_t OrderedBits(float logit) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit == 0.0f ? 0.0f : logit);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
constexpr float OrderedLogit(uint32_t bits) {
  return std::bit_cast<float>((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}

// Never +infinity: a division by a small penalty stops at the largest number.
constexpr float EditLogit(float logit, const RowEdit& edit) {
  logit += edit.bias;
  logit = logit > 0.0f ? logit / edit.repetition : logit * edit.repetition;
  logit -= edit.penalty;
  constexpr float kLargest = std::numeric_limits<float>::max();
  return logit > kLargest ? kLargest : logit;
}

// The mass that may lie before a token that stays.
constexpr uint64_t NucleusLimit(double top_p, uint64_t total) {
  return static_cast<uint64_t>(top_p * static_cast<double>(total));
}

}  // namespace deepinfer
