// How the tokens of one request are chosen and when it ends. Defaults are neutral: temperature 1,
// no filter, no penalty. docs/sampling.md has the order of operations. Part of the public
// interface.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "deepinfer/error.h"
#include "deepinfer/structured_output.h"

namespace deepinfer {

// What reported log-probabilities describe.
enum class LogprobsMode : uint8_t {
  kRaw,        // the model's own distribution: log-softmax of the unmodified logits
  kProcessed,  // the distribution that was drawn from, after masks, penalties, temperature and
               // filters
};

struct SamplingParams {
  // 0 ... 100. Below 1e-5 the choice is greedy: the largest logit, the lowest id among equals.
  double temperature = 1.0;
  // Only the k most likely tokens; -1 (all of them) or 1 ... 2^31-1.
  int64_t top_k = -1;
  // Only the most likely tokens until their mass exceeds this; (0, 1].
  double top_p = 1.0;
  // Only tokens at least this fraction as likely as the most likely one; [0, 1].
  double min_p = 0.0;

  // Subtracted once from the logit of every token in the output so far; [-2, 2].
  double presence_penalty = 0.0;
  // Subtracted once per occurrence in the output so far; [-2, 2].
  double frequency_penalty = 0.0;
  // Divides positive and multiplies negative logits of tokens in the prompt or the output; (0, 10].
  double repetition_penalty = 1.0;
  // Added to single tokens' logits; -100 ... 100.
  std::map<int64_t, double> logit_bias;
  // When present, no other token can be drawn; not empty.
  std::optional<std::vector<int64_t>> allowed_token_ids;
  // Texts, and token sequences, that must not appear in the output. Texts are turned into tokens
  // with and without a leading space; other tokenisations of the same text are not caught.
  std::vector<std::string> bad_words;
  std::vector<std::vector<int64_t>> bad_words_token_ids;

  // What the output must look like; present together with other masks, both apply.
  std::optional<StructuredOutput> structured_output;

  // No end token can be drawn, and no stop string counts, before this many output tokens; 0 ...
  // 2^31-1.
  int64_t min_tokens = 0;
  // Output tokens at most; 0 ... 2^31-1, absent: as many as the context has room for. 0 scores the
  // prompt only.
  std::optional<int64_t> max_tokens;
  // Output ends when one of these appears in the text; at most 64 of 1 ... 1,024 bytes.
  std::vector<std::string> stop;
  // Further tokens that end the output; at most 1,024.
  std::vector<int64_t> stop_token_ids;
  // Keeps the stop string that ended the output in the text.
  bool include_stop_str_in_output = false;
  // Goes on after the model's own end tokens (all of them); stop_token_ids still count.
  bool ignore_eos = false;

  // Independent completions of the prompt; 1 ... 1,024.
  int64_t n = 1;
  // 0: the log-probability of each output token; N: also the N most likely tokens'. Absent: none. 0
  // ... 1,000.
  std::optional<int64_t> logprobs = 0;
  // The same for the prompt's tokens after the first. Absent: none.
  std::optional<int64_t> prompt_logprobs;
  LogprobsMode logprobs_mode = LogprobsMode::kRaw;

  // The random numbers of a request depend on this and on token positions only. Absent: a fresh one
  // is drawn for each request and reported in its output.
  std::optional<uint64_t> seq_seed;
  // Special tokens leave no text.
  bool skip_special_tokens = true;

  // Every problem, in field order; empty when the parameters can be used. Each error's field is the
  // parameter's name, and its message names the value and what is allowed. With `vocab_size` > 0,
  // token ids are checked against it too.
  std::vector<Error> Validate(int64_t vocab_size = 0) const;

  bool greedy() const {
    return temperature < 1e-5;
  }
};

}  // namespace deepinfer
