#include "sample/triggered_constraint.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace deepinfer {
namespace {

// For each proper prefix of `ids`, by length: the longest shorter prefix that it ends with.
std::vector<int32_t> PrefixFallbacks(const std::vector<int32_t>& ids) {
  std::vector<int32_t> fallbacks(ids.size(), 0);
  int32_t matched = 0;
  for (size_t i = 1; i < ids.size(); ++i) {
    fallbacks[i] = matched;
    while (matched > 0 && ids[static_cast<size_t>(matched)] != ids[i])
      matched = fallbacks[static_cast<size_t>(matched)];
    if (ids[static_cast<size_t>(matched)] == ids[i]) ++matched;
  }
  return fallbacks;
}

class TriggeredConstraint : public TokenConstraint {
 public:
  TriggeredConstraint(ConstraintTrigger trigger, std::unique_ptr<TokenConstraint> inner,
                      int64_t vocab_size)
      : trigger_(std::move(trigger)),
        fallbacks_(PrefixFallbacks(trigger_.trigger_ids)),
        inner_(std::move(inner)),
        earlier_(static_cast<size_t>(inner_->max_rollback())) {
    for (const int32_t id : trigger_.trigger_ids) DI_CHECK(id >= 0 && id < vocab_size);
  }

  Verdict FillMask(std::span<uint32_t> mask) override {
    if (begun()) return inner_->FillMask(mask);
    if (!now_.forced) return Verdict::kFree;
    std::fill(mask.begin(), mask.end(), 0u);
    const auto id = static_cast<uint32_t>(next_id());
    mask[id / 32] = uint32_t{1} << (id % 32);
    return Verdict::kMasked;
  }

  Status Accept(int32_t token_id) override {
    if (begun()) return inner_->Accept(token_id);
    if (now_.forced && token_id != next_id()) {
      return Fail(Code::kInternal,
                  fmt::format("token {} was drawn where the trigger of the structured output "
                              "requires token {}.",
                              token_id, next_id()),
                  "structured_output");
    }
    if (!earlier_.empty()) earlier_[static_cast<size_t>(num_before_) % earlier_.size()] = now_;
    ++num_before_;
    while (now_.matched > 0 && token_id != next_id())
      now_.matched = fallbacks_[static_cast<size_t>(now_.matched)];
    if (token_id == next_id()) ++now_.matched;
    if (token_id == trigger_.bound_id) now_.forced = true;
    return {};
  }

  void Rollback(int64_t tokens) override {
    DI_CHECK(tokens >= 0 && tokens <= max_rollback() && tokens <= num_accepted());
    const int64_t inside = std::min(tokens, inner_->num_accepted());
    if (inside > 0) inner_->Rollback(inside);
    if (tokens == inside) return;
    num_before_ -= tokens - inside;
    now_ = earlier_[static_cast<size_t>(num_before_) % earlier_.size()];
  }

  int64_t max_rollback() const override {
    return inner_->max_rollback();
  }
  int64_t num_accepted() const override {
    return num_before_ + inner_->num_accepted();
  }

 private:
  struct State {
    int32_t matched = 0;  // trigger ids that the output ends with
    bool forced = false;
  };

  bool begun() const {
    return now_.matched == std::ssize(trigger_.trigger_ids);
  }
  int32_t next_id() const {
    return trigger_.trigger_ids[static_cast<size_t>(now_.matched)];
  }

  const ConstraintTrigger trigger_;
  const std::vector<int32_t> fallbacks_;
  const std::unique_ptr<TokenConstraint> inner_;
  State now_;
  int64_t num_before_ = 0;  // tokens up to the end of the trigger
  // The state before each of the last tokens, by their number modulo the size.
  std::vector<State> earlier_;
};

class ConstraintUntilEnd : public TokenConstraint {
 public:
  ConstraintUntilEnd(std::vector<int32_t> end_ids, std::unique_ptr<TokenConstraint> inner)
      : end_ids_(std::move(end_ids)), inner_(std::move(inner)) {}

  Verdict FillMask(std::span<uint32_t> mask) override {
    return ended_ ? Verdict::kFree : inner_->FillMask(mask);
  }

  Status Accept(int32_t token_id) override {
    if (ended_) {
      ++num_after_;
      return {};
    }
    DI_RETURN_IF_ERROR(inner_->Accept(token_id));
    ended_ = std::find(end_ids_.begin(), end_ids_.end(), token_id) != end_ids_.end();
    return {};
  }

  void Rollback(int64_t tokens) override {
    const int64_t after = std::min(tokens, num_after_);
    num_after_ -= after;
    if (tokens == after) return;
    inner_->Rollback(tokens - after);
    ended_ = false;
  }

  int64_t max_rollback() const override {
    return inner_->max_rollback();
  }
  int64_t num_accepted() const override {
    return inner_->num_accepted() + num_after_;
  }

 private:
  const std::vector<int32_t> end_ids_;
  const std::unique_ptr<TokenConstraint> inner_;
  bool ended_ = false;
  int64_t num_after_ = 0;  // tokens behind the end token
};

}  // namespace

std::unique_ptr<TokenConstraint> MakeTriggeredConstraint(ConstraintTrigger trigger,
                                                         std::unique_ptr<TokenConstraint> inner,
                                                         int64_t vocab_size) {
  DI_CHECK(!trigger.trigger_ids.empty());
  return std::make_unique<TriggeredConstraint>(std::move(trigger), std::move(inner), vocab_size);
}

std::unique_ptr<TokenConstraint> MakeConstraintUntilEnd(std::vector<int32_t> end_ids,
                                                        std::unique_ptr<TokenConstraint> inner) {
  return std::make_unique<ConstraintUntilEnd>(std::move(end_ids), std::move(inner));
}

}  // namespace deepinfer
