// The program `deepinfer`: parses the command line, installs the log sink and calls one command. All use of the option
// parser is in this file. Exit status: 0 success, 1 failure, 2 usage error.
#include <CLI/CLI.hpp>
#include <exception>

#include "apps/inspect.h"
#include "apps/make_checkpoint.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

// Each AddXCommand registers one sub-command, which stores its exit status in `status`.

void AddInspectCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Print a checkpoint's configuration, tensors and memory needs");
  command->add_option("directory", options->dir, "Checkpoint directory")->required();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &status] { status = RunInspect(*options); });
}

void AddMakeCheckpointCommand(CLI::App& app, int& status) {
  auto options = std::make_shared<MakeCheckpointOptions>();
  CLI::App* command = app.add_subcommand("make-checkpoint", "Write a checkpoint with random weights");
  command->add_option("output", options->output, "Directory to create")->required();
  command->add_option("--preset", options->preset, "tiny: every mechanism in a few MB; slice: released widths, chosen counts")
      ->check(CLI::IsMember({"tiny", "slice"}))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "The same seed gives the same bytes")->capture_default_str();
  command->add_option("--threads", options->num_threads, "0: all processors")->check(CLI::Range(0, 1024))->capture_default_str();
  SliceOptions& slice = options->slice;
  const auto count = [&](const char* name, int64_t& value, int64_t min, int64_t max, const char* what) {
    return command->add_option(name, value, what)->check(CLI::Range(min, max))->capture_default_str()->group("Preset slice");
  };
  const CLI::Option* slice_options[] = {
      count("--layers", slice.layers, 1, 40, "Backbone layers"),
      count("--experts", slice.experts, 1, 384, "Routed experts per layer"),
      count("--engram-rows", slice.engram_rows, 1000, 384006168, "Rows per Engram table, approximately"),
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

int Main(int argc, char** argv) {
  CLI::App app("DeepInfer: an inference engine for DeepSeek-V4.1-Flash", "deepinfer");
  app.set_version_flag("--version", "deepinfer " DI_VERSION);
  app.require_subcommand(1);
  int status = kExitOk;
  AddInspectCommand(app, status);
  AddMakeCheckpointCommand(app, status);
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
