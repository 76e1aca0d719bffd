// The answer of one chat completion as its tokens come: reasoning, content and tool calls, read by
// the streaming parser, and the message that they add up to. The counterpart of CompletionText for
// requests that are conversations. One object per completion, one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "deepinfer/chat.h"
#include "deepinfer/request_output.h"
#include "deepinfer/sampling_params.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace deepinfer {

class ChatAnswer {
 public:
  // `tokenizer` and `params` must outlive the object. `options` say where the answer starts; its
  // stop strings come from `params`. `seed` makes the ids of calls.
  ChatAnswer(const Tokenizer& tokenizer, const SamplingParams& params, OutputParserOptions options,
             uint64_t seed);

  // Reads a token and appends what it decides. `may_stop`: stop strings that it completes count.
  void Push(int32_t token_id, bool may_stop, std::string* content, std::string* reasoning);
  // The stop string that ended the content; nothing may be pushed after it.
  const std::optional<std::string>& stop_string() const {
    return parser_.stop_string();
  }
  // Releases what was held back. The truthful reason: kToolCalls if calls are reported and the
  // model ended its turn.
  FinishReason Finish(FinishReason reason, std::string* content, std::string* reasoning);
  // After Finish.
  ParsedMessage TakeMessage();

 private:
  void Take(std::string* content, std::string* reasoning);

  const Tokenizer& tokenizer_;
  const SamplingParams& params_;
  OutputParser parser_;
  MessageBuilder message_;
  uint64_t seed_;
  std::vector<OutputEvent> events_;  // of the call that is running
};

}  // namespace deepinfer
