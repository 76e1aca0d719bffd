#include "engine/llm_options.h"

#include <fmt/core.h>

#include <utility>

#include "model/decoder_replay.h"
#include "runtime/memory_plan.h"

namespace deepinfer {

std::vector<Error> LLMOptions::Validate() const {
  std::vector<Error> problems;
  const auto check = [&](const char* field, int64_t value, int64_t low, int64_t high,
                         const char* note) {
    if (value >= low && value <= high) return;
    problems.push_back(Error{
        Code::kInvalidArgument,
        fmt::format("{} is {}; allowed are {} ... {}{}.", field, value, low, high, note), field});
  };
  if (model_dir.empty()) {
    problems.push_back(Error{Code::kInvalidArgument,
                             "model_dir is empty; it names a checkpoint directory.", "model_dir"});
  }
  check("num_threads", num_threads, 0, kMaxThreads, " (0: one per core)");
  check("max_model_len", max_model_len, 0, kMaxTokens, " (0: as the model and the cache allow)");
  check("max_num_seqs", max_num_seqs, 1, kMaxNumSeqs, "");
  check("max_num_batched_tokens", max_num_batched_tokens, 1, kMaxNumBatchedTokens, "");
  check("max_chunk_tokens", max_chunk_tokens, 0, kMaxNumBatchedTokens, " (0: no limit of its own)");
  check("replay_keep_tokens", replay_keep_tokens, 0, kMaxTokens, " (0: window + 12)");
  check("approximate_hit_tokens", approximate_hit_tokens, 0, kMaxTokens, " (0: off)");
  check("cache_tokens", cache_tokens, 0, kMaxTokens, " (0: chosen from the machine's memory)");
  if (problems.empty() && max_num_batched_tokens < max_num_seqs) {
    problems.push_back(Error{
        Code::kInvalidArgument,
        fmt::format("max_num_batched_tokens is {}; allowed is at least max_num_seqs, which is {}.",
                    max_num_batched_tokens, max_num_seqs),
        "max_num_batched_tokens"});
  }
  if (decoder_replay == DecoderReplay::kOff && replay_keep_tokens > 0) {
    problems.push_back(
        Error{Code::kInvalidArgument,
              fmt::format("replay_keep_tokens is {}, but decoder_replay is off; it has a meaning "
                          "with mask and compact only.",
                          replay_keep_tokens),
              "replay_keep_tokens"});
  }
  if (!prefix_caching && approximate_hit_tokens > 0) {
    problems.push_back(
        Error{Code::kInvalidArgument,
              fmt::format("approximate_hit_tokens is {}, but prefix_caching is off; without a "
                          "prefix cache there are no hits.",
                          approximate_hit_tokens),
              "approximate_hit_tokens"});
  }
  return problems;
}

Status CheckOptions(const LLMOptions& options) {
  const std::vector<Error> problems = options.Validate();
  if (problems.empty()) return {};
  return tl::unexpected<Error>(Joined(problems));
}

Status CheckTailTokens(const ModelConfig& config, const char* field, int64_t tokens) {
  const int64_t shortest = config.sliding_window + kRollbackTokens;
  if (tokens == 0 || tokens >= shortest) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is {}; allowed are 0 or at least {} (the window of {} tokens and {} "
                          "that a sequence may be set back by).",
                          field, tokens, shortest, config.sliding_window, kRollbackTokens),
              field);
}

int64_t DefaultTailTokens(const ModelConfig& config) {
  return config.sliding_window + 2 * kRollbackTokens;
}

Status CheckOptionsForModel(const LLMOptions& options, const ModelConfig& config) {
  DI_RETURN_IF_ERROR(CheckMaxModelLen(config, options.max_model_len));
  DI_RETURN_IF_ERROR(CheckTailTokens(config, "replay_keep_tokens", options.replay_keep_tokens));
  DI_RETURN_IF_ERROR(
      CheckTailTokens(config, "approximate_hit_tokens", options.approximate_hit_tokens));
  if (options.decoder_replay != DecoderReplay::kOff) return CheckDecoderReplay(config);
  return {};
}

}  // namespace deepinfer
