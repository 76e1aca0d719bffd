// Text generation with a DeepSeek-V4.1-Flash checkpoint: load once, then hand in batches of
// requests. Part of the public interface.
//
//   auto llm = deepinfer::LLM::Load({.model_dir = "/models/DeepSeek-V4.1-Flash"});
//   if (!llm) { ... llm.error().message ... }
//   std::vector<deepinfer::Request> requests(1);
//   requests[0].prompt = "The capital of France is";
//   for (const deepinfer::RequestOutput& output : (*llm)->Generate(requests)) ...
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "deepinfer/chat.h"
#include "deepinfer/error.h"
#include "deepinfer/request_output.h"
#include "deepinfer/sampling_params.h"
#include "deepinfer/selfcheck.h"
#include "deepinfer/statistics.h"

namespace deepinfer {

struct Request {
  std::string id;  // returned in the output; not interpreted
  // A text (special tokens are recognised in it, and the beginning-of-sentence token is put in
  // front unless it is there), token ids as they are, or a conversation. The answer to a
  // conversation is parsed: CompletionOutput::message. Chat::tools that are forced or strict, and
  // Chat::response_format where there are no tools, are enforced as a structured output is, after
  // the reasoning.
  std::variant<std::string, std::vector<int64_t>, Chat> prompt;
  SamplingParams sampling_params;
  // Who asks: work is shared out fairly between users. Any text of at most 256 bytes.
  std::string user_id;
  // Requests with a larger number are served first; -1,000,000 ... 1,000,000.
  int64_t priority = 0;
  // Seconds from the moment the request is handed in after which it ends with
  // FinishReason::kDeadline; more than 0. Absent: no limit.
  std::optional<double> timeout_seconds;
  // Prefixes in the cache are shared only between requests with the same salt; at most 256 bytes.
  std::string cache_salt;
};

enum class NumericsProfile : uint8_t {
  kProduction,  // the rounding points of the published serving engine
  kReference,   // those of the vendor's small reference program, for comparisons
};

enum class DecoderReplay : uint8_t {
  kOff,
  kMask,     // the results of kCompact with the work of kOff: for comparisons
  kCompact,  // rows before the kept ones leave the model where its decoder half begins
};

struct LLMOptions {
  static constexpr int kMaxThreads = 1024;
  static constexpr int64_t kMaxTokens = int64_t{1} << 36;  // of a request, and of the cache
  static constexpr int64_t kMaxNumSeqs = 4096;
  static constexpr int64_t kMaxNumBatchedTokens = 1 << 20;

  std::string model_dir;  // checkpoint directory as published
  NumericsProfile numerics = NumericsProfile::kProduction;
  // "cpu", "cuda:N" (or "cuda" for the first), or "auto": the first CUDA device if there is one
  // that this build can use, else the CPU.
  std::string device = "auto";
  // Of a CUDA device. The Engram tables in its own memory instead of page-locked host memory, and
  // decoding steps launched kernel by kernel instead of as recorded graphs. Neither changes
  // outputs.
  bool engram_on_device = false;
  bool cuda_graphs = true;
  // 0: one per core this process may use; at most 1,024. Beside a CUDA device: for work of the
  // host.
  int num_threads = 0;
  int64_t max_model_len =
      0;  // prompt + output of a request; 0: what the model supports and the cache holds
  int64_t max_num_seqs = 64;             // sequences that run at once; 1 ... 4,096
  int64_t max_num_batched_tokens = 512;  // rows of a step; max_num_seqs ... 1,048,576
  // Capacity of the cache over all sequences, rounded up to blocks of 128 tokens; 0: chosen from
  // the machine's memory.
  int64_t cache_tokens = 0;

  // The next step is planned and started before the tokens of the last one are known. Changes no
  // output.
  bool async_scheduling = true;
  // Beginnings of earlier sequences that are still in the cache are not computed again. Changes no
  // output.
  bool prefix_caching = true;
  // Tokens that are computed again with a cut window where a cached prefix has lost its window keys
  // (the others are reused); 0: only hits that change no output. Otherwise at least 134 for the
  // released model (window + 6), and outputs depend on what is in the cache. Needs prefix_caching.
  int64_t approximate_hit_tokens = 0;
  // Only the last tokens of a prompt run the decoder half: nearly half the work of a long prompt.
  // Outputs are those of the truncated function, whatever the batch, the chunks and the cache, and
  // those of the whole model for prompts no longer than replay_keep_tokens.
  DecoderReplay decoder_replay = DecoderReplay::kOff;
  // Tokens that run it; 0: window + 12, which is 140 for the released model. Otherwise at least
  // window + 6. 0 while decoder_replay is off.
  int64_t replay_keep_tokens = 0;
  // How a sequence gives its memory up when it runs out: its state is computed again later, or kept
  // in host memory. Changes no output.
  bool preempt_by_saving = false;
  // Rows of one prompt in one step; 0: as many as max_num_batched_tokens leaves. Changes no output.
  int64_t max_chunk_tokens = 0;
  // Window keys, compressed keys and index keys as bf16 values instead of packed codes: two to four
  // times the memory. Changes no output.
  bool bf16_cache = false;
  // Keep a bounded record of what happened when, for WriteTrace.
  bool record_trace = false;
  // Keep a bounded record of what the scheduler was told and decided, for TakeSchedule.
  bool record_schedule = false;

  // Every problem, each with the field's name.
  std::vector<Error> Validate() const;
};

// A piece of output. Views are valid during the callback.
struct StreamEvent {
  size_t request = 0;                                // index into the requests
  int64_t completion = 0;                            // 0 ... n-1
  std::string_view text;                             // new text: whole characters only
  std::string_view reasoning;                        // of a conversation's answer
  std::span<const int32_t> token_ids;                // new tokens
  FinishReason finish_reason = FinishReason::kNone;  // set in the completion's last event
};

struct Progress {
  int64_t requests_done = 0;
  int64_t requests_total = 0;     // -1: not known yet, because a source still has requests
  int64_t prompt_tokens = 0;      // computed so far
  int64_t cached_tokens = 0;      // prompt tokens that were in the prefix cache
  int64_t completion_tokens = 0;  // generated so far
  int64_t running = 0;            // sequences
};

// All callbacks run on the thread that called Generate or GenerateStream; empty ones are skipped.
struct GenerateCallbacks {
  std::function<void(const StreamEvent&)> on_text;
  // A request has ended; `index` is its place, counted from 0. Called once per request, in the
  // order in which they end.
  std::function<void(size_t index, const RequestOutput& output)> on_finished;
  // After each step. Returning false stops: requests that were handed over end with
  // FinishReason::kAbort, the others of a list with an error of code kCancelled.
  std::function<bool(const Progress&)> on_progress;
};

// What a source answers when it is asked for its next request.
struct NoRequestYet {};   // there may be one later: ask again
struct EndOfRequests {};  // there is none any more; the source is not asked again
using NextRequest = std::variant<Request, NoRequestYet, EndOfRequests>;

// Hands out requests one by one, so that a job need not fit in memory. With `may_wait` nothing else
// is left to do and the call may take as long as it needs; without it requests are running, and a
// source that would have to wait answers NoRequestYet.
using RequestSource = std::function<NextRequest(bool may_wait)>;

class LLM {
 public:
  // Loads configuration, tokenizer and weights.
  static Result<std::unique_ptr<LLM>> Load(const LLMOptions& options);
  ~LLM();
  LLM(const LLM&) = delete;
  LLM& operator=(const LLM&) = delete;

  // Runs all requests and returns one output for each, in their order. What is wrong with a request
  // is reported in its output alone: RequestOutput::error if it could not start, else
  // CompletionOutput::error. One call at a time.
  std::vector<RequestOutput> Generate(std::span<const Request> requests,
                                      const GenerateCallbacks& callbacks = {});

  // Runs what the source hands out, asking for a request only when there is room for it and for a
  // few more. Requests are numbered 0, 1, ... as they are taken. Outputs go to on_finished and are
  // not kept, so memory is bounded by what runs. One call at a time.
  void GenerateStream(const RequestSource& next, const GenerateCallbacks& callbacks);

  // Text to ids without a beginning-of-sentence token; with `parse_special`, special tokens in the
  // text are recognised.
  Result<std::vector<int32_t>> Encode(std::string_view text, bool parse_special = true) const;
  // Ids to text; what is not UTF-8 becomes U+FFFD.
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens = false) const;

  // Runs made-up requests in many ways and compares (deepinfer/selfcheck.h). Errors:
  // kInvalidArgument for bad options. Empties the prefix cache. One call at a time.
  Result<SelfcheckReport> Selfcheck(const SelfcheckOptions& options,
                                    const SelfcheckCallback& progress = {});

  // What has been done since Load; from any thread.
  StatisticsSnapshot Statistics() const;
  // Counts a request that the caller refused itself, for instance because what it was read from is
  // no request, so that the statistics have every request that came in. From any thread.
  void CountRefused();
  // Hands the recorded trace over in pieces, as JSON for a trace viewer, until `write` returns
  // false. Nothing without LLMOptions::record_trace.
  void WriteTrace(const std::function<bool(std::string_view piece)>& write) const;

  // What the scheduler was told and decided since the last call: text that replays without a model
  // (`deepinfer replay-schedule`). It holds prompts and outputs as token ids. Not during Generate.
  std::string TakeSchedule();

  int64_t vocab_size() const;
  // The largest prompt + output of a request.
  int64_t max_model_len() const;

 private:
  LLM();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deepinfer
