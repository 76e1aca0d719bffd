#include "apps/parse.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

#include "apps/answer_line.h"
#include "apps/convert_lines.h"
#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/print.h"
#include "base/json_value.h"
#include "base/quoted.h"
#include "text/tokenizer.h"

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

ParsedLine<JsonValue> ReadLine(std::string_view text) {
  ParsedLine<JsonValue> parsed{std::nullopt, JsonValue::Parse(text)};
  if (!parsed.value.has_value()) {
    parsed.value.error().message = "the line is not valid JSON: " + parsed.value.error().message;
    return parsed;
  }
  if (parsed.value->if_object() == nullptr) {
    parsed.value = Fail(Code::kInvalidArgument, "the line is not a JSON object.");
    return parsed;
  }
  Result<LineId> id = ReadId(parsed.value->Find("id"));
  if (id.has_value()) {
    parsed.id = std::move(*id);
  } else {
    parsed.value = tl::unexpected<Error>(id.error());
  }
  return parsed;
}

Result<int> Run(const ParseOptions& options) {
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty() || !options.model.empty()) {
    DI_ASSIGN_OR_RETURN(
        tokenizer, Tokenizer::Load(options.tokenizer.empty() ? options.model + "/tokenizer.json"
                                                             : options.tokenizer));
  }
  return ConvertLines(
      options.input, options.output, ReadLine, [&](const JsonValue& line, const LineId& /*id*/) {
        return ParseAnswerLine(line, options.toolkit_policy, tokenizer ? &*tokenizer : nullptr);
      });
}

}  // namespace

int RunParse(const ParseOptions& options) {
  CatchInterrupts();
  const Result<int> status = Run(options);
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace deepinfer
