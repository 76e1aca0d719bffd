// Files of JSON lines: reading them line by line, turning a line into a typed value, and writing
// results in input order. Whatever is wrong with a line becomes an Error that names the field; no
// line can harm another. Used by the commands generate, tokenize, detokenize and logits.
//
// A line ends with "\n" or "\r\n"; the last one may lack it. Blank lines are skipped. Parsing is
// strict: unknown fields, fields given twice, wrong types and anything that is not JSON in UTF-8
// are refused.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "apps/output.h"
#include "base/error.h"
#include "deepinfer/llm.h"

namespace deepinfer {

// Longer lines are refused (and skipped without being kept in memory).
inline constexpr size_t kMaxLineBytes = size_t{256} << 20;

struct InputLine {
  int64_t number = 0;     // counted from 1, blank lines included
  std::string text;       // without its line end
  bool too_long = false;  // text is then empty
};

class LineReader {
 public:
  // "-" is the standard input. Errors: kNotFound, kInvalidArgument (a directory).
  static Result<LineReader> Open(const std::string& path, size_t max_line_bytes = kMaxLineBytes);

  // The next line that is not blank; nullopt at the end. Errors: kDataLoss when reading fails,
  // kCancelled when a signal that CatchInterrupts caught ends the wait for more input.
  Result<std::optional<InputLine>> Next();

 private:
  struct Closer {
    void operator()(std::FILE* file) const;
  };
  LineReader() = default;

  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
  size_t max_line_bytes_ = 0;
  int64_t number_ = 0;
};

// The id of a line as it was written: a string or an integer.
struct LineId {
  std::string text;
  bool is_integer = false;

  friend bool operator==(const LineId&, const LineId&) = default;
};

// A parsed line. `id` is filled whenever the line has a usable one, also if the rest is wrong.
template <class T>
struct ParsedLine {
  std::optional<LineId> id;
  Result<T> value;
};

struct TextLine {
  std::string text;
};
struct IdsLine {
  std::vector<int64_t> ids;
};
struct LogitsLine {
  std::vector<int64_t> token_ids;  // as "token_ids" or "ids"
  std::vector<int64_t> chunks;     // empty: not given
};

// {"id", one of "prompt", "prompt_token_ids", "messages", "sampling_params"?, "thinking_mode"?,
// "reasoning_effort"?}. Parameters that the line does not give come from `defaults`. Ranges of
// sampling parameters are checked too, token ids are not.
ParsedLine<Request> ParseGenerateLine(std::string_view line, const SamplingParams& defaults = {});
ParsedLine<TextLine> ParseTextLine(std::string_view line);  // {"id", "text"}
ParsedLine<IdsLine> ParseIdsLine(std::string_view line);    // {"id", "ids"}
// {"id", "token_ids" or (as tokenize writes it) "ids", "chunks"?}
ParsedLine<LogitsLine> ParseLogitsLine(std::string_view line);

// A JSON object with the fields of sampling_params.
Result<SamplingParams> ParseSamplingParams(std::string_view json);

// Remembers which ids have been seen. Results could not be told apart otherwise, so a repeated id
// is an error.
class IdRegister {
 public:
  Status Add(const LineId& id, int64_t line);

 private:
  std::unordered_map<std::string, int64_t> line_of_;
};

// {"id": ..., "line": n, "error": {"code", "field", "message"}}, the form of every failed line. No
// id: null.
std::string ErrorLine(const std::optional<LineId>& id, int64_t line, const Error& error);
// {"id": ..., "outputs": [...], "usage": {...}, "timings": {...}}; docs/generate.md has the fields.
std::string OutputLine(const LineId& id, const RequestOutput& output);
std::string IdsOutputLine(const LineId& id, const std::vector<int32_t>& ids);
std::string TextOutputLine(const LineId& id, const std::string& text);

// Writes lines in the order of their places, each as soon as all before it are there.
class OrderedWriter {
 public:
  // Errors: as OutputFile.
  static Result<OrderedWriter> Create(const std::string& path);

  // Errors: kCancelled when nobody reads any more, kResourceExhausted when writing fails otherwise,
  // for instance because the disk is full.
  Status Put(int64_t place, std::string line);
  // Writes what waits for missing lines.
  Status Finish();

 private:
  explicit OrderedWriter(OutputFile file) : file_(std::move(file)) {}

  OutputFile file_;
  int64_t next_place_ = 0;
  std::unordered_map<int64_t, std::string> waiting_;
};

}  // namespace deepinfer
