#include "text/output_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/utf8.h"
#include "text/call_reader.h"
#include "text/chat_template.h"
#include "text/event_sink.h"
#include "text/marker_matcher.h"
#include "text/toolkit_calls.h"

namespace deepinfer {
namespace {

using Policy = OutputParserOptions::Policy;
using Start = OutputParserOptions::Start;

// The sections of an answer outside of its calls, each with its own markers.
enum class Section : uint8_t {
  kReasoning,
  kContent,
  kJsonProse,   // JSON mode: before the JSON
  kJson,        // JSON mode
  kAfterJson,   // JSON mode: behind the closing fence
  kOrphanTail,  // behind "</｜DSML｜" outside of a block
  kCalls,
  kDone,
};
constexpr size_t kNumSections = 8;

// What a marker means.
enum class Meaning : uint8_t {
  kStop,
  kCalls,       // "<｜DSML｜": a block of calls
  kOrphanTail,  // "</｜DSML｜"
  kNewline,     // the first one is dropped
  kThinkEnd,
  kFence,     // JSON begins behind it
  kBracket,   // JSON begins with it
  kFenceEnd,  // JSON has ended before it
};

struct SectionMarkers {
  std::vector<Meaning> meanings;  // parallel to the markers
  MarkerSet set;
};

// The markers of one section under one set of options.
class SectionMarkersBuilder {
 public:
  SectionMarkersBuilder(const OutputParserOptions& options, bool by_origin)
      : options_(options), by_origin_(by_origin) {}

  SectionMarkers Build(Section section, bool leading) {
    switch (section) {
      case Section::kReasoning:
        AddCalls();
        if (leading) AddLeadingNewline();
        Add(Meaning::kThinkEnd, Special(kThinkEndMarker, 0, true));
        break;
      case Section::kContent:
        AddStops();
        AddCalls();
        if (leading) AddLeadingNewline();
        Add(Meaning::kThinkEnd, Special(kThinkEndMarker, 0, false));
        break;
      case Section::kJsonProse:
        Add(Meaning::kFence, {.text = "```json\n"});
        Add(Meaning::kFence, {.text = "```\n"});
        Add(Meaning::kBracket, {.text = "{"});
        Add(Meaning::kBracket, {.text = "["});
        AddCalls();
        if (leading) AddLeadingNewline();
        Add(Meaning::kThinkEnd, Special(kThinkEndMarker, 0, false));
        break;
      case Section::kJson:
        AddStops();
        Add(Meaning::kFenceEnd, {.text = "\n```"});
        // The vendor's machine takes the marker for JSON; the token can be none.
        if (by_origin_ && options_.policy == Policy::kRecommended) AddCalls();
        break;
      case Section::kAfterJson:
        AddCalls();
        break;
      case Section::kOrphanTail:
      case Section::kCalls:
      case Section::kDone:
        break;
    }
    return {std::move(meanings_), MarkerSet(std::move(markers_))};
  }

 private:
  void Add(Meaning meaning, Marker marker) {
    meanings_.push_back(meaning);
    markers_.push_back(std::move(marker));
  }
  // A marker that is a special token from `special_begin` on.
  Marker Special(std::string_view text, size_t special_begin, bool newlines_before) const {
    Marker marker{.text = std::string(text), .newlines_before = newlines_before};
    if (by_origin_) {
      marker.special_begin = special_begin;
      marker.special_end = text.size();
    }
    return marker;
  }
  void AddStops() {
    for (const std::string& stop : options_.stop) Add(Meaning::kStop, {.text = stop});
  }
  void AddCalls() {
    if (!options_.tools) return;
    const std::string marker(kDsmlMarker);
    Add(Meaning::kCalls, Special("<" + marker, 1, true));
    if (options_.policy != Policy::kRecommended) return;
    Add(Meaning::kOrphanTail, Special("</" + marker, 2, true));
    // Without its "<" the token is still no text.
    if (by_origin_) Add(Meaning::kCalls, Special(marker, 0, true));
  }
  void AddLeadingNewline() {
    Add(Meaning::kNewline, {.text = "\n", .only_first = true});
  }

  const OutputParserOptions& options_;
  const bool by_origin_;
  std::vector<Meaning> meanings_;
  std::vector<Marker> markers_;
};

// What an orphan tail may say: ` calls>` and the like.
bool IsStartOfTail(std::string_view text, bool* complete) {
  static constexpr std::array<std::string_view, 5> kNames = {
      "calls>", "tool_calls>", "function_calls>", "invoke>", "parameter>"};
  if (text.starts_with(' ')) text.remove_prefix(1);
  for (const std::string_view name : kNames) {
    if (!name.starts_with(text)) continue;
    *complete = name == text;
    return true;
  }
  return false;
}

}  // namespace

std::string_view OutputEndName(OutputEnd end) {
  switch (end) {
    case OutputEnd::kStop:
      return "stop";
    case OutputEnd::kLength:
      return "length";
    case OutputEnd::kContentFilter:
      return "content_filter";
    case OutputEnd::kToolCalls:
      return "tool_calls";
  }
  return "stop";
}

struct OutputParser::Impl {
  Impl(OutputParserOptions options_in, const Tokenizer* tokenizer_in)
      : options(std::move(options_in)), tokenizer(tokenizer_in) {
    std::erase(options.stop, "");
    if (tokenizer != nullptr) {
      special_ids = {tokenizer->IdOf(kDsmlMarker), tokenizer->IdOf(kThinkBeginMarker),
                     tokenizer->IdOf(kThinkEndMarker)};
    }
  }

  // ---- Input.

  // Bytes of a stream whose markers are spelt out, or of ordinary tokens.
  void PushBytes(std::string_view bytes, EventSink* sink) {
    if (unfinished.empty()) {
      const size_t valid = FindInvalidUtf8(bytes).value_or(bytes.size());
      Feed(bytes.substr(0, valid), false, sink);
      bytes.remove_prefix(valid);
      if (bytes.empty()) return;
    }
    unfinished += bytes;
    std::string text;
    const size_t decided = AppendDecidedUtf8(unfinished, &text);
    unfinished.erase(0, decided);
    Feed(text, false, sink);
  }

  void PushSpecial(std::string_view spelling, EventSink* sink) {
    FlushUnfinished(sink);
    Feed(spelling, true, sink);
  }

  void FlushUnfinished(EventSink* sink) {
    if (unfinished.empty()) return;
    std::string text;
    AppendLossyUtf8(unfinished, &text);
    unfinished.clear();
    Feed(text, false, sink);
  }

  // Before the first bytes: what marks markup is known then.
  void Begin(bool ids) {
    if (begun) return;
    begun = true;
    by_origin = ids;
    switch (options.start) {
      case Start::kReasoning:
        return Enter(Section::kReasoning, true);
      case Start::kReasoningContinuation:
        return Enter(Section::kReasoning, false);
      case Start::kContent:
        return Enter(ContentSection(), true);
      case Start::kContentContinuation:
        return Enter(ContentSection(), false);
      case Start::kToolCalls:
        return BeginCalls(false);
    }
  }

  // ---- Sections.

  Section ContentSection() const {
    return options.json ? Section::kJsonProse : Section::kContent;
  }

  void Enter(Section next, bool leading) {
    section = next;
    std::unique_ptr<SectionMarkers>& slot = markers[static_cast<size_t>(next)][leading ? 1 : 0];
    if (slot == nullptr) {
      slot = std::make_unique<SectionMarkers>(
          SectionMarkersBuilder(options, by_origin).Build(next, leading));
    }
    current = slot.get();
    matcher.Watch(current->set);
  }

  void BeginCalls(bool after_marker) {
    Enter(Section::kCalls, false);
    if (options.policy == Policy::kToolkit) {
      calls = std::make_unique<ToolkitCallReader>(by_origin);
    } else {
      calls = MakeRecommendedCallReader(by_origin, after_marker);
    }
  }

  void Feed(std::string_view text, bool special, EventSink* sink) {
    while (!text.empty()) {
      if (section == Section::kDone) return;
      if (section == Section::kCalls) return calls->Feed(text, special, sink);
      if (section == Section::kOrphanTail) {
        if (special) {
          EndTail(false, sink);
        } else {
          FeedTail(&text, sink);
        }
        continue;
      }
      const std::string_view before = text;
      const int marker =
          matcher.Feed(&text, special, [&](std::string_view piece) { Release(piece, sink); });
      if (marker == MarkerMatcher::kNone) return;
      Match(static_cast<size_t>(marker), before[before.size() - text.size() - 1], sink);
    }
  }

  // Text of the section.
  void Release(std::string_view text, EventSink* sink) {
    switch (section) {
      case Section::kReasoning:
        if (options.unclosed_reasoning_is_content) {
          undecided_reasoning += text;
        } else {
          sink->Reasoning(text);
        }
        return;
      case Section::kContent:
      case Section::kJson:
        sink->Content(text);
        return;
      case Section::kJsonProse:
      case Section::kAfterJson:
        // One space for all of it, however it was cut.
        if (!prose) sink->Content(" ");
        prose = true;
        return;
      case Section::kOrphanTail:
      case Section::kCalls:
      case Section::kDone:
        return;
    }
  }

  void Match(size_t marker, char last_byte, EventSink* sink) {
    const Meaning meaning = current->meanings[marker];
    if (section == Section::kReasoning && meaning != Meaning::kNewline &&
        meaning != Meaning::kOrphanTail) {
      sink->Reasoning(undecided_reasoning);
      undecided_reasoning.clear();
    }
    switch (meaning) {
      case Meaning::kStop:
        if (!may_stop) {
          Release(options.stop[marker], sink);
          return Enter(section, false);
        }
        stop_string = options.stop[marker];
        return Enter(Section::kDone, false);
      case Meaning::kCalls:
        return BeginCalls(true);
      case Meaning::kOrphanTail:
        tail_of = section;
        tail.clear();
        return Enter(Section::kOrphanTail, false);
      case Meaning::kNewline:
        return Enter(section, true);
      case Meaning::kThinkEnd:
        return Enter(ContentSection(), section == Section::kReasoning);
      case Meaning::kFence:
        prose = false;
        return Enter(Section::kJson, false);
      case Meaning::kBracket:
        prose = false;
        Enter(Section::kJson, false);
        return sink->Content(std::string_view(&last_byte, 1));
      case Meaning::kFenceEnd:
        return Enter(Section::kAfterJson, false);
    }
  }

  // A closing tag that closes nothing is dropped; anything else behind the marker is text.
  void FeedTail(std::string_view* text, EventSink* sink) {
    while (!text->empty()) {
      bool complete = false;
      tail += text->front();
      if (!IsStartOfTail(tail, &complete)) {
        tail.pop_back();
        return EndTail(false, sink);
      }
      text->remove_prefix(1);
      if (complete) return EndTail(true, sink);
    }
  }

  void EndTail(bool is_tag, EventSink* sink) {
    const std::string text = std::move(tail);
    tail.clear();
    Enter(tail_of, false);
    if (!is_tag) Feed(text, false, sink);
  }

  OutputEnd Finish(OutputEnd backend_end, EventSink* sink) {
    const bool by_itself = backend_end == OutputEnd::kStop || backend_end == OutputEnd::kToolCalls;
    FlushUnfinished(sink);
    if (section == Section::kCalls) {
      calls->End(by_itself, sink);
    } else if (section != Section::kOrphanTail && section != Section::kDone) {
      matcher.End([&](std::string_view text) { Release(text, sink); });
    }
    // Orphan tails are dropped also if they are cut.
    if (section == Section::kReasoning || tail_of == Section::kReasoning) {
      if (by_itself) {
        sink->Content(undecided_reasoning);
      } else {
        sink->Reasoning(undecided_reasoning);
      }
      undecided_reasoning.clear();
    }
    section = Section::kDone;
    if (stop_string.has_value()) return OutputEnd::kStop;
    if (!by_itself) return backend_end;
    return calls != nullptr && calls->num_calls() > 0 ? OutputEnd::kToolCalls : OutputEnd::kStop;
  }

  OutputParserOptions options;
  const Tokenizer* tokenizer;
  std::array<std::optional<int32_t>, 3> special_ids;

  bool begun = false;
  bool by_origin = false;  // only special tokens can be markup
  std::string unfinished;  // the beginning of a character

  Section section = Section::kContent;
  std::array<std::array<std::unique_ptr<SectionMarkers>, 2>, kNumSections> markers;
  const SectionMarkers* current = nullptr;
  MarkerMatcher matcher;
  bool prose = false;               // JSON mode: its space is out
  std::string undecided_reasoning;  // may become content
  std::string tail;                 // behind "</｜DSML｜"
  Section tail_of = Section::kContent;
  std::unique_ptr<CallReader> calls;
  bool may_stop = true;
  std::optional<std::string> stop_string;
};

OutputParser::OutputParser(OutputParserOptions options, const Tokenizer* tokenizer)
    : impl_(std::make_unique<Impl>(std::move(options), tokenizer)) {}
OutputParser::OutputParser(OutputParser&&) noexcept = default;
OutputParser& OutputParser::operator=(OutputParser&&) noexcept = default;
OutputParser::~OutputParser() = default;

void OutputParser::Push(std::string_view bytes, std::vector<OutputEvent>* events) {
  if (bytes.empty()) return;
  impl_->Begin(false);
  EventSink sink(events);
  impl_->PushBytes(bytes, &sink);
}

void OutputParser::PushToken(int32_t id, std::vector<OutputEvent>* events) {
  DI_CHECK(impl_->tokenizer != nullptr);
  impl_->Begin(true);
  EventSink sink(events);
  const std::string_view bytes = impl_->tokenizer->TokenBytes(id);
  const auto& special = impl_->special_ids;
  if (impl_->by_origin && std::find(special.begin(), special.end(), id) != special.end()) {
    impl_->PushSpecial(bytes, &sink);
  } else {
    impl_->PushBytes(bytes, &sink);
  }
}

OutputEnd OutputParser::Finish(OutputEnd backend_end, std::vector<OutputEvent>* events) {
  impl_->Begin(false);
  EventSink sink(events);
  return impl_->Finish(backend_end, &sink);
}

void OutputParser::set_may_stop(bool may_stop) {
  impl_->may_stop = may_stop;
}

const std::optional<std::string>& OutputParser::stop_string() const {
  return impl_->stop_string;
}

bool OutputParser::in_reasoning() const {
  const Impl& impl = *impl_;
  if (!impl.begun) {
    return impl.options.start == Start::kReasoning ||
           impl.options.start == Start::kReasoningContinuation;
  }
  return impl.section == Section::kReasoning ||
         (impl.section == Section::kOrphanTail && impl.tail_of == Section::kReasoning);
}

bool OutputParser::cut_call() const {
  return impl_->calls != nullptr && impl_->calls->cut();
}

void MessageBuilder::Add(const OutputEvent& event) {
  if (const auto* reasoning = std::get_if<ReasoningEvent>(&event)) {
    message_.reasoning_content += reasoning->text;
  } else if (const auto* content = std::get_if<ContentEvent>(&event)) {
    message_.content += content->text;
  } else if (const auto* call = std::get_if<ToolCallEvent>(&event)) {
    const auto index = static_cast<size_t>(call->index);
    if (index >= message_.tool_calls.size()) message_.tool_calls.resize(index + 1);
    message_.tool_calls[index].name = call->name;
  } else if (const auto* arguments = std::get_if<ArgumentsEvent>(&event)) {
    const auto index = static_cast<size_t>(arguments->index);
    if (index >= message_.tool_calls.size()) message_.tool_calls.resize(index + 1);
    message_.tool_calls[index].arguments += arguments->text;
  }
}

}  // namespace deepinfer
