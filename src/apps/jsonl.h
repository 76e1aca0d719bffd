// Files of JSON lines: reading them line by line, turning a line into a typed value, and writing
// results in input order. Whatever is wrong with a line becomes an Error that names the field; no
// line can harm another. Used by the commands generate, tokenize, detokenize and logits.
//
// A line ends with "\n" or "\r\n"; the last one may lack it. Blank lines are skipped. Parsing is
// strict: unknown fields, fields given twice, wrong types and anything that is not JSON in UTF-8
// are refused.
#pragma once

#include <cstdint>
#include <functional>
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
  // "-" is the standard input. Errors: kNotFound, kInvalidArgument (a directory), kCancelled when a
  // signal ends the wait for the writer of a FIFO.
  static Result<LineReader> Open(const std::string& path, size_t max_line_bytes = kMaxLineBytes);
  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  ~LineReader();

  // The next line that is not blank; nullopt at the end. Errors: kDataLoss when reading fails,
  // kCancelled when a signal that CatchInterrupts caught ends the wait for more input.
  Result<std::optional<InputLine>> Next();
  // Whether Next would return without waiting for whoever writes a pipe or types. Errors: as Next.
  Result<bool> Ready();

  // A regular file can be read again: Rewind goes back to where reading began.
  bool is_regular() const {
    return is_regular_;
  }
  Status Rewind();

 private:
  enum class State { kLine, kEnd, kNotYet };

  LineReader() = default;
  Result<State> Advance(bool may_wait);
  Result<bool> Fill(bool may_wait);
  void TakePiece(std::string_view piece);
  bool EndLine();

  int fd_ = -1;
  std::string path_;
  size_t max_line_bytes_ = 0;
  bool is_regular_ = false;
  int64_t first_byte_ = 0;  // of a regular file

  std::vector<char> buffer_;
  size_t begin_ = 0;  // of what is not yet used of the buffer
  size_t end_ = 0;
  bool at_end_ = false;
  InputLine line_;         // the one that is being read
  bool has_line_ = false;  // it is complete
  bool any_ = false;       // at least one byte of it has been read
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
// "reasoning_effort"?, "user_id"?, "priority"?, "timeout_seconds"?, "cache_salt"?}. Parameters that
// the line does not give come from `defaults`. Ranges of sampling parameters are checked too, token
// ids are not.
ParsedLine<Request> ParseGenerateLine(std::string_view line, const SamplingParams& defaults = {});
ParsedLine<TextLine> ParseTextLine(std::string_view line);  // {"id", "text"}
ParsedLine<IdsLine> ParseIdsLine(std::string_view line);    // {"id", "ids"}
// {"id", "token_ids" or (as tokenize writes it) "ids", "chunks"?}
ParsedLine<LogitsLine> ParseLogitsLine(std::string_view line);

// A JSON object with the fields of sampling_params.
Result<SamplingParams> ParseSamplingParams(std::string_view json);

// Remembers which ids have been seen. Results could not be told apart otherwise, so a repeated id
// is an error. Keeps 128 bits of each id's SHA-256 and its line: 24 bytes, 32 ... 64 with the free
// places of the table, whatever the ids are.
class IdRegister {
 public:
  // Lines are counted from 1.
  Status Add(const LineId& id, int64_t line);

 private:
  struct Entry {
    uint64_t hash[2] = {0, 0};
    int64_t line = 0;  // 0: free
  };
  Entry& PlaceOf(const uint64_t (&hash)[2]);

  std::vector<Entry> entries_;  // open addressing; the size is a power of two
  size_t num_used_ = 0;
};

// {"id": ..., "line": n, "error": {"code", "field", "message"}}, the form of every failed line. No
// id: null.
std::string ErrorLine(const std::optional<LineId>& id, int64_t line, const Error& error);
// {"id": ..., "outputs": [...], "usage": {...}, "timings": {...}}; docs/generate.md has the fields.
// Without `with_timings`, what differs between runs of the same line is left out: timings and the
// count of preemptions.
std::string OutputLine(const LineId& id, const RequestOutput& output, bool with_timings = true);
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

  // Of lines that wait for an earlier one.
  size_t waiting_bytes() const {
    return waiting_bytes_;
  }

 private:
  explicit OrderedWriter(OutputFile file) : file_(std::move(file)) {}

  OutputFile file_;
  int64_t next_place_ = 0;
  std::unordered_map<int64_t, std::string> waiting_;
  size_t waiting_bytes_ = 0;
};

}  // namespace deepinfer
