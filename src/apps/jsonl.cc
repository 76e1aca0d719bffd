#include "apps/jsonl.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/interrupt.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

using Json = nlohmann::ordered_json;

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

Json CompletionJson(const CompletionOutput& output) {
  Json json = {
      {"index", output.index},         {"text", output.text},
      {"token_ids", output.token_ids}, {"finish_reason", FinishReasonName(output.finish_reason)},
      {"stop_reason", nullptr},        {"seq_seed", output.seq_seed}};
  if (const auto* text = std::get_if<std::string>(&output.stop_reason)) json["stop_reason"] = *text;
  if (const auto* id = std::get_if<int64_t>(&output.stop_reason)) json["stop_reason"] = *id;
  if (!output.logprobs.empty()) {
    json["cumulative_logprob"] = output.cumulative_logprob;
    AddLogprobs(json, output.logprobs, "", "token_logprobs", HasTop(output.logprobs));
  }
  if (output.error.has_value()) json["error"] = ErrorJson(*output.error);
  return json;
}

}  // namespace

void LineReader::Closer::operator()(std::FILE* file) const {
  if (file != stdin) std::fclose(file);
}

Result<LineReader> LineReader::Open(const std::string& path, size_t max_line_bytes) {
  LineReader reader;
  reader.path_ = path;
  reader.max_line_bytes_ = max_line_bytes;
  if (path == "-") {
    reader.file_.reset(stdin);
    return reader;
  }
  struct ::stat status = {};
  if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("the input {} is a directory; a file of JSON lines is expected.",
                            Quoted(path)));
  }
  reader.file_.reset(std::fopen(path.c_str(), "rb"));
  if (reader.file_ == nullptr) {
    return Fail(
        errno == ENOENT ? Code::kNotFound : Code::kInvalidArgument,
        fmt::format("the input {} cannot be read: {}.", Quoted(path), std::strerror(errno)));
  }
  return reader;
}

Result<std::optional<InputLine>> LineReader::Next() {
  for (;;) {
    InputLine line;
    line.number = ++number_;
    bool any = false;
    int c = 0;
    for (;;) {
      c = ::getc_unlocked(file_.get());
      if (c == EOF && std::ferror(file_.get()) != 0 && errno == EINTR) {
        if (Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
        std::clearerr(file_.get());
        continue;
      }
      if (c == EOF) break;
      any = true;
      if (c == '\n') break;
      if (line.text.size() == max_line_bytes_) line.too_long = true;
      if (!line.too_long) line.text += static_cast<char>(c);
    }
    if (c == EOF && std::ferror(file_.get()) != 0) {
      return Fail(Code::kDataLoss, fmt::format("reading {} failed in line {}: {}.", Quoted(path_),
                                               number_, std::strerror(errno)));
    }
    if (!any) return std::nullopt;
    if (line.too_long) {
      line.text = std::string();
      return line;
    }
    if (!line.text.empty() && line.text.back() == '\r') line.text.pop_back();
    if (line.text.find_first_not_of(" \t") != std::string::npos) return line;
  }
}

Status IdRegister::Add(const LineId& id, int64_t line) {
  const auto [entry, added] = line_of_.try_emplace((id.is_integer ? "#" : "$") + id.text, line);
  if (added) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("id {} was used in line {} already; every line needs its own.",
                          Quoted(id.text), entry->second),
              "id");
}

std::string ErrorLine(const std::optional<LineId>& id, int64_t line, const Error& error) {
  return Dump({{"id", id.has_value() ? IdJson(*id) : Json(nullptr)},
               {"line", line},
               {"error", ErrorJson(error)}});
}

std::string OutputLine(const LineId& id, const RequestOutput& output) {
  Json json = {{"id", IdJson(id)}, {"outputs", Json::array()}};
  for (const CompletionOutput& completion : output.outputs)
    json["outputs"].push_back(CompletionJson(completion));
  if (!output.prompt_logprobs.empty()) {
    AddLogprobs(json, output.prompt_logprobs, "prompt_", "logprobs",
                HasTop(output.prompt_logprobs));
  }
  json["usage"] = {{"prompt_tokens", output.usage.prompt_tokens},
                   {"completion_tokens", output.usage.completion_tokens},
                   {"total_tokens", output.usage.prompt_tokens + output.usage.completion_tokens},
                   {"preemptions", output.usage.preemptions}};
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
  waiting_.emplace(place, std::move(line));
  std::string ready;
  for (auto entry = waiting_.find(next_place_); entry != waiting_.end();
       entry = waiting_.find(next_place_)) {
    ready += entry->second + "\n";
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
  return {};
}

}  // namespace deepinfer
