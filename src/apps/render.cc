#include "apps/render.h"

#include <fmt/core.h>

#include <optional>
#include <string>
#include <utility>

#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "apps/render_line.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

Result<LineRenderer> CreateRenderer(const RenderOptions& options) {
  std::optional<Tokenizer> tokenizer;
  if (!options.model.empty() || !options.tokenizer.empty()) {
    DI_ASSIGN_OR_RETURN(
        tokenizer, Tokenizer::Load(options.tokenizer.empty() ? options.model + "/tokenizer.json"
                                                             : options.tokenizer));
  }
  return LineRenderer::Create(options.profile, options.dialect, std::move(tokenizer));
}

Result<int> RenderLines(const RenderOptions& options) {
  DI_RETURN_IF_ERROR(CheckNotTheSameFile(options.input, options.output));
  DI_ASSIGN_OR_RETURN(const LineRenderer renderer, CreateRenderer(options));
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
    std::optional<RenderedId> id;
    Result<std::string> rendered = Fail(
        Code::kInvalidArgument, fmt::format("the line is longer than {} bytes.", kMaxLineBytes));
    if (!line->too_long) rendered = renderer.Render(line->text, &id);
    if (!rendered.has_value()) ++failed;
    std::string out;
    if (rendered.has_value()) {
      out = *std::move(rendered);
    } else {
      std::optional<LineId> line_id;
      if (id.has_value()) line_id = LineId{id->text, id->is_integer};
      out = ErrorLine(line_id, line->number, rendered.error());
    }
    DI_RETURN_IF_ERROR(writer.Put(place, std::move(out)));
  }
  DI_RETURN_IF_ERROR(writer.Finish());
  return failed > 0 ? kExitSomeLinesFailed : kExitOk;
}

}  // namespace

int RunRender(const RenderOptions& options) {
  CatchInterrupts();
  const Result<int> status = RenderLines(options);
  return status.has_value() ? *status : PrintError(status.error());
}

}  // namespace deepinfer
