// Decides which rows run in the next step. Pure logic over numbers and token ids: no device types,
// no clock, no threads, no text; time comes in as an argument, and the same calls give the same
// decisions. Owns the known tokens and the state (SequenceState) of every sequence and publishes to
// and reuses from the prefix cache. Called by the engine. Contract page: docs/scheduler.md.
//
// Life of a sequence:
//
//   Add --> held --Release--> waiting --Schedule--> running --End--> (gone once nothing is in
//   flight)
//                                ^                     |
//                                +----- preempted -----+
//
// Invariants: a sequence is in exactly one of held, waiting, running, ending. Waiting sequences own
// no state. Rows are planned only where the state has room. The first sequence in service order can
// always run: everything after it can be preempted for it, and Add refuses what does not fit the
// pools alone. So nothing waits for ever, and no two sequences wait for each other.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "state/prefix_cache.h"
#include "state/sequence_state.h"
#include "state/state_command.h"

namespace deepinfer {

enum class PreemptionMode : uint8_t {
  kRecompute,  // state is dropped (what the prefix cache keeps is found again) and rows run again
  kSave,       // state is exported to host memory and imported later, as long as all images
               // together hold no more blocks than the pool has; else as kRecompute
};

struct SchedulerOptions {
  int64_t max_num_seqs = 64;             // sequences in one step
  int64_t max_num_batched_tokens = 512;  // rows in one step; at least max_num_seqs
  int64_t max_chunk_tokens = 0;          // rows of one sequence in one step; 0: no limit of its own
  int64_t max_prompt_logit_rows = 256;   // rows whose logits are wanted beyond one per sequence
  bool prefix_caching = true;
  // Decoder bounded replay: the last tokens of a prompt that run the decoder half; 0: off.
  int64_t replay_keep_tokens = 0;
  // Prefix hits without window pages: recompute that many tokens before the hit with a cut window
  // (not exact); 0: exact hits only.
  int64_t approximate_hit_tokens = 0;
  PreemptionMode preemption = PreemptionMode::kRecompute;
  // A waiting sequence that others have overtaken this often because it did not fit is served next,
  // and nothing is admitted before it.
  int64_t max_overtakes = 64;
  // Test hook for the identity table: every n-th step preempts a running sequence chosen by a
  // counter-based draw from this seed; 0: never.
  int64_t forced_preemption_interval = 0;
  uint64_t forced_preemption_seed = 0;
};

using SeqId = int64_t;

// What the scheduler needs to know about a sequence when it comes.
struct SequenceSpec {
  SeqId id = 0;                                               // unique among living sequences
  std::string user = {};                                      // fairness is between users
  int32_t priority = 0;                                       // larger: served earlier
  double deadline = std::numeric_limits<double>::infinity();  // clock value
  std::vector<int32_t> prompt = {};                           // at least one token
  int64_t max_new_tokens = 0;                                 // 0: the prompt is scored only
  std::string cache_salt = {};  // prefixes are shared between equal salts only
  bool use_prefix_cache = true;
  bool replay = true;  // false: all of the prompt runs the decoder half, whatever the options say
  // Logits of prompt rows [first_prompt_logit_row, prompt.size() - 1) are wanted; at least
  // prompt.size() - 1: none. Such a sequence runs whole: no prefix hit beyond the first of these
  // rows, no replay.
  int64_t first_prompt_logit_row = std::numeric_limits<int64_t>::max();
  // Another sequence with the same prompt whose prompt must have run before this one is worth
  // starting (n > 1); -1: none. Ignored once that sequence is gone.
  SeqId leader = -1;
  bool held = false;  // not ready (image, grammar) until Release
  // The caller's own, handed back with every chunk; not looked at.
  void* context = nullptr;
};

// One sequence's rows in a step.
struct PlannedChunk {
  SeqId id = 0;
  void* context = nullptr;
  int64_t begin = 0;  // tokens [begin, end) of prompt + output
  int64_t end = 0;
  // The one row's token is still being sampled by the step before; begin + 1 == end.
  bool token_in_flight = false;
  bool samples = false;  // the last row draws a token
  int64_t num_logit_rows =
      0;  // last rows whose logits are wanted, the one that is sampled included
  int64_t num_recomputed = 0;  // rows that have run before
  // Valid until the next call that changes the scheduler: what is known of prompt and output, and
  // the state.
  std::span<const int32_t> tokens;
  int32_t slot = -1;
  std::span<const int32_t> blocks;
  std::span<const int32_t> window_pages;
  int64_t first_window_page = 0;
  int64_t window_begin = 0;
  int64_t decoder_begin = 0;
  int64_t entries_begin = 0;
};

struct SchedulerStep {
  std::vector<StateCommand> commands;
  std::vector<PlannedChunk> chunks;
  std::vector<SeqId> expired;  // sequences whose deadline has passed: End has been done for them
  int64_t num_rows = 0;

  void Clear() {
    commands.clear();
    chunks.clear();
    expired.clear();
    num_rows = 0;
  }
};

struct SchedulerCounters {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;      // prompt rows planned for the first time
  int64_t decode_tokens = 0;      // rows of output tokens planned for the first time
  int64_t recomputed_tokens = 0;  // rows planned again after a preemption
  int64_t cached_tokens = 0;      // prompt tokens taken from the prefix cache at first admission
  int64_t preemptions = 0;
  int64_t preemptions_saved = 0;  // among them, with an image
  int64_t expired = 0;
  int64_t most_overtakes = 0;  // of any admitted sequence
};

class Scheduler {
 public:
  // `pools` and `prefix_cache` (may be null: no caching) must outlive the scheduler.
  Scheduler(const SchedulerOptions& options, StatePools& pools, PrefixCache* prefix_cache);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The largest prompt + output of one sequence that the pools can hold.
  int64_t max_sequence_tokens() const;

  // Errors, with nothing changed: kResourceExhausted if the sequence can never fit, that is if its
  // prompt, and one output token if it wants any, exceed max_sequence_tokens(); kInvalidArgument if
  // the prompt is empty. No row is planned beyond max_sequence_tokens().
  Status Add(SequenceSpec spec, double now);
  // A held sequence is ready.
  void Release(SeqId id);

  // Plans one step: expires deadlines, preempts, admits, hands out rows. `step` is cleared first;
  // its vectors are reused. Empty chunks: nothing can run until Commit, Release or Add. Rows of the
  // step count as run from here on: a sequence's next rows may be planned before Commit reports the
  // tokens of this step. At most two steps with chunks are uncommitted at any time.
  void Schedule(double now, SchedulerStep* step);

  // The results of the oldest step that has not been committed: for each chunk in order, the token
  // it sampled, or -1. Sequences that ended meanwhile ignore it. Appends tokens, and publishes what
  // has become exact and complete to the prefix cache. Steps without chunks are not committed.
  // `ran` false: the step failed, tokens are -1, and the caller ends its sequences; nothing that
  // they computed in it or after it is published.
  struct ChunkResult {
    SeqId id = 0;
    int32_t token = -1;
  };
  void Commit(std::span<const ChunkResult> results, bool ran = true);

  // Ends a sequence in any phase: what it computed stays in the prefix cache, its state is given
  // back. Its id may be used again once InFlight is false; until then, and until the next Schedule,
  // it can be asked about. Does nothing if it has ended already.
  void End(SeqId id);
  bool InFlight(SeqId id) const;  // rows of it are in a step that has not been committed

  // Prompt and output known so far.
  const std::vector<int32_t>& tokens(SeqId id) const;
  int64_t cached_tokens(SeqId id) const;  // of the prompt, at first admission
  int64_t preemptions(SeqId id) const;

  int64_t num_held() const;
  int64_t num_waiting() const;
  int64_t num_running() const;
  bool idle() const;  // no sequence is left
  const SchedulerCounters& counters() const;

  // Empty, or what is wrong with the invariants (pools and prefix cache included).
  std::string FindViolation() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deepinfer
