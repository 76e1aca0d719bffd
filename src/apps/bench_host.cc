// What a decode step costs on the host beside the model: planning, stop rules, text, callbacks;
// with a device also what the thread does that feeds it: index arrays and their copy, the launch,
// draws, and taking in what was drawn.
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "apps/bench.h"
#include "apps/output.h"
#include "apps/print.h"
#include "engine/engine.h"
#include "engine/executor_backend.h"
#include "engine/null_backend.h"
#include "runtime/device_choice.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

using Clock = std::chrono::steady_clock;

// The scoreboard's targets, in microseconds; row 17 is the one of 256 sequences.
struct HostCase {
  int64_t sequences = 0;
  double target_us = 0;
};
constexpr HostCase kCases[] = {{1, 30}, {256, 150}, {1024, 400}};
constexpr int64_t kScoredSequences = 256;
constexpr double kScoredFloorUs = 400;
constexpr int64_t kWarmUps = 16;

struct HostResult {
  double plan_us = 0;  // medians
  double collect_us = 0;
  double total_us = 0;
  double p99_us = 0;
  // With a device.
  double begin_us = 0;    // rows: arrays, copy, launch
  double take_in_us = 0;  // of the step in front, and the preparation of draws
  double draw_us = 0;     // arrays, copy, launch
  double wait_us = 0;     // for the device
  double overlapped = 0;  // share of steps that were in the stream before the one in front was done
  double step_us = 0;     // from one step to the next
};

// What a step takes beside the device. The calls are those of one thread.
struct BackendTimes {
  std::vector<double> begin_us, take_in_us, draw_us, wait_us;
  int64_t overlapped = 0;
};

// An executor's steps, timed. Between the return of FinishStep and the call of DrawStep lies what
// the runner does with the results of the step in front, if the next one was begun before that.
class TimedBackend : public ExecutorBackend {
 public:
  explicit TimedBackend(Executor& executor) : ExecutorBackend(executor) {}

  Status BeginStep(const StepPlan& plan) override {
    const Clock::time_point start = Clock::now();
    Status begun = ExecutorBackend::BeginStep(plan);
    times_.begin_us.push_back(Since(start));
    begun_ = true;
    finished_ = false;
    return begun;
  }
  void DrawStep(std::span<const ListedDraw> draws, std::span<const int32_t> host_rows) override {
    const Clock::time_point start = Clock::now();
    if (finished_) {
      times_.take_in_us.push_back(
          std::chrono::duration<double, std::micro>(start - finished_at_).count());
      ++times_.overlapped;
    }
    ExecutorBackend::DrawStep(draws, host_rows);
    times_.draw_us.push_back(Since(start));
    begun_ = false;
  }
  Result<DrawnRows> FinishStep() override {
    const Clock::time_point start = Clock::now();
    Result<DrawnRows> drawn = ExecutorBackend::FinishStep();
    times_.wait_us.push_back(Since(start));
    finished_ = begun_;
    finished_at_ = Clock::now();
    return drawn;
  }

  // Not while an engine uses the backend.
  const BackendTimes& times() const {
    return times_;
  }

 private:
  static double Since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }

  BackendTimes times_;
  bool begun_ = false;     // a step has been begun that is not drawn
  bool finished_ = false;  // meanwhile the one in front has been finished
  Clock::time_point finished_at_;
};

double Percentile(std::vector<double> values, double share) {
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

double Median(const std::vector<double>& values) {
  return values.empty() ? 0 : Percentile(values, 0.5);
}

// The last values, without those of prompts and warm-up.
std::vector<double> Last(const std::vector<double>& values, int64_t count) {
  const int64_t from = std::max<int64_t>(0, std::ssize(values) - count);
  return {values.begin() + from, values.end()};
}

int64_t TokensOfSequence(const BenchHostOptions& options) {
  return options.context + options.steps + 128;
}

// Runs the engine's steps. `device`: null, or `backend` as what it is.
Result<HostResult> Run(const Tokenizer& tokenizer, const BenchHostOptions& options,
                       int64_t sequences, int64_t batched_tokens, ModelBackend& backend,
                       TimedBackend* device) {
  EngineOptions engine_options;
  engine_options.max_model_len = TokensOfSequence(options);
  engine_options.scheduler.max_num_seqs = sequences;
  engine_options.scheduler.max_num_batched_tokens = batched_tokens;
  // Where the model's time is nothing, only what the engine's own thread does is measured.
  engine_options.async_scheduling = device != nullptr;
  EngineEvents events;
  int64_t tokens = 0;
  events.on_delta = [&tokens](const EngineDelta& delta) {
    tokens += static_cast<int64_t>(delta.token_ids.size());
  };
  HostResult result;
  std::vector<double> plan, collect, host;
  {
    Engine engine(backend, tokenizer, engine_options, std::move(events));
    const int64_t vocab = std::min<int64_t>(tokenizer.vocab_size(), backend.vocab_size());
    for (int64_t i = 0; i < sequences; ++i) {
      EngineRequest request;
      request.prompt.resize(static_cast<size_t>(options.context));
      for (size_t t = 0; t < request.prompt.size(); ++t)
        request.prompt[t] = static_cast<int32_t>((static_cast<int64_t>(t) * 31 + i * 7) % vocab);
      request.params.max_tokens = options.steps + 128;
      request.params.ignore_eos = true;
      request.params.temperature = 0;
      request.params.logprobs.reset();
      DI_ASSIGN_OR_RETURN(const int64_t number, engine.Submit(std::move(request)));
      static_cast<void>(number);
    }
    while (tokens == 0 || engine.num_waiting() > 0) engine.Step();
    for (int64_t i = 0; i < kWarmUps; ++i) engine.Step();
    if (engine.num_running() != sequences) {
      return Fail(Code::kInternal,
                  fmt::format("{} of {} sequences are running.", engine.num_running(), sequences));
    }
    const Clock::time_point start = Clock::now();
    for (int64_t i = 0; i < options.steps; ++i) {
      engine.Step();
      plan.push_back(engine.last_plan_seconds() * 1e6);
      collect.push_back(engine.last_collect_seconds() * 1e6);
      host.push_back(plan.back() + collect.back());
    }
    result.step_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                     static_cast<double>(options.steps);
    if (engine.num_running() != sequences)
      return Fail(Code::kInternal, "Sequences have ended while steps were timed.");
  }
  result.plan_us = Median(plan);
  result.collect_us = Median(collect);
  if (device != nullptr) {
    const BackendTimes& times = device->times();
    const std::vector<double> begin = Last(times.begin_us, options.steps);
    const std::vector<double> take_in = Last(times.take_in_us, options.steps);
    const std::vector<double> draw = Last(times.draw_us, options.steps);
    result.begin_us = Median(begin);
    result.take_in_us = Median(take_in);
    result.draw_us = Median(draw);
    result.wait_us = Median(Last(times.wait_us, options.steps));
    result.overlapped =
        static_cast<double>(times.overlapped) / static_cast<double>(times.draw_us.size());
    const auto add = [&host](const std::vector<double>& values) {
      for (size_t i = 0; i < std::min(host.size(), values.size()); ++i) host[i] += values[i];
    };
    add(begin);
    add(take_in);
    add(draw);
  }
  result.total_us = Percentile(host, 0.5);
  result.p99_us = Percentile(host, 0.99);
  return result;
}

Result<HostResult> Measure(const Tokenizer& tokenizer, const BenchHostOptions& options,
                           int64_t sequences) {
  const int64_t blocks = TokensOfSequence(options) / kBlockTokens + 2;
  if (options.device.empty()) {
    NullBackend backend(tokenizer.vocab_size(), sequences,
                        {.num_blocks = sequences * blocks,
                         .num_window_pages = sequences * (blocks + 2),
                         .num_slots = sequences,
                         .window_tokens = 128,
                         .rollback_tokens = 6});
    // All prompts in one step, so that no output ends before the last one has begun.
    return Run(tokenizer, options, sequences, sequences * options.context, backend, nullptr);
  }
  DI_ASSIGN_OR_RETURN(const Device device, ChooseDevice(options.device));
  if (device.kind == DeviceKind::kCpu) {
    return Fail(Code::kInvalidArgument,
                fmt::format("--device is {}; the host's part of a step is measured beside a CUDA "
                            "device, or without the option.",
                            options.device),
                "device");
  }
  const int64_t batched_tokens = std::max<int64_t>(sequences, 16384);
  ExecutorOptions executor_options;
  executor_options.model_dir = options.model_dir;
  executor_options.device = device;
  executor_options.max_sequences = sequences;
  executor_options.cache_tokens = sequences * blocks * kBlockTokens;
  executor_options.max_model_len = TokensOfSequence(options);
  executor_options.max_batched_tokens = batched_tokens;
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<Executor> executor, Executor::Create(executor_options));
  TimedBackend backend(*executor);
  return Run(tokenizer, options, sequences, batched_tokens, backend, &backend);
}

Status PrintCase(const HostCase& host_case, const HostResult& result, bool device) {
  DI_RETURN_IF_ERROR(
      Print("{:5} running: {:7.1f} us a step (median; 99 % below {:.1f}), planning {:.1f}, results "
            "{:.1f}; target {:.0f}\n",
            host_case.sequences, result.total_us, result.p99_us, result.plan_us, result.collect_us,
            host_case.target_us));
  if (!device) return {};
  DI_RETURN_IF_ERROR(
      Print("               on the device's thread: rows {:.1f}, taking in {:.1f}, draws {:.1f}; "
            "{:.1f} waited; a step every {:.1f} us, {:.0f} % begun before the one in front was "
            "done\n",
            result.begin_us, result.take_in_us, result.draw_us, result.wait_us, result.step_us,
            100 * result.overlapped));
  if (host_case.sequences != kScoredSequences) return {};
  return Print(
      "row 17: host time of a step, B=256, overlapped: {:.0f} us; floor {:.0f}, target {:.0f} us\n",
      result.total_us, kScoredFloorUs, host_case.target_us);
}

}  // namespace

int RunBenchHost(const BenchHostOptions& options) {
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<Tokenizer> tokenizer = Tokenizer::Load(options.model_dir + "/tokenizer.json");
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const HostCase& host_case : kCases) {
    const Result<HostResult> result = Measure(*tokenizer, options, host_case.sequences);
    if (!result.has_value()) return PrintError(result.error());
    const Status printed = PrintCase(host_case, *result, !options.device.empty());
    if (!printed.has_value()) return ExitStatus(printed);
    rows.push_back({{"sequences", host_case.sequences},
                    {"context", options.context},
                    {"median_us", result->total_us},
                    {"p99_us", result->p99_us},
                    {"plan_us", result->plan_us},
                    {"collect_us", result->collect_us},
                    {"target_us", host_case.target_us}});
    if (options.device.empty()) continue;
    rows.back().update(nlohmann::ordered_json{{"begin_us", result->begin_us},
                                              {"take_in_us", result->take_in_us},
                                              {"draw_us", result->draw_us},
                                              {"wait_us", result->wait_us},
                                              {"step_us", result->step_us},
                                              {"overlapped", result->overlapped}});
  }
  if (!(*file).has_value()) return kExitOk;
  return ExitStatus(
      (*file)->Write(nlohmann::ordered_json{{"bench", "host"}, {"cases", rows}}.dump(2) + "\n"));
}

}  // namespace deepinfer
