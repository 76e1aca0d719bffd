#include "sched/scheduler.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/ceil_div.h"
#include "base/check.h"
#include "sched/policy.h"
#include "sched/user_service.h"

namespace deepinfer {
namespace {

enum class Phase : uint8_t { kHeld, kWaiting, kRunning, kEnding };

constexpr size_t kNowhere = static_cast<size_t>(-1);
constexpr int64_t kReservedOutputTokens = 4096;
constexpr int64_t kMaxUncommittedSteps = 2;

// The finaliser of SplitMix64: a draw that depends on its argument only.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct Sequence {
  SequenceSpec spec;  // its prompt has been moved to `tokens`
  std::vector<int32_t> tokens;
  int64_t prompt_tokens = 0;
  int64_t max_new_tokens = 0;  // limited by what the pools hold
  int64_t decoder_begin = 0;
  int64_t arrival = 0;
  Phase phase = Phase::kHeld;

  // Waiting.
  size_t user = kNowhere;           // present from when it is ready until it ends
  size_t waiting_index = kNowhere;  // in `waiting`; nowhere: not to be admitted yet
  Sequence* leader = nullptr;
  std::vector<Sequence*> followers;
  bool preempted = false;
  int64_t overtakes = 0;
  int64_t lookup_blocks = 0;  // what the last attempt lacked, to save lookups
  int64_t lookup_step = -1;
  std::shared_ptr<StateImage> image;

  // Running.
  std::optional<SequenceState> state;
  bool approximate = false;
  int64_t window_begin = 0;
  int64_t entries_begin = 0;
  int64_t room_end = 0;   // rows before this position have blocks and pages of their own
  int64_t computed = 0;   // tokens whose rows have been handed to a step
  int64_t committed = 0;  // those whose steps have been committed
  PrefixCache::Cursor cursor;
  int64_t published = 0;  // blocks of them in the prefix cache
  int64_t planned = 0;    // rows of the step that is being made
  int64_t progress_mark = 0;

  // Since the beginning.
  bool admitted = false;
  bool failed = false;  // a step with it has failed: nothing of it is exact any more
  int64_t most_computed = 0;
  int64_t most_committed = 0;
  int64_t next_logit_row = 0;  // prompt rows from here on still owe their logits
  int64_t cached_tokens = 0;
  int64_t preemptions = 0;

  int64_t chunks_in_flight = 0;
  int64_t tokens_in_flight = 0;

  int64_t known() const {
    return static_cast<int64_t>(tokens.size()) + tokens_in_flight;
  }
  // Everything that it may produce has been produced or is being produced.
  bool Done() const {
    return max_new_tokens == 0 ? most_committed >= prompt_tokens
                               : known() - prompt_tokens >= max_new_tokens;
  }
  // Rows that could run now.
  int64_t pending() const {
    return failed || (max_new_tokens > 0 && Done()) ? 0 : known() - computed;
  }
  // Rows that it will have at most.
  int64_t row_limit() const {
    return prompt_tokens + std::max<int64_t>(0, max_new_tokens - 1);
  }
  bool owes_prompt_logits() const {
    return next_logit_row < prompt_tokens - 1;
  }
  // Rows of before the end of an approximate hit run. They have room from the beginning, and their
  // state must not be extended, which would give back the pages of their windows.
  bool RepeatsEntries() const {
    return computed < state->num_tokens();
  }
  bool in_flight() const {
    return chunks_in_flight > 0;
  }
  RunningKey running_key() const {
    return {spec.priority, arrival};
  }
};

// A chunk of a step that has been handed out and not been committed.
struct FlightChunk {
  Sequence* sequence = nullptr;
  int64_t end = 0;
  bool samples = false;
};

struct WaitingEntry {
  WaitingKey key;
  Sequence* sequence = nullptr;
};

struct Deadline {
  double time = 0;
  SeqId id = 0;
  int64_t arrival = 0;
  // Latest first: std heap functions put the largest on top.
  bool operator<(const Deadline& other) const {
    return std::pair(other.time, other.arrival) < std::pair(time, arrival);
  }
};

}  // namespace

struct Scheduler::Impl {
  Impl(const SchedulerOptions& scheduler_options, StatePools& state_pools, PrefixCache* cache)
      : options(scheduler_options),
        pools(state_pools),
        prefix_cache(scheduler_options.prefix_caching ? cache : nullptr) {
    DI_CHECK_GE(options.max_num_seqs, 1);
    DI_CHECK_GE(options.max_num_batched_tokens, options.max_num_seqs);
    DI_CHECK_GE(options.max_prompt_logit_rows, 1);
    const int64_t pages = PagesRowByRow();
    int64_t units = pools.blocks.size();
    if (pools.window_pages.size() < pages) units = std::min(units, pools.window_pages.size());
    if (pools.slots.size() == 0) units = 0;
    max_sequence_tokens = units * kBlockTokens;
    const auto most = static_cast<size_t>(options.max_num_seqs);
    running.reserve(most);
    for (std::vector<FlightChunk>& flight : flights) flight.reserve(most);
  }

  // ---- Living sequences --------------------------------------------------------------------

  Sequence& Get(SeqId id) const {
    const auto found = sequences.find(id);
    DI_CHECK(found != sequences.end());
    return *found->second;
  }

  bool CachesPrefixes(const Sequence& sequence) const {
    return prefix_cache != nullptr && sequence.spec.use_prefix_cache;
  }

  // The sequence may be run from now on.
  void BecomeReady(Sequence& sequence) {
    sequence.phase = Phase::kWaiting;
    sequence.user = users.Join(sequence.spec.user);
    ++num_waiting;
    if (sequence.leader == nullptr) Enqueue(sequence);
  }

  void Enqueue(Sequence& sequence) {
    sequence.overtakes = 0;
    sequence.lookup_step = -1;
    sequence.waiting_index = waiting.size();
    waiting.push_back({{.priority = sequence.spec.priority,
                        .preempted = sequence.preempted,
                        .arrival = sequence.arrival},
                       &sequence});
  }

  void Dequeue(Sequence& sequence) {
    const size_t index = std::exchange(sequence.waiting_index, kNowhere);
    if (index == kNowhere) return;
    waiting[index] = waiting.back();
    waiting[index].sequence->waiting_index = index;
    waiting.pop_back();
    // When it was the last entry itself, the line above has set its index again.
    sequence.waiting_index = kNowhere;
  }

  void ReleaseFollowers(Sequence& leader) {
    for (Sequence* follower : leader.followers) {
      follower->leader = nullptr;
      if (follower->phase == Phase::kWaiting) Enqueue(*follower);
    }
    leader.followers.clear();
  }

  void End(Sequence& sequence) {
    if (sequence.phase == Phase::kEnding) return;
    switch (sequence.phase) {
      case Phase::kHeld:
        --num_held;
        break;
      case Phase::kWaiting:
        --num_waiting;
        Dequeue(sequence);
        break;
      case Phase::kRunning:
        Publish(sequence, /*is_end=*/true);
        DropState(sequence);
        running.erase(std::find(running.begin(), running.end(), &sequence));
        break;
      case Phase::kEnding:
        break;
    }
    if (sequence.user != kNowhere) users.Leave(std::exchange(sequence.user, kNowhere));
    ReleaseFollowers(sequence);
    if (sequence.leader != nullptr) {
      std::erase(sequence.leader->followers, &sequence);
      sequence.leader = nullptr;
    }
    DropImage(sequence);
    sequence.phase = Phase::kEnding;
    if (!sequence.in_flight()) ended.push_back(sequence.spec.id);
  }

  // Sequences that have ended can be asked about until the next call that hands out rows.
  void ForgetEnded() {
    for (const SeqId id : ended) sequences.erase(id);
    ended.clear();
  }

  // ---- State -------------------------------------------------------------------------------

  void DropState(Sequence& sequence) {
    sequence.state.reset();
    sequence.approximate = false;
    sequence.window_begin = sequence.entries_begin = 0;
    sequence.cursor = {};
    sequence.room_end = sequence.computed = sequence.committed = sequence.published = 0;
  }

  // What has been committed goes to the prefix cache; rows in flight do not.
  void Publish(Sequence& sequence, bool is_end) {
    if (!CachesPrefixes(sequence) || sequence.approximate || sequence.failed) return;
    const int64_t full = sequence.committed / kBlockTokens;
    if (sequence.committed == 0 || (!is_end && full == sequence.published)) return;
    const int64_t tokens = is_end ? sequence.committed : full * kBlockTokens;
    prefix_cache->Insert(sequence.spec.cache_salt,
                         std::span(sequence.tokens).first(static_cast<size_t>(tokens)),
                         *sequence.state, is_end, &sequence.cursor);
    sequence.published = full;
    // A partly filled unit may be shared now: look again before the next row is written to it.
    if (is_end) sequence.room_end = std::min(sequence.room_end, sequence.computed);
  }

  // Room for the next `rows` rows.
  bool MakeRoom(Sequence& sequence, int64_t rows, std::vector<StateCommand>* commands) {
    const int64_t end = sequence.computed + rows;
    if (sequence.room_end > 0 && sequence.RepeatsEntries()) return end <= sequence.room_end;
    // Prompts are extended in every step all the same: that gives old pages back, which their next
    // chunk can use.
    if (end <= sequence.room_end && (rows > 1 || sequence.pending() == 1)) return true;
    SequenceState& state = *sequence.state;
    if (!state.Extend(std::max<int64_t>(1, end - state.num_tokens()), commands)) return false;
    sequence.room_end = std::ssize(state.blocks()) * kBlockTokens;
    return true;
  }

  // How many of `rows` rows the pools have room for, given that there is room for the first.
  int64_t RowsWithRoom(const Sequence& sequence, int64_t rows) const {
    if (sequence.RepeatsEntries()) return std::min(rows, sequence.room_end - sequence.computed);
    const int64_t more = std::min(pools.available_blocks(), pools.available_window_pages());
    return std::min(rows, sequence.room_end + more * kBlockTokens - sequence.computed);
  }

  void DropImage(Sequence& sequence) {
    if (sequence.image == nullptr) return;
    saved_blocks -= CeilDiv(sequence.image->num_tokens, kBlockTokens);
    sequence.image.reset();
  }

  void Preempt(Sequence& sequence, SchedulerStep* step) {
    ++counters.preemptions;
    ++sequence.preemptions;
    const int64_t computed = sequence.computed;
    const auto blocks = CeilDiv(computed, kBlockTokens);
    if (options.preemption == PreemptionMode::kSave && !sequence.failed && computed > 0 &&
        computed == sequence.state->num_tokens() && saved_blocks + blocks <= pools.blocks.size()) {
      ++counters.preemptions_saved;
      saved_blocks += blocks;
      sequence.image = sequence.state->Save(&step->commands);
      sequence.state.reset();
      sequence.cursor = {};
      sequence.room_end = sequence.published = 0;
    } else {
      Publish(sequence, /*is_end=*/true);
      DropState(sequence);
    }
    running.erase(std::find(running.begin(), running.end(), &sequence));
    sequence.phase = Phase::kWaiting;
    sequence.preempted = true;
    ++num_waiting;
    EnqueueAgain(sequence);
  }

  // A preempted sequence comes back when nothing of it is in flight and there is work for it.
  void EnqueueAgain(Sequence& sequence) {
    if (!sequence.in_flight() && !sequence.Done() && !sequence.failed) Enqueue(sequence);
  }

  // ---- One step ----------------------------------------------------------------------------

  void Expire(double now, SchedulerStep* step) {
    while (!deadlines.empty() && deadlines.front().time <= now) {
      const Deadline deadline = deadlines.front();
      std::pop_heap(deadlines.begin(), deadlines.end());
      deadlines.pop_back();
      Sequence* sequence = Living(deadline);
      if (sequence == nullptr) continue;
      End(*sequence);
      ++counters.expired;
      step->expired.push_back(deadline.id);
    }
  }

  Sequence* Living(const Deadline& deadline) const {
    const auto found = sequences.find(deadline.id);
    if (found == sequences.end() || found->second->arrival != deadline.arrival ||
        found->second->phase == Phase::kEnding)
      return nullptr;
    return found->second.get();
  }

  void AddDeadline(const Sequence& sequence) {
    if (sequence.spec.deadline == std::numeric_limits<double>::infinity()) return;
    // Those of sequences that ended earlier are thrown away now and then.
    if (deadlines.size() > 2 * sequences.size() + 64) {
      std::erase_if(deadlines, [this](const Deadline& d) { return Living(d) == nullptr; });
      std::make_heap(deadlines.begin(), deadlines.end());
    }
    deadlines.push_back({sequence.spec.deadline, sequence.spec.id, sequence.arrival});
    std::push_heap(deadlines.begin(), deadlines.end());
  }

  // Test hook. Only sequences that have come further than before their last preemption are taken,
  // so that even a preemption in every step lets everything end.
  void PreemptByForce(SchedulerStep* step) {
    const int64_t interval = options.forced_preemption_interval;
    if (interval <= 0 || (counters.steps + 1) % interval != 0) return;
    candidates.clear();
    for (Sequence* sequence : running)
      if (sequence->computed > sequence->progress_mark) candidates.push_back(sequence);
    if (candidates.empty()) return;
    const uint64_t draw =
        Mix(options.forced_preemption_seed ^ Mix(static_cast<uint64_t>(counters.steps)));
    Preempt(*candidates[draw % candidates.size()], step);
  }

  // Every running sequence gets one row, in service order.
  void GiveFirstRows(SchedulerStep* step) {
    for (size_t i = 0; i < running.size(); ++i) {
      Sequence& sequence = *running[i];
      if (sequence.pending() == 0) continue;
      while (!MakeRoom(sequence, 1, &step->commands)) {
        if (running.size() == 1 && prefix_cache != nullptr && !cache_cleared) {
          // Alone it fits without what the cache shares with it.
          prefix_cache->Clear();
          cache_cleared = true;
          continue;
        }
        Sequence& victim = *running[VictimIndex(running.size())];
        Preempt(victim, step);
        if (&victim == &sequence) return;
      }
      GiveRows(sequence, 1);
    }
  }

  // The sequence has `rows` rows in this step. Rows that run again are not held against the user.
  void GiveRows(Sequence& sequence, int64_t rows) {
    const auto fresh = [&sequence](int64_t count) {
      return std::max<int64_t>(0, sequence.computed + count - sequence.most_computed);
    };
    users.Serve(sequence.user, fresh(rows) - fresh(sequence.planned));
    logit_rows_left += std::max<int64_t>(0, LogitRows(sequence, sequence.planned) - 1);
    rows_left -= rows - sequence.planned;
    sequence.planned = rows;
    logit_rows_left -= std::max<int64_t>(0, LogitRows(sequence, sequence.planned) - 1);
  }

  // Rows of the next `rows` whose logits are wanted; they are the last ones.
  int64_t LogitRows(const Sequence& sequence, int64_t rows) const {
    const int64_t begin = sequence.computed;
    const int64_t end = begin + rows;
    const int64_t first = std::max(begin, sequence.next_logit_row);
    if (sequence.owes_prompt_logits() && first < std::min(end, sequence.prompt_tokens - 1))
      return end - first;
    return Samples(sequence, end) ? 1 : 0;
  }

  static bool Samples(const Sequence& sequence, int64_t end) {
    return end == sequence.known() && sequence.max_new_tokens > 0;
  }

  // The rows that a sequence with at least one row in this step can have at most, given the rows
  // that others leave.
  int64_t MostRows(const Sequence& sequence, int64_t share) const {
    int64_t rows = std::min(sequence.pending(), sequence.planned + share);
    if (options.max_chunk_tokens > 0) rows = std::min(rows, options.max_chunk_tokens);
    // The first row whose logits are wanted costs nothing of the budget for them.
    if (sequence.owes_prompt_logits()) {
      const int64_t first = std::max(sequence.computed, sequence.next_logit_row);
      const int64_t spent = std::max<int64_t>(0, LogitRows(sequence, sequence.planned) - 1);
      rows = std::min(rows, first - sequence.computed + 1 + logit_rows_left + spent);
    }
    return std::max(sequence.planned, RowsWithRoom(sequence, rows));
  }

  // Running prompts get more rows, in service order.
  void GiveMoreRows(bool someone_waits, SchedulerStep* step) {
    for (Sequence* sequence : running) {
      if (rows_left == 0) return;
      if (sequence->planned == 0 || sequence->pending() == sequence->planned) continue;
      const int64_t rows = MostRows(*sequence, PromptShare(rows_left, someone_waits));
      if (rows == sequence->planned || !MakeRoom(*sequence, rows, &step->commands)) continue;
      GiveRows(*sequence, rows);
    }
  }

  bool MayAdmit() const {
    return !waiting.empty() && rows_left > 0 && std::ssize(running) < options.max_num_seqs &&
           pools.slots.num_free() > 0 && pools.available_blocks() > 0 &&
           pools.available_window_pages() > 0;
  }

  // Blocks that running sequences need for the tokens they know and do not hold yet.
  int64_t PromisedBlocks() const {
    int64_t blocks = 0;
    for (const Sequence* sequence : running) {
      if (sequence->pending() <= sequence->planned) continue;
      blocks += std::max<int64_t>(
          0, CeilDiv(sequence->known(), kBlockTokens) - std::ssize(sequence->state->blocks()));
    }
    return blocks;
  }

  void Admit(SchedulerStep* step) {
    if (!MayAdmit()) return;
    order.clear();
    for (WaitingEntry& entry : waiting) {
      entry.key.overtaken = entry.sequence->overtakes >= options.max_overtakes;
      order.push_back(entry);
      order.back().key.user_service = users.service(entry.sequence->user);
    }
    const auto later = [](const WaitingEntry& a, const WaitingEntry& b) {
      return ServedBefore(b.key, a.key);
    };
    std::make_heap(order.begin(), order.end(), later);
    passed_over.clear();
    int64_t promised = PromisedBlocks();
    while (!order.empty() && MayAdmit()) {
      std::pop_heap(order.begin(), order.end(), later);
      WaitingEntry entry = order.back();
      order.pop_back();
      Sequence& sequence = *entry.sequence;
      // An admission of this step has served the user: its others come later now.
      if (const int64_t service = users.service(sequence.user); service != entry.key.user_service) {
        entry.key.user_service = service;
        order.push_back(entry);
        std::push_heap(order.begin(), order.end(), later);
        continue;
      }
      if (TryAdmit(sequence, promised, step)) {
        promised += std::max<int64_t>(
            0, CeilDiv(sequence.known(), kBlockTokens) - std::ssize(sequence.state->blocks()));
        for (Sequence* other : passed_over) ++other->overtakes;
        const auto fed_up = [this](const Sequence* other) {
          return other->overtakes >= options.max_overtakes;
        };
        if (std::any_of(passed_over.begin(), passed_over.end(), fed_up)) return;
      } else {
        passed_over.push_back(&sequence);
        if (sequence.overtakes >= options.max_overtakes ||
            std::ssize(passed_over) >= kMaxPassedOver)
          return;
      }
    }
  }

  bool TryAdmit(Sequence& sequence, int64_t promised, SchedulerStep* step) {
    if (sequence.image != nullptr && sequence.image->lost) {
      DropImage(sequence);
      DropState(sequence);
    }
    const bool alone = running.empty();
    const int64_t reserve = alone ? 0 : AdmissionReserve(std::ssize(running), promised);
    const int64_t page_reserve = alone ? 0 : AdmissionReserve(std::ssize(running), 0);
    // It should get through its known tokens and the next block of output.
    const int64_t rows = std::min(sequence.known() + kBlockTokens, sequence.row_limit());
    const int64_t all_blocks = CeilDiv(rows, kBlockTokens);
    if (!alone && page_reserve >= pools.available_window_pages()) return false;
    if (!alone && all_blocks + reserve > pools.available_blocks()) {
      // Only a prefix in the cache could make it fit.
      if (sequence.image != nullptr || !CachesPrefixes(sequence)) return false;
      if (sequence.lookup_step >= 0 &&
          counters.steps < sequence.lookup_step + kStepsBetweenLookups &&
          sequence.lookup_blocks + reserve > pools.available_blocks())
        return false;
    }
    const bool found = sequence.image != nullptr
                           ? Import(sequence, alone, reserve, page_reserve, all_blocks, step)
                           : Begin(sequence, alone, reserve, page_reserve, rows, step);
    if (!found) return false;

    if (!sequence.admitted) {
      sequence.admitted = true;
      sequence.cached_tokens = sequence.computed;
      counters.cached_tokens += sequence.computed;
      sequence.most_computed = sequence.computed;
    }
    counters.most_overtakes = std::max(counters.most_overtakes, sequence.overtakes);
    Dequeue(sequence);
    --num_waiting;
    sequence.phase = Phase::kRunning;
    sequence.progress_mark = sequence.most_computed;
    running.insert(std::upper_bound(running.begin(), running.end(), &sequence,
                                    [](const Sequence* a, const Sequence* b) {
                                      return RunsBefore(a->running_key(), b->running_key());
                                    }),
                   &sequence);
    GiveRows(sequence, 1);
    const int64_t most = MostRows(sequence, rows_left);
    if (MakeRoom(sequence, most, &step->commands)) GiveRows(sequence, most);
    return true;
  }

  // The most window pages that a sequence holds that goes on row by row.
  int64_t PagesRowByRow() const {
    return 1 + CeilDiv(pools.window - 1 + pools.rollback, kBlockTokens);
  }

  // From a saved state.
  bool Import(Sequence& sequence, bool alone, int64_t reserve, int64_t page_reserve,
              int64_t all_blocks, SchedulerStep* step) {
    if (!alone && (all_blocks + reserve > pools.available_blocks() ||
                   PagesRowByRow() + page_reserve > pools.available_window_pages()))
      return false;
    const size_t commands = step->commands.size();
    sequence.state = SequenceState::Restore(pools, sequence.image, &step->commands);
    if (!sequence.state.has_value()) return false;
    sequence.computed = sequence.committed = sequence.state->num_tokens();
    if (!MakeRoom(sequence, 1, &step->commands)) {
      step->commands.resize(commands);
      sequence.state.reset();
      return false;
    }
    DropImage(sequence);
    return true;
  }

  // From the longest prefix in the cache, or from nothing.
  bool Begin(Sequence& sequence, bool alone, int64_t reserve, int64_t page_reserve, int64_t rows,
             SchedulerStep* step) {
    // At least one row has to run, rows that owe their logits too, and so has the replayed part.
    int64_t limit = std::min(sequence.known() - 1, sequence.next_logit_row);
    if (options.replay_keep_tokens > 0) limit = std::min(limit, sequence.decoder_begin);
    if (!CachesPrefixes(sequence)) limit = 0;
    while (true) {
      const int64_t available = pools.available_blocks();
      SharedPrefix prefix;
      bool approximate = false;
      if (limit > 0) prefix = FindPrefix(sequence, limit, &approximate);
      const int64_t hit = prefix.num_tokens;
      sequence.state =
          hit > 0 ? SequenceState::Restore(pools, prefix) : SequenceState::Create(pools);
      if (!sequence.state.has_value()) return false;
      SequenceState& state = *sequence.state;
      const int64_t blocks = state.NeedFor(std::max<int64_t>(1, rows - hit)).blocks;
      const int64_t pages = state.NeedFor(1).window_pages;
      sequence.computed = approximate ? WindowBegin(hit) : hit;
      if ((alone || (blocks + reserve <= pools.available_blocks() &&
                     pages + page_reserve <= pools.available_window_pages())) &&
          MakeRoom(sequence, 1, &step->commands)) {
        sequence.committed = sequence.computed;
        sequence.published = hit / kBlockTokens;
        sequence.approximate = approximate;
        if (approximate) {
          sequence.window_begin = sequence.computed;
          sequence.entries_begin = hit;
        }
        return true;
      }
      // Units of the hit that only the cache used are not available while it is shared.
      sequence.lookup_blocks = blocks + available - pools.available_blocks();
      sequence.lookup_step = counters.steps;
      DropState(sequence);
      if (!alone || hit == 0) return false;
      // Alone it must run: a shared unit that is partly filled costs one more than it holds.
      limit = !approximate && hit % kBlockTokens != 0 ? hit / kBlockTokens * kBlockTokens : 0;
    }
  }

  // Rows of an approximate hit run from here on.
  int64_t WindowBegin(int64_t hit) const {
    return std::max<int64_t>(0, hit - options.approximate_hit_tokens);
  }

  SharedPrefix FindPrefix(const Sequence& sequence, int64_t limit, bool* approximate) {
    const std::span<const int32_t> tokens = sequence.tokens;
    SharedPrefix exact =
        prefix_cache->Find(sequence.spec.cache_salt, tokens, limit, WindowNeed::kExact);
    if (options.approximate_hit_tokens == 0 || exact.num_tokens >= limit - 1) return exact;
    SharedPrefix blocks =
        prefix_cache->Find(sequence.spec.cache_salt, tokens, limit, WindowNeed::kNone);
    // Worth it only where fewer rows have to run than after the exact hit.
    if (WindowBegin(blocks.num_tokens) <= exact.num_tokens) return exact;
    blocks.window_pages.clear();
    blocks.first_window_page = WindowBegin(blocks.num_tokens) / kBlockTokens;
    *approximate = true;
    return blocks;
  }

  void HandOut(SchedulerStep* step) {
    if (std::none_of(running.begin(), running.end(),
                     [](const Sequence* sequence) { return sequence->planned > 0; })) {
      // Moves of bytes without rows wait for the next step.
      std::swap(carried_commands, step->commands);
      step->commands.clear();
      return;
    }
    ++counters.steps;
    DI_CHECK_LT(num_flights, kMaxUncommittedSteps);
    std::vector<FlightChunk>& flight =
        flights[static_cast<size_t>((first_flight + num_flights) % kMaxUncommittedSteps)];
    flight.clear();
    ++num_flights;
    for (Sequence* s : running) {
      if (s->planned == 0) continue;
      const int64_t rows = std::exchange(s->planned, 0);
      const int64_t begin = s->computed;
      const int64_t end = begin + rows;
      const int64_t repeated = std::clamp<int64_t>(s->most_computed - begin, 0, rows);
      const bool samples = Samples(*s, end);
      step->chunks.push_back({.id = s->spec.id,
                              .context = s->spec.context,
                              .begin = begin,
                              .end = end,
                              .token_in_flight = begin >= std::ssize(s->tokens),
                              .samples = samples,
                              .num_logit_rows = LogitRows(*s, rows),
                              .num_recomputed = repeated,
                              .tokens = s->tokens,
                              .slot = s->state->slot(),
                              .blocks = s->state->blocks(),
                              .window_pages = s->state->window_pages(),
                              .first_window_page = s->state->first_window_page(),
                              .window_begin = s->window_begin,
                              .decoder_begin = s->decoder_begin,
                              .entries_begin = s->entries_begin});
      step->num_rows += rows;
      flight.push_back({s, end, samples});

      const int64_t fresh_begin = begin + repeated;
      const int64_t prompt_rows =
          std::max<int64_t>(0, std::min(end, s->prompt_tokens) - fresh_begin);
      counters.recomputed_tokens += repeated;
      counters.prompt_tokens += prompt_rows;
      counters.decode_tokens += end - fresh_begin - prompt_rows;

      s->computed = end;
      s->most_computed = std::max(s->most_computed, end);
      s->next_logit_row = std::max(s->next_logit_row, end);
      ++s->chunks_in_flight;
      if (samples) ++s->tokens_in_flight;
      // Its pages stay as they are until the next Extend, which is in a later step.
      s->state->Advance(std::max<int64_t>(0, end - s->state->num_tokens()));
    }
  }

  void Schedule(double now, SchedulerStep* step) {
    DI_CHECK_LT(num_flights, kMaxUncommittedSteps);
    step->Clear();
    ForgetEnded();
    std::swap(step->commands, carried_commands);
    rows_left = options.max_num_batched_tokens;
    logit_rows_left = options.max_prompt_logit_rows;
    cache_cleared = false;

    Expire(now, step);
    PreemptByForce(step);
    GiveFirstRows(step);
    GiveMoreRows(MayAdmit(), step);
    Admit(step);
    GiveMoreRows(/*someone_waits=*/false, step);
    HandOut(step);
  }

  void Commit(std::span<const ChunkResult> results, bool ran) {
    DI_CHECK_GE(num_flights, 1);
    const std::vector<FlightChunk>& flight = flights[static_cast<size_t>(first_flight)];
    DI_CHECK_EQ(results.size(), flight.size());
    for (size_t i = 0; i < flight.size(); ++i) {
      const FlightChunk& chunk = flight[i];
      Sequence& sequence = *chunk.sequence;
      DI_CHECK_EQ(results[i].id, sequence.spec.id);
      CommitChunk(sequence, chunk, results[i].token, ran);
    }
    first_flight = (first_flight + 1) % kMaxUncommittedSteps;
    --num_flights;
  }

  void CommitChunk(Sequence& sequence, const FlightChunk& chunk, int32_t token, bool ran) {
    --sequence.chunks_in_flight;
    if (chunk.samples) --sequence.tokens_in_flight;
    if (sequence.phase == Phase::kEnding) {
      if (!sequence.in_flight()) ended.push_back(sequence.spec.id);
      return;
    }
    if (chunk.samples && token >= 0) sequence.tokens.push_back(token);
    if (!ran || (chunk.samples && token < 0)) sequence.failed = true;
    if (!sequence.failed) {
      const bool prompt_has_run = sequence.most_committed >= sequence.prompt_tokens;
      sequence.most_committed = std::max(sequence.most_committed, chunk.end);
      // It runs on the state that the chunk was computed with: after a preemption it would not have
      // come back before this.
      if (sequence.phase == Phase::kRunning) {
        sequence.committed = chunk.end;
        // Others wait for this prompt: its end is worth keeping, too.
        Publish(sequence, /*is_end=*/!prompt_has_run && !sequence.followers.empty() &&
                              sequence.most_committed >= sequence.prompt_tokens);
      }
      if (!prompt_has_run && sequence.most_committed >= sequence.prompt_tokens)
        ReleaseFollowers(sequence);
    }
    if (sequence.phase == Phase::kWaiting) EnqueueAgain(sequence);
  }

  std::string FindViolation() const;
  std::string FindPoolViolation() const;

  const SchedulerOptions options;
  StatePools& pools;
  PrefixCache* const prefix_cache;
  int64_t max_sequence_tokens = 0;

  std::unordered_map<SeqId, std::unique_ptr<Sequence>> sequences;
  std::vector<Sequence*> running;     // in service order
  std::vector<WaitingEntry> waiting;  // in any order
  int64_t num_held = 0;
  int64_t num_waiting = 0;  // more than waiting.size(): some wait for a leader or their results
  std::vector<SeqId> ended;
  std::vector<Deadline> deadlines;  // a heap
  int64_t saved_blocks = 0;         // that the images together hold
  UserService users;
  int64_t next_arrival = 0;
  SchedulerCounters counters;

  std::array<std::vector<FlightChunk>, kMaxUncommittedSteps> flights;
  int64_t first_flight = 0;
  int64_t num_flights = 0;
  std::vector<StateCommand> carried_commands;

  // Of the step that is being made.
  int64_t rows_left = 0;
  int64_t logit_rows_left = 0;
  bool cache_cleared = false;
  std::vector<WaitingEntry> order;  // a heap
  std::vector<Sequence*> passed_over;
  std::vector<Sequence*> candidates;
};

// ---- Invariants
// ----------------------------------------------------------------------------------

std::string Scheduler::Impl::FindPoolViolation() const {
  // Every reference belongs to a state or to the cache.
  std::vector<int32_t> blocks(static_cast<size_t>(pools.blocks.size()));
  std::vector<int32_t> pages(static_cast<size_t>(pools.window_pages.size()));
  std::vector<int32_t> slots(static_cast<size_t>(pools.slots.size()));
  for (const Sequence* sequence : running) {
    for (const int32_t id : sequence->state->blocks()) ++blocks[static_cast<size_t>(id)];
    for (const int32_t id : sequence->state->window_pages()) ++pages[static_cast<size_t>(id)];
    ++slots[static_cast<size_t>(sequence->state->slot())];
  }
  const auto compare = [](const BlockPool& pool, const std::vector<int32_t>& owned,
                          const char* what) -> std::string {
    for (size_t i = 0; i < owned.size(); ++i) {
      const auto id = static_cast<int32_t>(i);
      const int32_t expected = owned[i] + (pool.cached(id) ? 1 : 0);
      if (pool.references(id) != expected)
        return fmt::format("{} {} has {} references, but {} owners", what, id, pool.references(id),
                           expected);
    }
    return pool.FindViolation();
  };
  if (std::string found = compare(pools.blocks, blocks, "block"); !found.empty()) return found;
  if (std::string found = compare(pools.window_pages, pages, "page"); !found.empty()) return found;
  if (std::string found = compare(pools.slots, slots, "slot"); !found.empty()) return found;
  return prefix_cache != nullptr ? prefix_cache->FindViolation() : std::string();
}

std::string Scheduler::Impl::FindViolation() const {
  int64_t held = 0;
  int64_t waits = 0;
  int64_t runs = 0;
  int64_t queued = 0;
  int64_t saved = 0;
  std::unordered_map<const Sequence*, int64_t> chunks;
  for (int64_t i = 0; i < num_flights; ++i)
    for (const FlightChunk& chunk :
         flights[static_cast<size_t>((first_flight + i) % kMaxUncommittedSteps)])
      ++chunks[chunk.sequence];
  for (const auto& [id, owned] : sequences) {
    const Sequence& s = *owned;
    held += s.phase == Phase::kHeld;
    waits += s.phase == Phase::kWaiting;
    runs += s.phase == Phase::kRunning;
    queued += s.waiting_index != kNowhere;
    if (s.image != nullptr) saved += CeilDiv(s.image->num_tokens, kBlockTokens);
    const auto fail = [&id = id](const char* what) {
      return fmt::format("sequence {} {}", id, what);
    };
    if (s.spec.id != id) return fail("is filed under another id");
    if ((s.phase == Phase::kRunning) != s.state.has_value())
      return fail("owns state without running, or runs without state");
    if (s.waiting_index != kNowhere &&
        (s.phase != Phase::kWaiting || waiting[s.waiting_index].sequence != &s))
      return fail("is in the waiting list at a wrong place");
    if (s.phase == Phase::kWaiting && s.waiting_index == kNowhere && s.leader == nullptr &&
        !s.in_flight() && !s.Done() && !s.failed)
      return fail("waits for nothing and is not in the waiting list");
    if (s.leader != nullptr && std::find(s.leader->followers.begin(), s.leader->followers.end(),
                                         &s) == s.leader->followers.end())
      return fail("is not known to its leader");
    const auto found = chunks.find(&s);
    if (s.chunks_in_flight != (found == chunks.end() ? 0 : found->second))
      return fail("counts other chunks in flight than there are");
    if (s.tokens_in_flight < 0 || s.tokens_in_flight > s.chunks_in_flight)
      return fail("has more tokens in flight than chunks");
    if (std::ssize(s.tokens) > s.prompt_tokens + s.max_new_tokens)
      return fail("has more tokens than it asked for");
    if (s.phase == Phase::kRunning) {
      const int64_t state_tokens = s.state->num_tokens();
      if (s.approximate ? s.computed > state_tokens : s.computed != state_tokens)
        return fail("and its state disagree about how many rows have run");
      if (s.committed > s.computed || s.computed > s.known())
        return fail("has computed more than is known");
      if (std::ssize(s.state->blocks()) * kBlockTokens < s.computed)
        return fail("has rows outside of its blocks");
    }
  }
  if (held != num_held || waits != num_waiting || runs != std::ssize(running) ||
      queued != std::ssize(waiting))
    return "the sequences of a phase are not as many as counted";
  if (runs > options.max_num_seqs) return "more sequences run than are allowed";
  if (saved != saved_blocks || saved > pools.blocks.size())
    return "saved states hold more blocks than are counted or allowed";
  for (size_t i = 0; i + 1 < running.size(); ++i)
    if (!RunsBefore(running[i]->running_key(), running[i + 1]->running_key()))
      return "the running sequences are not in service order";
  return FindPoolViolation();
}

// ---- The interface
// -------------------------------------------------------------------------------

Scheduler::Scheduler(const SchedulerOptions& options, StatePools& pools, PrefixCache* prefix_cache)
    : impl_(std::make_unique<Impl>(options, pools, prefix_cache)) {}

Scheduler::~Scheduler() = default;

int64_t Scheduler::max_sequence_tokens() const {
  return impl_->max_sequence_tokens;
}

Status Scheduler::Add(SequenceSpec spec, double /*now*/) {
  Impl& impl = *impl_;
  const auto prompt_tokens = static_cast<int64_t>(spec.prompt.size());
  if (prompt_tokens == 0) {
    return Fail(Code::kInvalidArgument, "the prompt has no tokens; at least one is needed.",
                "prompt");
  }
  if (prompt_tokens + (spec.max_new_tokens > 0 ? 1 : 0) > impl.max_sequence_tokens) {
    return Fail(Code::kResourceExhausted,
                fmt::format("the prompt has {} tokens, but the cache memory holds {} tokens for "
                            "prompt and output together.",
                            prompt_tokens, impl.max_sequence_tokens),
                "prompt");
  }
  // The id of a sequence that has ended is free.
  if (const auto found = impl.sequences.find(spec.id); found != impl.sequences.end()) {
    DI_CHECK(found->second->phase == Phase::kEnding && !found->second->in_flight());
    std::erase(impl.ended, spec.id);
    impl.sequences.erase(found);
  }
  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.spec = std::move(spec);
  sequence.tokens = std::exchange(sequence.spec.prompt, {});
  sequence.prompt_tokens = prompt_tokens;
  sequence.max_new_tokens =
      std::min(sequence.spec.max_new_tokens, impl.max_sequence_tokens - prompt_tokens);
  sequence.tokens.reserve(static_cast<size_t>(
      prompt_tokens + std::min(sequence.max_new_tokens, kReservedOutputTokens)));
  sequence.arrival = impl.next_arrival++;
  sequence.next_logit_row = std::min(sequence.spec.first_prompt_logit_row, prompt_tokens);
  if (sequence.owes_prompt_logits()) {
    sequence.next_logit_row = std::max<int64_t>(0, sequence.next_logit_row);
  } else {
    sequence.next_logit_row = std::numeric_limits<int64_t>::max();
    if (impl.options.replay_keep_tokens > 0 && sequence.spec.replay)
      sequence.decoder_begin =
          std::max<int64_t>(0, prompt_tokens - impl.options.replay_keep_tokens);
  }
  impl.sequences.emplace(sequence.spec.id, std::move(owned));
  impl.AddDeadline(sequence);
  const auto leader = impl.sequences.find(sequence.spec.leader);
  if (leader != impl.sequences.end() && leader->second.get() != &sequence &&
      leader->second->phase != Phase::kEnding &&
      leader->second->most_committed < leader->second->prompt_tokens) {
    sequence.leader = leader->second.get();
    sequence.leader->followers.push_back(&sequence);
  }
  if (sequence.spec.held) {
    ++impl.num_held;
  } else {
    impl.BecomeReady(sequence);
  }
  return {};
}

void Scheduler::Release(SeqId id) {
  Sequence& sequence = impl_->Get(id);
  if (sequence.phase != Phase::kHeld) return;
  --impl_->num_held;
  impl_->BecomeReady(sequence);
}

void Scheduler::Schedule(double now, SchedulerStep* step) {
  impl_->Schedule(now, step);
}

void Scheduler::Commit(std::span<const ChunkResult> results, bool ran) {
  impl_->Commit(results, ran);
}

void Scheduler::End(SeqId id) {
  impl_->End(impl_->Get(id));
}

bool Scheduler::InFlight(SeqId id) const {
  const auto found = impl_->sequences.find(id);
  return found != impl_->sequences.end() && found->second->in_flight();
}

const std::vector<int32_t>& Scheduler::tokens(SeqId id) const {
  return impl_->Get(id).tokens;
}

int64_t Scheduler::cached_tokens(SeqId id) const {
  return impl_->Get(id).cached_tokens;
}

int64_t Scheduler::preemptions(SeqId id) const {
  return impl_->Get(id).preemptions;
}

int64_t Scheduler::num_held() const {
  return impl_->num_held;
}

int64_t Scheduler::num_waiting() const {
  return impl_->num_waiting;
}

int64_t Scheduler::num_running() const {
  return static_cast<int64_t>(impl_->running.size());
}

bool Scheduler::idle() const {
  return impl_->sequences.size() == impl_->ended.size();
}

const SchedulerCounters& Scheduler::counters() const {
  return impl_->counters;
}

std::string Scheduler::FindViolation() const {
  return impl_->FindViolation();
}

}  // namespace deepinfer
