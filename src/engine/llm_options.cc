#include <fmt/core.h>

#include "deepinfer/llm.h"

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
  return problems;
}

}  // namespace deepinfer
