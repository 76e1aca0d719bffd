#include "state/sequence_state.h"

#include <algorithm>
#include <utility>

#include "base/ceil_div.h"
#include "base/check.h"

namespace deepinfer {
namespace {

// The first position of the window history of a state of `tokens` tokens.
int64_t HistoryBegin(const StatePools& pools, int64_t tokens) {
  return std::max<int64_t>(0, tokens - (pools.window - 1 + pools.rollback));
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
  const int64_t num_blocks = CeilDiv(prefix.num_tokens, kBlockTokens);
  DI_CHECK_EQ(std::ssize(prefix.blocks), num_blocks);
  DI_CHECK(prefix.window_pages.empty() ||
           prefix.first_window_page + std::ssize(prefix.window_pages) == num_blocks);
  DI_CHECK_LE(prefix.first_window_page * kBlockTokens, prefix.num_tokens);
  std::optional<SequenceState> state = Create(pools);
  if (!state.has_value()) return state;
  state->num_tokens_ = state->most_tokens_ = state->remainder_begin_ = prefix.num_tokens;
  state->blocks_ = prefix.blocks;
  state->window_pages_ = prefix.window_pages;
  state->first_window_page_ = prefix.first_window_page;
  // Cached pages are complete from their first row on. Without pages the rows from there on will
  // run again, but for a window of one token, which needs no history.
  state->window_begin_ =
      pools.window == 1 ? prefix.num_tokens : prefix.first_window_page * kBlockTokens;
  for (const int32_t id : state->blocks_) pools.blocks.Retain(id);
  for (const int32_t id : state->window_pages_) pools.window_pages.Retain(id);
  return state;
}

std::optional<SequenceState> SequenceState::Restore(StatePools& pools,
                                                    std::shared_ptr<StateImage> image,
                                                    std::vector<StateCommand>* commands) {
  const int64_t tokens = image->num_tokens;
  const int64_t window_begin = image->window_begin;
  DI_CHECK(window_begin >= 0 && window_begin <= tokens);
  DI_CHECK(image->remainder_begin >= 0 && image->remainder_begin <= tokens);
  const int64_t num_blocks = CeilDiv(tokens, kBlockTokens);
  const int64_t first_page = window_begin / kBlockTokens;
  const int64_t num_pages = window_begin < tokens ? num_blocks - first_page : 0;
  if (pools.slots.num_free() == 0 || num_blocks > pools.available_blocks() ||
      num_pages > pools.available_window_pages())
    return std::nullopt;
  std::optional<SequenceState> state = Create(pools);
  state->num_tokens_ = state->most_tokens_ = tokens;
  state->remainder_begin_ = image->remainder_begin;
  state->first_window_page_ = first_page;
  state->window_begin_ = window_begin;
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
  remainder_begin_ = std::exchange(other.remainder_begin_, 0);
  blocks_ = std::exchange(other.blocks_, {});
  window_pages_ = std::exchange(other.window_pages_, {});
  first_window_page_ = std::exchange(other.first_window_page_, 0);
  window_begin_ = std::exchange(other.window_begin_, 0);
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

void SequenceState::DropOldPages() {
  const int64_t oldest = HistoryBegin(*pools_, num_tokens_) / kBlockTokens;
  const int64_t gone = std::min<int64_t>(oldest - first_window_page_, std::ssize(window_pages_));
  if (gone <= 0) return;
  for (int64_t i = gone - 1; i >= 0; --i)
    pools_->window_pages.Release(window_pages_[static_cast<size_t>(i)]);
  window_pages_.erase(window_pages_.begin(), window_pages_.begin() + gone);
  first_window_page_ += gone;
  window_begin_ = std::max(window_begin_, first_window_page_ * kBlockTokens);
}

SequenceState::Need SequenceState::NeedFor(int64_t rows) const {
  const int64_t total = CeilDiv(num_tokens_ + rows, kBlockTokens);
  const auto have = static_cast<int64_t>(blocks_.size());
  Need need{std::max<int64_t>(0, total - have), std::max<int64_t>(0, total - pages_end())};
  if (rows > 0) {
    const int64_t first_written = num_tokens_ / kBlockTokens;
    for (int64_t i = first_written; i < std::min(have, total); ++i)
      if (pools_->blocks.references(blocks_[static_cast<size_t>(i)]) > 1) ++need.blocks;
    for (int64_t i = std::max(first_written, first_window_page_); i < std::min(pages_end(), total);
         ++i) {
      const int32_t page = window_pages_[static_cast<size_t>(i - first_window_page_)];
      if (pools_->window_pages.references(page) > 1) ++need.window_pages;
    }
  }
  return need;
}

bool SequenceState::Extend(int64_t rows, std::vector<StateCommand>* commands) {
  if (rows == 0) return true;
  DropOldPages();
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
  for (int64_t i = std::max(first_written, first_window_page_); i < std::min(pages_end(), total);
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
  while (pages_end() < total) window_pages_.push_back(pools_->TakeWindowPage());
  return true;
}

void SequenceState::Advance(int64_t rows) {
  num_tokens_ += rows;
  most_tokens_ = std::max(most_tokens_, num_tokens_);
  DI_CHECK_LE(num_tokens_, std::ssize(blocks_) * kBlockTokens);
  DI_CHECK_LE(num_tokens_, pages_end() * kBlockTokens);
}

bool SequenceState::Truncate(int64_t tokens) {
  DI_CHECK(tokens >= 0 && tokens <= num_tokens_);
  if (tokens > 0) {
    const int64_t oldest_read = std::max<int64_t>(0, tokens - (pools_->window - 1));
    if (oldest_read < tokens && oldest_read < window_begin_) return false;
    const bool beyond_rollback = most_tokens_ - tokens > pools_->rollback;
    // The token before an odd length is the first of an open group: its projections are needed.
    if (tokens % 2 != 0 && (beyond_rollback || tokens - 1 < remainder_begin_)) return false;
    if (beyond_rollback) most_tokens_ = remainder_begin_ = tokens;
  } else {
    most_tokens_ = 0;
  }
  num_tokens_ = tokens;
  remainder_begin_ = std::min(remainder_begin_, tokens);
  window_begin_ = std::min(window_begin_, tokens);
  const int64_t kept = CeilDiv(tokens, kBlockTokens);
  while (std::ssize(blocks_) > kept) {
    pools_->blocks.Release(blocks_.back());
    blocks_.pop_back();
  }
  while (!window_pages_.empty() && pages_end() > kept) {
    pools_->window_pages.Release(window_pages_.back());
    window_pages_.pop_back();
  }
  if (window_pages_.empty())
    first_window_page_ = std::min(first_window_page_, tokens / kBlockTokens);
  return true;
}

std::shared_ptr<StateImage> SequenceState::Save(std::vector<StateCommand>* commands) const {
  auto image = std::make_shared<StateImage>();
  image->num_tokens = num_tokens_;
  image->remainder_begin =
      std::min(num_tokens_, std::max(remainder_begin_, most_tokens_ - pools_->rollback - 1));
  // Right after a restoration less than the whole history may be there, or none.
  const int64_t kept = CeilDiv(num_tokens_, kBlockTokens);
  image->window_begin =
      pages_end() < kept
          ? num_tokens_
          : std::min(num_tokens_, std::max(HistoryBegin(*pools_, num_tokens_), window_begin_));
  const int64_t first_page = image->window_begin / kBlockTokens;
  std::vector<int32_t> pages;
  if (image->window_begin < num_tokens_) {
    const auto begin = window_pages_.begin();
    pages.assign(begin + (first_page - first_window_page_), begin + (kept - first_window_page_));
  }
  commands->push_back({.kind = StateCommand::Kind::kExport,
                       .image = image,
                       .num_tokens = num_tokens_,
                       .slot = slot_,
                       .blocks = {blocks_.begin(), blocks_.begin() + kept},
                       .window_pages = std::move(pages),
                       .first_window_page = first_page});
  return image;
}

}  // namespace deepinfer
