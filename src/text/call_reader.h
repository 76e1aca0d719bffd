// Reads a block of calls, from behind its opening marker to the end of the answer. The two policies
// are two readers; what comes before a block is read by the output parser.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "text/event_sink.h"

namespace deepinfer {

class CallReader {
 public:
  virtual ~CallReader() = default;

  // The bytes are whole characters. `special`: they are the spelling of a special token.
  virtual void Feed(std::string_view bytes, bool special, EventSink* sink) = 0;
  // The answer ends: by itself, or cut.
  virtual void End(bool by_itself, EventSink* sink) = 0;

  // Of which an event tells.
  int64_t num_calls() const {
    return num_calls_;
  }
  // A call has begun that no event tells of, and never will.
  bool cut() const {
    return cut_;
  }

 protected:
  int64_t num_calls_ = 0;
  bool cut_ = false;
};

// Repairs what can be repaired, and passes on whole calls only. `by_origin`: only bytes of special
// tokens are a marker; without, a call whose headers are not of the described form is read as
// text/toolkit_calls.h reads it. `after_marker`: the text begins directly behind "<｜DSML｜";
// otherwise between two calls of a block.
std::unique_ptr<CallReader> MakeRecommendedCallReader(bool by_origin, bool after_marker);

}  // namespace deepinfer
