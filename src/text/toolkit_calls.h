// The vendor's streaming machine for calls. It copies what the model wrote and checks nothing: keys
// with their quotes up to the first space, raw values as they are, whatever is misspelt as it
// comes.
#pragma once

#include <string>
#include <string_view>

#include "text/call_reader.h"
#include "text/event_sink.h"
#include "text/marker_matcher.h"

namespace deepinfer {

class ToolkitCallReader final : public CallReader {
 public:
  // `by_origin`: only bytes of special tokens are the marker.
  explicit ToolkitCallReader(bool by_origin);

  void Feed(std::string_view bytes, bool special, EventSink* sink) override;
  void End(bool by_itself, EventSink* sink) override;

  // Reads no further than to the end of a call, which is directly behind a "</｜DSML｜". Returns
  // whether it has come.
  bool FeedToEndOfCall(std::string_view bytes, EventSink* sink);

 private:
  enum Stage {
    kCalls,
    kName,
    kFirstArgument,
    kArguments,
    kKey,
    kType,
    kStringValue,
    kRawValue,
    kDone,
  };

  static const MarkerSet& MarkersOf(bool by_origin, Stage stage);

  // Takes bytes up to the next change of the stage; returns whether there was one.
  bool Advance(std::string_view* bytes, bool special, EventSink* sink);
  void Enter(Stage stage);
  // Text that is no marker.
  void Release(std::string_view text, EventSink* sink);
  // Returns the next stage.
  Stage Match(int marker, EventSink* sink);

  const bool by_origin_;
  Stage stage_ = kCalls;
  MarkerMatcher matcher_;
  std::string name_;
};

}  // namespace deepinfer
