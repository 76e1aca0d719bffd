#include "sched/recorder.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <charconv>
#include <deque>
#include <iterator>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace deepinfer {
namespace {

constexpr std::string_view kFirstWords = "deepinfer-schedule 1";
// What a recording may ask for, so that reading one cannot take all memory.
constexpr int64_t kMostUnits = int64_t{1} << 24;
constexpr int64_t kMostSequences = int64_t{1} << 20;
constexpr size_t kChecksumChars = 10;  // " #" and eight digits

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Digest {
 public:
  void Number(int64_t value) {
    state_ = Mix(state_ + 0x9E3779B97F4A7C15u + static_cast<uint64_t>(value));
  }
  template <class Range>
  void Numbers(const Range& values) {
    Number(static_cast<int64_t>(values.size()));
    for (const auto& value : values) Number(value);
  }
  uint64_t value() const {
    return state_;
  }

 private:
  uint64_t state_ = 0;
};

// FNV-1a.
uint64_t Checksum(uint64_t before, std::string_view text) {
  uint64_t sum = before ^ 0xcbf29ce484222325u;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return sum;
}

std::string ChecksumWord(uint64_t checksum) {
  return fmt::format(" #{:08x}", static_cast<uint32_t>(checksum ^ (checksum >> 32)));
}

// Strings as hexadecimal digits after an "x", so that a word is never empty.
std::string StringWord(std::string_view text) {
  std::string word = "x";
  for (const char c : text)
    fmt::format_to(std::back_inserter(word), "{:02x}", static_cast<unsigned char>(c));
  return word;
}

// The words of one line; the first that cannot be read makes everything after it fail.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  bool ok() const {
    return ok_;
  }
  bool empty() const {
    return rest_.empty();
  }

  std::string_view Word() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    if (word.empty()) ok_ = false;
    return word;
  }
  template <class T>
  T Number() {
    const std::string_view word = Word();
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size()) ok_ = false;
    return ok_ ? value : T{};
  }
  int64_t Between(int64_t least, int64_t most) {
    const auto value = Number<int64_t>();
    if (value < least || value > most) ok_ = false;
    return ok_ ? value : least;
  }
  std::string String() {
    const std::string_view word = Word();
    std::string text;
    if (word.size() % 2 != 1 || word[0] != 'x') ok_ = false;
    for (size_t i = 1; ok_ && i + 1 < word.size(); i += 2) {
      unsigned value = 0;
      const auto [end, error] = std::from_chars(word.data() + i, word.data() + i + 2, value, 16);
      if (error != std::errc() || end != word.data() + i + 2) ok_ = false;
      text.push_back(static_cast<char>(value));
    }
    return text;
  }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

std::string OptionWords(const SchedulerOptions& o) {
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {}", o.max_num_seqs, o.max_num_batched_tokens,
                     o.max_chunk_tokens, o.max_prompt_logit_rows, int{o.prefix_caching},
                     o.replay_keep_tokens, o.approximate_hit_tokens,
                     int{o.preemption == PreemptionMode::kSave}, o.max_overtakes,
                     o.forced_preemption_interval, o.forced_preemption_seed);
}

SchedulerOptions ReadOptions(Words& words) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
  SchedulerOptions o;
  o.max_num_seqs = words.Between(1, kMostSequences);
  o.max_num_batched_tokens = words.Between(o.max_num_seqs, kMost);
  o.max_chunk_tokens = words.Between(0, kMost);
  o.max_prompt_logit_rows = words.Between(1, kMost);
  o.prefix_caching = words.Between(0, 1) == 1;
  o.replay_keep_tokens = words.Between(0, kMost);
  o.approximate_hit_tokens = words.Between(0, kMost);
  o.preemption = words.Between(0, 1) == 1 ? PreemptionMode::kSave : PreemptionMode::kRecompute;
  o.max_overtakes = words.Between(0, kMost);
  o.forced_preemption_interval = words.Between(0, kMost);
  o.forced_preemption_seed = words.Number<uint64_t>();
  return o;
}

// One replay: a scheduler with its pools, and what is needed to refuse calls that no run makes.
class Player {
 public:
  Player(const SchedulerOptions& options, std::unique_ptr<StatePools> pools, bool has_prefix_cache)
      : pools_(std::move(pools)) {
    if (has_prefix_cache) cache_ = std::make_unique<PrefixCache>(*pools_);
    scheduler_ = std::make_unique<Scheduler>(options, *pools_, cache_.get());
  }

  const SchedulerCounters& counters() const {
    return scheduler_->counters();
  }
  int64_t num_steps() const {
    return num_steps_;
  }
  // Why the last decision is another one than was recorded; empty: it is the same.
  const std::string& divergence() const {
    return divergence_;
  }

  // False if the line says what no run can say.
  bool Play(std::string_view line) {
    Words words(line);
    const std::string_view verb = words.Word();
    if (verb == "add") return Add(words);
    if (verb == "release") return Release(words);
    if (verb == "schedule") return Schedule(words);
    if (verb == "commit") return Commit(words);
    if (verb == "end") return End(words);
    return false;
  }

 private:
  bool Add(Words& words) {
    SequenceSpec spec;
    const auto now = words.Number<double>();
    spec.id = words.Number<int64_t>();
    spec.priority = words.Number<int32_t>();
    spec.deadline = words.Number<double>();
    spec.max_new_tokens = words.Number<int64_t>();
    spec.first_prompt_logit_row = words.Number<int64_t>();
    spec.leader = words.Number<int64_t>();
    spec.held = words.Between(0, 1) == 1;
    const auto kind = words.Between(0, 3);
    spec.use_prefix_cache = kind % 2 == 1;
    spec.replay = kind < 2;
    const bool accepted = words.Between(0, 1) == 1;
    spec.user = words.String();
    spec.cache_salt = words.String();
    while (words.ok() && !words.empty()) spec.prompt.push_back(words.Number<int32_t>());
    const SeqId id = spec.id;
    if (!words.ok() || living_.contains(id) || scheduler_->InFlight(id)) return false;
    const bool added = scheduler_->Add(std::move(spec), now).has_value();
    if (added) living_.insert(id);
    if (added != accepted) {
      divergence_ = fmt::format("sequence {} is {} now.", id, added ? "accepted" : "refused");
    }
    return true;
  }

  bool Release(Words& words) {
    const auto id = words.Number<int64_t>();
    if (!words.ok() || !living_.contains(id)) return false;
    scheduler_->Release(id);
    return true;
  }

  bool End(Words& words) {
    const auto id = words.Number<int64_t>();
    if (!words.ok()) return false;
    if (living_.erase(id) == 1) scheduler_->End(id);
    return true;
  }

  bool Schedule(Words& words) {
    const auto now = words.Number<double>();
    const auto rows = words.Number<int64_t>();
    const auto chunks = words.Number<int64_t>();
    const auto digest = words.Number<uint64_t>();
    if (!words.ok() || flights_.size() >= 2) return false;
    scheduler_->Schedule(now, &step_);
    for (const SeqId id : step_.expired) living_.erase(id);
    if (!step_.chunks.empty()) {
      ++num_steps_;
      std::vector<SeqId> ids;
      for (const PlannedChunk& chunk : step_.chunks) ids.push_back(chunk.id);
      flights_.push_back(std::move(ids));
    }
    if (step_.num_rows != rows || std::ssize(step_.chunks) != chunks) {
      divergence_ =
          fmt::format("the step has {} chunks with {} rows and was recorded with {} with {}.",
                      step_.chunks.size(), step_.num_rows, chunks, rows);
    } else if (DigestOf(step_) != digest) {
      divergence_ = fmt::format(
          "the step has {} chunks with {} rows as it was recorded, but not the same ones.", chunks,
          rows);
    }
    return true;
  }

  bool Commit(Words& words) {
    const bool ran = words.Between(0, 1) == 1;
    if (flights_.empty()) return false;
    std::vector<Scheduler::ChunkResult> results;
    for (const SeqId id : flights_.front()) results.push_back({id, words.Number<int32_t>()});
    if (!words.ok() || !words.empty()) return false;
    flights_.pop_front();
    scheduler_->Commit(results, ran);
    return true;
  }

  std::unique_ptr<StatePools> pools_;
  std::unique_ptr<PrefixCache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  SchedulerStep step_;
  std::unordered_set<SeqId> living_;
  std::deque<std::vector<SeqId>> flights_;
  int64_t num_steps_ = 0;
  std::string divergence_;
};

}  // namespace

uint64_t DigestOf(const SchedulerStep& step) {
  Digest digest;
  digest.Numbers(step.expired);
  for (const StateCommand& command : step.commands) {
    digest.Number(static_cast<int64_t>(command.kind));
    digest.Number(command.source);
    digest.Number(command.target);
    digest.Number(command.num_tokens);
    digest.Number(command.slot);
    digest.Numbers(command.blocks);
    digest.Numbers(command.window_pages);
    digest.Number(command.first_window_page);
  }
  for (const PlannedChunk& chunk : step.chunks) {
    digest.Number(chunk.id);
    digest.Number(chunk.begin);
    digest.Number(chunk.end);
    digest.Number(int64_t{chunk.token_in_flight} * 2 + int64_t{chunk.samples});
    digest.Number(chunk.num_logit_rows);
    digest.Number(chunk.num_recomputed);
    digest.Number(chunk.slot);
    digest.Numbers(chunk.blocks);
    digest.Numbers(chunk.window_pages);
    digest.Number(chunk.first_window_page);
    digest.Number(chunk.window_begin);
    digest.Number(chunk.decoder_begin);
    digest.Number(chunk.entries_begin);
  }
  return digest.value();
}

ScheduleRecorder::ScheduleRecorder(const SchedulerOptions& options, const StatePools& pools,
                                   bool has_prefix_cache, int64_t max_bytes)
    : max_bytes_(max_bytes) {
  Finish(std::string(kFirstWords));
  Finish(fmt::format("pools {} {} {} {} {} {} options {}", pools.blocks.size(),
                     pools.window_pages.size(), pools.slots.size(), pools.window, pools.rollback,
                     int{has_prefix_cache}, OptionWords(options)));
}

void ScheduleRecorder::Finish(std::string line) {
  if (full_) return;
  num_bytes_ += static_cast<int64_t>(line.size() + kChecksumChars + 1);
  if (num_bytes_ > max_bytes_) {
    full_ = true;
    return;
  }
  checksum_ = Checksum(checksum_, line);
  line += ChecksumWord(checksum_);
  line += '\n';
  text_ += line;
}

std::string ScheduleRecorder::TakeText() {
  return std::exchange(text_, {});
}

void ScheduleRecorder::Add(const SequenceSpec& spec, double now, bool accepted) {
  if (full_) return;
  std::string line =
      fmt::format("add {} {} {} {} {} {} {} {} {} {} {} {}", now, spec.id, spec.priority,
                  spec.deadline, spec.max_new_tokens, spec.first_prompt_logit_row, spec.leader,
                  int{spec.held}, int{spec.use_prefix_cache} + (spec.replay ? 0 : 2), int{accepted},
                  StringWord(spec.user), StringWord(spec.cache_salt));
  for (const int32_t token : spec.prompt) fmt::format_to(std::back_inserter(line), " {}", token);
  Finish(std::move(line));
}

void ScheduleRecorder::Release(SeqId id) {
  Finish(fmt::format("release {}", id));
}

void ScheduleRecorder::Schedule(double now, const SchedulerStep& step) {
  if (full_) return;
  Finish(
      fmt::format("schedule {} {} {} {}", now, step.num_rows, step.chunks.size(), DigestOf(step)));
}

void ScheduleRecorder::Commit(std::span<const Scheduler::ChunkResult> results, bool ran) {
  if (full_) return;
  std::string line = fmt::format("commit {}", int{ran});
  for (const Scheduler::ChunkResult& result : results)
    fmt::format_to(std::back_inserter(line), " {}", result.token);
  Finish(std::move(line));
}

void ScheduleRecorder::End(SeqId id) {
  Finish(fmt::format("end {}", id));
}

Result<ScheduleReplay> ReplaySchedule(std::string_view text) {
  ScheduleReplay replay;
  std::unique_ptr<Player> player;
  uint64_t checksum = 0;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos || end < kChecksumChars) {
      return Fail(Code::kDataLoss, fmt::format("line {} of the recording is incomplete.", number));
    }
    const std::string_view line = text.substr(0, end - kChecksumChars);
    const std::string_view check = text.substr(end - kChecksumChars, kChecksumChars);
    text.remove_prefix(end + 1);
    checksum = Checksum(checksum, line);
    if (number == 1 && line != kFirstWords) {
      return Fail(Code::kUnsupported,
                  fmt::format("the text does not begin with '{}': it is no recording of the "
                              "scheduler, or one of another version.",
                              kFirstWords));
    }
    if (check != ChecksumWord(checksum)) {
      return Fail(Code::kDataLoss,
                  fmt::format("line {} of the recording, or one before it, has been changed: its "
                              "checksum does not fit.",
                              number));
    }
    if (number == 1) continue;
    bool valid = true;
    if (number == 2) {
      Words words(line);
      valid = words.Word() == "pools";
      const int64_t blocks = words.Between(0, kMostUnits);
      const int64_t pages = words.Between(0, kMostUnits);
      const int64_t slots = words.Between(0, kMostUnits);
      const int64_t window = words.Between(1, kMostUnits);
      const int64_t rollback = words.Between(0, kMostUnits);
      const bool has_prefix_cache = words.Between(0, 1) == 1;
      valid = valid && words.Word() == "options";
      const SchedulerOptions options = ReadOptions(words);
      valid = valid && words.ok() && words.empty();
      if (valid) {
        player = std::make_unique<Player>(
            options, std::make_unique<StatePools>(blocks, pages, slots, window, rollback),
            has_prefix_cache);
      }
    } else {
      valid = player->Play(line);
      ++replay.num_calls;
    }
    if (!valid) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("line {} of the recording says what no run can say: '{}'.", number,
                              line.substr(0, 80)));
    }
    if (!player->divergence().empty()) {
      replay.first_divergence = {number, player->divergence()};
      break;
    }
  }
  if (player == nullptr) {
    return Fail(Code::kDataLoss, "the recording ends before it describes the pools.");
  }
  replay.num_steps = player->num_steps();
  replay.counters = player->counters();
  return replay;
}

}  // namespace deepinfer
