#include "runtime/session.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"

namespace deepinfer {
namespace {

tl::unexpected<Error> NoSlot(const StatePools& pools) {
  return Fail(Code::kResourceExhausted,
              fmt::format("All {} sequence slots are in use.", pools.slots.size()));
}

}  // namespace

StatePools MakeStatePools(Executor& executor) {
  const CacheMemory& memory = executor.memory();
  return {memory.num_blocks(), memory.num_window_pages(), memory.num_slots(),
          executor.config().sliding_window, executor.options().rollback_tokens};
}

Result<Session> Session::Create(Executor& executor, StatePools& pools) {
  std::optional<SequenceState> state = SequenceState::Create(pools);
  if (!state.has_value()) return NoSlot(pools);
  return Session(executor, std::move(*state), {});
}

Result<Session> Session::Continue(Executor& executor, StatePools& pools, const SharedPrefix& prefix,
                                  std::span<const int32_t> tokens) {
  DI_CHECK_EQ(std::ssize(tokens), prefix.num_tokens);
  std::optional<SequenceState> state = SequenceState::Restore(pools, prefix);
  if (!state.has_value()) return NoSlot(pools);
  return Session(executor, std::move(*state), tokens);
}

Result<Session> Session::Restore(Executor& executor, StatePools& pools,
                                 std::shared_ptr<StateImage> image,
                                 std::span<const int32_t> tokens) {
  DI_CHECK_EQ(std::ssize(tokens), image->num_tokens);
  StepPlan plan;
  std::optional<SequenceState> state =
      SequenceState::Restore(pools, std::move(image), &plan.commands);
  if (!state.has_value()) {
    return Fail(
        Code::kResourceExhausted,
        fmt::format("A saved state of {} tokens does not fit into the caches now.", tokens.size()));
  }
  DI_RETURN_IF_ERROR(executor.Step(plan));
  return Session(executor, std::move(*state), tokens);
}

Status Session::Plan(const Part& part, StepPlan* plan) {
  const int64_t rows = std::ssize(part.ids);
  const SequenceState::Need need = state_.NeedFor(rows);
  if (!state_.Extend(rows, &plan->commands)) {
    return Fail(
        Code::kResourceExhausted,
        fmt::format("{} more tokens need {} more cache blocks and {} more window pages of {} "
                    "tokens, which are not free.",
                    rows, need.blocks, need.window_pages, kBlockTokens));
  }
  StepChunk chunk{.slot = state_.slot(),
                  .begin = state_.num_tokens(),
                  .num_rows = rows,
                  .tokens = part.ids,
                  .blocks = state_.blocks(),
                  .window_pages = state_.window_pages(),
                  .first_window_page = state_.first_window_page(),
                  .decoder_begin = decoder_begin_,
                  .num_logit_rows = part.num_logit_rows};
  for (int64_t i = 0; i < kMaxLookback && i < chunk.begin; ++i)
    chunk.lookback[static_cast<size_t>(i)] = tokens_[static_cast<size_t>(chunk.begin - 1 - i)];
  plan->chunks.push_back(chunk);
  return {};
}

Result<TensorView> Session::Step(std::span<const Part> parts, LayerTrace* trace) {
  DI_CHECK(!parts.empty());
  Executor& executor = *parts[0].session->executor_;
  StepPlan plan;
  Status planned;
  for (const Part& part : parts) {
    planned = part.session->Plan(part, &plan);
    if (!planned.has_value()) break;
  }
  Result<TensorView> logits = planned.has_value()
                                  ? executor.Step(plan, trace)
                                  : Result<TensorView>(tl::unexpected<Error>(planned.error()));
  if (!logits.has_value()) {
    // Units have changed hands all the same, so their bytes must follow.
    plan.chunks.clear();
    if (!plan.commands.empty()) DI_RETURN_IF_ERROR(executor.Step(plan));
    return logits;
  }
  for (const Part& part : parts) {
    Session& session = *part.session;
    session.state_.Advance(std::ssize(part.ids));
    session.tokens_.insert(session.tokens_.end(), part.ids.begin(), part.ids.end());
  }
  return logits;
}

Result<TensorView> Session::Append(std::span<const int32_t> ids, int64_t num_logit_rows,
                                   LayerTrace* trace) {
  const Part part{this, ids, num_logit_rows};
  return Step({&part, 1}, trace);
}

DraftChunk Session::ChunkForDraft(int32_t anchor) const {
  return {.anchor = anchor,
          .length = state_.num_tokens(),
          .window_pages = state_.window_pages(),
          .first_window_page = state_.first_window_page(),
          .window_begin = std::max(decoder_begin_, state_.window_begin())};
}

Result<Drafts> Session::Draft(int32_t anchor, bool want_logits) const {
  const DraftChunk chunk = ChunkForDraft(anchor);
  return executor_->Draft({&chunk, 1}, want_logits);
}

bool Session::Truncate(int64_t tokens) {
  if (!state_.Truncate(tokens)) return false;
  tokens_.resize(static_cast<size_t>(tokens));
  return true;
}

Result<std::shared_ptr<StateImage>> Session::Save() {
  StepPlan plan;
  std::shared_ptr<StateImage> image = state_.Save(&plan.commands);
  DI_RETURN_IF_ERROR(executor_->Step(plan));
  return image;
}

}  // namespace deepinfer
