// Constraints for tests: automata over token ids, given as tables. What they allow is written down
// state by state, so that a test can say what an output must be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "sample/token_constraint.h"

namespace deepinfer {

// next[state * vocab_size + id] is the state after `id`, or -1 where it is not allowed. State 0 is
// the first.
struct TokenTable {
  int64_t vocab_size = 0;
  std::vector<int32_t> next;

  TokenTable(int64_t vocab, int64_t num_states)
      : vocab_size(vocab), next(static_cast<size_t>(vocab * num_states), -1) {}

  int32_t& At(int64_t state, int64_t id) {
    return next[static_cast<size_t>(state * vocab_size + id)];
  }
  int32_t At(int64_t state, int64_t id) const {
    return next[static_cast<size_t>(state * vocab_size + id)];
  }
  int64_t num_states() const {
    return static_cast<int64_t>(next.size()) / vocab_size;
  }
};

class TableConstraint : public TokenConstraint {
 public:
  explicit TableConstraint(std::shared_ptr<const TokenTable> table, int64_t max_rollback = 8)
      : table_(std::move(table)), max_rollback_(max_rollback) {
    states_.reserve(4096);
    states_.push_back(0);
  }

  Verdict FillMask(std::span<uint32_t> mask) override {
    DI_CHECK_EQ(static_cast<int64_t>(mask.size()), (table_->vocab_size + 31) / 32);
    int64_t allowed = 0;
    std::fill(mask.begin(), mask.end(), 0u);
    for (int64_t id = 0; id < table_->vocab_size; ++id) {
      if (table_->At(states_.back(), id) < 0) continue;
      mask[static_cast<size_t>(id / 32)] |= uint32_t{1} << (id % 32);
      ++allowed;
    }
    if (allowed == 0) return Verdict::kDeadEnd;
    return allowed == table_->vocab_size ? Verdict::kFree : Verdict::kMasked;
  }
  Status Accept(int32_t token_id) override {
    const int32_t next = table_->At(states_.back(), token_id);
    if (next < 0) return Fail(Code::kInternal, fmt::format("token {} is not allowed", token_id));
    states_.push_back(next);
    return {};
  }
  void Rollback(int64_t tokens) override {
    DI_CHECK_LE(tokens, max_rollback_);
    DI_CHECK_LE(tokens, num_accepted());
    states_.resize(states_.size() - static_cast<size_t>(tokens));
  }
  int64_t max_rollback() const override {
    return max_rollback_;
  }
  int64_t num_accepted() const override {
    return static_cast<int64_t>(states_.size()) - 1;
  }

 private:
  const std::shared_ptr<const TokenTable> table_;
  const int64_t max_rollback_;
  std::vector<int32_t> states_;  // after each number of tokens
};

// These tokens one after the other, and nothing after the last: a dead end unless it ends the
// output.
inline std::shared_ptr<const TokenTable> FixedTokens(int64_t vocab,
                                                     const std::vector<int32_t>& ids) {
  auto table = std::make_shared<TokenTable>(vocab, std::ssize(ids) + 1);
  for (size_t i = 0; i < ids.size(); ++i)
    table->At(static_cast<int64_t>(i), ids[i]) = static_cast<int32_t>(i) + 1;
  return table;
}

// At least one of `ids`, any number of times, then the end token.
inline std::shared_ptr<const TokenTable> AnyOfThenEnd(int64_t vocab, std::span<const int32_t> ids,
                                                      int32_t end_id) {
  auto table = std::make_shared<TokenTable>(vocab, 3);
  for (const int32_t id : ids) table->At(0, id) = table->At(1, id) = 1;
  table->At(1, end_id) = 2;
  return table;
}

// Some 16 states with a few to all tokens each, chosen by `seed`; the end token leads to a state
// without any.
inline std::shared_ptr<const TokenTable> RandomTable(int64_t vocab, uint64_t seed, int32_t end_id) {
  constexpr int32_t kStates = 16;
  auto table = std::make_shared<TokenTable>(vocab, kStates + 1);
  uint64_t x = seed;
  const auto draw = [&x] {
    x += 0x9E3779B97F4A7C15u;
    uint64_t y = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    y = (y ^ (y >> 27)) * 0x94D049BB133111EBu;
    return y ^ (y >> 31);
  };
  for (int32_t state = 0; state < kStates; ++state) {
    // One in 1, 4, 16 or 64 tokens; at least one.
    const uint64_t rarity = uint64_t{1} << (2 * (draw() % 4));
    for (int64_t id = 0; id < vocab; ++id) {
      if (draw() % rarity == 0) table->At(state, id) = static_cast<int32_t>(draw() % kStates);
    }
    table->At(state, static_cast<int64_t>(draw() % static_cast<uint64_t>(vocab))) =
        static_cast<int32_t>(draw() % kStates);
    table->At(state, end_id) = draw() % 2 == 0 ? kStates : -1;
  }
  return table;
}

}  // namespace deepinfer
