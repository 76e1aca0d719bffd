// The vendor's streaming machine for calls. It copies what the model wrote and checks nothing: keys
// with their quotes up to the first space, raw values as they are, whatever is misspelt as it
// comes.
#include <array>
#include <string>

#include "base/json_value.h"
#include "text/call_reader.h"
#include "text/marker_matcher.h"

namespace deepinfer {
namespace {

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

MarkerSet SetOf(bool by_origin, std::initializer_list<std::string_view> texts) {
  std::vector<Marker> markers;
  for (const std::string_view text : texts) {
    Marker marker{.text = std::string(text)};
    if (const size_t at = text.find(kCallMarker); by_origin && at != std::string_view::npos) {
      marker.special_begin = at;
      marker.special_end = at + kCallMarker.size();
    }
    markers.push_back(std::move(marker));
  }
  return MarkerSet(std::move(markers));
}

// What each stage watches for.
std::array<MarkerSet, kDone + 1> Markers(bool by_origin) {
  const auto set = [&](std::initializer_list<std::string_view> texts) {
    return SetOf(by_origin, texts);
  };
  return {
      set({"invoke name=\"", "</｜DSML｜tool_calls>", "</｜DSML｜ calls>"}),
      set({"\""}),
      set({"parameter name=", "</｜DSML｜"}),
      set({"parameter name=", "</｜DSML｜"}),
      set({" "}),
      set({"true\">", "false\">"}),
      set({"</｜DSML｜"}),
      set({"</｜DSML｜"}),
      set({}),
  };
}

const MarkerSet& MarkersOf(bool by_origin, Stage stage) {
  static const std::array<MarkerSet, kDone + 1> kSpelt = Markers(false);
  static const std::array<MarkerSet, kDone + 1> kTokens = Markers(true);
  return (by_origin ? kTokens : kSpelt)[stage];
}

class ToolkitCallReader final : public CallReader {
 public:
  explicit ToolkitCallReader(bool by_origin) : by_origin_(by_origin) {
    Enter(kCalls);
  }

  void Feed(std::string_view bytes, bool special, EventSink* sink) override {
    while (!bytes.empty() && stage_ != kDone) {
      const int marker =
          matcher_.Feed(&bytes, special, [&](std::string_view text) { Release(text, sink); });
      if (marker == MarkerMatcher::kNone) return;
      Enter(Match(marker, sink));
    }
  }

  void End(bool /*by_itself*/, EventSink* sink) override {
    matcher_.End([&](std::string_view text) { Release(text, sink); });
  }

 private:
  void Enter(Stage stage) {
    stage_ = stage;
    matcher_.Watch(MarkersOf(by_origin_, stage));
  }

  // Text that is no marker.
  void Release(std::string_view text, EventSink* sink) {
    switch (stage_) {
      case kName:
        name_ += text;
        break;
      case kStringValue: {
        std::string escaped;
        AppendJsonEscaped(text, &escaped);
        sink->Arguments(num_calls_ - 1, escaped);
        break;
      }
      case kKey:
      case kRawValue:
        sink->Arguments(num_calls_ - 1, text);
        break;
      case kCalls:
      case kFirstArgument:
      case kArguments:
      case kType:
      case kDone:
        break;
    }
  }

  // Returns the next stage.
  Stage Match(int marker, EventSink* sink) {
    const auto add = [&](std::string_view text) { sink->Arguments(num_calls_ - 1, text); };
    switch (stage_) {
      case kCalls:
        name_.clear();
        return marker == 0 ? kName : kDone;
      case kName:
        sink->Call(num_calls_++, std::move(name_));
        return kFirstArgument;
      case kFirstArgument:
        add(marker == 0 ? "{" : "{}");
        return marker == 0 ? kKey : kCalls;
      case kArguments:
        add(marker == 0 ? ", " : "}");
        return marker == 0 ? kKey : kCalls;
      case kKey:
        add(": ");
        return kType;
      case kType:
        if (marker == 1) return kRawValue;
        add("\"");
        return kStringValue;
      case kStringValue:
        add("\"");
        return kArguments;
      case kRawValue:
        return kArguments;
      case kDone:
        break;
    }
    return kDone;
  }

  const bool by_origin_;
  Stage stage_ = kCalls;
  MarkerMatcher matcher_;
  std::string name_;
};

}  // namespace

std::unique_ptr<CallReader> MakeToolkitCallReader(bool by_origin) {
  return std::make_unique<ToolkitCallReader>(by_origin);
}

}  // namespace deepinfer
