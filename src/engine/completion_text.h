// The text of one completion as its tokens come: whole characters only, nothing of a stop string,
// special tokens left out on request. What all calls return together is the text of the completion.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "deepinfer/sampling_params.h"
#include "engine/stop_scanner.h"
#include "text/incremental_decoder.h"
#include "text/tokenizer.h"

namespace deepinfer {

class CompletionText {
 public:
  // Both arguments must outlive the object.
  CompletionText(const Tokenizer& tokenizer, const SamplingParams& params);

  // Reads a token and appends the text that is decided now to `text`. `may_stop`: stop strings that
  // it completes count.
  void Push(int32_t token_id, bool may_stop, std::string* text);
  // The stop string that ended the text; nothing may be pushed after it.
  const std::optional<std::string>& stop_string() const {
    return stop_string_;
  }
  // Releases what was held back, unless a stop string ended the text.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  const SamplingParams& params_;
  IncrementalDecoder decoder_;
  StopScanner scanner_;
  std::string held_;  // decoded text that may be the beginning of a stop string
  std::optional<std::string> stop_string_;
};

}  // namespace deepinfer
