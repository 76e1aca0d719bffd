// For the tests of this module: an engine without a model. Rows run on a plain arithmetic model
// whose state lives in the units that the scheduler names, and every row depends on all that it may
// see, so that a missing, stale or foreign unit changes the tokens. What each sequence should
// produce is computed without any scheduler.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "base/check.h"
#include "sched/recorder.h"
#include "sched/scheduler.h"

namespace deepinfer {

inline uint64_t MixBits(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// What a row leaves behind: a window key for each half of the model, and the projections that two
// neighbouring rows make a compressed entry of.
struct SimulatedRow {
  uint64_t encoder = 0;
  uint64_t decoder = 0;
  uint64_t projection = 0;
};

// One row, given the sums over what it sees.
inline SimulatedRow RunRow(int32_t token, int64_t position, uint64_t entries, uint64_t encoder_keys,
                           uint64_t decoder_keys) {
  const uint64_t x =
      MixBits(entries ^ MixBits(encoder_keys) ^
              MixBits((static_cast<uint64_t>(position) << 32) | static_cast<uint32_t>(token)));
  return {MixBits(x ^ 1), MixBits(x ^ MixBits(decoder_keys) ^ 2), MixBits(x ^ 3)};
}

inline uint64_t EntryOf(uint64_t even_projection, uint64_t odd_projection) {
  return MixBits(even_projection ^ MixBits(odd_projection));
}

inline int32_t SampleToken(uint64_t decoder, uint64_t seed) {
  return static_cast<int32_t>(MixBits(decoder ^ seed) % 50000);
}

// The model without caches: extends `tokens` by up to `count` outputs, stopping after a multiple of
// `end_divisor`.
class PlainModel {
 public:
  PlainModel(int64_t window, int64_t decoder_begin, uint64_t seed, int64_t end_divisor)
      : window_(window), decoder_begin_(decoder_begin), seed_(seed), end_divisor_(end_divisor) {}

  std::vector<int32_t> Complete(std::vector<int32_t> tokens, int64_t count) {
    const auto prompt = static_cast<int64_t>(tokens.size());
    std::vector<SimulatedRow> rows;
    uint64_t entries = 0;
    uint64_t encoder_keys = 0;
    uint64_t decoder_keys = 0;
    for (int64_t p = 0; p < std::ssize(tokens); ++p) {
      const auto at = [&rows](int64_t i) -> const SimulatedRow& {
        return rows[static_cast<size_t>(i)];
      };
      // The window of row p is the `window - 1` positions before it.
      if (p >= 1) encoder_keys += at(p - 1).encoder;
      if (p >= 1 && p - 1 >= decoder_begin_) decoder_keys += at(p - 1).decoder;
      if (p >= window_) encoder_keys -= at(p - window_).encoder;
      if (p >= window_ && p - window_ >= decoder_begin_) decoder_keys -= at(p - window_).decoder;
      rows.push_back(
          RunRow(tokens[static_cast<size_t>(p)], p, entries, encoder_keys, decoder_keys));
      if (p % 2 == 1) entries += EntryOf(at(p - 1).projection, at(p).projection);
      if (p + 1 < std::ssize(tokens) || std::ssize(tokens) - prompt >= count) continue;
      const int32_t token = SampleToken(at(p).decoder, seed_);
      tokens.push_back(token);
      if (token % end_divisor_ == 0) break;
    }
    return tokens;
  }

 private:
  int64_t window_;
  int64_t decoder_begin_;
  uint64_t seed_;
  int64_t end_divisor_;
};

// The bytes behind the pools, and the execution of steps in order.
class SimulatedDevice {
 public:
  explicit SimulatedDevice(const StatePools& pools)
      : window_(pools.window),
        remainder_rows_(pools.rollback + 1),
        blocks_(static_cast<size_t>(pools.blocks.size())),
        pages_(static_cast<size_t>(pools.window_pages.size())),
        slots_(static_cast<size_t>(pools.slots.size())) {
    for (Slot& slot : slots_) slot.projections.resize(static_cast<size_t>(remainder_rows_));
  }

  // The tokens sampled by each chunk, -1 where it does not sample. `tokens` and `seed` by chunk.
  struct ChunkInput {
    const std::vector<int32_t>* tokens = nullptr;
    uint64_t seed = 0;
  };
  std::vector<int32_t> Run(const SchedulerStep& step, const std::vector<ChunkInput>& inputs) {
    for (const StateCommand& command : step.commands) Execute(command);
    std::vector<int32_t> sampled;
    for (size_t i = 0; i < step.chunks.size(); ++i)
      sampled.push_back(RunChunk(step.chunks[i], inputs[i]));
    return sampled;
  }

 private:
  using Block = std::array<uint64_t, kBlockTokens / 2>;
  struct Key {
    uint64_t encoder = 0;
    uint64_t decoder = 0;
  };
  using Page = std::array<Key, kBlockTokens>;
  struct Slot {
    std::vector<uint64_t> projections;
    int32_t last_sampled = -1;
  };

  void Execute(const StateCommand& command) {
    switch (command.kind) {
      case StateCommand::Kind::kCopyBlock:
        BlockAt(command.target) = BlockAt(command.source);
        break;
      case StateCommand::Kind::kCopyWindowPage:
        PageAt(command.target) = PageAt(command.source);
        break;
      case StateCommand::Kind::kExport: {
        std::vector<std::byte>& bytes = command.image->bytes;
        bytes.clear();
        for (const int32_t id : command.blocks) Append(BlockAt(id).data(), sizeof(Block), &bytes);
        for (const int32_t id : command.window_pages)
          Append(PageAt(id).data(), sizeof(Page), &bytes);
        const Slot& slot = slots_.at(static_cast<size_t>(command.slot));
        Append(slot.projections.data(), slot.projections.size() * sizeof(uint64_t), &bytes);
        break;
      }
      case StateCommand::Kind::kImport: {
        const std::vector<std::byte>& bytes = command.image->bytes;
        Slot& slot = slots_.at(static_cast<size_t>(command.slot));
        const size_t size = command.blocks.size() * sizeof(Block) +
                            command.window_pages.size() * sizeof(Page) +
                            slot.projections.size() * sizeof(uint64_t);
        DI_CHECK_EQ(bytes.size(), size);
        const std::byte* from = bytes.data();
        const auto take = [&from](void* to, size_t count) {
          std::memcpy(to, from, count);
          from += count;
        };
        for (const int32_t id : command.blocks) take(BlockAt(id).data(), sizeof(Block));
        for (const int32_t id : command.window_pages) take(PageAt(id).data(), sizeof(Page));
        take(slot.projections.data(), slot.projections.size() * sizeof(uint64_t));
        break;
      }
    }
  }

  static void Append(const void* from, size_t count, std::vector<std::byte>* to) {
    const auto* bytes = static_cast<const std::byte*>(from);
    to->insert(to->end(), bytes, bytes + count);
  }

  Block& BlockAt(int32_t id) {
    return blocks_.at(static_cast<size_t>(id));
  }
  Page& PageAt(int32_t id) {
    return pages_.at(static_cast<size_t>(id));
  }
  Key& KeyAt(const PlannedChunk& chunk, int64_t position) {
    const int64_t page = position / kBlockTokens - chunk.first_window_page;
    DI_CHECK(page >= 0 && page < std::ssize(chunk.window_pages));
    return PageAt(chunk.window_pages[static_cast<size_t>(page)])[position % kBlockTokens];
  }
  uint64_t& EntryAt(const PlannedChunk& chunk, int64_t entry) {
    const int64_t block = entry / (kBlockTokens / 2);
    DI_CHECK_LT(block, std::ssize(chunk.blocks));
    return BlockAt(chunk.blocks[static_cast<size_t>(block)])[entry % (kBlockTokens / 2)];
  }

  int32_t RunChunk(const PlannedChunk& chunk, const ChunkInput& input) {
    Slot& slot = slots_.at(static_cast<size_t>(chunk.slot));
    uint64_t entries = 0;
    // Groups that are complete before the first row. Before entries_begin all entries exist, but a
    // row sees only those of complete groups before it.
    for (int64_t entry = 0; entry < chunk.begin / 2; ++entry) entries += EntryAt(chunk, entry);
    SimulatedRow row;
    for (int64_t p = chunk.begin; p < chunk.end; ++p) {
      uint64_t encoder_keys = 0;
      uint64_t decoder_keys = 0;
      for (int64_t j = std::max({p - window_ + 1, chunk.window_begin, int64_t{0}}); j < p; ++j) {
        const Key& key = KeyAt(chunk, j);
        encoder_keys += key.encoder;
        if (j >= chunk.decoder_begin) decoder_keys += key.decoder;
      }
      const int32_t token =
          chunk.token_in_flight ? slot.last_sampled : input.tokens->at(static_cast<size_t>(p));
      row = RunRow(token, p, entries, encoder_keys, decoder_keys);
      // Rows of the replayed-over part have no decoder half: what is in the page stays stale.
      Key& key = KeyAt(chunk, p);
      key.encoder = row.encoder;
      key.decoder = p >= chunk.decoder_begin ? row.decoder : 0xdeadbeef;
      uint64_t& kept = slot.projections[static_cast<size_t>(p % remainder_rows_)];
      if (p % 2 == 1) {
        const auto before = static_cast<size_t>((p - 1) % remainder_rows_);
        uint64_t& entry = EntryAt(chunk, p / 2);
        if (p >= chunk.entries_begin) entry = EntryOf(slot.projections[before], row.projection);
        entries += entry;
      }
      kept = row.projection;
    }
    if (!chunk.samples) return -1;
    slot.last_sampled = SampleToken(row.decoder, input.seed);
    return slot.last_sampled;
  }

  int64_t window_;
  int64_t remainder_rows_;
  std::vector<Block> blocks_;
  std::vector<Page> pages_;
  std::vector<Slot> slots_;
};

// Runs a scheduler with the device above, up to two steps ahead, and checks what it does.
class SimulatedEngine {
 public:
  static constexpr int64_t kEndDivisor = 40;
  enum class Reason : uint8_t { kStop, kLength, kAborted, kExpired, kFailed };
  struct Finished {
    SeqId id = 0;
    Reason reason = Reason::kStop;
  };

  SimulatedEngine(const SchedulerOptions& options, StatePools& pools, PrefixCache* prefix_cache,
                  ScheduleRecorder* recorder = nullptr)
      : options_(options),
        pools_(pools),
        recorder_(recorder),
        device_(pools),
        scheduler_(options, pools, prefix_cache) {}

  Scheduler& scheduler() {
    return scheduler_;
  }
  const std::string& problem() const {
    return problem_;
  }
  std::vector<Finished> TakeFinished() {
    return std::exchange(finished_, {});
  }
  int64_t num_living() const {
    return std::ssize(living_);
  }
  int64_t num_flights() const {
    return std::ssize(flights_);
  }
  bool living(SeqId id) const {
    return living_.contains(id);
  }
  bool held(SeqId id) const {
    return living_.at(id).spec.held;
  }
  int64_t most_steps_waited() const {
    return most_steps_waited_;
  }
  int64_t num_approximate() const {
    return num_approximate_;
  }
  int64_t num_checked_tokens() const {
    return num_checked_tokens_;
  }
  const SchedulerStep& step() const {
    return step_;
  }

  Status Add(const SequenceSpec& spec, double now) {
    Status added = scheduler_.Add(spec, now);
    if (recorder_ != nullptr) recorder_->Add(spec, now, added.has_value());
    if (!added.has_value()) return added;
    Request request;
    request.spec = spec;
    request.serial = next_serial_++;
    request.tokens = spec.prompt;
    request.next_logit_row = spec.first_prompt_logit_row;
    request.room =
        std::min(spec.max_new_tokens, scheduler_.max_sequence_tokens() - std::ssize(spec.prompt));
    living_[spec.id] = std::move(request);
    if (!spec.held) StartWaiting(living_[spec.id]);
    return {};
  }

  void Release(SeqId id) {
    Request& request = living_.at(id);
    if (!request.spec.held) return;
    request.spec.held = false;
    scheduler_.Release(id);
    if (recorder_ != nullptr) recorder_->Release(id);
    StartWaiting(request);
  }

  void Abort(SeqId id) {
    End(id);
    Finish(id, Reason::kAborted);
  }

  // Plans and runs one step. False if it has no rows.
  bool Launch(double now) {
    scheduler_.Schedule(now, &step_);
    if (recorder_ != nullptr) recorder_->Schedule(now, step_);
    for (const SeqId id : step_.expired) {
      Expect(living_.at(id).spec.deadline <= now, "expired before its deadline", id);
      Finish(id, Reason::kExpired);
    }
    Expect(step_.num_rows <= options_.max_num_batched_tokens, "more rows than allowed", -1);
    Expect(std::ssize(step_.chunks) <= options_.max_num_seqs, "more sequences than allowed", -1);
    if (step_.chunks.empty()) {
      Expect(step_.commands.empty(), "moves without rows", -1);
      return false;
    }
    Flight flight;
    std::vector<SimulatedDevice::ChunkInput> inputs;
    int64_t rows = 0;
    int64_t extra_logits = 0;
    for (const PlannedChunk& chunk : step_.chunks) {
      Request& request = living_.at(chunk.id);
      CheckChunk(chunk, request);
      rows += chunk.end - chunk.begin;
      extra_logits += std::max<int64_t>(0, chunk.num_logit_rows - 1);
      inputs.push_back({&scheduler_.tokens(chunk.id), SeedOf(request.spec)});
      flight.chunks.push_back({chunk.id, request.serial, chunk.begin, chunk.end, chunk.samples});
    }
    Expect(rows == step_.num_rows, "wrong number of rows", -1);
    Expect(extra_logits <= options_.max_prompt_logit_rows, "more logit rows than allowed", -1);
    ++steps_;
    const std::vector<int32_t> sampled = device_.Run(step_, inputs);
    for (size_t i = 0; i < sampled.size(); ++i)
      flight.results.push_back({flight.chunks[i].id, sampled[i]});
    flights_.push_back(std::move(flight));
    return true;
  }

  // Reports the oldest step that has been launched; `ran` false: as if the device had failed.
  void Land(bool ran = true) {
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    if (!ran)
      for (Scheduler::ChunkResult& result : flight.results) result.token = -1;
    scheduler_.Commit(flight.results, ran);
    if (recorder_ != nullptr) recorder_->Commit(flight.results, ran);
    for (size_t i = 0; i < flight.chunks.size(); ++i) {
      const FlightChunk& chunk = flight.chunks[i];
      const auto found = living_.find(chunk.id);
      if (found == living_.end() || found->second.serial != chunk.serial) continue;
      Request& request = found->second;
      if (!ran) {
        End(chunk.id);
        Finish(chunk.id, Reason::kFailed);
        continue;
      }
      const auto prompt = std::ssize(request.spec.prompt);
      if (chunk.samples) {
        const int32_t token = flight.results[i].token;
        request.tokens.push_back(token);
        Expect(scheduler_.tokens(chunk.id) == request.tokens, "knows other tokens", chunk.id);
        if (token % kEndDivisor == 0) {
          End(chunk.id);
          Finish(chunk.id, Reason::kStop);
        } else if (std::ssize(request.tokens) - prompt >= request.room) {
          End(chunk.id);
          Finish(chunk.id, Reason::kLength);
        }
      } else if (request.room == 0 && chunk.end == prompt) {
        End(chunk.id);
        Finish(chunk.id, Reason::kLength);
      }
    }
  }

  // Somebody could run now that nothing is in flight.
  bool CouldRun() const {
    return std::any_of(living_.begin(), living_.end(), [this](const auto& entry) {
      const Request* request = &entry.second;
      for (int depth = 0; depth < 8; ++depth) {
        if (request->spec.held) return false;
        const auto leader = living_.find(request->spec.leader);
        if (leader == living_.end() || leader->second.serial > request->serial) return true;
        request = &leader->second;
      }
      return false;
    });
  }

 private:
  struct Request {
    SequenceSpec spec;
    int64_t serial = 0;
    std::vector<int32_t> tokens;
    int64_t room = 0;
    int64_t next_logit_row = 0;
    bool waiting = false;
    bool admitted = false;
    bool approximate = false;
    int64_t preemptions = 0;
    int64_t ready_step = 0;
    int64_t rows_before = 0;  // of admissions that do not count against its waiting
  };
  struct FlightChunk {
    SeqId id = 0;
    int64_t serial = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool samples = false;
  };
  struct Flight {
    std::vector<FlightChunk> chunks;
    std::vector<Scheduler::ChunkResult> results;
  };

  void Expect(bool holds, const char* what, SeqId id) {
    if (!holds && problem_.empty()) problem_ = fmt::format("sequence {}: {}", id, what);
  }

  void End(SeqId id) {
    scheduler_.End(id);
    if (recorder_ != nullptr) recorder_->End(id);
  }

  static uint64_t SeedOf(const SequenceSpec& spec) {
    return MixBits(static_cast<uint64_t>(spec.id));
  }

  int64_t RowLimit(const Request& request) const {
    return std::ssize(request.spec.prompt) + std::max<int64_t>(0, request.room - 1);
  }

  void StartWaiting(Request& request) {
    request.waiting = true;
    request.ready_step = steps_;
    request.rows_before = admitted_rows_;
    for (const auto& [id, other] : living_)
      if (other.admitted) request.rows_before -= RowLimit(other);
  }

  void CheckChunk(const PlannedChunk& chunk, Request& request) {
    const SeqId id = chunk.id;
    const auto prompt = std::ssize(request.spec.prompt);
    Expect(!request.spec.held, "runs while it is held", id);
    Expect(chunk.begin < chunk.end && chunk.end <= RowLimit(request), "rows beyond its limit", id);
    const bool in_flight = chunk.begin >= std::ssize(scheduler_.tokens(id));
    Expect(chunk.token_in_flight == in_flight, "token_in_flight is wrong", id);
    Expect(!in_flight || chunk.end == chunk.begin + 1, "more than one row with one in flight", id);
    if (options_.max_chunk_tokens > 0)
      Expect(chunk.end - chunk.begin <= options_.max_chunk_tokens, "chunk is too long", id);
    if (chunk.window_begin > 0) request.approximate = true;
    // Rows that owe their logits deliver them once and in order.
    const int64_t first = std::max(chunk.begin, request.next_logit_row);
    if (request.next_logit_row < prompt - 1 && first < std::min(chunk.end, prompt - 1)) {
      Expect(first == request.next_logit_row, "a row's logits have been left out", id);
      Expect(chunk.num_logit_rows == chunk.end - first, "wrong number of logit rows", id);
      request.next_logit_row = chunk.end;
    } else {
      Expect(chunk.num_logit_rows == (chunk.samples ? 1 : 0), "wrong number of logit rows", id);
    }
    // While a sequence waits, every step gives the first running one a row: it waits at most as
    // many steps as those that run meanwhile have rows, counted once for each time they are
    // admitted.
    if (request.waiting) {
      request.waiting = false;
      const int64_t waited = steps_ - request.ready_step;
      Expect(waited <= admitted_rows_ - request.rows_before, "waited too long", id);
      most_steps_waited_ = std::max(most_steps_waited_, waited);
    }
    if (!request.admitted || request.preemptions != scheduler_.preemptions(id)) {
      request.admitted = true;
      request.preemptions = scheduler_.preemptions(id);
      admitted_rows_ += RowLimit(request);
    }
  }

  void Finish(SeqId id, Reason reason) {
    const auto found = living_.find(id);
    if (found == living_.end()) {
      Expect(false, "ended twice", id);
      return;
    }
    const Request& request = found->second;
    num_approximate_ += request.approximate;
    if (!request.approximate) CheckTokens(request, reason);
    if (reason == Reason::kStop || reason == Reason::kLength) {
      Expect(request.next_logit_row >= std::ssize(request.spec.prompt) - 1,
             "ended without all of its prompt logits", id);
    }
    finished_.push_back({id, reason});
    living_.erase(found);
  }

  void CheckTokens(const Request& request, Reason reason) {
    const auto prompt = std::ssize(request.spec.prompt);
    const bool scores_prompt = request.spec.first_prompt_logit_row < prompt - 1;
    const int64_t keep = options_.replay_keep_tokens;
    const int64_t decoder_begin =
        keep > 0 && !scores_prompt ? std::max<int64_t>(0, prompt - keep) : 0;
    PlainModel model(pools_.window, decoder_begin, SeedOf(request.spec), kEndDivisor);
    const int64_t count = std::ssize(request.tokens) - prompt;
    const bool whole = reason == Reason::kStop || reason == Reason::kLength;
    const std::vector<int32_t> expected =
        model.Complete(request.spec.prompt, whole ? request.room : count);
    Expect(request.tokens == expected, "tokens differ from those of the plain model",
           request.spec.id);
    num_checked_tokens_ += count;
  }

  SchedulerOptions options_;
  StatePools& pools_;
  ScheduleRecorder* recorder_;
  SimulatedDevice device_;
  Scheduler scheduler_;
  SchedulerStep step_;
  std::deque<Flight> flights_;
  std::map<SeqId, Request> living_;
  std::vector<Finished> finished_;
  std::string problem_;
  int64_t steps_ = 0;
  int64_t admitted_rows_ = 0;
  int64_t next_serial_ = 1;
  int64_t most_steps_waited_ = 0;
  int64_t num_checked_tokens_ = 0;
  int64_t num_approximate_ = 0;
};

}  // namespace deepinfer
