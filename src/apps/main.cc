// The program `deepinfer`: parses the command line, installs the log sink and calls one command.
// All use of the option parser is in this file. Exit status: 0 success, 1 failure, 2 usage error, 3
// finished but some input lines failed, 130 interrupted.
#include <CLI/CLI.hpp>
#include <exception>

#include "apps/bench.h"
#include "apps/generate.h"
#include "apps/inspect.h"
#include "apps/logits.h"
#include "apps/make_checkpoint.h"
#include "apps/print.h"
#include "apps/tokenize.h"

namespace deepinfer {
namespace {

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
      ->check(CLI::IsMember({"tiny", "slice"}))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "The same seed gives the same bytes")
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

void AddModelOptions(CLI::App* command, LLMOptions& llm) {
  command->add_option("--model", llm.model_dir, "Checkpoint directory")->required();
  command
      ->add_option(
          "--numerics", llm.numerics,
          "production: as the published engine rounds; reference: as the vendor's small program")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, NumericsProfile>{{"production", NumericsProfile::kProduction},
                                                 {"reference", NumericsProfile::kReference}}))
      ->default_str("production");
  command->add_option("--threads", llm.num_threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

void AddGenerateCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command =
      app.add_subcommand("generate", "Generate text for a file of prompts, or for one prompt");
  command->footer(
      "Input lines: {\"id\", one of \"prompt\", \"prompt_token_ids\", \"messages\", and optionally "
      "\"sampling_params\"}. Blank lines are\n"
      "skipped; a line that is wrong gets an error object in the output and harms no other. Output "
      "lines keep the input's order.\n"
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 1 failure, 2 wrong "
      "usage, 130 interrupted.\n"
      "docs/generate.md describes both formats, docs/sampling.md the sampling parameters.");
  AddModelOptions(command, options->llm);
  CLI::Option* input =
      command->add_option("--input", options->input, "JSON lines; '-' is the standard input");
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
      ->capture_default_str();
  LLMOptions& llm = options->llm;
  command
      ->add_option("--max-model-len", llm.max_model_len,
                   "Prompt + output of a request; 0: as the model and memory allow")
      ->capture_default_str();
  command->add_option("--max-num-seqs", llm.max_num_seqs, "Sequences that run at once")
      ->capture_default_str();
  command->add_option("--max-num-batched-tokens", llm.max_num_batched_tokens, "Rows of one step")
      ->capture_default_str();
  command
      ->add_option("--cache-tokens", llm.cache_tokens,
                   "Cache capacity in tokens; 0: chosen from the machine's memory")
      ->capture_default_str();
  command->add_flag("!--no-progress", options->show_progress, "No progress line on standard error");
  command->callback([options, input, prompt, &status] {
    if (input->count() + prompt->count() == 0) throw CLI::RequiredError("--input or --prompt");
    status = RunGenerate(*options);
  });
}

void AddTokenizerCommand(CLI::App& app, int& status, const char* name, const char* what,
                         int (*run)(const TokenizeOptions&)) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand(name, what);
  command->footer(
      "Exit status: 0 every line is fine, 3 finished but some lines failed, 1 failure, 2 wrong "
      "usage.");
  CLI::Option* model = command->add_option("--model", options->model, "Checkpoint directory");
  CLI::Option* tokenizer =
      command->add_option("--tokenizer", options->tokenizer, "A tokenizer.json");
  model->excludes(tokenizer);
  command->add_option("--input", options->input, "JSON lines; '-' is the standard input")
      ->capture_default_str();
  command->add_option("--output", options->output, "JSON lines; '-' is the standard output")
      ->capture_default_str();
  if (run == RunTokenize)
    command->add_flag("--no-special", options->no_special, "Special tokens in text are plain text");
  command->callback([options, model, tokenizer, run, &status] {
    if (model->count() + tokenizer->count() == 0)
      throw CLI::RequiredError("--model or --tokenizer");
    status = run(*options);
  });
}

void AddLogitsCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<LogitsOptions>();
  CLI::App* command = app.add_subcommand(
      "logits", "Write the model's logits for given tokens to a safetensors file");
  command->footer(
      "Input lines: {\"id\", \"token_ids\", \"chunks\" (optional)}. docs/generate.md describes the "
      "tensors.");
  AddModelOptions(command, options->llm);
  command->add_option("--input", options->input, "JSON lines; '-' is the standard input")
      ->capture_default_str();
  command->add_option("--output", options->output, "A safetensors file")->required();
  command->add_option("--last", options->last, "Only the last K rows of each line; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_flag(
      "--dump-layers", options->dump_layers,
      "Also the residual streams, routed experts and selected entries of every layer");
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
  ops_command->add_flag("!--no-compare", ops->compare, "Do not time oneDNN beside");
  ops_command->add_option("--json", ops->json, "Write the results to this file");
  ops_command->callback([ops, &status] { status = RunBenchOps(*ops); });
  auto decode = std::make_shared<BenchDecodeOptions>();
  CLI::App* decode_command =
      command->add_subcommand("decode", "Time whole-model decode against the bandwidth bound");
  decode_command->add_option("--model", decode->model_dir, "Checkpoint directory")->required();
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
  decode_command->add_option("--json", decode->json, "Write the results to this file");
  decode_command->callback([decode, &status] { status = RunBenchDecode(*decode); });
}

int Main(int argc, char** argv) {
  CLI::App app("DeepInfer: an inference engine for DeepSeek-V4.1-Flash", "deepinfer");
  app.set_version_flag("--version", "deepinfer " DI_VERSION);
  app.require_subcommand(1);
  int status = kExitOk;
  AddGenerateCommand(app, status);
  AddTokenizerCommand(app, status, "tokenize", "Turn lines of text into lines of token ids",
                      RunTokenize);
  AddTokenizerCommand(app, status, "detokenize", "Turn lines of token ids into lines of text",
                      RunDetokenize);
  AddLogitsCommand(app, status);
  AddInspectCommand(app, status);
  AddMakeCheckpointCommand(app, status);
  AddBenchCommand(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help and --version
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "deepinfer: error: {}\nRun 'deepinfer --help' for usage.\n", error.what());
    return kExitUsage;
  }
  return status;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  try {
    return deepinfer::Main(argc, argv);
  } catch (const std::exception& error) {
    // Out of memory and the like; the library itself does not throw.
    return deepinfer::PrintError({deepinfer::Code::kInternal, error.what(), {}});
  }
}
