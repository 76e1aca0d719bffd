#include "apps/tokenize.h"

#include <fmt/core.h>

#include <utility>

#include "apps/convert_lines.h"
#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/load_tokenizer.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

int Finish(const Result<int>& status) {
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace

int RunTokenize(const TokenizeOptions& options) {
  CatchInterrupts();
  const Result<Tokenizer> tokenizer =
      Tokenizer::Load(TokenizerPath(options.model, options.tokenizer));
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  EncodeOptions encode;
  encode.parse_special = !options.no_special;
  return Finish(ConvertLines(options.input, options.output, ParseTextLine,
                             [&](const TextLine& line, const LineId& id) -> Result<std::string> {
                               Result<std::vector<int32_t>> ids =
                                   tokenizer->Encode(line.text, encode);
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
  const Result<Tokenizer> tokenizer =
      Tokenizer::Load(TokenizerPath(options.model, options.tokenizer));
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  return Finish(ConvertLines(options.input, options.output, ParseIdsLine,
                             [&](const IdsLine& line, const LineId& id) -> Result<std::string> {
                               std::vector<int32_t> ids;
                               for (size_t i = 0; i < line.ids.size(); ++i) {
                                 if (line.ids[i] < 0 || line.ids[i] >= tokenizer->vocab_size()) {
                                   const std::string field = fmt::format("ids[{}]", i);
                                   return Fail(
                                       Code::kInvalidArgument,
                                       fmt::format("{} is {}; ids of this tokenizer are 0 ... {}.",
                                                   field, line.ids[i], tokenizer->vocab_size() - 1),
                                       field);
                                 }
                                 ids.push_back(static_cast<int32_t>(line.ids[i]));
                               }
                               return TextOutputLine(id, tokenizer->Decode(ids));
                             }));
}

}  // namespace deepinfer
