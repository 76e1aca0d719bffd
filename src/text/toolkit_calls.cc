#include "text/toolkit_calls.h"

#include <array>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/json_value.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

MarkerSet SetOf(bool by_origin, std::initializer_list<std::string_view> texts) {
  std::vector<Marker> markers;
  for (const std::string_view text : texts) {
    Marker marker{.text = std::string(text)};
    if (const size_t at = text.find(kDsmlMarker); by_origin && at != std::string_view::npos) {
      marker.special_begin = at;
      marker.special_end = at + kDsmlMarker.size();
    }
    markers.push_back(std::move(marker));
  }
  return MarkerSet(std::move(markers));
}

constexpr size_t kNumStages = 9;

// What each stage watches for.
std::array<MarkerSet, kNumStages> Markers(bool by_origin) {
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

}  // namespace

const MarkerSet& ToolkitCallReader::MarkersOf(bool by_origin, Stage stage) {
  static const std::array<MarkerSet, kNumStages> kSpelt = Markers(false);
  static const std::array<MarkerSet, kNumStages> kTokens = Markers(true);
  return (by_origin ? kTokens : kSpelt)[stage];
}

ToolkitCallReader::ToolkitCallReader(bool by_origin) : by_origin_(by_origin) {
  Enter(kCalls);
}

void ToolkitCallReader::Feed(std::string_view bytes, bool special, EventSink* sink) {
  while (Advance(&bytes, special, sink)) {
  }
}

bool ToolkitCallReader::FeedToEndOfCall(std::string_view bytes, EventSink* sink) {
  while (Advance(&bytes, false, sink)) {
    if (stage_ == kCalls) return true;
  }
  return false;
}

void ToolkitCallReader::End(bool /*by_itself*/, EventSink* sink) {
  matcher_.End([&](std::string_view text) { Release(text, sink); });
}

bool ToolkitCallReader::Advance(std::string_view* bytes, bool special, EventSink* sink) {
  if (bytes->empty() || stage_ == kDone) return false;
  const int marker =
      matcher_.Feed(bytes, special, [&](std::string_view text) { Release(text, sink); });
  if (marker == MarkerMatcher::kNone) return false;
  Enter(Match(marker, sink));
  return true;
}

void ToolkitCallReader::Enter(Stage stage) {
  stage_ = stage;
  matcher_.Watch(MarkersOf(by_origin_, stage));
}

void ToolkitCallReader::Release(std::string_view text, EventSink* sink) {
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

ToolkitCallReader::Stage ToolkitCallReader::Match(int marker, EventSink* sink) {
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

}  // namespace deepinfer
