// A stand-in for the model in tests: each row's logits are a pure function of the tokens up to it,
// which it reads back through the blocks and pages of the plan, so that a wrong, stale or shared
// unit changes the output. Every rule of the contract is checked. It can also be a device that
// draws tokens itself, and does everything as late as it may: rows run when somebody waits for
// them.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/model_backend.h"
#include "state/sequence_state.h"
#include "tensor/device_lost.h"

namespace deepinfer {

class FakeBackend : public ModelBackend {
 public:
  // Logits of the row of the last of `tokens`; `row` is filled with pseudo-random values
  // beforehand.
  using Shape = std::function<void(std::span<const int32_t> tokens, std::span<float> row)>;

  // A window of 20 tokens, 6 of rollback.
  FakeBackend(int64_t vocab, int64_t num_blocks, int64_t num_window_pages, int64_t num_slots)
      : vocab_(vocab),
        blocks_(static_cast<size_t>(num_blocks), std::vector<int32_t>(kBlockTokens, -7)),
        window_pages_(static_cast<size_t>(num_window_pages),
                      std::vector<int32_t>(kBlockTokens, -7)),
        sampled_(static_cast<size_t>(num_slots), -7),
        sampled_on_device_(static_cast<size_t>(num_slots), -7) {}

  void set_draws_tokens(bool value) {
    draws_tokens_ = value;
  }

  void set_shape(Shape shape) {
    shape_ = std::move(shape);
  }
  // The step with this number, counted from 0, fails; where the device draws, an even one when it
  // is begun and an odd one when it is waited for.
  void set_failing_step(int64_t step) {
    failing_step_ = step;
  }
  // From the failing step on all steps fail, as on a device that is lost.
  void set_loses_device() {
    loses_device_ = true;
  }
  // What a step waits for before it runs, on the thread that runs it.
  void set_before_step(std::function<void(int64_t step)> hook) {
    before_step_ = std::move(hook);
  }
  int64_t steps() const {
    return step_;
  }
  int64_t rows() const {
    return rows_;
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
  StateCapacity capacity() const override {
    return {.num_blocks = static_cast<int64_t>(blocks_.size()),
            .num_window_pages = static_cast<int64_t>(window_pages_.size()),
            .num_slots = static_cast<int64_t>(sampled_.size()),
            .window_tokens = kWindow,
            .rollback_tokens = 6};
  }
  void SetSampledToken(int32_t slot, int32_t token) override {
    sampled_.at(static_cast<size_t>(slot)) = token;
  }

  Result<std::span<const float>> Step(const StepPlan& plan) override {
    EXPECT_FALSE(draws_tokens_);
    const int64_t step = step_++;
    if (before_step_) before_step_(step);
    const bool fails = Fails(step);
    ExecuteAll(plan.commands, fails);
    RunRows(plan.chunks, fails);
    if (fails) return Failure();
    return std::span<const float>(logits_);
  }

  bool draws_tokens() const override {
    return draws_tokens_;
  }

  Status BeginStep(const StepPlan& plan) override {
    EXPECT_TRUE(draws_tokens_);
    EXPECT_TRUE(queue_.empty() || queue_.back().drawn);
    EXPECT_LE(queue_.size(), size_t{1});
    const int64_t step = step_++;
    if (before_step_) before_step_(step);
    const bool fails = Fails(step);
    // Images leave and enter at once, in order behind what is queued.
    for (const StateCommand& command : plan.commands) {
      if (command.kind == StateCommand::Kind::kExport ||
          command.kind == StateCommand::Kind::kImport)
        Drain();
    }
    Queued queued;
    queued.fails = fails;
    for (const StateCommand& command : plan.commands) {
      if (queue_.empty() || queue_.back().done) {
        ExecuteAll({command}, fails);
      } else {
        queued.commands.push_back(command);
      }
    }
    for (const StepChunk& chunk : plan.chunks) queued.chunks.emplace_back(chunk, sampled_);
    if (fails && step % 2 == 0) {
      // It has run before it failed.
      Drain();
      Run(queued);
      return Failure();
    }
    queue_.push_back(std::move(queued));
    return {};
  }

  void DrawStep(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows) override {
    ASSERT_FALSE(queue_.empty());
    Queued& step = queue_.back();
    EXPECT_FALSE(step.drawn);
    step.drawn = true;
    step.host_rows.assign(host_rows.begin(), host_rows.end());
    for (const ListedDraw& draw : draws) {
      step.draws.emplace_back(draw);
      if (draw.draw.slot >= 0) sampled_.at(static_cast<size_t>(draw.draw.slot)) = kOnDevice;
    }
  }

  Result<DrawnRows> FinishStep() override {
    EXPECT_FALSE(queue_.empty());
    EXPECT_TRUE(queue_.front().drawn);
    Run(queue_.front());
    finished_ = std::move(queue_.front());
    queue_.pop_front();
    if (finished_.fails) return Failure();
    return DrawnRows{.rows = finished_.rows, .logits = finished_.host_logits};
  }

 private:
  static constexpr int64_t kWindow = 20;
  static constexpr int32_t kOnDevice = -2;

  // What a device copies when a step is put into its queue.
  struct QueuedChunk {
    QueuedChunk(const StepChunk& from, const std::vector<int32_t>& sampled)
        : chunk(from),
          tokens(from.tokens.begin(), from.tokens.end()),
          blocks(from.blocks.begin(), from.blocks.end()),
          pages(from.window_pages.begin(), from.window_pages.end()) {
      const int32_t known = sampled.at(static_cast<size_t>(from.slot));
      if (tokens.empty() && known != kOnDevice) tokens.push_back(known);
    }
    StepChunk View() const {
      StepChunk view = chunk;
      view.tokens = tokens;
      view.blocks = blocks;
      view.window_pages = pages;
      return view;
    }
    StepChunk chunk;
    std::vector<int32_t> tokens, blocks, pages;
  };
  struct QueuedDraw {
    explicit QueuedDraw(const ListedDraw& from)
        : draw(from.draw),
          mask(from.lists.mask.begin(), from.lists.mask.end()),
          edits(from.lists.edits.begin(), from.lists.edits.end()),
          excluded(from.lists.excluded.begin(), from.lists.excluded.end()),
          ends(from.lists.ends.begin(), from.lists.ends.end()) {}
    RowDraw draw;
    std::vector<uint32_t> mask;
    std::vector<RowEdit> edits;
    std::vector<int32_t> excluded, ends;
  };
  struct Queued {
    std::vector<StateCommand> commands;
    std::vector<QueuedChunk> chunks;
    std::vector<QueuedDraw> draws;
    std::vector<int32_t> host_rows;
    bool fails = false;
    bool drawn = false;
    bool done = false;
    std::vector<SampledRow> rows;
    std::vector<float> host_logits;
  };

  bool Fails(int64_t step) const {
    return step == failing_step_ || (loses_device_ && failing_step_ >= 0 && step > failing_step_);
  }
  tl::unexpected<Error> Failure() const {
    return Fail(Code::kInternal, "the fake model failed as told",
                loses_device_ ? kLostDeviceField : "");
  }

  void ExecuteAll(const std::vector<StateCommand>& commands, bool fails) {
    for (const StateCommand& command : commands) {
      // A step that fails moves nothing out.
      if (!fails || command.kind != StateCommand::Kind::kExport) Execute(command);
    }
  }

  void RunRows(std::span<const StepChunk> chunks, bool fails) {
    EXPECT_FALSE(chunks.empty());
    std::set<int32_t> seen;
    int64_t rows = 0;
    logits_.clear();
    for (const StepChunk& chunk : chunks) {
      EXPECT_TRUE(seen.insert(chunk.slot).second);
      EXPECT_GE(chunk.num_rows, 1);
      EXPECT_LE(chunk.num_logit_rows, chunk.num_rows);
      Run(chunk);
      rows += chunk.num_rows;
    }
    if (fails) return;
    rows_ += rows;
    max_rows_seen_ = std::max(max_rows_seen_, rows);
    max_sequences_seen_ = std::max(max_sequences_seen_, static_cast<int64_t>(chunks.size()));
    max_logit_rows_seen_ =
        std::max(max_logit_rows_seen_, static_cast<int64_t>(logits_.size()) / vocab_);
  }

  void Drain() {
    for (Queued& step : queue_) Run(step);
  }

  void Run(Queued& step) {
    if (std::exchange(step.done, true)) return;
    ExecuteAll(step.commands, step.fails);
    std::vector<StepChunk> chunks;
    for (const QueuedChunk& chunk : step.chunks) chunks.push_back(chunk.View());
    RunRows(chunks, step.fails);
    const auto row_of = [&](int32_t row) {
      return std::span<const float>(logits_).subspan(
          static_cast<size_t>(row) * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
    };
    RowScratch scratch;
    for (const QueuedDraw& draw : step.draws) {
      const SampledRow& row = step.rows.emplace_back(SampleRow(
          row_of(draw.draw.logit_row), draw.draw,
          {.mask = draw.mask, .edits = draw.edits, .excluded = draw.excluded, .ends = draw.ends},
          scratch));
      if (draw.draw.slot >= 0) {
        sampled_on_device_.at(static_cast<size_t>(draw.draw.slot)) =
            row.status == RowStatus::kDrawn ? row.token : 0;
      }
    }
    for (const int32_t row : step.host_rows) {
      const std::span<const float> logits = row_of(row);
      step.host_logits.insert(step.host_logits.end(), logits.begin(), logits.end());
    }
  }

  int32_t& At(std::vector<std::vector<int32_t>>& units, std::span<const int32_t> ids, int64_t first,
              int64_t position) {
    const int64_t unit = position / kBlockTokens - first;
    EXPECT_GE(unit, 0) << "position " << position << " has left the window";
    EXPECT_LT(unit, std::ssize(ids)) << "no room for position " << position;
    return units.at(static_cast<size_t>(ids[static_cast<size_t>(unit)]))
        .at(static_cast<size_t>(position % kBlockTokens));
  }

  int32_t LatestToken(int32_t slot) const {
    return draws_tokens_ ? sampled_on_device_.at(static_cast<size_t>(slot))
                         : sampled_.at(static_cast<size_t>(slot));
  }

  void Run(const StepChunk& chunk) {
    std::vector<int32_t> tokens;
    for (int64_t p = 0; p < chunk.begin; ++p) tokens.push_back(At(blocks_, chunk.blocks, 0, p));
    // What the window keeps is what the blocks say.
    for (int64_t p = std::max<int64_t>(chunk.window_begin, chunk.begin - kWindow + 1);
         p < chunk.begin; ++p) {
      EXPECT_EQ(At(window_pages_, chunk.window_pages, chunk.first_window_page, p),
                tokens[static_cast<size_t>(p)])
          << "window key of position " << p;
    }
    for (size_t i = 0; i < chunk.lookback.size(); ++i) {
      const int64_t p = chunk.begin - 1 - static_cast<int64_t>(i);
      EXPECT_EQ(chunk.lookback[i], p < 0 ? -1 : tokens[static_cast<size_t>(p)]);
    }
    for (int64_t i = 0; i < chunk.num_rows; ++i) {
      const int32_t token =
          chunk.tokens.empty() ? LatestToken(chunk.slot) : chunk.tokens[static_cast<size_t>(i)];
      EXPECT_GE(token, 0);
      EXPECT_LT(token, vocab_);
      tokens.push_back(token);
      At(blocks_, chunk.blocks, 0, chunk.begin + i) = token;
      At(window_pages_, chunk.window_pages, chunk.first_window_page, chunk.begin + i) = token;
      if (i >= chunk.num_rows - chunk.num_logit_rows) AppendRow(tokens);
    }
  }

  void Execute(const StateCommand& command) {
    switch (command.kind) {
      case StateCommand::Kind::kCopyBlock:
        blocks_.at(static_cast<size_t>(command.target)) =
            blocks_.at(static_cast<size_t>(command.source));
        return;
      case StateCommand::Kind::kCopyWindowPage:
        window_pages_.at(static_cast<size_t>(command.target)) =
            window_pages_.at(static_cast<size_t>(command.source));
        return;
      case StateCommand::Kind::kExport:
      case StateCommand::Kind::kImport: {
        const bool out = command.kind == StateCommand::Kind::kExport;
        std::vector<std::byte>& bytes = command.image->bytes;
        const size_t unit = kBlockTokens * sizeof(int32_t);
        int64_t first_page = command.first_window_page;
        if (out) {
          bytes.resize(sizeof(first_page) +
                       (command.blocks.size() + command.window_pages.size()) * unit);
          std::memcpy(bytes.data(), &first_page, sizeof(first_page));
        } else {
          std::memcpy(&first_page, bytes.data(), sizeof(first_page));
        }
        std::byte* at = bytes.data() + sizeof(first_page);
        const auto move = [&](std::vector<std::vector<int32_t>>& units, int32_t id) {
          int32_t* values = units.at(static_cast<size_t>(id)).data();
          if (out) {
            std::memcpy(at, values, unit);
          } else {
            std::memcpy(values, at, unit);
          }
          at += unit;
        };
        for (const int32_t id : command.blocks) move(blocks_, id);
        // The image may cover fewer pages than the importing side makes room for.
        const int64_t skip = std::max<int64_t>(0, first_page - command.first_window_page);
        for (int64_t i = skip; i < std::ssize(command.window_pages); ++i)
          move(window_pages_, command.window_pages[static_cast<size_t>(i)]);
        EXPECT_EQ(at, bytes.data() + bytes.size());
        return;
      }
    }
  }

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
  std::vector<std::vector<int32_t>> blocks_;
  std::vector<std::vector<int32_t>> window_pages_;
  bool draws_tokens_ = false;
  // By slot: the latest token that the host has named, or kOnDevice, and the one drawn here.
  std::vector<int32_t> sampled_;
  std::vector<int32_t> sampled_on_device_;
  std::deque<Queued> queue_;
  Queued finished_;
  Shape shape_;
  std::function<void(int64_t)> before_step_;
  std::vector<float> logits_;
  int64_t step_ = 0;
  int64_t rows_ = 0;
  int64_t failing_step_ = -1;
  bool loses_device_ = false;
  int64_t max_rows_seen_ = 0;
  int64_t max_sequences_seen_ = 0;
  int64_t max_logit_rows_seen_ = 0;
};

}  // namespace deepinfer
