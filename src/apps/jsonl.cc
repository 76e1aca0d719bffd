#include "apps/jsonl.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/interrupt.h"
#include "base/quoted.h"
#include "base/sha256.h"

namespace deepinfer {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kReadBytes = size_t{64} << 10;
// A signal may go to another thread and so not end a wait.
constexpr int kPollMilliseconds = 200;

Json IdJson(const LineId& id) {
  return id.is_integer ? Json(std::stoll(id.text)) : Json(id.text);
}

Json ErrorJson(const Error& error) {
  return {{"code", CodeName(error.code)}, {"field", error.field}, {"message", error.message}};
}

// Messages quote input, which may be anything; everything else is valid UTF-8 already.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Lists of numbers side by side, one entry per token.
void AddLogprobs(Json& json, const std::vector<TokenLogprobs>& entries, const std::string& prefix,
                 const std::string& own, bool with_top) {
  Json logprobs = Json::array();
  Json ranks = Json::array();
  Json top_ids = Json::array();
  Json top_logprobs = Json::array();
  for (const TokenLogprobs& entry : entries) {
    logprobs.push_back(entry.logprob);
    ranks.push_back(entry.rank);
    Json ids = Json::array();
    Json values = Json::array();
    for (const TokenLogprob& top : entry.top) {
      ids.push_back(top.token_id);
      values.push_back(top.logprob);
    }
    top_ids.push_back(std::move(ids));
    top_logprobs.push_back(std::move(values));
  }
  json[prefix + own] = std::move(logprobs);
  json[prefix + "ranks"] = std::move(ranks);
  if (!with_top) return;
  json[prefix + "top_token_ids"] = std::move(top_ids);
  json[prefix + "top_logprobs"] = std::move(top_logprobs);
}

bool HasTop(const std::vector<TokenLogprobs>& entries) {
  return std::any_of(entries.begin(), entries.end(),
                     [](const TokenLogprobs& entry) { return !entry.top.empty(); });
}

// As a message of a conversation, to be sent back with the next turn.
Json MessageJson(const ParsedMessage& message) {
  Json json = {{"role", "assistant"}, {"content", message.content}};
  if (!message.reasoning_content.empty()) json["reasoning_content"] = message.reasoning_content;
  if (message.tool_calls.empty()) return json;
  json["tool_calls"] = Json::array();
  for (const ToolCall& call : message.tool_calls) {
    json["tool_calls"].push_back(
        {{"id", call.id},
         {"type", "function"},
         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return json;
}

Json CompletionJson(const CompletionOutput& output) {
  Json json = {
      {"index", output.index},         {"text", output.text},
      {"token_ids", output.token_ids}, {"finish_reason", FinishReasonName(output.finish_reason)},
      {"stop_reason", nullptr},        {"seq_seed", output.seq_seed}};
  if (const auto* text = std::get_if<std::string>(&output.stop_reason)) json["stop_reason"] = *text;
  if (const auto* id = std::get_if<int64_t>(&output.stop_reason)) json["stop_reason"] = *id;
  if (output.message.has_value()) json["message"] = MessageJson(*output.message);
  if (!output.logprobs.empty()) {
    json["cumulative_logprob"] = output.cumulative_logprob;
    AddLogprobs(json, output.logprobs, "", "token_logprobs", HasTop(output.logprobs));
  }
  if (output.error.has_value()) json["error"] = ErrorJson(*output.error);
  return json;
}

}  // namespace

Result<LineReader> LineReader::Open(const std::string& path, size_t max_line_bytes) {
  LineReader reader;
  reader.path_ = path;
  reader.max_line_bytes_ = max_line_bytes;
  // Opening a FIFO waits for its writer.
  while (reader.fd_ < 0) {
    reader.fd_ = path == "-" ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (reader.fd_ >= 0) break;
    if (errno == EINTR && Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
    if (errno == EINTR) continue;
    return Fail(
        errno == ENOENT ? Code::kNotFound : Code::kInvalidArgument,
        fmt::format("the input {} cannot be read: {}.", Quoted(path), std::strerror(errno)));
  }
  struct ::stat status = {};
  if (::fstat(reader.fd_, &status) == 0) {
    if (S_ISDIR(status.st_mode)) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("the input {} is a directory; a file of JSON lines is expected.",
                              Quoted(path)));
    }
    if (S_ISREG(status.st_mode)) {
      reader.first_byte_ = ::lseek(reader.fd_, 0, SEEK_CUR);
      reader.is_regular_ = reader.first_byte_ >= 0;
    }
  }
  reader.buffer_.resize(kReadBytes);
  reader.line_.number = 1;
  return reader;
}

LineReader::LineReader(LineReader&& other) noexcept {
  *this = std::move(other);
}

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  std::swap(fd_, other.fd_);
  path_ = std::move(other.path_);
  max_line_bytes_ = other.max_line_bytes_;
  is_regular_ = other.is_regular_;
  first_byte_ = other.first_byte_;
  buffer_ = std::move(other.buffer_);
  begin_ = other.begin_;
  end_ = other.end_;
  at_end_ = other.at_end_;
  line_ = std::move(other.line_);
  has_line_ = other.has_line_;
  any_ = other.any_;
  return *this;
}

LineReader::~LineReader() {
  if (fd_ > STDERR_FILENO) ::close(fd_);
}

Result<std::optional<InputLine>> LineReader::Next() {
  DI_ASSIGN_OR_RETURN(const State state, Advance(/*may_wait=*/true));
  if (state == State::kEnd) return std::nullopt;
  InputLine line = std::move(line_);
  line_ = InputLine{line.number + 1, {}, false};
  has_line_ = any_ = false;
  return line;
}

Result<bool> LineReader::Ready() {
  DI_ASSIGN_OR_RETURN(const State state, Advance(/*may_wait=*/false));
  return state != State::kNotYet;
}

Status LineReader::Rewind() {
  if (!is_regular_ || ::lseek(fd_, first_byte_, SEEK_SET) != first_byte_) {
    return Fail(
        Code::kDataLoss,
        fmt::format("the input {} cannot be read again from its beginning.", Quoted(path_)));
  }
  begin_ = end_ = 0;
  at_end_ = has_line_ = any_ = false;
  line_ = InputLine{1, {}, false};
  return {};
}

// Reads until `line_` is complete.
Result<LineReader::State> LineReader::Advance(bool may_wait) {
  while (!has_line_) {
    if (begin_ == end_) {
      if (!at_end_) {
        DI_ASSIGN_OR_RETURN(const bool filled, Fill(may_wait));
        if (!filled) return State::kNotYet;
      }
      if (at_end_ && !any_) return State::kEnd;
      if (at_end_) has_line_ = EndLine();
      continue;
    }
    const char* begin = buffer_.data() + begin_;
    const auto* line_end = static_cast<const char*>(std::memchr(begin, '\n', end_ - begin_));
    const size_t size = line_end == nullptr ? end_ - begin_ : static_cast<size_t>(line_end - begin);
    TakePiece({begin, size});
    begin_ += size;
    if (line_end == nullptr) continue;
    ++begin_;
    has_line_ = EndLine();
  }
  return State::kLine;
}

void LineReader::TakePiece(std::string_view piece) {
  any_ = true;
  if (line_.too_long) return;
  if (piece.size() > max_line_bytes_ - line_.text.size()) {
    line_.too_long = true;
    line_.text = std::string();
  } else {
    line_.text += piece;
  }
}

// Whether the line is one to return; a blank one is dropped.
bool LineReader::EndLine() {
  if (line_.too_long) return true;
  if (!line_.text.empty() && line_.text.back() == '\r') line_.text.pop_back();
  if (line_.text.find_first_not_of(" \t") != std::string::npos) return true;
  line_.text.clear();
  ++line_.number;
  any_ = false;
  return false;
}

// Gets more bytes, or the end of the file; false if that would take waiting.
Result<bool> LineReader::Fill(bool may_wait) {
  for (;;) {
    // Not left to read() alone: a signal between a check and the call would go unnoticed.
    struct ::pollfd ready = {fd_, POLLIN, 0};
    const int polled = is_regular_ ? 1 : ::poll(&ready, 1, may_wait ? kPollMilliseconds : 0);
    ssize_t count = -1;
    if (polled > 0) count = ::read(fd_, buffer_.data(), buffer_.size());
    if (count >= 0) {
      begin_ = 0;
      end_ = static_cast<size_t>(count);
      at_end_ = count == 0;
      return true;
    }
    if (polled != 0 && errno != EINTR && errno != EAGAIN) {
      return Fail(Code::kDataLoss, fmt::format("reading {} failed in line {}: {}.", Quoted(path_),
                                               line_.number, std::strerror(errno)));
    }
    if (!may_wait) return false;
    if (Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
  }
}

IdRegister::Entry& IdRegister::PlaceOf(const uint64_t (&hash)[2]) {
  const size_t mask = entries_.size() - 1;
  for (size_t i = hash[0] & mask;; i = (i + 1) & mask) {
    Entry& entry = entries_[i];
    if (entry.line == 0 || (entry.hash[0] == hash[0] && entry.hash[1] == hash[1])) return entry;
  }
}

Status IdRegister::Add(const LineId& id, int64_t line) {
  if (num_used_ * 4 >= entries_.size() * 3) {
    std::vector<Entry> old(std::max<size_t>(64, entries_.size() * 2));
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.line != 0) PlaceOf(entry.hash) = entry;
    }
  }
  const Sha256::Digest digest = Sha256::Of((id.is_integer ? "#" : "$") + id.text);
  const uint64_t hash[2] = {Word(digest, 0), Word(digest, 1)};
  Entry& entry = PlaceOf(hash);
  if (entry.line == 0) {
    entry = {{hash[0], hash[1]}, line};
    ++num_used_;
    return {};
  }
  return Fail(Code::kInvalidArgument,
              fmt::format("id {} was used in line {} already; every line needs its own.",
                          Quoted(id.text), entry.line),
              "id");
}

std::string ErrorLine(const std::optional<LineId>& id, int64_t line, const Error& error) {
  return Dump({{"id", id.has_value() ? IdJson(*id) : Json(nullptr)},
               {"line", line},
               {"error", ErrorJson(error)}});
}

std::string OutputLine(const LineId& id, const RequestOutput& output, bool with_timings) {
  Json json = {{"id", IdJson(id)}, {"outputs", Json::array()}};
  for (const CompletionOutput& completion : output.outputs)
    json["outputs"].push_back(CompletionJson(completion));
  if (!output.prompt_logprobs.empty()) {
    AddLogprobs(json, output.prompt_logprobs, "prompt_", "logprobs",
                HasTop(output.prompt_logprobs));
  }
  json["usage"] = {{"prompt_tokens", output.usage.prompt_tokens},
                   {"completion_tokens", output.usage.completion_tokens},
                   {"total_tokens", output.usage.prompt_tokens + output.usage.completion_tokens}};
  if (!with_timings) return Dump(json);
  json["usage"]["cached_tokens"] = output.usage.cached_tokens;
  json["usage"]["preemptions"] = output.usage.preemptions;
  json["timings"] = {{"queue_seconds", output.timings.queue_seconds},
                     {"first_token_seconds", output.timings.first_token_seconds},
                     {"total_seconds", output.timings.total_seconds}};
  return Dump(json);
}

std::string IdsOutputLine(const LineId& id, const std::vector<int32_t>& ids) {
  return Dump({{"id", IdJson(id)}, {"ids", ids}});
}

std::string TextOutputLine(const LineId& id, const std::string& text) {
  return Dump({{"id", IdJson(id)}, {"text", text}});
}

Result<OrderedWriter> OrderedWriter::Create(const std::string& path) {
  DI_ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  return OrderedWriter(std::move(file));
}

Status OrderedWriter::Put(int64_t place, std::string line) {
  waiting_bytes_ += line.size();
  waiting_.emplace(place, std::move(line));
  std::string ready;
  for (auto entry = waiting_.find(next_place_); entry != waiting_.end();
       entry = waiting_.find(next_place_)) {
    ready += entry->second + "\n";
    waiting_bytes_ -= entry->second.size();
    waiting_.erase(entry);
    ++next_place_;
  }
  // Not buffered: finished lines survive whatever happens to the process.
  return file_.Write(ready);
}

Status OrderedWriter::Finish() {
  std::vector<int64_t> places;
  for (const auto& [place, line] : waiting_) places.push_back(place);
  std::sort(places.begin(), places.end());
  for (const int64_t place : places) DI_RETURN_IF_ERROR(file_.Write(waiting_.at(place) + "\n"));
  waiting_.clear();
  waiting_bytes_ = 0;
  return {};
}

}  // namespace deepinfer
