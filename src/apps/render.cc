#include "apps/render.h"

#include <optional>
#include <string>
#include <utility>

#include "apps/convert_lines.h"
#include "apps/interrupt.h"
#include "apps/json_line.h"
#include "apps/load_tokenizer.h"
#include "apps/print.h"
#include "apps/render_line.h"

namespace deepinfer {
namespace {

Result<LineRenderer> CreateRenderer(const RenderOptions& options) {
  DI_ASSIGN_OR_RETURN(std::optional<Tokenizer> tokenizer,
                      LoadTokenizer(options.model, options.tokenizer));
  return LineRenderer::Create(options.profile, options.dialect, std::move(tokenizer));
}

Result<int> RenderLines(const RenderOptions& options) {
  DI_ASSIGN_OR_RETURN(const LineRenderer renderer, CreateRenderer(options));
  return ConvertLines(
      options.input, options.output, ParseJsonLine,
      [&](const JsonLine& line, const LineId& /*id*/) { return renderer.Render(line); });
}

}  // namespace

int RunRender(const RenderOptions& options) {
  CatchInterrupts();
  const Result<int> status = RenderLines(options);
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace deepinfer
