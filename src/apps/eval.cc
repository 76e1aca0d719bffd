#include "apps/eval.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "apps/eval_report.h"
#include "apps/eval_task.h"
#include "apps/generate_job.h"
#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/print.h"
#include "apps/progress.h"
#include "base/quoted.h"
#include "base/sha256.h"

namespace deepinfer {
namespace {

namespace fs = std::filesystem;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A line of a task file on its way through the evaluation.
struct Entry {
  std::string file;  // its name without folders
  int64_t line = 0;
  std::optional<LineId> id;
  std::unique_ptr<EvalTask> task;  // null: `error` says why
  Error error;
};

// ---- Reading.

Status ReadTaskFile(const std::string& path, const SamplingParams& defaults,
                    std::vector<Entry>* entries) {
  DI_ASSIGN_OR_RETURN(LineReader lines, LineReader::Open(path));
  EvalTaskReader reader(defaults);
  const std::string name = path == "-" ? path : fs::path(path).filename().string();
  for (;;) {
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, lines.Next());
    if (!line.has_value()) return {};
    Entry entry;
    entry.file = name;
    entry.line = line->number;
    Result<std::unique_ptr<EvalTask>> task =
        line->too_long ? Fail(Code::kInvalidArgument,
                              fmt::format("the line is longer than {} bytes.", kMaxLineBytes))
                       : reader.Read(line->text, line->number, &entry.id);
    if (!task.has_value()) {
      entry.error = std::move(task.error());
    } else if (*task == nullptr) {
      continue;  // a document
    } else {
      entry.task = std::move(*task);
    }
    entries->push_back(std::move(entry));
  }
}

// Keeps `limit` tasks of each skill and context, and all lines with errors. Which ones depends on
// the seed and on each task's file and id only, not on what else is there.
void Sample(int64_t limit, uint64_t seed, std::vector<Entry>* entries) {
  std::map<EvalReport::Key, std::vector<std::pair<Sha256::Digest, size_t>>> groups;
  for (size_t i = 0; i < entries->size(); ++i) {
    const Entry& entry = (*entries)[i];
    if (entry.task == nullptr) continue;
    groups[{entry.task->skill, entry.task->context}].emplace_back(
        Sha256::Of(fmt::format("{} {} {}", seed, entry.file, entry.id->text)), i);
  }
  std::vector<bool> kept(entries->size(), true);
  for (auto& [key, members] : groups) {
    std::sort(members.begin(), members.end());
    for (size_t i = static_cast<size_t>(limit); i < members.size(); ++i)
      kept[members[i].second] = false;
  }
  std::vector<Entry> chosen;
  for (size_t i = 0; i < entries->size(); ++i) {
    if (kept[i]) chosen.push_back(std::move((*entries)[i]));
  }
  *entries = std::move(chosen);
}

// ---- Result lines.

JsonValue IdJson(const std::optional<LineId>& id) {
  if (!id.has_value()) return nullptr;
  if (!id->is_integer) return id->text;
  int64_t number = 0;
  std::from_chars(id->text.data(), id->text.data() + id->text.size(), number);
  return number;
}

std::string FailedLine(const Entry& entry, const Error& error) {
  JsonValue json;
  json.Set("id", IdJson(entry.id));
  json.Set("file", entry.file);
  json.Set("line", entry.line);
  json.Set("error", JsonValue::Object{{"code", std::string(CodeName(error.code))},
                                      {"field", error.field},
                                      {"message", error.message}});
  return json.DumpCompact();
}

std::string VerdictLine(const Entry& entry, const RequestOutput& output,
                        const ParsedMessage& answer, bool correct) {
  const EvalTask& task = *entry.task;
  JsonValue json;
  json.Set("id", IdJson(entry.id));
  json.Set("file", entry.file);
  json.Set("skill", task.skill);
  if (task.context.has_value()) json.Set("context", *task.context);
  json.Set("correct", correct);
  json.Set("scorer", task.scorer_name);
  json.Set("expected", task.expected);
  JsonValue shown;
  shown.Set("content", answer.content);
  if (!answer.reasoning_content.empty()) shown.Set("reasoning_content", answer.reasoning_content);
  if (!answer.tool_calls.empty()) {
    JsonValue::Array calls;
    for (const ToolCall& call : answer.tool_calls)
      calls.push_back(JsonValue::Object{{"name", call.name}, {"arguments", call.arguments}});
    shown.Set("tool_calls", std::move(calls));
  }
  json.Set("answer", std::move(shown));
  json.Set("finish_reason", std::string(FinishReasonName(output.outputs[0].finish_reason)));
  json.Set("prompt_tokens", output.usage.prompt_tokens);
  json.Set("completion_tokens", output.usage.completion_tokens);
  return json.DumpCompact();
}

// ---- Running.

class EvalRun {
 public:
  EvalRun(std::vector<Entry> entries, std::optional<OrderedWriter> writer, bool show_progress)
      : entries_(std::move(entries)),
        writer_(std::move(writer)),
        show_progress_(show_progress),
        progress_line_("eval") {
    sample_.total = static_cast<int64_t>(entries_.size());
  }

  void Run(LLM& llm) {
    start_ = Now();
    GenerateCallbacks callbacks;
    callbacks.on_finished = [this](size_t index, const RequestOutput& output) {
      Take(running_[index], output);
    };
    callbacks.on_progress = [this](const Progress& progress) {
      sample_.prompt_tokens = progress.prompt_tokens;
      sample_.completion_tokens = progress.completion_tokens;
      sample_.seconds = Now() - start_;
      if (show_progress_) progress_line_.Update(sample_);
      return written_.has_value() && !Interrupted();
    };
    llm.GenerateStream([this](bool) { return Next(); }, callbacks);
    sample_.seconds = Now() - start_;
    if (show_progress_) progress_line_.Finish(sample_);
    if (writer_.has_value() && written_.has_value()) written_ = writer_->Finish();
  }

  const EvalReport& report() const {
    return report_;
  }
  const Status& written() const {
    return written_;
  }
  bool complete() const {
    return sample_.done == sample_.total;
  }

 private:
  NextRequest Next() {
    while (next_ < entries_.size() && written_.has_value() && !Interrupted()) {
      const size_t place = next_++;
      Entry& entry = entries_[place];
      if (entry.task != nullptr) {
        running_.push_back(place);
        return std::move(entry.task->request);
      }
      report_.AddUnreadable();
      PutError(place, entry.error);
    }
    return EndOfRequests{};
  }

  void Take(size_t place, const RequestOutput& output) {
    const Entry& entry = entries_[place];
    const EvalTask& task = *entry.task;
    std::optional<Error> error = output.error;
    if (!error.has_value()) error = output.outputs[0].error;
    if (error.has_value()) {
      if (error->code == Code::kCancelled) return;
      report_.AddFailed(task.skill, task.context);
      return PutError(place, *error);
    }
    const CompletionOutput& completion = output.outputs[0];
    if (completion.finish_reason == FinishReason::kAbort) return;
    ParsedMessage answer;
    if (completion.message.has_value()) {
      answer = *completion.message;
    } else {
      answer.content = completion.text;
    }
    const bool correct = task.scorer->Accepts(answer);
    report_.Add(task.skill, task.context, correct);
    Put(place, VerdictLine(entry, output, answer, correct));
  }

  void PutError(size_t place, const Error& error) {
    const Entry& entry = entries_[place];
    ++sample_.failed;
    // The first ones tell what is wrong; all of them are in the output.
    if (sample_.failed <= kShownErrors)
      PrintStderr("deepinfer: {}, line {}: {}\n", entry.file, entry.line, error.message);
    Put(place, FailedLine(entry, error));
  }

  void Put(size_t place, std::string line) {
    ++sample_.done;
    if (writer_.has_value() && written_.has_value())
      written_ = writer_->Put(static_cast<int64_t>(place), std::move(line));
  }

  static constexpr int64_t kShownErrors = 10;

  std::vector<Entry> entries_;
  std::optional<OrderedWriter> writer_;
  const bool show_progress_;
  ProgressLine progress_line_;
  ProgressSample sample_;
  double start_ = 0;
  size_t next_ = 0;
  std::vector<size_t> running_;  // places, by the number of the request
  EvalReport report_;
  Status written_;
};

Result<std::vector<Entry>> ReadTasks(const EvalOptions& options) {
  std::vector<std::string> files = options.tasks;
  if (!options.suite.empty()) {
    DI_ASSIGN_OR_RETURN(files, SuiteFiles(options.llm.model_dir, options.suite));
  }
  SamplingParams defaults;
  defaults.temperature = 0;
  defaults.max_tokens = options.max_tokens;
  std::vector<Entry> entries;
  for (const std::string& file : files) {
    if (!options.output.empty()) DI_RETURN_IF_ERROR(CheckNotTheSameFile(file, options.output));
    DI_RETURN_IF_ERROR(ReadTaskFile(file, defaults, &entries));
  }
  if (options.limit > 0) Sample(options.limit, options.seed, &entries);
  if (entries.empty()) return Fail(Code::kInvalidArgument, "the task files have no tasks.");
  for (Entry& entry : entries) {
    if (entry.task == nullptr) continue;
    std::optional<uint64_t>& seed = entry.task->request.sampling_params.seq_seed;
    if (!seed.has_value()) seed = LineSeed(options.seed, entry.line);
  }
  return entries;
}

}  // namespace

Result<std::vector<std::string>> SuiteFiles(const std::string& model_dir,
                                            const std::string& suite) {
  if (suite.empty() || suite.find('/') != std::string::npos || suite.starts_with('.')) {
    return Fail(Code::kInvalidArgument,
                fmt::format("--suite is {}; allowed is the name of a folder in {}/eval.",
                            Quoted(suite), model_dir),
                "suite");
  }
  const fs::path all = fs::path(model_dir) / "eval";
  std::error_code error;
  std::vector<std::string> files;
  for (const auto& file : fs::directory_iterator(all / suite, error)) {
    if (file.path().extension() == ".jsonl") files.push_back(file.path().string());
  }
  std::sort(files.begin(), files.end());
  if (!files.empty()) return files;
  std::vector<std::string> names;
  for (const auto& folder : fs::directory_iterator(all, error)) {
    if (folder.is_directory()) names.push_back(folder.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return Fail(Code::kNotFound,
              fmt::format("the checkpoint has no suite {}: there is no *.jsonl in {}; {}.",
                          Quoted(suite), Quoted((all / suite).string()),
                          list.empty() ? "it has no suites" : "its suites are " + list),
              "suite");
}

int RunEval(const EvalOptions& options) {
  CatchInterrupts();
  Result<std::vector<Entry>> entries = ReadTasks(options);
  if (!entries.has_value()) return PrintError(entries.error());
  Result<std::optional<OutputFile>> json = CreateIfNamed(options.json);
  if (!json.has_value()) return PrintError(json.error());
  Result<std::unique_ptr<LLM>> llm = LLM::Load(options.llm);
  if (!llm.has_value()) return PrintError(WithOptionNames(llm.error()));
  std::optional<OrderedWriter> writer;
  if (!options.output.empty()) {
    Result<OrderedWriter> created = OrderedWriter::Create(options.output);
    if (!created.has_value()) return PrintError(created.error());
    writer = std::move(*created);
  }
  EvalRun run(std::move(*entries), std::move(writer), options.show_progress);
  run.Run(**llm);
  if (!run.written().has_value()) return PrintError(run.written().error());
  const EvalReport& report = run.report();
  if (json->has_value()) {
    const Status written = (*json)->Write(report.Json());
    if (!written.has_value()) return PrintError(written.error());
  }
  // With the answers on the standard output, the table is for people.
  if (options.output == "-") {
    WriteStderr(report.Table());
  } else if (const Status printed = WriteStdout(report.Table()); !printed.has_value()) {
    return PrintError(printed.error());
  }
  if (!run.complete()) {
    PrintStderr("deepinfer: interrupted; the table has what was finished.\n");
    return kExitInterrupted;
  }
  return report.failed() > 0 ? kExitSomeLinesFailed : kExitOk;
}

}  // namespace deepinfer
