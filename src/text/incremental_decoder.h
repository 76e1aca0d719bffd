// Turns the ids of one stream into text as they come, never cutting a character: a token may end
// inside of one.
#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace deepinfer {

// What all calls return together equals Tokenizer::Decode of all ids.
class IncrementalDecoder {
 public:
  // `tokenizer` must outlive the decoder.
  explicit IncrementalDecoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {
    held_.reserve(64);  // an unfinished character and all but the rarest tokens
  }

  // Returns all text that is decided after `id`. Only an unfinished character (at most 3 bytes) is
  // held; bytes that can no longer become one are returned as U+FFFD at once.
  std::string Push(int32_t id);
  // The same, appended to `text`.
  void Push(int32_t id, std::string* text);

  // Ends the stream: returns U+FFFD if something is held. The decoder can then be used for another
  // stream.
  std::string Flush();

 private:
  const Tokenizer* tokenizer_;
  std::string held_;
};

}  // namespace deepinfer
