#include "apps/generate_job.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <charconv>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "apps/interrupt.h"
#include "apps/journal.h"
#include "apps/jsonl.h"
#include "apps/model_fingerprint.h"
#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/print.h"
#include "apps/progress.h"
#include "base/quoted.h"
#include "base/sha256.h"
#include "tensor/device_lost.h"

namespace deepinfer {
namespace {

// Results that wait for an earlier line of a stream; beyond, no new lines are begun.
constexpr size_t kMaxWaitingBytes = size_t{256} << 20;
// Lines that are read in one go before running requests get their next step.
constexpr int kLinesAtOnce = 256;
constexpr double kSyncSeconds = 1.0;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Names of sampling parameters in engine errors are fields of sampling_params in a line.
Error InLine(Error error) {
  for (const char* top_level :
       {"prompt", "messages", "tools", "tool_choice", "response_format", "reasoning_effort",
        "user_id", "priority", "timeout_seconds", "cache_salt"}) {
    if (error.field.rfind(top_level, 0) == 0 && error.field != "prompt_logprobs") return error;
  }
  if (!error.field.empty()) error.field = "sampling_params." + error.field;
  return error;
}

bool Failed(const RequestOutput& output) {
  if (output.error.has_value()) return true;
  for (const CompletionOutput& completion : output.outputs) {
    if (completion.error.has_value()) return true;
  }
  return false;
}

bool Aborted(const RequestOutput& output) {
  if (output.error.has_value()) return output.error->code == Code::kCancelled;
  for (const CompletionOutput& completion : output.outputs) {
    if (completion.finish_reason == FinishReason::kAbort) return true;
  }
  return false;
}

// A line on its way through the job.
struct Line {
  std::optional<LineId> id;
  int64_t number = 0;  // in the input
  int64_t place = 0;   // among the lines that are not blank
  uint64_t fingerprint = 0;
};

// Where results go.
class ResultSink {
 public:
  virtual ~ResultSink() = default;
  // Whether the line was finished in an earlier run. kInvalidArgument: it was another line then.
  virtual Result<bool> IsDone(const Line& line) = 0;
  virtual Status Put(const Line& line, bool failed, std::string result) = 0;
  // Called between steps.
  virtual Status Tick() = 0;
  // Called before a wait that may be long: everything becomes as safe as it can be.
  virtual Status Flush() = 0;
  // False: nothing new should be begun before running requests have ended.
  virtual bool HasRoom() const = 0;
};

class StreamSink : public ResultSink {
 public:
  explicit StreamSink(OrderedWriter writer) : writer_(std::move(writer)) {}

  Result<bool> IsDone(const Line&) override {
    return false;
  }
  Status Put(const Line& line, bool, std::string result) override {
    return writer_.Put(line.place, std::move(result));
  }
  Status Tick() override {
    return {};
  }
  Status Flush() override {
    return {};
  }
  bool HasRoom() const override {
    return writer_.waiting_bytes() <= kMaxWaitingBytes;
  }
  Status Finish() {
    return writer_.Finish();
  }

 private:
  OrderedWriter writer_;
};

class JournalSink : public ResultSink {
 public:
  JournalSink(Journal& journal, std::string input) : journal_(journal), input_(std::move(input)) {}

  Result<bool> IsDone(const Line& line) override {
    const Journal::Record* record = journal_.Find(line.number);
    if (record == nullptr) return false;
    if (record->input == line.fingerprint) return true;
    return Fail(Code::kInvalidArgument,
                fmt::format("line {} of the input {} is not the line that this job has finished; "
                            "the input differs. Give the same input, or --overwrite to begin anew.",
                            line.number, Quoted(input_)));
  }
  Status Put(const Line& line, bool failed, std::string result) override {
    return journal_.Append(line.number, line.fingerprint, failed, result);
  }
  Status Tick() override {
    const double now = Now();
    if (now - last_sync_ < kSyncSeconds) return {};
    last_sync_ = now;
    return journal_.Sync();
  }
  Status Flush() override {
    return journal_.Sync();
  }
  bool HasRoom() const override {
    return true;
  }

 private:
  Journal& journal_;
  std::string input_;
  double last_sync_ = Now();
};

// Moves lines from the input through the model to the sink.
class JobRun {
 public:
  struct Options {
    SamplingParams defaults;
    uint64_t seed = 0;
    bool with_timings = true;
    bool show_progress = true;
    std::optional<int64_t> max_errors;
    int64_t total = -1;          // lines, if known
    int64_t already_done = 0;    // in earlier runs
    int64_t already_failed = 0;  // among them
  };

  JobRun(LineReader& reader, ResultSink& sink, Options options)
      : reader_(reader), sink_(sink), options_(std::move(options)), progress_line_("generate") {
    sample_.total = options_.total;
    sample_.done = sample_.done_before = options_.already_done;
    sample_.failed = options_.already_failed;
  }

  void Run(LLM& llm) {
    start_ = Now();
    llm_ = &llm;
    GenerateCallbacks callbacks;
    callbacks.on_finished = [this](size_t index, const RequestOutput& output) {
      Take(index, output);
    };
    callbacks.on_progress = [this](const Progress& progress) { return AfterStep(progress); };
    llm.GenerateStream([this](bool may_wait) { return Next(may_wait); }, callbacks);
    UpdateSample();
  }

  // Of reading and writing; kCancelled if nobody reads the output.
  Status status() const {
    return written_.has_value() ? read_ : written_;
  }
  bool too_many_errors() const {
    return too_many_errors_;
  }
  // Every line of the input has its result.
  bool complete() const {
    return written_.has_value() && !too_many_errors_ && at_end_ && open_.empty() &&
           num_aborted_ == 0;
  }
  const ProgressSample& sample() const {
    return sample_;
  }
  // What this run has done, in one line.
  void ShowStatistics(const LLM& llm) const {
    if (!options_.show_progress) return;
    PrintStderr("generate: {}\n", SummaryLine(llm.Statistics(), sample_.seconds));
  }
  void ShowFinalProgress() {
    if (options_.show_progress) progress_line_.Finish(sample_);
  }

 private:
  NextRequest Next(bool may_wait) {
    for (int i = 0; i < kLinesAtOnce; ++i) {
      if (Interrupted() || !status().has_value() || too_many_errors_) return EndOfRequests{};
      if (!sink_.HasRoom()) return NoRequestYet{};
      const Result<bool> ready = reader_.Ready();
      if (!ready.has_value()) return Stop(ready.error());
      if (!*ready) {
        if (!may_wait) return NoRequestYet{};
        written_ = sink_.Flush();
        if (!written_.has_value()) return EndOfRequests{};
      }
      Result<std::optional<InputLine>> next = reader_.Next();
      if (!next.has_value()) {
        if (next.error().code == Code::kCancelled) return EndOfRequests{};  // interrupted
        return Stop(next.error());
      }
      if (!next->has_value()) {
        at_end_ = true;
        sample_.total = num_lines_;
        return EndOfRequests{};
      }
      std::optional<Request> request = Begin(**next);
      if (request.has_value()) return std::move(*request);
    }
    return NoRequestYet{};
  }

  NextRequest Stop(Error error) {
    read_ = tl::unexpected<Error>(std::move(error));
    return EndOfRequests{};
  }

  // The request of a line, unless the line is finished: in an earlier run, or because it is wrong.
  std::optional<Request> Begin(const InputLine& input) {
    Line line;
    line.number = input.number;
    line.place = num_lines_++;
    line.fingerprint = Word(Sha256::Of(input.text));
    Status accepted;
    std::optional<Request> request;
    if (input.too_long) {
      accepted = Fail(Code::kInvalidArgument,
                      fmt::format("the line is longer than {} bytes.", kMaxLineBytes));
    } else {
      ParsedLine<Request> parsed = ParseGenerateLine(input.text, options_.defaults);
      line.id = parsed.id;
      if (parsed.id.has_value()) accepted = ids_.Add(*parsed.id, line.number);
      if (!parsed.value.has_value()) {
        accepted = tl::unexpected<Error>(parsed.value.error());
      } else {
        request = std::move(*parsed.value);
      }
    }
    // Asked only now: ids of lines that are done count too.
    const Result<bool> done = sink_.IsDone(line);
    if (!done.has_value()) {
      Stop(done.error());
      return std::nullopt;
    }
    if (*done) return std::nullopt;
    if (!accepted.has_value()) {
      llm_->CountRefused();
      Put(line, true, ErrorLine(line.id, line.number, accepted.error()));
      return std::nullopt;
    }
    std::optional<uint64_t>& seed = request->sampling_params.seq_seed;
    if (!seed.has_value()) seed = LineSeed(options_.seed, line.number);
    open_.emplace(num_requests_++, std::move(line));
    return request;
  }

  // The error that has lost the device, if there is one. Lines that meet it are not finished: the
  // job can go on in another process.
  static const Error* LostDevice(const RequestOutput& output) {
    if (output.error.has_value() && IsDeviceLost(*output.error)) return &*output.error;
    for (const CompletionOutput& completion : output.outputs) {
      if (completion.error.has_value() && IsDeviceLost(*completion.error))
        return &*completion.error;
    }
    return nullptr;
  }

  void Take(size_t index, const RequestOutput& output) {
    const auto entry = open_.find(index);
    const Line line = std::move(entry->second);
    open_.erase(entry);
    if (Aborted(output)) {
      ++num_aborted_;
      return;
    }
    if (const Error* lost = LostDevice(output); lost != nullptr) {
      Stop(*lost);
      return;
    }
    Put(line, Failed(output),
        output.error.has_value() ? ErrorLine(line.id, line.number, InLine(*output.error))
                                 : OutputLine(*line.id, output, options_.with_timings));
  }

  void Put(const Line& line, bool failed, std::string result) {
    if (written_.has_value()) written_ = sink_.Put(line, failed, std::move(result));
    if (!written_.has_value()) return;
    ++sample_.done;
    if (failed) ++sample_.failed;
    if (options_.max_errors.has_value() && sample_.failed > *options_.max_errors)
      too_many_errors_ = true;
  }

  bool AfterStep(const Progress& progress) {
    sample_.prompt_tokens = progress.prompt_tokens;
    sample_.completion_tokens = progress.completion_tokens;
    UpdateSample();
    if (options_.show_progress) progress_line_.Update(sample_);
    if (written_.has_value()) written_ = sink_.Tick();
    if (!written_.has_value()) return false;
    if (Interruptions() == 1 && !drain_announced_ && !open_.empty()) {
      drain_announced_ = true;
      PrintStderr(
          "deepinfer: interrupted; finishing the {} that began. Interrupt again to stop "
          "after the current step.\n",
          Counted(static_cast<int64_t>(open_.size()), "line"));
    }
    return Interruptions() < 2 && !too_many_errors_;
  }

  void UpdateSample() {
    sample_.seconds = Now() - start_;
  }

  LineReader& reader_;
  ResultSink& sink_;
  const Options options_;
  ProgressLine progress_line_;
  ProgressSample sample_;
  double start_ = 0;
  LLM* llm_ = nullptr;  // while it runs
  IdRegister ids_;
  std::unordered_map<size_t, Line> open_;  // by the number of the request
  size_t num_requests_ = 0;
  int64_t num_lines_ = 0;
  int64_t num_aborted_ = 0;
  bool at_end_ = false;
  bool too_many_errors_ = false;
  bool drain_announced_ = false;
  Status read_;     // after an error, what runs is still finished and kept
  Status written_;  // after an error, nothing can be kept
};

// What a pass over a regular input finds.
struct InputSummary {
  int64_t lines = 0;  // that are not blank
  std::string digest;
};

Result<InputSummary> Summarise(LineReader& reader) {
  InputSummary summary;
  Sha256 hash;
  for (;;) {
    if (Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, reader.Next());
    if (!line.has_value()) break;
    ++summary.lines;
    hash.Update(fmt::format("{} {}\n", line->number, line->text.size())).Update(line->text);
  }
  DI_RETURN_IF_ERROR(reader.Rewind());
  summary.digest = Hex(hash.Finish());
  return summary;
}

// The same parameters have the same text, whatever their order and spacing were.
std::string CanonicalJson(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? std::string() : json.dump(-1, ' ', /*ensure_ascii=*/true);
}

uint64_t FreshSeed() {
  std::random_device entropy;
  return (uint64_t{entropy()} << 32) | entropy();
}

// Names of the journal's fields.
constexpr char kSeed[] = "seed";
constexpr char kInputLines[] = "input_lines";
constexpr char kInputDigest[] = "input_sha256";
constexpr char kSampling[] = "sampling_params";
constexpr char kNumerics[] = "numerics";
constexpr char kModel[] = "model";
constexpr char kMaxModelLen[] = "max_model_len";
constexpr char kContext[] = "context";
constexpr char kTimings[] = "timings";
constexpr char kReplay[] = "replay";
constexpr char kApproximateHits[] = "approximate_hit_tokens";

JobFields FieldsOf(const GenerateOptions& options, const std::optional<InputSummary>& input) {
  JobFields fields;
  if (input.has_value()) {
    fields[kInputLines] = fmt::format("{}", input->lines);
    fields[kInputDigest] = input->digest;
  }
  fields[kSampling] = CanonicalJson(options.sampling_params);
  fields[kNumerics] =
      options.llm.numerics == NumericsProfile::kReference ? "reference" : "production";
  fields[kModel] = ModelFingerprint(options.llm.model_dir);
  fields[kMaxModelLen] = fmt::format("{}", options.llm.max_model_len);
  fields[kTimings] = options.with_timings ? "yes" : "no";
  // Mask and compact give the same results.
  fields[kReplay] = options.llm.decoder_replay == DecoderReplay::kOff
                        ? "off"
                        : fmt::format("keep {}", options.llm.replay_keep_tokens);
  fields[kApproximateHits] = fmt::format("{}", options.llm.approximate_hit_tokens);
  return fields;
}

const std::string& Get(const JobFields& fields, const std::string& name) {
  static const std::string none;
  const auto field = fields.find(name);
  return field == fields.end() ? none : field->second;
}

// Empty if the job of `then` can be continued with `now`, else what differs.
std::string Difference(const JobFields& then, const JobFields& now) {
  const auto both = [](const std::string& a, const std::string& b) {
    return !a.empty() && !b.empty() && a != b;
  };
  if (both(Get(then, kInputLines), Get(now, kInputLines))) {
    return fmt::format("the number of lines of the input is {} and was {}", Get(now, kInputLines),
                       Get(then, kInputLines));
  }
  if (both(Get(then, kInputDigest), Get(now, kInputDigest)))
    return "the input has as many lines as before, but not the same ones";
  if (Get(then, kModel) != Get(now, kModel)) return "the files of the model are not the same";
  const std::pair<const char*, const char*> options[] = {
      {kSampling, "--sampling-params"},
      {kNumerics, "--numerics"},
      {kMaxModelLen, "--max-model-len"},
      {kReplay, "--replay"},
      {kApproximateHits, "--approximate-hit-tokens"}};
  for (const auto& [field, option] : options) {
    if (Get(then, field) != Get(now, field))
      return fmt::format("{} is {} and was {}", option, Quoted(Get(now, field), 400),
                         Quoted(Get(then, field), 400));
  }
  if (Get(then, kTimings) != Get(now, kTimings))
    return fmt::format("the job was begun {} --no-timings",
                       Get(then, kTimings) == "no" ? "with" : "without");
  if (!Get(now, kSeed).empty() && Get(then, kSeed) != Get(now, kSeed))
    return fmt::format("--seed is {} and the job has {}", Get(now, kSeed), Get(then, kSeed));
  return "";
}

Result<int64_t> NumberOf(const JobFields& fields, const char* name) {
  const std::string& text = Get(fields, name);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty() && number >= 0)
    return number;
  return Fail(Code::kDataLoss,
              fmt::format("the header of the job's journal has {} as {}; a number is expected.",
                          Quoted(text), name));
}

Result<uint64_t> SeedOf(const JobFields& fields) {
  const std::string& text = Get(fields, kSeed);
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return seed;
  return Fail(Code::kDataLoss,
              fmt::format("the header of the job's journal has {} as seed; a number is expected.",
                          Quoted(text)));
}

int ExitStatusOf(int64_t failed) {
  return failed > 0 ? kExitSomeLinesFailed : kExitOk;
}

// "1 line is finished", "120 lines are finished".
std::string LinesFinished(int64_t done) {
  return fmt::format("{} {} finished", Counted(done, "line"), done == 1 ? "is" : "are");
}

// "120 of 1000 lines are finished", "120 lines are finished" while the total is not known.
std::string Finished(const ProgressSample& sample) {
  if (sample.total < 0) return LinesFinished(sample.done);
  return fmt::format("{} of {} {} finished", sample.done, Counted(sample.total, "line"),
                     sample.done == 1 ? "is" : "are");
}

int RunToStream(const GenerateOptions& options, const SamplingParams& defaults) {
  if (options.resume) {
    return PrintError(
        {Code::kInvalidArgument,
         fmt::format("--resume needs an output that is a file; {} gets its lines at once and keeps "
                     "none.",
                     options.output == "-" ? "the standard output" : Quoted(options.output)),
         "output"});
  }
  Result<LineReader> reader = LineReader::Open(options.input);
  if (!reader.has_value()) return PrintError(reader.error());
  JobRun::Options job{.defaults = defaults,
                      .seed = options.seed.has_value() ? *options.seed : FreshSeed(),
                      .with_timings = options.with_timings,
                      .show_progress = options.show_progress,
                      .max_errors = options.max_errors};
  if (reader->is_regular()) {
    const Result<InputSummary> input = Summarise(*reader);
    if (!input.has_value()) return PrintError(input.error());
    job.total = input->lines;
  }
  Result<ReportFiles> reports =
      ReportFiles::Create(options.reports, {options.input, options.output});
  if (!reports.has_value()) return PrintError(reports.error());
  Result<std::unique_ptr<LLM>> llm = LLM::Load(options.llm);
  if (!llm.has_value()) return PrintError(WithOptionNames(llm.error()));
  Result<OrderedWriter> writer = OrderedWriter::Create(options.output);
  if (!writer.has_value()) return PrintError(writer.error());
  StreamSink sink(std::move(*writer));
  JobRun run(*reader, sink, std::move(job));
  CatchInterrupts(2);
  run.Run(**llm);
  const Status written = sink.Finish();
  run.ShowStatistics(**llm);
  const Status reported = reports->Write(**llm);
  if (!run.status().has_value()) return PrintError(run.status().error());
  if (!written.has_value()) return PrintError(written.error());
  if (!reported.has_value()) return PrintError(reported.error());
  run.ShowFinalProgress();
  if (run.too_many_errors()) {
    PrintStderr(
        "deepinfer: error: {} failed, more than --max-errors {}; stopped. {} and "
        "written.\n",
        Counted(run.sample().failed, "line"), *options.max_errors, Finished(run.sample()));
    return kExitTooManyErrors;
  }
  if (!run.complete()) {
    PrintStderr("deepinfer: interrupted; {} and written.\n", Finished(run.sample()));
    return kExitInterrupted;
  }
  return ExitStatusOf(run.sample().failed);
}

// A job whose output is a file: with a journal beside it.
class FileJob {
 public:
  FileJob(const GenerateOptions& options, const SamplingParams& defaults)
      : options_(options),
        defaults_(defaults),
        output_(ResolvedPath(options.output)),
        journal_path_(output_ + ".partial"),
        temporary_path_(output_ + ".partial.sorted") {}

  int Run() {
    for (const std::string* path : {&journal_path_, &temporary_path_}) {
      const Status different = CheckNotTheSameFile(options_.input, *path);
      if (!different.has_value()) {
        return PrintError({Code::kInvalidArgument,
                           fmt::format("the input {} has the name of a file that this job writes, "
                                       "{}; give another output.",
                                       Quoted(options_.input), Quoted(*path)),
                           "output"});
      }
    }
    Result<Journal> journal = OpenJournal();
    if (!journal.has_value()) {
      if (finished_before_) {
        PrintStderr("deepinfer: {} is complete and has no journal; nothing is left to resume.\n",
                    Quoted(options_.output));
        return kExitOk;
      }
      return PrintError(journal.error());
    }
    journal_ = &*journal;
    const Result<int> status = RunWithJournal();
    if (status.has_value()) return *status;
    if (status.error().code == Code::kCancelled && Interrupted()) {
      PrintStderr("deepinfer: interrupted while reading the input; nothing was generated.\n");
      return kExitInterrupted;
    }
    const int printed = PrintError(status.error());
    if (journal_->num_records() > 0 && begun_) PrintHowToResume();
    return printed;
  }

 private:
  Result<Journal> OpenJournal() {
    if (!options_.resume) return Journal::Create(journal_path_, options_.overwrite);
    Result<Journal> journal = Journal::Open(journal_path_);
    if (journal.has_value() || journal.error().code != Code::kNotFound) return journal;
    struct ::stat status = {};
    finished_before_ = ::stat(output_.c_str(), &status) == 0;
    if (finished_before_) return journal;
    PrintStderr("deepinfer: there is no job to resume ({} and {} do not exist); it begins now.\n",
                Quoted(journal_path_), Quoted(options_.output));
    return Journal::Create(journal_path_);
  }

  Result<int> RunWithJournal() {
    const bool resumed = !journal_->fields().empty();
    DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(options_.input));
    std::optional<InputSummary> input;
    if (reader.is_regular()) {
      DI_ASSIGN_OR_RETURN(input, Summarise(reader));
    }
    JobFields fields = FieldsOf(options_, input);
    if (options_.seed.has_value()) fields[kSeed] = fmt::format("{}", *options_.seed);
    LLMOptions llm_options = options_.llm;
    if (resumed) {
      if (const std::string difference = Difference(journal_->fields(), fields);
          !difference.empty()) {
        return Fail(Code::kInvalidArgument,
                    fmt::format("the job of {} cannot be resumed: {}. Undo that to continue, or "
                                "give --overwrite instead of --resume to begin anew.",
                                Quoted(journal_path_), difference));
      }
      if (journal_->cut_bytes() > 0) {
        PrintStderr(
            "deepinfer: the last {} of {} {} not a whole result and {} cut; what was there is "
            "computed again.\n",
            Counted(journal_->cut_bytes(), "byte"), Quoted(journal_path_),
            journal_->cut_bytes() == 1 ? "is" : "are", journal_->cut_bytes() == 1 ? "was" : "were");
      }
      ProgressSample sample;
      sample.done = journal_->num_records();
      sample.total = input.has_value() ? input->lines : -1;
      sample.failed = journal_->num_failed();
      if (TooMany(sample.failed)) return StopForErrors(sample);
      if (sample.done == sample.total) {
        begun_ = true;
        return Complete(sample);
      }
      DI_ASSIGN_OR_RETURN(llm_options.max_model_len, NumberOf(journal_->fields(), kContext));
    }
    DI_ASSIGN_OR_RETURN(
        reports_, ReportFiles::Create(options_.reports, {options_.input, options_.output, output_,
                                                         journal_path_, temporary_path_}));
    const Result<std::unique_ptr<LLM>> loaded = LLM::Load(llm_options);
    if (!loaded.has_value()) return tl::unexpected<Error>(WithOptionNames(loaded.error()));
    const std::unique_ptr<LLM>& llm = *loaded;
    if (resumed && llm->max_model_len() < llm_options.max_model_len) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("the job of {} cannot be resumed: a request has room for {} tokens "
                              "and had {}. Give --cache-tokens {} or more.",
                              Quoted(journal_path_), llm->max_model_len(),
                              llm_options.max_model_len, llm_options.max_model_len));
    }
    if (Interrupted()) return Interruption(ProgressSample{.total = -1});
    if (!resumed) {
      if (!options_.seed.has_value()) fields[kSeed] = fmt::format("{}", FreshSeed());
      fields[kContext] = fmt::format("{}", llm->max_model_len());
      DI_RETURN_IF_ERROR(journal_->Begin(fields));
    }
    begun_ = true;
    return RunLines(*llm, reader, input);
  }

  Result<int> RunLines(LLM& llm, LineReader& reader, const std::optional<InputSummary>& input) {
    DI_ASSIGN_OR_RETURN(const uint64_t seed, SeedOf(journal_->fields()));
    JournalSink sink(*journal_, options_.input);
    JobRun run(reader, sink,
               {.defaults = defaults_,
                .seed = seed,
                .with_timings = options_.with_timings,
                .show_progress = options_.show_progress,
                .max_errors = options_.max_errors,
                .total = input.has_value() ? input->lines : -1,
                .already_done = journal_->num_records(),
                .already_failed = journal_->num_failed()});
    CatchInterrupts(2);
    run.Run(llm);
    const Status synced = journal_->Sync();
    run.ShowStatistics(llm);
    // A report that cannot be written withholds no result.
    const Status reported = reports_->Write(llm);
    Result<int> status = Conclude(run, synced);
    if (reported.has_value()) return status;
    const int failed = PrintError(reported.error());
    if (status.has_value() && *status == kExitOk) return failed;
    return status;
  }

  Result<int> Conclude(JobRun& run, const Status& synced) {
    if (!run.status().has_value()) return tl::unexpected<Error>(run.status().error());
    if (!synced.has_value()) return tl::unexpected<Error>(synced.error());
    if (run.complete() && journal_->num_records() != run.sample().total) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("the input {} has {} and the job has finished {}; the input differs. "
                              "Give the same input, or --overwrite to begin anew.",
                              Quoted(options_.input), Counted(run.sample().total, "line"),
                              journal_->num_records()));
    }
    if (run.complete()) {
      run.ShowFinalProgress();
      return Complete(run.sample());
    }
    run.ShowFinalProgress();
    return run.too_many_errors() ? StopForErrors(run.sample()) : Interruption(run.sample());
  }

  bool TooMany(int64_t failed) const {
    return options_.max_errors.has_value() && failed > *options_.max_errors;
  }

  Result<int> StopForErrors(const ProgressSample& sample) {
    PrintStderr(
        "deepinfer: error: {} failed, more than --max-errors {}; stopped. {}. "
        "The journal {} keeps what is finished; a larger --max-errors lets the job go on.\n",
        Counted(sample.failed, "line"), *options_.max_errors, Finished(sample),
        Quoted(journal_path_));
    PrintHowToResume();
    return kExitTooManyErrors;
  }

  Result<int> Interruption(const ProgressSample& sample) {
    if (journal_->num_records() == 0) {
      if (begun_) DI_RETURN_IF_ERROR(journal_->Remove());
      PrintStderr("deepinfer: interrupted; nothing was generated.\n");
      return kExitInterrupted;
    }
    PrintStderr("deepinfer: interrupted; {}, and the journal {} keeps what is finished.\n",
                sample.done > 0 ? Finished(sample) : LinesFinished(journal_->num_records()),
                Quoted(journal_path_));
    PrintHowToResume();
    return kExitInterrupted;
  }

  void PrintHowToResume() const {
    PrintStderr("deepinfer: to go on{}:\n  {}\n",
                options_.input == "-" ? ", with the same lines on the standard input" : "",
                options_.resume_command);
  }

  // All lines are in the journal: the output takes its place.
  Result<int> Complete(const ProgressSample& sample) {
    const auto not_lost = [this](const Status& status) {
      Error error = status.error();
      error.message += fmt::format(" All results are in {}.", Quoted(journal_path_));
      return tl::unexpected<Error>(std::move(error));
    };
    Result<ReplacementFile> file = ReplacementFile::Create(output_, temporary_path_);
    if (!file.has_value()) return not_lost(tl::unexpected<Error>(file.error()));
    Status status =
        journal_->CopyInOrder([&](std::string_view piece) { return file->Write(piece); });
    if (status.has_value()) status = file->Commit();
    if (!status.has_value()) return not_lost(status);
    DI_RETURN_IF_ERROR(journal_->Remove());
    return ExitStatusOf(sample.failed);
  }

  const GenerateOptions& options_;
  const SamplingParams& defaults_;
  const std::string output_;
  const std::string journal_path_;
  const std::string temporary_path_;
  Journal* journal_ = nullptr;
  std::optional<ReportFiles> reports_;
  bool finished_before_ = false;
  bool begun_ = false;  // nothing stands in the way of running, so trying again makes sense
};

// Lines of an output that is not a regular file go to it as they are ready.
bool IsStream(const std::string& output) {
  struct ::stat status = {};
  return output == "-" || (::stat(output.c_str(), &status) == 0 && !S_ISREG(status.st_mode));
}

}  // namespace

uint64_t LineSeed(uint64_t job_seed, int64_t line) {
  return Word(Sha256::Of(fmt::format("seed {} line {}", job_seed, line)));
}

int RunGenerateJob(const GenerateOptions& options, const SamplingParams& defaults) {
  const Status different = CheckNotTheSameFile(options.input, options.output);
  if (!different.has_value()) return PrintError(different.error());
  std::error_code ignored;
  if (std::filesystem::is_directory(options.output, ignored)) {
    return PrintError(
        {Code::kInvalidArgument,
         fmt::format("the output {} is a directory; a file is expected.", Quoted(options.output)),
         "output"});
  }
  return IsStream(options.output) ? RunToStream(options, defaults)
                                  : FileJob(options, defaults).Run();
}

}  // namespace deepinfer
