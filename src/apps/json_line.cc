#include "apps/json_line.h"

#include <fmt/core.h>

#include <utility>

#include "base/quoted.h"

namespace deepinfer {
namespace {

Result<LineId> ReadId(const JsonValue* value) {
  if (value == nullptr) {
    return Fail(Code::kInvalidArgument,
                "id is missing; every line needs one, a string or an integer.", "id");
  }
  if (const int64_t* number = value->if_int64(); number != nullptr)
    return LineId{fmt::format("{}", *number), true};
  const std::string* const text = value->if_string();
  if (text == nullptr) {
    return Fail(Code::kInvalidArgument,
                fmt::format("id is {}; allowed is a string or an integer.",
                            Quoted(value->DumpCompact(), 60)),
                "id");
  }
  if (text->empty() || text->size() > 1024) {
    return Fail(Code::kInvalidArgument,
                fmt::format("id has {} bytes; allowed are 1 ... 1024.", text->size()), "id");
  }
  return LineId{*text, false};
}

}  // namespace

ParsedLine<JsonLine> ParseJsonLine(std::string_view text) {
  ParsedLine<JsonLine> parsed{std::nullopt, JsonLine{}};
  Result<JsonValue> value = JsonValue::Parse(text);
  if (!value.has_value()) {
    value.error().message = "the line is not valid JSON: " + value.error().message;
    parsed.value = tl::unexpected<Error>(std::move(value.error()));
    return parsed;
  }
  if (value->if_object() == nullptr) {
    parsed.value = Fail(Code::kInvalidArgument, "the line is not a JSON object.");
    return parsed;
  }
  Result<LineId> id = ReadId(value->Find("id"));
  if (id.has_value()) {
    parsed.id = std::move(*id);
    parsed.value = JsonLine{std::move(*value), text};
  } else {
    parsed.value = tl::unexpected<Error>(id.error());
  }
  return parsed;
}

}  // namespace deepinfer
