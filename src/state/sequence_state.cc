#include "state/sequence_state.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace deepinfer {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int32_t StatePools::TakeBlock() {
  if (blocks.num_free() == 0) reclaim_block();
  return blocks.Take();
}

int32_t StatePools::TakeWindowPage() {
  if (window_pages.num_free() == 0) reclaim_window_page();
  return window_pages.Take();
}

std::optional<SequenceState> SequenceState::Create(StatePools& pools) {
  if (pools.slots.num_free() == 0) return std::nullopt;
  SequenceState state(pools);
  state.slot_ = pools.slots.Take();
  return state;
}

std::optional<SequenceState> SequenceState::Restore(StatePools& pools, const SharedPrefix& prefix) {
  DI_CHECK_EQ(prefix.num_tokens % 2, 0);
  DI_CHECK_EQ(static_cast<int64_t>(prefix.blocks.size()), CeilDiv(prefix.num_tokens, kBlockTokens));
  std::optional<SequenceState> state = Create(pools);
  if (!state.has_value()) return state;
  state->num_tokens_ = state->most_tokens_ = prefix.num_tokens;
  state->blocks_ = prefix.blocks;
  state->window_pages_ = prefix.window_pages;
  state->first_window_page_ = prefix.first_window_page;
  for (const int32_t id : state->blocks_) pools.blocks.Retain(id);
  for (const int32_t id : state->window_pages_) pools.window_pages.Retain(id);
  return state;
}

std::optional<SequenceState> SequenceState::Restore(StatePools& pools,
                                                    std::shared_ptr<StateImage> image,
                                                    std::vector<StateCommand>* commands) {
  const int64_t tokens = image->num_tokens;
  const int64_t num_blocks = CeilDiv(tokens, kBlockTokens);
  const int64_t history = pools.window - 1 + pools.rollback;
  const int64_t first_page = std::max<int64_t>(0, tokens - history) / kBlockTokens;
  const int64_t num_pages = num_blocks - std::min(num_blocks, first_page);
  if (pools.slots.num_free() == 0 || num_blocks > pools.available_blocks() ||
      num_pages > pools.available_window_pages())
    return std::nullopt;
  std::optional<SequenceState> state = Create(pools);
  state->num_tokens_ = state->most_tokens_ = tokens;
  state->first_window_page_ = first_page;
  for (int64_t i = 0; i < num_blocks; ++i) state->blocks_.push_back(pools.TakeBlock());
  for (int64_t i = 0; i < num_pages; ++i) state->window_pages_.push_back(pools.TakeWindowPage());
  commands->push_back({.kind = StateCommand::Kind::kImport,
                       .image = std::move(image),
                       .num_tokens = tokens,
                       .slot = state->slot_,
                       .blocks = state->blocks_,
                       .window_pages = state->window_pages_,
                       .first_window_page = first_page});
  return state;
}

SequenceState::SequenceState(SequenceState&& other) noexcept {
  *this = std::move(other);
}

SequenceState& SequenceState::operator=(SequenceState&& other) noexcept {
  if (this == &other) return *this;
  ReleaseAll();
  pools_ = std::exchange(other.pools_, nullptr);
  slot_ = std::exchange(other.slot_, -1);
  num_tokens_ = std::exchange(other.num_tokens_, 0);
  most_tokens_ = std::exchange(other.most_tokens_, 0);
  blocks_ = std::exchange(other.blocks_, {});
  window_pages_ = std::exchange(other.window_pages_, {});
  first_window_page_ = std::exchange(other.first_window_page_, 0);
  return *this;
}

SequenceState::~SequenceState() {
  ReleaseAll();
}

void SequenceState::ReleaseAll() {
  if (pools_ == nullptr) return;
  // Last block first, so that low ids are handed out again first.
  for (auto id = blocks_.rbegin(); id != blocks_.rend(); ++id) pools_->blocks.Release(*id);
  for (auto id = window_pages_.rbegin(); id != window_pages_.rend(); ++id)
    pools_->window_pages.Release(*id);
  if (slot_ >= 0) pools_->slots.Release(slot_);
  blocks_.clear();
  window_pages_.clear();
  slot_ = -1;
  pools_ = nullptr;
}

int64_t SequenceState::OldestHistoryPage() const {
  const int64_t history = pools_->window - 1 + pools_->rollback;
  return std::max<int64_t>(0, num_tokens_ - history) / kBlockTokens;
}

SequenceState::Need SequenceState::NeedFor(int64_t rows) const {
  const int64_t total = CeilDiv(num_tokens_ + rows, kBlockTokens);
  const auto have = static_cast<int64_t>(blocks_.size());
  const int64_t pages_end = first_window_page_ + static_cast<int64_t>(window_pages_.size());
  Need need{std::max<int64_t>(0, total - have), std::max<int64_t>(0, total - pages_end)};
  if (rows > 0) {
    const int64_t first_written = num_tokens_ / kBlockTokens;
    for (int64_t i = first_written; i < std::min(have, total); ++i)
      if (pools_->blocks.references(blocks_[static_cast<size_t>(i)]) > 1) ++need.blocks;
    for (int64_t i = std::max(first_written, first_window_page_); i < std::min(pages_end, total);
         ++i) {
      const int32_t page = window_pages_[static_cast<size_t>(i - first_window_page_)];
      if (pools_->window_pages.references(page) > 1) ++need.window_pages;
    }
  }
  return need;
}

bool SequenceState::Extend(int64_t rows, std::vector<StateCommand>* commands) {
  if (rows == 0) return true;
  const Need need = NeedFor(rows);
  if (need.blocks > pools_->available_blocks() ||
      need.window_pages > pools_->available_window_pages())
    return false;
  const int64_t total = CeilDiv(num_tokens_ + rows, kBlockTokens);
  const int64_t first_written = num_tokens_ / kBlockTokens;
  const bool partly_filled = num_tokens_ % kBlockTokens != 0;
  // A shared unit that rows will be written to is replaced; what it holds already, only the first
  // can, is copied.
  for (int64_t i = first_written; i < std::min<int64_t>(std::ssize(blocks_), total); ++i) {
    int32_t& id = blocks_[static_cast<size_t>(i)];
    if (pools_->blocks.references(id) == 1) continue;
    const int32_t own = pools_->TakeBlock();
    if (i == first_written && partly_filled) {
      commands->push_back({.kind = StateCommand::Kind::kCopyBlock, .source = id, .target = own});
    }
    pools_->blocks.Release(std::exchange(id, own));
  }
  while (std::ssize(blocks_) < total) blocks_.push_back(pools_->TakeBlock());
  const int64_t pages_end = first_window_page_ + std::ssize(window_pages_);
  for (int64_t i = std::max(first_written, first_window_page_); i < std::min(pages_end, total);
       ++i) {
    int32_t& id = window_pages_[static_cast<size_t>(i - first_window_page_)];
    if (pools_->window_pages.references(id) == 1) continue;
    const int32_t own = pools_->TakeWindowPage();
    if (i == first_written && partly_filled) {
      commands->push_back(
          {.kind = StateCommand::Kind::kCopyWindowPage, .source = id, .target = own});
    }
    pools_->window_pages.Release(std::exchange(id, own));
  }
  while (first_window_page_ + std::ssize(window_pages_) < total)
    window_pages_.push_back(pools_->TakeWindowPage());
  return true;
}

void SequenceState::Advance(int64_t rows) {
  num_tokens_ += rows;
  most_tokens_ = std::max(most_tokens_, num_tokens_);
  DI_CHECK_LE(num_tokens_, std::ssize(blocks_) * kBlockTokens);
  const int64_t gone =
      std::min<int64_t>(OldestHistoryPage() - first_window_page_, std::ssize(window_pages_));
  if (gone <= 0) return;
  for (int64_t i = 0; i < gone; ++i)
    pools_->window_pages.Release(window_pages_[static_cast<size_t>(i)]);
  window_pages_.erase(window_pages_.begin(), window_pages_.begin() + gone);
  first_window_page_ += gone;
}

bool SequenceState::Truncate(int64_t tokens) {
  DI_CHECK(tokens >= 0 && tokens <= num_tokens_);
  if (tokens > 0 && most_tokens_ - tokens > pools_->rollback) {
    const int64_t oldest = std::max<int64_t>(0, tokens - (pools_->window - 1)) / kBlockTokens;
    if (tokens % 2 != 0 || oldest < first_window_page_) return false;
    most_tokens_ = tokens;
  }
  if (tokens == 0) most_tokens_ = 0;
  num_tokens_ = tokens;
  const int64_t kept = CeilDiv(tokens, kBlockTokens);
  while (std::ssize(blocks_) > kept) {
    pools_->blocks.Release(blocks_.back());
    blocks_.pop_back();
  }
  while (!window_pages_.empty() && first_window_page_ + std::ssize(window_pages_) > kept) {
    pools_->window_pages.Release(window_pages_.back());
    window_pages_.pop_back();
  }
  if (tokens == 0) first_window_page_ = 0;
  return true;
}

std::shared_ptr<StateImage> SequenceState::Save(std::vector<StateCommand>* commands) const {
  auto image = std::make_shared<StateImage>();
  image->num_tokens = num_tokens_;
  const int64_t kept = CeilDiv(num_tokens_, kBlockTokens);
  const int64_t first_page = std::max(OldestHistoryPage(), first_window_page_);
  const auto skip = static_cast<size_t>(first_page - first_window_page_);
  const auto pages = static_cast<size_t>(std::max<int64_t>(0, kept - first_page));
  commands->push_back({.kind = StateCommand::Kind::kExport,
                       .image = image,
                       .num_tokens = num_tokens_,
                       .slot = slot_,
                       .blocks = {blocks_.begin(), blocks_.begin() + kept},
                       .window_pages = {window_pages_.begin() + static_cast<int64_t>(skip),
                                        window_pages_.begin() + static_cast<int64_t>(skip + pages)},
                       .first_window_page = first_page});
  return image;
}

}  // namespace deepinfer
