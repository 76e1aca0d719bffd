#include "apps/parse.h"

#include <optional>
#include <utility>

#include "apps/answer_line.h"
#include "apps/convert_lines.h"
#include "apps/interrupt.h"
#include "apps/json_line.h"
#include "apps/load_tokenizer.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

Result<int> Run(const ParseOptions& options) {
  DI_ASSIGN_OR_RETURN(const std::optional<Tokenizer> tokenizer,
                      LoadTokenizer(options.model, options.tokenizer));
  return ConvertLines(options.input, options.output, ParseJsonLine,
                      [&](const JsonLine& line, const LineId& /*id*/) {
                        return ParseAnswerLine(line.value, options.toolkit_policy,
                                               tokenizer ? &*tokenizer : nullptr);
                      });
}

}  // namespace

int RunParse(const ParseOptions& options) {
  CatchInterrupts();
  const Result<int> status = Run(options);
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace deepinfer
