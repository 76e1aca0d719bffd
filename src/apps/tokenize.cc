#include "apps/tokenize.h"

#include <fmt/core.h>

#include <utility>

#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

// Runs convert(parsed value, id) -> Result<output line> over all lines. Nothing is kept: files may
// be larger than memory.
template <class Parse, class Convert>
Result<int> ConvertLines(const TokenizeOptions& options, Parse parse, Convert convert) {
  DI_RETURN_IF_ERROR(CheckNotTheSameFile(options.input, options.output));
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(options.input));
  DI_ASSIGN_OR_RETURN(OrderedWriter writer, OrderedWriter::Create(options.output));
  int64_t failed = 0;
  for (int64_t place = 0;; ++place) {
    const Result<std::optional<InputLine>> next = reader.Next();
    // Every line that was read whole is written by now.
    if (Interrupted()) {
      PrintStderr("deepinfer: interrupted; {} written.\n", Counted(place, "line"));
      return kExitInterrupted;
    }
    if (!next.has_value()) return tl::unexpected<Error>(next.error());
    const std::optional<InputLine>& line = *next;
    if (!line.has_value()) break;
    std::optional<LineId> id;
    Result<std::string> converted = Fail(
        Code::kInvalidArgument, fmt::format("the line is longer than {} bytes.", kMaxLineBytes));
    if (!line->too_long) {
      auto parsed = parse(line->text);
      id = parsed.id;
      converted = parsed.value.has_value()
                      ? convert(*parsed.value, *id)
                      : Result<std::string>(tl::unexpected<Error>(parsed.value.error()));
    }
    if (!converted.has_value()) ++failed;
    DI_RETURN_IF_ERROR(writer.Put(place, converted.has_value()
                                             ? std::move(*converted)
                                             : ErrorLine(id, line->number, converted.error())));
  }
  DI_RETURN_IF_ERROR(writer.Finish());
  return failed > 0 ? kExitSomeLinesFailed : kExitOk;
}

Result<Tokenizer> LoadTokenizer(const TokenizeOptions& options) {
  return Tokenizer::Load(options.tokenizer.empty() ? options.model + "/tokenizer.json"
                                                   : options.tokenizer);
}

int Finish(const Result<int>& status) {
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace

int RunTokenize(const TokenizeOptions& options) {
  CatchInterrupts();
  const Result<Tokenizer> tokenizer = LoadTokenizer(options);
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  EncodeOptions encode;
  encode.parse_special = !options.no_special;
  return Finish(ConvertLines(
      options, ParseTextLine, [&](const TextLine& line, const LineId& id) -> Result<std::string> {
        Result<std::vector<int32_t>> ids = tokenizer->Encode(line.text, encode);
        if (!ids.has_value()) {
          Error error = ids.error();
          error.field = "text";
          return tl::unexpected<Error>(std::move(error));
        }
        return IdsOutputLine(id, *ids);
      }));
}

int RunDetokenize(const TokenizeOptions& options) {
  CatchInterrupts();
  const Result<Tokenizer> tokenizer = LoadTokenizer(options);
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  return Finish(ConvertLines(
      options, ParseIdsLine, [&](const IdsLine& line, const LineId& id) -> Result<std::string> {
        std::vector<int32_t> ids;
        for (size_t i = 0; i < line.ids.size(); ++i) {
          if (line.ids[i] < 0 || line.ids[i] >= tokenizer->vocab_size()) {
            const std::string field = fmt::format("ids[{}]", i);
            return Fail(Code::kInvalidArgument,
                        fmt::format("{} is {}; ids of this tokenizer are 0 ... {}.", field,
                                    line.ids[i], tokenizer->vocab_size() - 1),
                        field);
          }
          ids.push_back(static_cast<int32_t>(line.ids[i]));
        }
        return TextOutputLine(id, tokenizer->Decode(ids));
      }));
}

}  // namespace deepinfer
