// Reads calls as the model meant them. Only the marker is structure: text between markers belongs
// to a region (a header, a value, ...), and the tag that a marker makes ends or begins one. A call
// is reported when it is closed, so its arguments are known in full and are valid JSON wherever the
// model's own JSON is.
//
// Without ids, nothing tells markup from text that looks like it, and a header that is not of the
// described form may be either. The call is then the vendor's to read: its bytes so far, and all up
// to the end that the vendor's machine sees, go through that machine.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json_value.h"
#include "text/call_reader.h"
#include "text/chat_template.h"
#include "text/json_text.h"
#include "text/marker_matcher.h"
#include "text/output_parser.h"
#include "text/toolkit_calls.h"

namespace deepinfer {
namespace {

// Where text between two markers belongs.
enum class Region : uint8_t {
  kBlock,            // between calls: dropped
  kInvokeHeader,     // attributes of a call
  kBody,             // of a call, outside of parameters
  kParameterHeader,  // attributes of a parameter
  kValue,            // of a parameter
  kVendorCall,       // all of a call that the vendor's machine reads
  kDone,             // behind the block: dropped
};

enum class TagName : uint8_t { kInvoke, kParameter, kBlock, kUnknown };

// What stood before a marker.
enum class Opening : uint8_t { kOpen, kClose, kSlash, kBare };  // "<", "</", "/", nothing

enum class ValueType : uint8_t { kString, kJson, kUnknown };

constexpr std::string_view kTypeAttribute = " string=\"";

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

bool IsExactName(std::string_view name) {
  return name == "invoke" || name == "parameter" || name == "calls" || name == "tool_calls" ||
         name == "function_calls";
}

// Of a closing tag, whose name may be misspelt or cut.
TagName NearestName(std::string_view name) {
  const auto is_start_of = [&](std::string_view whole) { return whole.starts_with(name); };
  if (name.empty()) return TagName::kUnknown;
  if (name.starts_with("par") || is_start_of("parameter")) return TagName::kParameter;
  if (name.starts_with("inv") || is_start_of("invoke")) return TagName::kInvoke;
  if (name.find("call") != std::string_view::npos || name.starts_with("tool") ||
      name.starts_with("func") || is_start_of("calls") || is_start_of("tool_calls") ||
      is_start_of("function_calls"))
    return TagName::kBlock;
  return TagName::kUnknown;
}

TagName ExactName(std::string_view name) {
  return IsExactName(name) ? NearestName(name) : TagName::kUnknown;
}

// The value of an attribute at the start or behind a space; nullopt if there is none that is
// closed.
std::optional<std::string_view> FindAttribute(std::string_view header, std::string_view name) {
  const std::string opening = std::string(name) + "=\"";
  for (size_t at = header.find(opening); at != std::string_view::npos;
       at = header.find(opening, at + 1)) {
    if (at > 0 && header[at - 1] != ' ') continue;
    const std::string_view rest = header.substr(at + opening.size());
    const size_t quote = rest.find('"');
    if (quote == std::string_view::npos) return std::nullopt;
    return rest.substr(0, quote);
  }
  return std::nullopt;
}

std::string_view TrimSpaces(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// Cuts one ` name="value"` off the end of `text`, which must leave something that ends with a quote
// there.
bool CutLastAttribute(std::string_view* text) {
  if (!text->ends_with('"')) return false;
  const size_t quote = text->rfind('"', text->size() - 2);
  if (quote == std::string_view::npos || quote == 0 || (*text)[quote - 1] != '=') return false;
  size_t begin = quote - 1;
  while (begin > 0 && (IsNameByte((*text)[begin - 1]) || (*text)[begin - 1] == '-')) --begin;
  if (begin == quote - 1 || begin == 0 || (*text)[begin - 1] != ' ') return false;
  const std::string_view rest = TrimSpaces(text->substr(0, begin));
  if (rest.size() < 2 || !rest.ends_with('"')) return false;
  *text = rest;
  return true;
}

// The key in the part of a parameter's header before ` string=`: `name="a"`, perhaps with further
// attributes. Quotes and spaces in a key are part of it.
std::string KeyOf(std::string_view head) {
  head = TrimSpaces(head);
  constexpr std::string_view kName = "name=";
  if (!head.starts_with(kName)) return std::string(FindAttribute(head, "name").value_or(""));
  std::string_view key = head.substr(kName.size());
  if (!key.starts_with('"')) return std::string(key);
  while (CutLastAttribute(&key)) {
  }
  key.remove_prefix(1);
  if (key.ends_with('"')) key.remove_suffix(1);
  return std::string(key);
}

// Cuts a closing tag that is damaged beyond recognition off the end of a value that lacks its own:
// "</DSML｜ parameter>" and the like, with white space behind it.
void CutDamagedCloser(std::string* value) {
  constexpr size_t kLongest = 40;
  const size_t end = value->find_last_not_of(" \t\r\n");
  if (end == std::string::npos || (*value)[end] != '>') return;
  const size_t begin = value->rfind('<', end);
  if (begin == std::string::npos || end - begin > kLongest) return;
  const std::string_view tag = std::string_view(*value).substr(begin, end + 1 - begin);
  if (tag.find("DSM") == std::string_view::npos && tag.find("SML") == std::string_view::npos &&
      tag.find("｜") == std::string_view::npos)
    return;
  if (tag.find('\n') != std::string_view::npos) return;
  value->resize(begin);
}

// Headers of the described form, as they stand between the name of the tag and ">". The vendor's
// machine reads the same in them.
bool IsDescribedInvokeHeader(std::string_view header) {
  constexpr std::string_view kName = "name=\"";
  if (!header.starts_with(kName)) return false;
  const std::string_view name = header.substr(kName.size());
  return name.size() > 1 && name.find('"') == name.size() - 1;
}

// `head` is what stands before ` string=`, `rest` what stands behind the type.
bool IsDescribedParameterHeader(std::string_view head, std::string_view type,
                                std::string_view rest) {
  constexpr std::string_view kName = "name=\"";
  if (!head.starts_with(kName) || head.size() == kName.size() || !head.ends_with('"')) return false;
  if ((type != "true" && type != "false") || !rest.empty()) return false;
  const std::string_view quoted_key = head.substr(kName.size() - 1);
  const std::string_view key = quoted_key.substr(1, quoted_key.size() - 2);
  return key.find(' ') == std::string_view::npos && JsonQuoted(key) == quoted_key;
}

// One call as the vendor's machine reads it.
class VendorCall {
 public:
  // Returns whether the call has ended.
  bool Feed(std::string_view bytes) {
    EventSink sink(&events_);
    const bool ended = machine_.FeedToEndOfCall(bytes, &sink);
    Collect();
    return ended;
  }
  void End() {
    EventSink sink(&events_);
    machine_.End(true, &sink);
    Collect();
  }
  // Null if the machine has seen none.
  const ToolCall* call() const {
    const std::vector<ToolCall>& calls = collected_.message().tool_calls;
    return calls.empty() ? nullptr : &calls.front();
  }

 private:
  void Collect() {
    for (const OutputEvent& event : events_) collected_.Add(event);
    events_.clear();
  }

  ToolkitCallReader machine_{false};
  std::vector<OutputEvent> events_;
  MessageBuilder collected_;
};

class RecommendedCallReader final : public CallReader {
 public:
  RecommendedCallReader(bool by_origin, bool after_marker)
      : by_origin_(by_origin), markers_(SetOfMarker(by_origin)) {
    matcher_.Watch(markers_);
    if (after_marker) BeginTag(Opening::kOpen, "<");
  }

  void Feed(std::string_view bytes, bool special, EventSink* sink) override {
    while (!bytes.empty() && region_ != Region::kDone) {
      const int marker =
          matcher_.Feed(&bytes, special, [&](std::string_view text) { Text(text, sink); });
      if (marker == MarkerMatcher::kNone) return;
      matcher_.Watch(markers_);
      OnMarker(sink);
    }
  }

  void End(bool by_itself, EventSink* sink) override {
    if (region_ == Region::kDone) return;
    matcher_.End([&](std::string_view text) { Text(text, sink); });
    if (in_tag_ && opening_ == Opening::kClose) EndTag(false, sink);
    switch (region_) {
      case Region::kBlock:
      case Region::kDone:
        return;
      case Region::kVendorCall:
        if (!by_itself) break;
        vendor_call_->End();
        return CloseVendorCall(sink);
      case Region::kBody:
        // In a tag, a parameter or the next call was about to begin.
        if (by_itself && !in_tag_ && (!BodyIsJson() || IsJson(text_))) return CloseCall(sink);
        break;
      case Region::kInvokeHeader:
      case Region::kParameterHeader:
      case Region::kValue:
        break;
    }
    // What has no name would have been no call.
    cut_ = region_ == Region::kInvokeHeader || region_ == Region::kVendorCall || !name_.empty();
  }

 private:
  static MarkerSet SetOfMarker(bool by_origin) {
    Marker marker{.text = std::string(kDsmlMarker)};
    if (by_origin) marker.special_end = marker.text.size();
    return MarkerSet({std::move(marker)});
  }

  // ---- Text between markers.

  void Text(std::string_view text, EventSink* sink) {
    if (in_tag_) text = TagText(text, sink);
    Keep(text);
    RegionText(text, sink);
  }

  void RegionText(std::string_view text, EventSink* sink) {
    switch (region_) {
      case Region::kVendorCall:
        VendorText(text, sink);
        return;
      case Region::kDone:
        return;
      case Region::kBlock:
        BlockText(text, sink);
        return;
      case Region::kInvokeHeader:
        InvokeHeaderText(text, sink);
        return;
      case Region::kParameterHeader:
        ParameterHeaderText(text, sink);
        return;
      case Region::kBody:
        BodyText(text, sink);
        return;
      case Region::kValue:
        text_ += text;
        return;
    }
  }

  // Between calls and between parameters no text is expected, so that, as for the vendor's machine,
  // a tag is one even if its marker is damaged. (Special tokens are not damaged.)

  void BlockText(std::string_view text, EventSink* sink) {
    constexpr std::string_view kOpening = "invoke name=\"";
    text_ += text;
    if (const size_t at = by_origin_ ? std::string::npos : text_.find(kOpening);
        at != std::string::npos) {
      const std::string header = text_.substr(text_.find("name=", at));
      BeginCall(header, sink);
      return;
    }
    // Only what the next piece may complete is of interest.
    if (text_.size() > kOpening.size()) text_.erase(0, text_.size() - kOpening.size());
  }

  void BodyText(std::string_view text, EventSink* sink) {
    constexpr std::string_view kOpening = "parameter name=";
    // Space at the start means nothing; without it, the first byte tells what the body is.
    if (text_.empty())
      text.remove_prefix(std::min(text.find_first_not_of(kJsonSpace), text.size()));
    const size_t from = text_.size() - std::min(text_.size(), kOpening.size());
    text_ += text;
    if (by_origin_ || BodyIsJson()) return;
    if (const size_t at = text_.find(kOpening, from); at != std::string::npos) {
      const std::string header = text_.substr(text_.find("name=", at));
      BeginParameter(header, sink);
    }
  }

  void Enter(Region region) {
    region_ = region;
    text_.clear();
    in_quotes_ = false;
    header_part_ = HeaderPart::kKey;
    matched_ = 0;
  }

  // A header ends at the first ">" outside of quotes; a line end shows that a quote is missing.
  void InvokeHeaderText(std::string_view text, EventSink* sink) {
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (c == '"') in_quotes_ = !in_quotes_;
      if (c == '\n' || (c == '>' && !in_quotes_)) {
        text_ += text.substr(0, i);
        EndInvokeHeader(text.substr(i + 1), sink);
        return;
      }
    }
    text_ += text;
  }

  // `body`: what has come behind the header.
  void EndInvokeHeader(std::string_view body, EventSink* sink) {
    if (!by_origin_ && !IsDescribedInvokeHeader(text_)) return BeginVendorCall(body, sink);
    if (const std::optional<std::string_view> name = FindAttribute(text_, "name")) {
      name_ = *name;
    } else {
      // The closing quote is missing.
      std::string_view rest = text_;
      constexpr std::string_view kName = "name=\"";
      rest.remove_prefix(std::min(rest.find(kName), rest.size()));
      rest.remove_prefix(std::min(kName.size(), rest.size()));
      name_ = rest.substr(0, rest.find('>'));
    }
    Enter(Region::kBody);
    BodyText(body, sink);
  }

  // ` string="`, then the type up to a quote, then up to ">": whatever the key contains. Without it
  // the header ends at the next marker.
  void ParameterHeaderText(std::string_view text, EventSink* sink) {
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      text_ += c;
      switch (header_part_) {
        case HeaderPart::kKey:
          // No prefix of the string is found inside of it again.
          matched_ = c == kTypeAttribute[matched_] ? matched_ + 1 : (c == ' ' ? 1 : 0);
          if (matched_ < kTypeAttribute.size()) break;
          key_end_ = text_.size() - kTypeAttribute.size();
          header_part_ = HeaderPart::kType;
          break;
        case HeaderPart::kType:
          if (c != '"') break;
          type_end_ = text_.size() - 1;
          header_part_ = HeaderPart::kRest;
          break;
        case HeaderPart::kRest:
          if (c != '>') break;
          text_.pop_back();
          BeginValue(text.substr(i + 1), sink);
          return;
      }
    }
  }

  void BeginValue(std::string_view value, EventSink* sink) {
    const std::string_view header = text_;
    const std::string_view head = header.substr(0, key_end_);
    const size_t type_begin = key_end_ + kTypeAttribute.size();
    const std::string_view type = header.substr(type_begin, type_end_ - type_begin);
    if (!by_origin_ && !IsDescribedParameterHeader(head, type, header.substr(type_end_ + 1)))
      return BeginVendorCall(value, sink);
    type_ = type == "true"    ? ValueType::kString
            : type == "false" ? ValueType::kJson
                              : ValueType::kUnknown;
    key_ = KeyOf(head);
    std::string first(value);
    Enter(Region::kValue);
    text_ = std::move(first);
  }

  // A marker came before the header was complete: the value begins where the header seems to end.
  void EndBrokenParameterHeader(EventSink* sink) {
    if (!by_origin_) return BeginVendorCall("", sink);
    if (header_part_ == HeaderPart::kRest) {  // only ">" is missing
      const std::string value = text_.substr(type_end_ + 1);
      BeginValue(value, sink);
      return;
    }
    const std::string header = std::move(text_);
    size_t key_end = header.find("\">");  // `name="a">`
    size_t value_begin = key_end + 2;
    if (key_end != std::string::npos) {
      ++key_end;
    } else {
      key_end = std::min(header.find('>'), header.size());  // `name="a>`
      value_begin = std::min(key_end + 1, header.size());
    }
    key_ = KeyOf(std::string_view(header).substr(0, key_end));
    type_ = ValueType::kUnknown;
    Enter(Region::kValue);
    text_ = header.substr(value_begin);
  }

  // ---- Tags.

  void OnMarker(EventSink* sink) {
    if (in_tag_) EndTag(false, sink);
    if (region_ == Region::kDone) return;
    if (region_ == Region::kVendorCall) {
      VendorText(kDsmlMarker, sink);
      // The machine ends a call at the marker of a closing tag.
      if (region_ == Region::kBlock) BeginTag(Opening::kClose, "</");
      return;
    }
    Keep(kDsmlMarker);
    const auto take = [&](std::string_view end) {
      if (!text_.ends_with(end)) return false;
      text_.resize(text_.size() - end.size());
      return true;
    };
    if (take("</")) {
      BeginTag(Opening::kClose, "</");
    } else if (take("<")) {
      BeginTag(Opening::kOpen, "<");
    } else if (take("/")) {
      BeginTag(Opening::kSlash, "/");
    } else {
      BeginTag(Opening::kBare, "");
    }
  }

  void BeginTag(Opening opening, std::string_view before) {
    in_tag_ = true;
    opening_ = opening;
    before_ = before;
    tag_.clear();
    tag_part_ = TagPart::kLead;
    name_begin_ = name_end_ = 0;
    attribute_ = 0;
  }

  // Reads ` name` and then ">" or ` name=`, which decides what the tag is. Returns the text behind.
  std::string_view TagText(std::string_view text, EventSink* sink) {
    constexpr size_t kLongestTag = 64;
    constexpr std::string_view kAttribute = "name=";
    while (!text.empty()) {
      const char c = text[0];
      bool taken = true;
      bool ends = false;
      if (tag_.size() == kLongestTag) {
        EndTag(false, sink);
        break;
      }
      switch (tag_part_) {
        case TagPart::kLead:
          if (c == ' ') break;
          name_begin_ = name_end_ = tag_.size();
          tag_part_ = TagPart::kName;
          [[fallthrough]];
        case TagPart::kName:
          if (IsNameByte(c)) {
            name_end_ = tag_.size() + 1;
            break;
          }
          if (c == ' ' && name_end_ > name_begin_) {
            tag_part_ = TagPart::kGap;
            break;
          }
          taken = c == '>';
          ends = true;
          break;
        case TagPart::kGap:
          if (c == ' ' && attribute_ == 0) break;
          if (c == kAttribute[attribute_]) {
            ++attribute_;
            ends = attribute_ == kAttribute.size();
            break;
          }
          taken = c == '>' && attribute_ == 0;
          ends = true;
          break;
      }
      if (taken) {
        tag_ += c;
        Keep(text.substr(0, 1));
        text.remove_prefix(1);
      }
      if (!ends) continue;
      EndTag(taken && c == '>', sink);
      break;
    }
    return text;
  }

  void EndTag(bool closed, EventSink* sink) {
    in_tag_ = false;
    const std::string_view name =
        std::string_view(tag_).substr(name_begin_, name_end_ - name_begin_);
    if (opening_ == Opening::kClose) {
      Close(NearestName(name), sink);
      return;
    }
    const TagName exact = ExactName(name);
    const bool is_described = by_origin_ || std::string_view(tag_).substr(name_end_) == " name=";
    const bool has_name = attribute_ == 5;
    // Inside of a value only what can be nothing else begins a tag.
    const bool may_open = has_name || (region_ != Region::kValue && !closed &&
                                       tag_part_ == TagPart::kGap && opening_ == Opening::kOpen);
    if (opening_ != Opening::kSlash && may_open && exact == TagName::kInvoke && is_described) {
      OpenCall(sink);
    } else if (opening_ != Opening::kSlash && may_open && exact == TagName::kParameter) {
      OpenParameter(is_described, sink);
    } else if (closed && (exact == TagName::kInvoke || exact == TagName::kParameter ||
                          (exact == TagName::kBlock && opening_ != Opening::kOpen))) {
      Close(exact, sink);  // a closing tag that lacks its "<" or its "/"
    } else if (region_ != Region::kDone && (!by_origin_ || region_ != Region::kBlock)) {
      // No tag. The special token is no text either.
      std::string literal;
      if (!by_origin_) {
        literal = before_ + std::string(kDsmlMarker);
      } else if (opening_ == Opening::kSlash) {
        literal = before_;
      }
      RegionText(literal + tag_, sink);
    }
  }

  // What the tag has already read of the header.
  std::string HeaderStart() const {
    return std::string(TrimSpaces(std::string_view(tag_).substr(name_end_)));
  }

  void OpenCall(EventSink* sink) {
    EndOpenParts(false, sink);
    if (region_ == Region::kVendorCall) return;
    if (region_ == Region::kBody) CloseCall(sink);
    BeginCall(HeaderStart(), sink);
  }

  void BeginCall(std::string_view header, EventSink* sink) {
    Enter(Region::kInvokeHeader);
    Keep("invoke ");
    Keep(header);
    name_.clear();
    keys_.clear();
    places_.clear();
    InvokeHeaderText(header, sink);
  }

  void OpenParameter(bool is_described, EventSink* sink) {
    EndOpenParts(false, sink);
    if (region_ != Region::kBody) return;  // no call is open, or it is the vendor's
    if (!is_described) return BeginVendorCall("", sink);
    BeginParameter(HeaderStart(), sink);
  }

  void BeginParameter(std::string_view header, EventSink* sink) {
    Enter(Region::kParameterHeader);
    ParameterHeaderText(header, sink);
  }

  void Close(TagName name, EventSink* sink) {
    const bool had_value = region_ == Region::kValue || region_ == Region::kParameterHeader;
    EndOpenParts(name == TagName::kParameter || name == TagName::kUnknown, sink);
    if (region_ == Region::kBody) {
      if (name == TagName::kParameter) return;  // its own, or one too many
      if (name == TagName::kUnknown && had_value) return;
      CloseCall(sink);
    }
    if (region_ == Region::kBlock && name == TagName::kBlock) Enter(Region::kDone);
  }

  // Leaves headers and values for the body. `own`: by the value's own closing tag.
  void EndOpenParts(bool own, EventSink* sink) {
    if (region_ == Region::kInvokeHeader) EndInvokeHeader("", sink);
    if (region_ == Region::kParameterHeader) EndBrokenParameterHeader(sink);
    if (region_ == Region::kValue) CloseValue(own);
  }

  // ---- Values and calls.

  void CloseValue(bool own) {
    if (!own) CutDamagedCloser(&text_);
    std::string value = std::move(text_);
    Enter(Region::kBody);
    std::string json;
    if (type_ != ValueType::kString && IsJson(value)) {
      json = TrimJsonSpace(value);
    } else {
      json = JsonQuoted(value);
    }
    const auto [place, is_new] = places_.try_emplace(key_, keys_.size());
    if (is_new) {
      keys_.emplace_back(std::move(key_), std::move(json));
    } else {
      keys_[place->second].second = std::move(json);
    }
  }

  // The body of the call is an object instead of parameters, right or wrong.
  bool BodyIsJson() const {
    return keys_.empty() && text_.starts_with('{');
  }

  std::string Arguments() const {
    if (BodyIsJson()) return std::string(TrimJsonSpace(text_));
    std::string arguments = "{";
    for (const auto& [key, json] : keys_) {
      if (arguments.size() > 1) arguments += ", ";
      arguments += JsonQuoted(key) + ": " + json;
    }
    return arguments + "}";
  }

  void CloseCall(EventSink* sink) {
    if (!name_.empty()) {
      const int64_t index = num_calls_++;
      sink->Call(index, name_);
      sink->Arguments(index, Arguments());
    }
    kept_.clear();
    Enter(Region::kBlock);
  }

  // ---- Calls that are the vendor's to read.

  // Of the open call, whose header may yet turn out not to be of the described form.
  void Keep(std::string_view text) {
    if (by_origin_ || region_ == Region::kBlock || region_ == Region::kVendorCall ||
        region_ == Region::kDone)
      return;
    kept_ += text;
  }

  // The open call is one, from its beginning. `ahead`: what is kept of it, but has not been read.
  void BeginVendorCall(std::string_view ahead, EventSink* sink) {
    std::string bytes = std::move(kept_);
    kept_.clear();
    bytes.resize(bytes.size() - ahead.size());
    vendor_call_.emplace();
    Enter(Region::kVendorCall);
    VendorText(bytes, sink);
    RegionText(ahead, sink);
  }

  void VendorText(std::string_view text, EventSink* sink) {
    if (vendor_call_->Feed(text)) CloseVendorCall(sink);
  }

  void CloseVendorCall(EventSink* sink) {
    if (const ToolCall* const call = vendor_call_->call(); call != nullptr) {
      const int64_t index = num_calls_++;
      sink->Call(index, call->name);
      sink->Arguments(index, call->arguments);
    }
    vendor_call_.reset();
    Enter(Region::kBlock);
  }

  enum class HeaderPart : uint8_t { kKey, kType, kRest };
  enum class TagPart : uint8_t { kLead, kName, kGap };

  const bool by_origin_;
  const MarkerSet markers_;
  MarkerMatcher matcher_;

  Region region_ = Region::kBlock;
  std::string text_;  // of the region

  // The tag that is being read: `before_`, the marker, `tag_`.
  bool in_tag_ = false;
  Opening opening_ = Opening::kBare;
  std::string before_;
  std::string tag_;
  TagPart tag_part_ = TagPart::kLead;
  size_t name_begin_ = 0;
  size_t name_end_ = 0;
  size_t attribute_ = 0;  // bytes of `name=`

  // The header that is being read.
  bool in_quotes_ = false;
  HeaderPart header_part_ = HeaderPart::kKey;
  size_t matched_ = 0;
  size_t key_end_ = 0;
  size_t type_end_ = 0;

  // The call that is being read.
  std::string name_;
  std::string key_;  // of the open parameter
  ValueType type_ = ValueType::kString;
  std::vector<std::pair<std::string, std::string>> keys_;  // key, JSON text
  std::unordered_map<std::string, size_t> places_;         // in keys_

  // Without ids: the text of the open call, from "invoke" on.
  std::string kept_;
  std::optional<VendorCall> vendor_call_;
};

}  // namespace

std::unique_ptr<CallReader> MakeRecommendedCallReader(bool by_origin, bool after_marker) {
  return std::make_unique<RecommendedCallReader>(by_origin, after_marker);
}

}  // namespace deepinfer
