// A plain model of cache memory for tests of the state module: it stores what every unit holds at
// every offset, carries out state commands, and knows what each sequence must find. The record of a
// position is a hash of all tokens up to it, so that a record of another sequence, or of the same
// tokens after another beginning, is noticed.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "state/prefix_cache.h"
#include "state/sequence_state.h"

namespace deepinfer {

class StateModel {
 public:
  struct Options {
    int64_t num_blocks = 64;
    int64_t num_pages = 64;
    int64_t num_slots = 8;
    int64_t window = 128;
    int64_t rollback = 4;
    uint64_t hash_mask = ~uint64_t{0};
  };

  struct Sequence {
    SequenceState state;
    std::vector<int32_t> tokens;  // of all rows, also those that are not computed yet
    std::string salt;
    PrefixCache::Cursor cursor;
  };

  // What has been inserted.
  struct Recorded {
    std::string salt;
    std::vector<int32_t> tokens;
  };

  explicit StateModel(const Options& with)
      : options(with),
        pools(with.num_blocks, with.num_pages, with.num_slots, with.window, with.rollback),
        cache(std::make_unique<PrefixCache>(pools, with.hash_mask)),
        block_rows_(static_cast<size_t>(with.num_blocks * kBlockTokens)),
        page_rows_(static_cast<size_t>(with.num_pages * kBlockTokens)),
        remainder_rows_(static_cast<size_t>(with.num_slots * (with.rollback + 1))) {}

  bool Create(std::vector<int32_t> tokens, std::string salt) {
    std::optional<SequenceState> state = SequenceState::Create(pools);
    if (!state.has_value()) return false;
    sequences.push_back({std::move(*state), std::move(tokens), std::move(salt), {}});
    return true;
  }

  // Looks the tokens up, checks what is found, and starts a sequence from it. The length of the
  // hit, or -1 without a free slot.
  int64_t Start(std::vector<int32_t> tokens, const std::string& salt, int64_t limit) {
    const SharedPrefix prefix = FindChecked(tokens, salt, limit, WindowNeed::kExact);
    if (prefix.num_tokens == 0) return Create(std::move(tokens), salt) ? 0 : -1;
    std::optional<SequenceState> state = SequenceState::Restore(pools, prefix);
    if (!state.has_value()) return -1;
    sequences.push_back({std::move(*state), std::move(tokens), salt, {}});
    return prefix.num_tokens;
  }

  SharedPrefix FindChecked(const std::vector<int32_t>& tokens, const std::string& salt,
                           int64_t limit, WindowNeed need) {
    SharedPrefix prefix = cache->Find(salt, tokens, limit, need);
    const int64_t n = prefix.num_tokens;
    if (n % 2 != 0 || n > std::max<int64_t>(0, limit) || n > std::ssize(tokens))
      Fail("a hit of {} tokens", n);
    if (std::ssize(prefix.blocks) != (n + kBlockTokens - 1) / kBlockTokens)
      Fail("a hit of {} tokens has {} blocks", n, prefix.blocks.size());
    const std::vector<uint64_t> records = Records(tokens);
    for (int64_t p = 0; p < n; ++p) {
      if (BlockRow(prefix.blocks, p) != records[static_cast<size_t>(p)])
        Fail("position {} of a hit of {} tokens is another's", p, n);
    }
    if (need == WindowNeed::kExact) {
      for (int64_t p = std::max<int64_t>(0, n - options.window + 1); p < n; ++p) {
        if (PageRow(prefix.window_pages, prefix.first_window_page, p) !=
            records[static_cast<size_t>(p)])
          Fail("window position {} of a hit of {} tokens is another's", p, n);
      }
    }
    return prefix;
  }

  // The longest prefix that anything inserted so far shares with the tokens.
  int64_t LongestRecorded(const std::vector<int32_t>& tokens, const std::string& salt,
                          int64_t limit) const {
    int64_t longest = 0;
    for (const Recorded& other : recorded) {
      if (other.salt != salt) continue;
      const size_t n = std::min(other.tokens.size(), tokens.size());
      const auto end = std::mismatch(tokens.begin(), tokens.begin() + static_cast<int64_t>(n),
                                     other.tokens.begin());
      longest = std::max<int64_t>(longest, end.first - tokens.begin());
    }
    longest = std::min(longest, limit);
    return longest - longest % 2;
  }

  // A step of rows of several sequences, each at most once; those without room are left out.
  struct Rows {
    size_t sequence;
    int64_t rows;
  };
  int Step(const std::vector<Rows>& plan) {
    struct Write {
      std::vector<int32_t> blocks;
      std::vector<int32_t> pages;
      int64_t first_page;
      int32_t slot;
      int64_t begin;
      int64_t end;
      const std::vector<int32_t>* tokens;
    };
    std::vector<Write> writes;
    std::vector<StateCommand> commands;
    for (const Rows& chunk : plan) {
      Sequence& sequence = sequences[chunk.sequence];
      SequenceState& state = sequence.state;
      const SequenceState::Need need = state.NeedFor(chunk.rows);
      const bool fits = need.blocks <= pools.available_blocks() &&
                        need.window_pages <= pools.available_window_pages();
      const bool extended = state.Extend(chunk.rows, &commands);
      // Extend gives old pages back first, so that it may succeed where the need exceeds the pools.
      if (fits && !extended) Fail("Extend refuses what fits");
      if (!extended) continue;
      const int64_t begin = state.num_tokens();
      state.Advance(chunk.rows);
      writes.push_back({state.blocks(), state.window_pages(), state.first_window_page(),
                        state.slot(), begin, begin + chunk.rows, &sequence.tokens});
    }
    Execute(commands);
    std::set<int32_t> written_blocks;
    std::set<int32_t> written_pages;
    for (const Write& write : writes) {
      for (int64_t i = write.begin / kBlockTokens; i * kBlockTokens < write.end; ++i) {
        const int32_t block = write.blocks[static_cast<size_t>(i)];
        const int32_t page = write.pages[static_cast<size_t>(i - write.first_page)];
        if (!written_blocks.insert(block).second) Fail("block {} has two writers", block);
        if (!written_pages.insert(page).second) Fail("window page {} has two writers", page);
        if (pools.blocks.references(block) != 1) Fail("block {} is written and shared", block);
        if (pools.window_pages.references(page) != 1) Fail("page {} is written and shared", page);
      }
      const std::vector<uint64_t> records = Records(*write.tokens);
      for (int64_t p = write.begin; p < write.end; ++p) {
        const uint64_t record = records[static_cast<size_t>(p)];
        BlockRow(write.blocks, p) = record;
        PageRow(write.pages, write.first_page, p) = record;
        RemainderRow(write.slot, p) = record;
      }
    }
    return static_cast<int>(writes.size());
  }

  // Publishes the first `tokens` tokens.
  void Insert(size_t index, int64_t tokens, bool is_end, bool with_cursor) {
    Sequence& sequence = sequences[index];
    const std::span<const int32_t> all = sequence.tokens;
    cache->Insert(sequence.salt, all.first(static_cast<size_t>(tokens)), sequence.state, is_end,
                  with_cursor ? &sequence.cursor : nullptr);
    const int64_t known = is_end ? tokens : tokens / kBlockTokens * kBlockTokens;
    recorded.push_back({sequence.salt, {sequence.tokens.begin(), sequence.tokens.begin() + known}});
  }

  bool Truncate(size_t index, int64_t tokens) {
    Sequence& sequence = sequences[index];
    if (!sequence.state.Truncate(tokens)) return false;
    sequence.cursor = {};
    return true;
  }

  void End(size_t index) {
    sequences.erase(sequences.begin() + static_cast<int64_t>(index));
  }

  // Save, end, and keep the image.
  void Preempt(size_t index) {
    Sequence& sequence = sequences[index];
    std::vector<StateCommand> commands;
    std::shared_ptr<StateImage> image = sequence.state.Save(&commands);
    Execute(commands);
    saved.push_back({std::move(image), std::move(sequence.tokens), std::move(sequence.salt)});
    End(index);
  }

  bool Resume(size_t index) {
    Saved& one = saved[index];
    std::vector<StateCommand> commands;
    const int64_t free_slots = pools.slots.num_free();
    std::optional<SequenceState> state = SequenceState::Restore(pools, one.image, &commands);
    if (!state.has_value()) {
      if (!commands.empty() || pools.slots.num_free() != free_slots)
        Fail("a refused restoration changed something");
      return false;
    }
    Execute(commands);
    images_.erase(one.image.get());
    sequences.push_back({std::move(*state), std::move(one.tokens), std::move(one.salt), {}});
    saved.erase(saved.begin() + static_cast<int64_t>(index));
    return true;
  }

  // Empty, or the first thing that is wrong.
  std::string FindViolation() {
    if (!failure_.empty()) return failure_;
    for (const Sequence& sequence : sequences) CheckSequence(sequence);
    if (std::string wrong = cache->FindViolation(); !wrong.empty()) Fail("cache: {}", wrong);
    if (std::string wrong = pools.slots.FindViolation(); !wrong.empty()) Fail("slots: {}", wrong);
    return failure_;
  }

  // Empty if everything comes back when sequences, images and cache are gone.
  std::string FindLeak() {
    sequences.clear();
    saved.clear();
    cache->Clear();
    if (cache->num_nodes() != 0) Fail("{} nodes are left", cache->num_nodes());
    if (pools.blocks.num_free() != pools.blocks.size()) Fail("blocks are lost");
    if (pools.window_pages.num_free() != pools.window_pages.size()) Fail("window pages are lost");
    if (pools.slots.num_free() != pools.slots.size()) Fail("slots are lost");
    return FindViolation();
  }

  // The first failure is the one that is reported.
  template <typename... Args>
  void Fail(fmt::format_string<Args...> format, Args&&... args) {
    if (failure_.empty()) failure_ = fmt::format(format, std::forward<Args>(args)...);
  }

  struct Saved {
    std::shared_ptr<StateImage> image;
    std::vector<int32_t> tokens;
    std::string salt;
  };

  const Options options;
  StatePools pools;
  std::unique_ptr<PrefixCache> cache;
  std::vector<Sequence> sequences;
  std::vector<Saved> saved;
  std::vector<Recorded> recorded;

 private:
  struct ImageRows {
    std::vector<uint64_t> blocks;     // of positions from 0
    std::vector<uint64_t> window;     // from window_begin
    std::vector<uint64_t> remainder;  // from remainder_begin
  };

  static std::vector<uint64_t> Records(const std::vector<int32_t>& tokens) {
    std::vector<uint64_t> records;
    uint64_t hash = 1;
    for (const int32_t token : tokens) {
      hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 31;
      records.push_back(hash | 1);
    }
    return records;
  }

  uint64_t& BlockRow(const std::vector<int32_t>& blocks, int64_t position) {
    const int64_t block = blocks.at(static_cast<size_t>(position / kBlockTokens));
    return block_rows_.at(static_cast<size_t>(block * kBlockTokens + position % kBlockTokens));
  }
  uint64_t& PageRow(const std::vector<int32_t>& pages, int64_t first_page, int64_t position) {
    const int64_t page = pages.at(static_cast<size_t>(position / kBlockTokens - first_page));
    return page_rows_.at(static_cast<size_t>(page * kBlockTokens + position % kBlockTokens));
  }
  uint64_t& RemainderRow(int32_t slot, int64_t position) {
    const int64_t rows = options.rollback + 1;
    return remainder_rows_.at(static_cast<size_t>(slot * rows + position % rows));
  }

  static void Copy(std::vector<uint64_t>* rows, int32_t source, int32_t target) {
    const auto from = rows->begin() + source * kBlockTokens;
    std::copy(from, from + kBlockTokens, rows->begin() + target * kBlockTokens);
  }

  void Execute(const std::vector<StateCommand>& commands) {
    for (const StateCommand& command : commands) {
      switch (command.kind) {
        case StateCommand::Kind::kCopyBlock:
          Copy(&block_rows_, command.source, command.target);
          break;
        case StateCommand::Kind::kCopyWindowPage:
          Copy(&page_rows_, command.source, command.target);
          break;
        case StateCommand::Kind::kExport:
          Export(command);
          break;
        case StateCommand::Kind::kImport:
          Import(command);
          break;
      }
    }
  }

  void Export(const StateCommand& command) {
    const StateImage& image = *command.image;
    ImageRows& rows = images_[&image];
    for (int64_t p = 0; p < image.num_tokens; ++p)
      rows.blocks.push_back(BlockRow(command.blocks, p));
    for (int64_t p = image.window_begin; p < image.num_tokens; ++p)
      rows.window.push_back(PageRow(command.window_pages, command.first_window_page, p));
    for (int64_t p = image.remainder_begin; p < image.num_tokens; ++p)
      rows.remainder.push_back(RemainderRow(command.slot, p));
  }

  void Import(const StateCommand& command) {
    const StateImage& image = *command.image;
    const ImageRows& rows = images_.at(&image);
    for (int64_t p = 0; p < image.num_tokens; ++p)
      BlockRow(command.blocks, p) = rows.blocks[static_cast<size_t>(p)];
    for (int64_t p = image.window_begin; p < image.num_tokens; ++p) {
      PageRow(command.window_pages, command.first_window_page, p) =
          rows.window[static_cast<size_t>(p - image.window_begin)];
    }
    for (int64_t p = image.remainder_begin; p < image.num_tokens; ++p)
      RemainderRow(command.slot, p) =
          rows.remainder[static_cast<size_t>(p - image.remainder_begin)];
  }

  void CheckSequence(const Sequence& sequence) {
    const SequenceState& state = sequence.state;
    const int64_t n = state.num_tokens();
    const std::vector<uint64_t> records = Records(sequence.tokens);
    for (int64_t p = 0; p < n; ++p) {
      if (BlockRow(state.blocks(), p) != records[static_cast<size_t>(p)])
        Fail("position {} of a sequence of {} is another's", p, n);
    }
    // What the next row reads, and everything that the state claims to have.
    const int64_t read = std::max<int64_t>(0, n - options.window + 1);
    const int64_t history = std::max<int64_t>(0, read - options.rollback);
    if (read < n && state.window_begin() > read)
      Fail("the window of {} tokens begins at {}", n, state.window_begin());
    for (int64_t p = std::max(history, state.window_begin()); p < n; ++p) {
      if (PageRow(state.window_pages(), state.first_window_page(), p) !=
          records[static_cast<size_t>(p)])
        Fail("window position {} of a sequence of {} is another's", p, n);
    }
    if (n % 2 != 0 && RemainderRow(state.slot(), n - 1) != records[static_cast<size_t>(n - 1)])
      Fail("the remainder of a sequence of {} is another's", n);
  }

  std::vector<uint64_t> block_rows_;
  std::vector<uint64_t> page_rows_;
  std::vector<uint64_t> remainder_rows_;
  std::map<const StateImage*, ImageRows> images_;
  std::string failure_;
};

}  // namespace deepinfer
