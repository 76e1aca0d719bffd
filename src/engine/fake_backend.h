// A stand-in for the model in tests: each row's logits are a pure function of the tokens up to it,
// and every rule of the contract is checked.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "engine/model_backend.h"

namespace deepinfer {

class FakeBackend : public ModelBackend {
 public:
  // Logits of the row of the last of `tokens`; `row` is filled with pseudo-random values
  // beforehand.
  using Shape = std::function<void(std::span<const int32_t> tokens, std::span<float> row)>;

  FakeBackend(int64_t vocab, int64_t block_tokens, int64_t num_blocks, int64_t num_slots)
      : vocab_(vocab),
        block_tokens_(block_tokens),
        num_blocks_(num_blocks),
        num_slots_(num_slots) {}
  ~FakeBackend() override {
    EXPECT_EQ(sequences_.size(), 0u) << "sequences were left open";
  }

  void set_shape(Shape shape) {
    shape_ = std::move(shape);
  }
  // The step with this number, counted from 0, fails.
  void set_failing_step(int64_t step) {
    failing_step_ = step;
  }
  int64_t max_rows_seen() const {
    return max_rows_seen_;
  }
  int64_t max_sequences_seen() const {
    return max_sequences_seen_;
  }
  int64_t max_logit_rows_seen() const {
    return max_logit_rows_seen_;
  }

  int64_t vocab_size() const override {
    return vocab_;
  }
  int64_t block_tokens() const override {
    return block_tokens_;
  }
  int64_t num_blocks() const override {
    return num_blocks_;
  }
  int64_t num_free_blocks() const override {
    int64_t used = 0;
    for (const auto& [id, sequence] : sequences_) used += sequence.blocks;
    return num_blocks_ - used;
  }
  int64_t num_slots() const override {
    return num_slots_;
  }
  int64_t num_free_slots() const override {
    return num_slots_ - static_cast<int64_t>(sequences_.size());
  }

  Result<SequenceId> Open() override {
    if (num_free_slots() == 0) return Fail(Code::kResourceExhausted, "no slot");
    sequences_[next_id_] = {};
    return next_id_++;
  }
  void Close(SequenceId id) override {
    EXPECT_EQ(sequences_.erase(id), 1u);
  }
  Status Reserve(SequenceId id, int64_t tokens) override {
    State& sequence = sequences_.at(id);
    const int64_t total = static_cast<int64_t>(sequence.tokens.size()) + tokens;
    const int64_t blocks = (total + block_tokens_ - 1) / block_tokens_;
    if (blocks - sequence.blocks > num_free_blocks())
      return Fail(Code::kResourceExhausted, "no block");
    sequence.blocks = std::max(sequence.blocks, blocks);
    return {};
  }

  Result<std::span<const float>> Step(std::span<const Chunk> chunks) override {
    EXPECT_FALSE(chunks.empty());
    if (step_++ == failing_step_) return Fail(Code::kInternal, "the fake model failed as told");
    std::set<SequenceId> seen;
    int64_t rows = 0;
    logits_.clear();
    for (const Chunk& chunk : chunks) {
      EXPECT_TRUE(seen.insert(chunk.sequence).second);
      State& sequence = sequences_.at(chunk.sequence);
      const int64_t count = static_cast<int64_t>(chunk.token_ids.size());
      EXPECT_GE(count, 1);
      EXPECT_LE(chunk.num_logit_rows, count);
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_GE(chunk.token_ids[static_cast<size_t>(i)], 0);
        EXPECT_LT(chunk.token_ids[static_cast<size_t>(i)], vocab_);
        sequence.tokens.push_back(chunk.token_ids[static_cast<size_t>(i)]);
        if (i >= count - chunk.num_logit_rows) AppendRow(sequence.tokens);
      }
      EXPECT_LE(static_cast<int64_t>(sequence.tokens.size()), sequence.blocks * block_tokens_)
          << "blocks were not reserved";
      rows += count;
    }
    max_rows_seen_ = std::max(max_rows_seen_, rows);
    max_sequences_seen_ = std::max(max_sequences_seen_, static_cast<int64_t>(chunks.size()));
    max_logit_rows_seen_ =
        std::max(max_logit_rows_seen_, static_cast<int64_t>(logits_.size()) / vocab_);
    return std::span<const float>(logits_);
  }

 private:
  struct State {
    std::vector<int32_t> tokens;
    int64_t blocks = 0;
  };

  void AppendRow(std::span<const int32_t> tokens) {
    uint64_t hash = 1469598103934665603u;
    for (const int32_t token : tokens)
      hash = (hash ^ static_cast<uint64_t>(token)) * 1099511628211u;
    const size_t begin = logits_.size();
    for (int64_t id = 0; id < vocab_; ++id) {
      uint64_t x = hash + static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u;
      x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
      logits_.push_back(static_cast<float>(x >> 40) * 0x1p-22f);  // 0 ... 4
    }
    if (shape_) shape_(tokens, std::span<float>(logits_).subspan(begin));
  }

  int64_t vocab_;
  int64_t block_tokens_;
  int64_t num_blocks_;
  int64_t num_slots_;
  Shape shape_;
  std::map<SequenceId, State> sequences_;
  SequenceId next_id_ = 0;
  std::vector<float> logits_;
  int64_t step_ = 0;
  int64_t failing_step_ = -1;
  int64_t max_rows_seen_ = 0;
  int64_t max_sequences_seen_ = 0;
  int64_t max_logit_rows_seen_ = 0;
};

}  // namespace deepinfer
