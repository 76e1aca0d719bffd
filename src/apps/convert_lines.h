// The loop of commands that turn every line of a file into one line of another, on its own.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/error.h"

namespace deepinfer {

// Runs convert(parsed value, id) -> Result<output line> over all lines; `parse` gives a ParsedLine.
// Nothing is kept: files may be larger than memory. The result is an exit status.
template <class Parse, class Convert>
Result<int> ConvertLines(const std::string& input, const std::string& output, Parse parse,
                         Convert convert) {
  DI_RETURN_IF_ERROR(CheckNotTheSameFile(input, output));
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(input));
  DI_ASSIGN_OR_RETURN(OrderedWriter writer, OrderedWriter::Create(output));
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

}  // namespace deepinfer
