// The program `deepinfer`: parses the command line, installs the log sink and calls one command.
// All use of the option parser is in this file. Exit status: 0 success, 1 failure, 2 usage error, 3
// finished but some input lines failed, 4 stopped because too many failed, 130 interrupted, 141
// nobody reads the output any more.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <limits>
#include <span>
#include <sstream>

#include "apps/bench.h"
#include "apps/eval.h"
#include "apps/generate.h"
#include "apps/inspect.h"
#include "apps/jsonl.h"
#include "apps/logits.h"
#include "apps/make_checkpoint.h"
#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/parse.h"
#include "apps/plan.h"
#include "apps/print.h"
#include "apps/render.h"
#include "apps/replay_schedule.h"
#include "apps/selfcheck.h"
#include "apps/tokenize.h"
#include "base/log.h"
#include "base/quoted.h"
#include "deepinfer/statistics.h"
#include "engine/llm_options.h"

namespace deepinfer {
namespace {

// Checks of option values: empty, or what is wrong. The option's name is put in front.

std::string CheckSeed(const std::string& text) {
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (!text.empty() && error == std::errc() && end == text.data() + text.size()) return "";
  return fmt::format("Value {} not in range 0 to {}", text, std::numeric_limits<uint64_t>::max());
}

std::string CheckSamplingParams(const std::string& text) {
  const Result<SamplingParams> params = ParseSamplingParams(text);
  return params.has_value() ? "" : params.error().message;
}

// A file for a report: an empty name is not "no report" but a mistake, a variable that is not set.
CLI::Validator FileName() {
  return CLI::Validator(
      [](const std::string& path) {
        return path.empty() ? "The name of a file is expected, and it is empty" : "";
      },
      "");
}

CLI::Validator OneOf(std::vector<std::string> words) {
  std::string list;
  for (const std::string& word : words) list += (list.empty() ? "" : " or ") + word;
  return CLI::Validator(
      [words, list](const std::string& text) {
        return std::find(words.begin(), words.end(), text) != words.end()
                   ? std::string()
                   : fmt::format("{} is given; allowed is {}", Quoted(text), list);
      },
      list);
}

// Each AddXCommand registers one sub-command, which stores its exit status in `status`.

void AddInspectCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command =
      app.add_subcommand("inspect", "Print a checkpoint's configuration, tensors and memory needs");
  command->add_option("directory", options->dir, "Checkpoint directory")->required();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &status] { status = RunInspect(*options); });
}

void AddMakeCheckpointCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<MakeCheckpointOptions>();
  CLI::App* command =
      app.add_subcommand("make-checkpoint", "Write a checkpoint with random weights");
  command->add_option("output", options->output, "Directory to create")->required();
  command
      ->add_option("--preset", options->preset,
                   "tiny: every mechanism in a few MB; slice: released widths, chosen counts")
      ->check(OneOf({"tiny", "slice"}))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "The same seed gives the same bytes")
      ->check(CLI::Validator(CheckSeed, "0 to 2^64-1"))
      ->capture_default_str();
  command->add_option("--threads", options->num_threads, "0: all processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  SliceOptions& slice = options->slice;
  const auto count = [&](const char* name, int64_t& value, int64_t min, int64_t max,
                         const char* what) {
    return command->add_option(name, value, what)
        ->check(CLI::Range(min, max))
        ->capture_default_str()
        ->group("Preset slice");
  };
  const CLI::Option* slice_options[] = {
      count("--layers", slice.layers, 1, 40, "Backbone layers"),
      count("--experts", slice.experts, 1, 384, "Routed experts per layer"),
      count("--engram-rows", slice.engram_rows, 1000, 384006168,
            "Rows per Engram table, approximately"),
      count("--vocab", slice.vocab, 320, 129280, "Vocabulary size"),
      count("--draft-layers", slice.draft_layers, 0, 3, "Draft layers"),
      count("--draft-experts", slice.draft_experts, 1, 128, "Routed experts per draft layer"),
  };
  std::vector<const CLI::Option*> only_slice(std::begin(slice_options), std::end(slice_options));
  command->callback([options, only_slice, &status] {
    for (const CLI::Option* option : only_slice) {
      if (options->preset != "slice" && option->count() > 0) {
        throw CLI::ValidationError(option->get_name(), "applies to --preset slice only");
      }
    }
    status = RunMakeCheckpoint(*options);
  });
}

void AddDeviceName(CLI::App* command, std::string& device) {
  command
      ->add_option("--device", device,
                   "cpu, cuda:N, or auto: the first CUDA device if there is one, else the CPU")
      ->capture_default_str();
}

void AddDevice(CLI::App* command, LLMOptions& llm) {
  AddDeviceName(command, llm.device);
  command
      ->add_option_function<std::string>(
          "--engram-memory",
          [&llm](const std::string& name) { llm.engram_on_device = name == "device"; },
          "Where the Engram tables of a CUDA device are: host (page-locked), or device; no output "
          "changes")
      ->check(OneOf({"host", "device"}))
      ->default_str("host");
  command->add_flag_callback(
      "--no-cuda-graphs", [&llm] { llm.cuda_graphs = false; },
      "Launch decoding steps kernel by kernel; no output changes");
}

void AddThreads(CLI::App* command, LLMOptions& llm) {
  command->add_option("--threads", llm.num_threads, "0: one per processor")
      ->check(CLI::Range(0, LLMOptions::kMaxThreads))
      ->capture_default_str();
}

void AddMaxModelLen(CLI::App* command, LLMOptions& llm) {
  command
      ->add_option("--max-model-len", llm.max_model_len,
                   "Prompt + output of a request; 0: as the model and memory allow")
      ->check(CLI::Range(int64_t{0}, LLMOptions::kMaxTokens))
      ->capture_default_str();
}

void AddModelOptions(CLI::App* command, LLMOptions& llm) {
  command->add_option("--model", llm.model_dir, "Checkpoint directory")->required();
  command
      ->add_option_function<std::string>(
          "--numerics",
          [&llm](const std::string& name) {
            llm.numerics =
                name == "reference" ? NumericsProfile::kReference : NumericsProfile::kProduction;
          },
          "production: as the published engine rounds; reference: as the vendor's small program")
      ->check(OneOf({"production", "reference"}))
      ->default_str("production");
  AddDevice(command, llm);
  AddThreads(command, llm);
}

// The cache and the function that is computed.
struct ReplayOptions {
  CLI::Option* mode = nullptr;
  CLI::Option* keep = nullptr;
};

DecoderReplay ReplayMode(const std::string& name) {
  return name == "mask"      ? DecoderReplay::kMask
         : name == "compact" ? DecoderReplay::kCompact
                             : DecoderReplay::kOff;
}

// What the command line does not say comes from the environment, under the published engine's
// names.
void ApplyReplayEnvironment(const ReplayOptions& options, LLMOptions& llm) {
  constexpr char kMode[] = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE";
  constexpr char kKeep[] = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS";
  const char* const mode = std::getenv(kMode);
  if (options.mode->count() == 0 && mode != nullptr && *mode != '\0') {
    const std::string name = mode;
    if (name != "off" && name != "mask" && name != "compact") {
      throw CLI::ValidationError(
          fmt::format("environment {}", kMode),
          fmt::format("{} is not allowed; allowed are off, mask and compact", Quoted(name)));
    }
    llm.decoder_replay = ReplayMode(name);
  }
  const char* const keep = std::getenv(kKeep);
  if (llm.decoder_replay == DecoderReplay::kOff || options.keep->count() > 0 || keep == nullptr ||
      *keep == '\0')
    return;
  const std::string_view text = keep;
  int64_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (error != std::errc() || end != text.data() + text.size() || tokens < 0 ||
      tokens > LLMOptions::kMaxTokens) {
    throw CLI::ValidationError(fmt::format("environment {}", kKeep),
                               fmt::format("{} is not allowed; allowed are 0 to {}", Quoted(text),
                                           LLMOptions::kMaxTokens));
  }
  llm.replay_keep_tokens = tokens;
}

ReplayOptions AddCapacityOptions(CLI::App* command, LLMOptions& llm) {
  command
      ->add_option("--max-num-batched-tokens", llm.max_num_batched_tokens,
                   "Rows of one step; at least --max-num-seqs")
      ->check(CLI::Range(int64_t{1}, LLMOptions::kMaxNumBatchedTokens))
      ->capture_default_str();
  command->add_option("--max-num-seqs", llm.max_num_seqs, "Sequences that run at once")
      ->check(CLI::Range(int64_t{1}, LLMOptions::kMaxNumSeqs))
      ->capture_default_str();
  command
      ->add_option("--cache-tokens", llm.cache_tokens,
                   "Cache capacity in tokens, rounded up to blocks of 128; 0: chosen from the "
                   "machine's memory")
      ->check(CLI::Range(int64_t{0}, LLMOptions::kMaxTokens))
      ->capture_default_str();
  command
      ->add_option_function<std::string>(
          "--cache-format", [&llm](const std::string& name) { llm.bf16_cache = name == "bf16"; },
          "packed, or bf16: two to four times the memory; no output changes")
      ->check(OneOf({"packed", "bf16"}))
      ->default_str("packed");
  ReplayOptions replay;
  replay.mode =
      command
          ->add_option_function<std::string>(
              "--replay",
              [&llm](const std::string& name) { llm.decoder_replay = ReplayMode(name); },
              "off; compact: only the last tokens of a prompt run the decoder half; mask: the same "
              "results without the saving. Also DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE")
          ->check(OneOf({"off", "mask", "compact"}))
          ->default_str("off");
  replay.keep =
      command
          ->add_option("--replay-keep-tokens", llm.replay_keep_tokens,
                       "Tokens that run the decoder half with --replay; 0: window + 12. Also "
                       "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS")
          ->check(CLI::Range(int64_t{0}, LLMOptions::kMaxTokens))
          ->capture_default_str();
  return replay;
}

// Options that only together are wrong are refused as wrong usage, with the library's sentence.
void CheckTogether(const LLMOptions& llm) {
  const Status status = CheckOptions(llm);
  if (!status.has_value()) throw CLI::ValidationError(WithOptionNames(status.error()).message);
}

void AddPlanCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "Print what a run takes of memory, and what requests fit");
  command->footer(
      "Reads config.json only. Exit status: 0 the plan fits, 1 it does not or the options do not "
      "fit the model, 2 wrong usage.");
  LLMOptions& llm = options->llm;
  command->add_option("--model", llm.model_dir, "Checkpoint directory")->required();
  command->add_option("--device", options->device, "Where the model runs")
      ->check(OneOf(PlanDeviceNames()))
      ->capture_default_str();
  command
      ->add_option("--memory", options->memory_bytes,
                   "Bytes that may be used on each device; 0: nine tenths of what it has")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 50))
      ->capture_default_str();
  command->add_option("--ranks", options->ranks, "GPUs")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str();
  AddThreads(command, llm);
  AddMaxModelLen(command, llm);
  const ReplayOptions replay = AddCapacityOptions(command, llm);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, replay, &status] {
    ApplyReplayEnvironment(replay, options->llm);
    CheckTogether(options->llm);
    status = RunPlan(*options);
  });
}

// Who runs, and what is reused.
void AddSchedulingOptions(CLI::App* command, LLMOptions& llm) {
  const char* const group = "Scheduling";
  command
      ->add_flag_callback(
          "--no-prefix-cache", [&llm] { llm.prefix_caching = false; },
          "Compute every prompt from its first token")
      ->group(group);
  command
      ->add_option("--approximate-hit-tokens", llm.approximate_hit_tokens,
                   "Also reuse prefixes that have lost their window keys, and compute that many "
                   "tokens again with a cut window; outputs then depend on the cache. 0: off")
      ->check(CLI::Range(int64_t{0}, LLMOptions::kMaxTokens))
      ->capture_default_str()
      ->group(group);
  command
      ->add_flag_callback(
          "--no-async-scheduling", [&llm] { llm.async_scheduling = false; },
          "Plan a step only when the tokens of the last one are known")
      ->group(group);
  command
      ->add_option("--max-chunk-tokens", llm.max_chunk_tokens,
                   "Tokens of one prompt in one step; 0: as many as fit")
      ->check(CLI::Range(int64_t{0}, LLMOptions::kMaxNumBatchedTokens))
      ->capture_default_str()
      ->group(group);
  command
      ->add_option_function<std::string>(
          "--preemption",
          [&llm](const std::string& name) { llm.preempt_by_saving = name == "save"; },
          "What happens when cache memory runs out: recompute, or save to host memory")
      ->check(OneOf({"recompute", "save"}))
      ->default_str("recompute")
      ->group(group);
}

// The command line that continues the job of this one.
std::string ResumeCommand(std::span<char* const> words) {
  std::string command;
  for (const std::string_view word : words) {
    if (word != "--resume" && word != "--overwrite") command += ShellQuoted(word) + " ";
  }
  return command + "--resume";
}

void AddGenerateCommand(CLI::App& app, const std::string& resume_command, int& status) {
  auto options = std::make_shared<GenerateOptions>();
  options->resume_command = resume_command;
  CLI::App* command =
      app.add_subcommand("generate", "Generate text for a file of prompts, or for one prompt");
  command->footer(
      "Input lines: {\"id\", one of \"prompt\", \"prompt_token_ids\", \"messages\", and optionally "
      "\"sampling_params\", \"user_id\",\n"
      "\"priority\", \"timeout_seconds\", \"cache_salt\"}. Blank lines are skipped; a line that is "
      "wrong gets an error object in the\n"
      "output and harms no other. Output lines keep the input's order.\n"
      "With \"messages\" also \"tools\", \"tool_choice\", \"response_format\", \"thinking\" or "
      "\"thinking_mode\" (thinking or chat),\n"
      "\"reasoning_effort\" (1 to 100, or none, low, high, max, ...), \"encoding_profile\" (recipe "
      "or "
      "checkpoint), \"drop_thinking\".\n"
      "What an output must look like is said in \"sampling_params\": {\"structured_outputs\": {one "
      "of \"json\", \"regex\", \"choice\",\n"
      "\"grammar\", \"json_object\", \"structural_tag\"}}, \"so_args\" or \"guided_...\", or by "
      "\"response_format\".\n"
      "Results of a job whose output is a file are kept in OUTPUT.partial until all are there; "
      "--resume continues a job that was stopped.\n"
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 4 stopped by "
      "--max-errors, 1 failure, 2 wrong "
      "usage, 130 interrupted, 141 nobody reads the output.\n"
      "docs/generate.md describes both formats, docs/sampling.md the sampling parameters.");
  AddModelOptions(command, options->llm);
  CLI::Option* input =
      command->add_option("--input", options->input, "JSON lines; '-' is the standard input")
          ->check(FileName());
  CLI::Option* prompt = command->add_option("--prompt", options->prompt,
                                            "Print the completion of this text as it is generated");
  CLI::Option* output =
      command->add_option("--output", options->output, "JSON lines; '-' is the standard output")
          ->capture_default_str();
  CLI::Option* chat =
      command->add_flag("--chat", options->chat, "--prompt is a message to the assistant");
  input->excludes(prompt);
  output->needs(input);
  chat->needs(prompt);
  command
      ->add_option("--sampling-params", options->sampling_params,
                   "JSON object; what the input does not give")
      ->check(CLI::Validator(CheckSamplingParams, "", "JSON"))
      ->capture_default_str();
  LLMOptions& llm = options->llm;
  AddMaxModelLen(command, llm);
  const ReplayOptions replay = AddCapacityOptions(command, llm);
  AddSchedulingOptions(command, llm);
  command
      ->add_option("--stats", options->reports.stats,
                   "Write the statistics of the run to this file, as JSON")
      ->check(FileName());
  command
      ->add_option("--metrics", options->reports.metrics,
                   "The same as Prometheus' text; docs/metrics.md describes both")
      ->check(FileName());
  command
      ->add_option("--record-schedule", options->reports.schedule,
                   "Write what the scheduler was told and decided to this file; "
                   "'replay-schedule' repeats it without a model. Holds prompts as token ids")
      ->check(FileName());
  command
      ->add_option("--trace", options->reports.trace,
                   "Write what happened when to this file, for Chrome's or Perfetto's viewer")
      ->check(FileName());
  command->add_flag_callback(
      "--no-progress", [options] { options->show_progress = false; },
      "No progress line on standard error");
  CLI::Option* resume = command->add_flag(
      "--resume", options->resume,
      "Continue the job whose journal is beside the output, or begin it if there is none");
  CLI::Option* overwrite = command->add_flag("--overwrite", options->overwrite,
                                             "Begin anew although there is a journal; it is lost");
  CLI::Option* seed =
      command
          ->add_option("--seed", options->seed,
                       "Lines without a seed get theirs from this one; absent: a fresh one, which "
                       "the journal keeps")
          ->check(CLI::Validator(CheckSeed, "0 to 2^64-1"));
  CLI::Option* max_errors =
      command
          ->add_option("--max-errors", options->max_errors,
                       "Stop when more lines than this have failed; absent: no limit")
          ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  CLI::Option* timings = command->add_flag_callback(
      "--no-timings", [options] { options->with_timings = false; },
      "No timings in output lines: the same job gives the same bytes");
  for (CLI::Option* option : {resume, overwrite, seed, max_errors, timings}) option->needs(input);
  resume->excludes(overwrite);
  overwrite->needs(output);
  command->callback([options, input, prompt, replay, &status] {
    ApplyReplayEnvironment(replay, options->llm);
    if (input->count() + prompt->count() == 0) throw CLI::RequiredError("--input or --prompt");
    CheckTogether(options->llm);
    if (const Result<SamplingParams> params = ParseSamplingParams(options->sampling_params);
        prompt->count() > 0 && params.has_value() && params->n != 1) {
      throw CLI::ValidationError(
          "--sampling-params", fmt::format("n is {}; --prompt prints one completion.", params->n));
    }
    options->llm.record_trace = !options->reports.trace.empty();
    options->llm.record_schedule = !options->reports.schedule.empty();
    status = RunGenerate(*options);
  });
}

// --input and --output of commands that turn lines into lines.
template <class Options>
void AddLineFiles(CLI::App* command, Options& options) {
  command->add_option("--input", options.input, "JSON lines; '-' is the standard input")
      ->capture_default_str();
  command->add_option("--output", options.output, "JSON lines; '-' is the standard output")
      ->capture_default_str();
}

void AddTokenizerCommand(CLI::App& app, int& status, const char* name, const char* what,
                         int (*run)(const TokenizeOptions&)) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand(name, what);
  command->footer(
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 1 failure, 2 wrong "
      "usage, 130 interrupted, 141 nobody reads the output.");
  CLI::Option* model = command->add_option("--model", options->model, "Checkpoint directory");
  CLI::Option* tokenizer =
      command->add_option("--tokenizer", options->tokenizer, "A tokenizer.json");
  model->excludes(tokenizer);
  AddLineFiles(command, *options);
  if (run == RunTokenize)
    command->add_flag("--no-special", options->no_special, "Special tokens in text are plain text");
  command->callback([options, model, tokenizer, run, &status] {
    if (model->count() + tokenizer->count() == 0)
      throw CLI::RequiredError("--model or --tokenizer");
    status = run(*options);
  });
}

void AddParseCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<ParseOptions>();
  CLI::App* command =
      app.add_subcommand("parse", "Turn answers into reasoning, content and tool calls");
  command->footer(
      "Input lines: {\"id\", \"text\" or \"ids\", and optionally \"parser\", \"finish\", "
      "\"cuts\"}; ids need --model or\n"
      "--tokenizer. docs/answers.md describes them.\n"
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 1 failure, 2 wrong "
      "usage, 130 interrupted, 141 nobody reads the output.");
  CLI::Option* model = command->add_option("--model", options->model, "Checkpoint directory");
  command->add_option("--tokenizer", options->tokenizer, "A tokenizer.json")->excludes(model);
  command
      ->add_option_function<std::string>(
          "--policy",
          [options](const std::string& name) { options->toolkit_policy = name == "toolkit"; },
          "recommended: markup that is not quite right is repaired; toolkit: as the vendor's "
          "parser")
      ->check(OneOf({"recommended", "toolkit"}))
      ->default_str("recommended");
  AddLineFiles(command, *options);
  command->callback([options, &status] { status = RunParse(*options); });
}

void AddRenderCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<RenderOptions>();
  CLI::App* command = app.add_subcommand(
      "render", "Turn lines of requests or conversations into lines of prompts and token ids");
  command->footer(
      "Input lines: {\"id\", one of \"request\" (with \"api\" and \"options\"), \"conversation\" "
      "and \"messages\" (with \"mode\",\n"
      "\"effort\" and \"drop_thinking\")}. docs/chat.md describes them.\n"
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 1 failure, 2 wrong "
      "usage, 130 interrupted, 141 nobody reads the output.");
  CLI::Option* model =
      command->add_option("--model", options->model, "Checkpoint directory: token ids are written");
  CLI::Option* tokenizer = command->add_option("--tokenizer", options->tokenizer,
                                               "A tokenizer.json: token ids are written");
  model->excludes(tokenizer);
  command
      ->add_option("--profile", options->profile,
                   "Whose rules: recipe (the toolkit for servers) or checkpoint (its encoder)")
      ->check(OneOf({"recipe", "checkpoint"}))
      ->capture_default_str();
  command
      ->add_option("--dialect", options->dialect,
                   "v4.1 or v4; without it the tokenizer's, v4.1 without a tokenizer")
      ->check(OneOf({"v4.1", "v4"}));
  AddLineFiles(command, *options);
  command->callback([options, &status] { status = RunRender(*options); });
}

void AddCacheFormat(CLI::App* command, std::string& format) {
  command->add_option("--cache-format", format, "packed or bf16; the results are the same")
      ->check(OneOf({"packed", "bf16"}))
      ->capture_default_str();
}

void AddLogitsCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<LogitsOptions>();
  CLI::App* command = app.add_subcommand(
      "logits", "Write the model's logits for given tokens to a safetensors file");
  command->footer(
      "Input lines: {\"id\", \"token_ids\" or \"ids\", \"chunks\" (optional)}. docs/generate.md "
      "describes the "
      "tensors.");
  AddModelOptions(command, options->llm);
  command->add_option("--input", options->input, "JSON lines; '-' is the standard input")
      ->capture_default_str();
  command->add_option("--output", options->output, "A safetensors file")
      ->required()
      ->check(CLI::Validator(
          [](const std::string& path) {
            return path == "-" ? "A safetensors file cannot go to the standard output; give a path"
                               : "";
          },
          ""));
  command->add_option("--last", options->last, "Only the last K rows of each line; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_flag(
      "--dump-layers", options->dump_layers,
      "Also the residual streams, routed experts and selected entries of every layer");
  AddCacheFormat(command, options->cache_format);
  command->callback([options, &status] { status = RunLogits(*options); });
}

void AddBenchCommand(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("bench", "Measure speed against what this machine can do");
  command->require_subcommand(1);
  auto ops = std::make_shared<BenchOpsOptions>();
  CLI::App* ops_command = command->add_subcommand("ops", "Time each operation over its case table");
  ops_command->add_option("--threads", ops->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  ops_command->add_option("--runs", ops->runs, "Timings per case")
      ->check(CLI::Range(3, 1000))
      ->capture_default_str();
  ops_command->add_option("--filter", ops->filter, "Only cases whose name contains this");
  ops_command->add_flag("--all-levels", ops->all_levels,
                        "Every instruction-set level of the host, not only the best");
  ops_command->add_flag_callback(
      "--no-compare", [ops] { ops->compare = false; }, "Do not time oneDNN beside");
  ops_command->add_option("--json", ops->json, "Write the results to this file")->check(FileName());
  ops_command->callback([ops, &status] { status = RunBenchOps(*ops); });
  auto decode = std::make_shared<BenchDecodeOptions>();
  CLI::App* decode_command =
      command->add_subcommand("decode", "Time whole-model decode against the bandwidth bound");
  decode_command->add_option("--model", decode->model_dir, "Checkpoint directory")->required();
  AddDeviceName(decode_command, decode->device);
  decode_command->add_option("--threads", decode->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  decode_command->add_option("--batch", decode->batch, "Sequences that decode together")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  decode_command->add_option("--prompt", decode->prompt, "Tokens of each prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  decode_command->add_option("--tokens", decode->tokens, "Decode steps timed")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  decode_command->add_option("--json", decode->json, "Write the results to this file")
      ->check(FileName());
  AddCacheFormat(decode_command, decode->cache_format);
  decode_command->callback([decode, &status] { status = RunBenchDecode(*decode); });
  auto prefill = std::make_shared<BenchPrefillOptions>();
  CLI::App* prefill_command =
      command->add_subcommand("prefill", "Time whole-model prefill of one prompt");
  prefill_command->add_option("--model", prefill->model_dir, "Checkpoint directory")->required();
  AddDeviceName(prefill_command, prefill->device);
  prefill_command->add_option("--threads", prefill->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  prefill_command->add_option("--tokens", prefill->tokens, "Tokens of the prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  prefill_command->add_option("--chunk", prefill->chunk, "Tokens of a step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  prefill_command
      ->add_option("--replay", prefill->replay,
                   "off; compact: only the last tokens run the decoder half; mask: the same "
                   "results without the saving")
      ->check(OneOf({"off", "mask", "compact"}))
      ->capture_default_str();
  prefill_command
      ->add_option("--keep", prefill->keep,
                   "Tokens that run the decoder half, with replay; 0: window + 12")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  prefill_command->add_option("--runs", prefill->runs, "Timed runs; the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  AddCacheFormat(prefill_command, prefill->cache_format);
  prefill_command->add_option("--json", prefill->json, "Write the results to this file")
      ->check(FileName());
  prefill_command->callback([prefill, &status] { status = RunBenchPrefill(*prefill); });
  auto serve = std::make_shared<BenchServeOptions>();
  CLI::App* serve_command = command->add_subcommand(
      "serve", "Time the whole engine by the number of requests that run at once");
  serve_command->add_option("--model", serve->model_dir, "Checkpoint directory")->required();
  AddDeviceName(serve_command, serve->device);
  serve_command->add_option("--threads", serve->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  serve_command
      ->add_option("--concurrency", serve->concurrency,
                   "Requests at once, one measurement each, as in 1,8,32")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, LLMOptions::kMaxNumSeqs))
      ->capture_default_str();
  serve_command->add_option("--prompt", serve->prompt, "Tokens of each prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  serve_command->add_option("--tokens", serve->tokens, "Tokens of each output")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  serve_command->add_option("--json", serve->json, "Write the results to this file")
      ->check(FileName());
  serve_command->callback([serve, &status] { status = RunBenchServe(*serve); });
  auto slice = std::make_shared<BenchSliceOptions>();
  CLI::App* slice_command = command->add_subcommand(
      "slice", "Time one rank's share of an expert-parallel deployment, without the wire");
  slice_command->footer(
      "Random weights at the released widths on one CUDA device. Without --prefill a decode step "
      "of "
      "--batch sequences,\nwith it one prompt's step; the experts get the rows that all ranks "
      "would "
      "send. Printed: tokens per second beside\nwhat the device could do, and the same for each "
      "part "
      "of the step.");
  slice_command->add_option("--device", slice->device, "cuda:N, or auto: the first CUDA device")
      ->capture_default_str();
  slice_command
      ->add_option("--threads", slice->threads, "That make the weights; 0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  slice_command->add_option("--layers", slice->layers, "The released model has 40")
      ->capture_default_str();
  slice_command->add_option("--ep", slice->ep, "Ranks that share the 384 experts of a layer")
      ->capture_default_str();
  CLI::Option* slice_batch =
      slice_command
          ->add_option("--batch", slice->batch, "Sequences that decode together on the rank")
          ->capture_default_str();
  slice_command->add_option("--context", slice->context,
                            "Tokens of each sequence; with --prefill, before the new ones. Absent: "
                            "131072, with --prefill 0");
  CLI::Option* slice_prefill =
      slice_command->add_option("--prefill", slice->prefill, "New tokens of one prompt")
          ->excludes(slice_batch);
  slice_command->add_option("--replay", slice->replay, "Last of these that run the decoder half")
      ->needs(slice_prefill)
      ->capture_default_str();
  slice_command->add_option("--engram-rows", slice->engram_rows, "Of each n-gram table")
      ->capture_default_str();
  slice_command->add_option("--runs", slice->runs, "Steps timed; the median counts")
      ->capture_default_str();
  slice_command->add_option("--seed", slice->seed, "Of weights, tokens and routing")
      ->capture_default_str();
  slice_command->add_option("--json", slice->json, "Write the results to this file")
      ->check(FileName());
  slice_command->callback([slice, &status] { status = RunBenchSlice(*slice); });
  auto host = std::make_shared<BenchHostOptions>();
  CLI::App* host_command =
      command->add_subcommand("host", "Time what a decode step costs on the host beside the model");
  host_command->add_option("--model", host->model_dir, "Checkpoint directory, for its tokenizer")
      ->required();
  host_command->add_option("--context", host->context, "Tokens of each running sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  host_command->add_option("--steps", host->steps, "Decode steps timed")
      ->check(CLI::Range(10, 100000))
      ->capture_default_str();
  host_command->add_option("--json", host->json, "Write the results to this file")
      ->check(FileName());
  host_command->callback([host, &status] { status = RunBenchHost(*host); });
  auto grammar = std::make_shared<BenchGrammarOptions>();
  CLI::App* grammar_command = command->add_subcommand(
      "grammar", "Time the compilation of schemas and the masks along documents");
  grammar_command->footer(
      "Lines of --schemas are {\"name\", \"kind\", \"schema\", \"documents\"}; each document is "
      "followed "
      "token "
      "by token, with a mask before each.\n"
      "tools/bench_xgrammar.py times the Python package over the same file.");
  grammar_command->add_option("--tokenizer", grammar->tokenizer, "The file tokenizer.json")
      ->required();
  grammar_command->add_option("--schemas", grammar->schemas, "Schemas and documents, JSON lines")
      ->capture_default_str();
  grammar_command->add_option("--rounds", grammar->rounds, "Times that each document is followed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  grammar_command->add_option("--json", grammar->json, "Write the results to this file")
      ->check(FileName());
  grammar_command->callback([grammar, &status] { status = RunBenchGrammar(*grammar); });
}

void AddSelfcheckCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<SelfcheckCommandOptions>();
  CLI::App* command =
      app.add_subcommand("selfcheck", "Prove on this machine that no speed-up changes an answer");
  command->footer(
      "Runs made-up requests alone, from an empty cache, synchronously and unchunked, then under "
      "combinations of batching, chunking, prefix\n"
      "cache, preemption and asynchronous scheduling, and compares tokens and log-probabilities "
      "bit "
      "by bit.\n"
      "Exit status: 0 all the same, 5 an answer changed, 1 failure, 2 wrong usage, 130 "
      "interrupted.");
  AddModelOptions(command, options->llm);
  SelfcheckOptions& check = options->check;
  command->add_option("--requests", check.num_requests, "Requests in each way of running")
      ->check(CLI::Range(2, 1024))
      ->capture_default_str();
  command
      ->add_option("--max-prompt-tokens", check.max_prompt_tokens,
                   "Longest prompt; 0: about three cache blocks")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--max-output-tokens", check.max_output_tokens, "Longest output")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--seed", check.seed, "Of the requests")
      ->check(CLI::Validator(CheckSeed, "0 to 2^64-1"))
      ->capture_default_str();
  command->add_flag("--thorough", check.thorough, "Every combination (95 instead of 12)");
  const ReplayOptions replay = AddCapacityOptions(command, options->llm);
  command->add_option("--json", options->json, "Write the report to this file")->check(FileName());
  command->callback([options, replay, &status] {
    ApplyReplayEnvironment(replay, options->llm);
    CheckTogether(options->llm);
    status = RunSelfcheckCommand(*options);
  });
}

void AddEvalCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command =
      app.add_subcommand("eval", "Run tasks with known answers and count the right ones");
  command->footer(
      "Task lines: {\"id\", \"skill\", \"prompt\" or \"messages\", \"expected\", \"scorer\", and "
      "optionally \"context\", \"document\",\n"
      "\"thinking\" (true or false) and the other fields that 'generate' knows beside messages, "
      "\"sampling_params\"}. A line\n"
      "{\"document\", \"text\"} is a text that later tasks of the file share; \"{document}\" in "
      "their "
      "texts stands for it.\n"
      "Scorers: exact, trimmed, prefix, contains, regex, number, json, tool_calls. Answers are "
      "greedy unless a task says otherwise.\n"
      "Prints the share of right answers by skill and context length.\n"
      "Exit status: 0 every task was run, right or wrong; 3 finished, but some lines are no tasks "
      "or could not be run; 1 failure,\n"
      "2 wrong usage, 130 interrupted, 141 nobody reads the output. docs/evaluation.md describes "
      "the format and the scorers.");
  AddModelOptions(command, options->llm);
  CLI::Option* suite =
      command->add_option("--suite", options->suite, "The checkpoint's own tasks: DIR/eval/SUITE")
          ->check(FileName());
  CLI::Option* tasks =
      command
          ->add_option("--tasks", options->tasks, "Files of JSON lines; '-' is the standard input")
          ->check(FileName());
  suite->excludes(tasks);
  command
      ->add_option("--limit", options->limit,
                   "Tasks of each skill and context length, drawn with --seed; 0: all")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "The same seed draws the same tasks")
      ->check(CLI::Validator(CheckSeed, "0 to 2^64-1"))
      ->capture_default_str();
  command->add_option("--max-tokens", options->max_tokens, "Of an answer, unless its task says")
      ->check(CLI::Range(int64_t{1}, LLMOptions::kMaxTokens))
      ->capture_default_str();
  command
      ->add_option("--output", options->output,
                   "Write every answer with its verdict to this file, as JSON lines; '-' is the "
                   "standard output, and the table goes to standard error")
      ->check(FileName());
  command->add_option("--json", options->json, "Write the table to this file, as JSON")
      ->check(FileName());
  command->add_flag_callback(
      "--no-progress", [options] { options->show_progress = false; },
      "No progress line on standard error");
  AddMaxModelLen(command, options->llm);
  const ReplayOptions replay = AddCapacityOptions(command, options->llm);
  command->callback([options, suite, tasks, replay, &status] {
    ApplyReplayEnvironment(replay, options->llm);
    if (suite->count() + tasks->count() == 0) throw CLI::RequiredError("--suite or --tasks");
    CheckTogether(options->llm);
    status = RunEval(*options);
  });
}

void AddReplayScheduleCommand(CLI::App& app, int& status) {
  auto path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "replay-schedule", "Repeat a recorded run of the scheduler without a model, and compare");
  command->footer(
      "Reads what 'generate --record-schedule' wrote. Exit status: 0 the same decisions, 5 one "
      "differs, 1 failure, 2 wrong usage.");
  command->add_option("file", *path, "The recording; '-' is the standard input")->required();
  command->callback([path, &status] { status = RunReplaySchedule(*path); });
}

void AddMetricsCommand(CLI::App& app, int& status) {
  app.add_subcommand("metrics", "Print what the statistics of a run contain, as docs/metrics.md")
      ->callback([&status] { status = ExitStatus(WriteStdout(MetricsPage())); });
}

// The innermost command that the command line names.
const CLI::App* NamedCommand(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return command;
}

// A word that no command expects is told first: that an option or a command is missing may follow
// from it.
std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = NamedCommand(app);
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) return error.what();
  const auto option = std::find_if(unknown.begin(), unknown.end(),
                                   [](const std::string& word) { return word.starts_with("-"); });
  const std::string path =
      command == &app ? app.get_name() : fmt::format("'{}'", command->get_name());
  if (option != unknown.end()) return fmt::format("{} is no option of {}", Quoted(*option), path);
  const auto all = command->get_subcommands([](const CLI::App*) { return true; });
  if (all.empty())
    return fmt::format("{} is one argument too many for {}", Quoted(unknown[0]), path);
  std::string names;
  for (const CLI::App* known : all) names += (names.empty() ? "" : ", ") + known->get_name();
  return fmt::format("{} is no command of {}; commands are {}", Quoted(unknown[0]), path, names);
}

// Warnings and errors of the library are always shown, life-cycle messages on request; but nobody
// should wait for a large model without a sign of life.
void ShowLog(const bool& verbose) {
  SetLogSink(
      [&verbose](LogLevel level, std::string_view line) {
        if (level == LogLevel::kInfo && !verbose && !line.starts_with("loading")) return;
        PrintStderr("deepinfer: {}{}\n",
                    level == LogLevel::kError  ? "error: "
                    : level == LogLevel::kWarn ? "warning: "
                                               : "",
                    line);
      },
      LogLevel::kInfo);
}

// The same switch for the program and each of its commands.
void AddVerbose(CLI::App* command, bool& verbose) {
  command->add_flag("--verbose", verbose, "Also messages on what happens, on standard error");
  for (CLI::App* sub : command->get_subcommands([](const CLI::App*) { return true; }))
    AddVerbose(sub, verbose);
}

int Main(int argc, char** argv) {
  CLI::App app("DeepInfer: an inference engine for DeepSeek-V4.1-Flash", "deepinfer");
  app.set_version_flag("--version", "deepinfer " DI_VERSION);
  app.require_subcommand(1);
  int status = kExitOk;
  AddGenerateCommand(app, ResumeCommand({argv, static_cast<size_t>(argc)}), status);
  AddTokenizerCommand(app, status, "tokenize", "Turn lines of text into lines of token ids",
                      RunTokenize);
  AddTokenizerCommand(app, status, "detokenize", "Turn lines of token ids into lines of text",
                      RunDetokenize);
  AddParseCommand(app, status);
  AddRenderCommand(app, status);
  AddLogitsCommand(app, status);
  AddInspectCommand(app, status);
  AddPlanCommand(app, status);
  AddMakeCheckpointCommand(app, status);
  AddEvalCommand(app, status);
  AddSelfcheckCommand(app, status);
  AddReplayScheduleCommand(app, status);
  AddBenchCommand(app, status);
  AddMetricsCommand(app, status);
  static bool verbose = false;  // the sink outlives this function
  AddVerbose(&app, verbose);
  ShowLog(verbose);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help and --version
    std::ostringstream text;
    app.exit(success, text, text);
    return ExitStatus(WriteStdout(text.str()));
  } catch (const CLI::ParseError& error) {
    PrintStderr("deepinfer: error: {}\nRun 'deepinfer{}{} --help' for usage.\n",
                UsageMessage(app, error), app.get_subcommands().empty() ? "" : " ",
                app.get_subcommands().empty() ? "" : app.get_subcommands().front()->get_name());
    return kExitUsage;
  }
  return status;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  deepinfer::PrepareStandardStreams();
  try {
    return deepinfer::Main(argc, argv);
  } catch (const std::exception& error) {
    // Out of memory and the like; the library itself does not throw.
    return deepinfer::PrintError({deepinfer::Code::kInternal, error.what(), {}});
  }
}
