// The commands as a user runs them, and their reports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "apps/inspect.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Outcome {
  int status = -1;
  std::string output;  // standard output and error
};

Outcome RunProgram(const std::string& arguments) {
  Outcome outcome;
  const std::string command = std::string(DI_BINARY_DIR "/deepinfer ") + arguments + " 2>&1";
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.output.append(buffer.data(), count);
  const int wait = ::pclose(pipe);
  outcome.status = WIFEXITED(wait) ? WEXITSTATUS(wait) : -1;
  return outcome;
}

TEST(Program, AMissingDriverOrTooLittleMemoryIsOneSentenceAndStatusOne) {
  const std::string generate =
      "generate --prompt x --model " DI_TEST_DATA_DIR "/model/three/checkpoint ";
  for (const char* device : {"cuda", "cuda:0"}) {
    // A machine that has a device hides it.
    ASSERT_EQ(::setenv("CUDA_VISIBLE_DEVICES", "", 1), 0);
    const Outcome outcome = RunProgram(generate + "--device " + device);
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    if (outcome.status == 0) continue;  // the emulated one, which is always there
    EXPECT_EQ(outcome.status, 1) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(StartsWith("deepinfer: error: "), HasSubstr("CUDA")));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }
  // On the first device of the machine, or the CPU.
  const Outcome full = RunProgram(generate + "--cache-tokens 60000000000");
  EXPECT_EQ(full.status, 1) << full.output;
  EXPECT_THAT(full.output, AllOf(StartsWith("deepinfer: error: "), HasSubstr("cache-tokens")));
  EXPECT_EQ(std::count(full.output.begin(), full.output.end(), '\n'), 1) << full.output;
}

TEST(Program, MakesATinyCheckpointAndInspectsIt) {
  const std::filesystem::path dir =
      std::filesystem::temp_directory_path() / fmt::format("deepinfer_apps_{}", ::getpid());
  std::filesystem::remove_all(dir);
  const Outcome made = RunProgram("make-checkpoint --seed 5 " + dir.string());
  EXPECT_EQ(made.status, 0) << made.output;
  EXPECT_THAT(made.output, HasSubstr("Wrote 13.0 MB of weights"));
  const Outcome again = RunProgram("make-checkpoint " + dir.string());
  EXPECT_EQ(again.status, 1);
  EXPECT_THAT(again.output, AllOf(StartsWith("deepinfer: error: "), HasSubstr("is not empty")));
  const Outcome text = RunProgram("inspect " + dir.string());
  EXPECT_EQ(text.status, 0) << text.output;
  EXPECT_THAT(text.output,
              AllOf(HasSubstr("10 (6 encoder, 4 decoder), 3 draft"), HasSubstr("in 18 shards")));
  const Outcome json = RunProgram("inspect --json " + dir.string());
  EXPECT_EQ(json.status, 0) << json.output;
  const nlohmann::json report = nlohmann::json::parse(json.output);
  EXPECT_EQ(report["bytes"], 13045324);
  EXPECT_EQ(report["memory"]["gpu"][0]["weight_bytes_per_rank"], 13045324);
  EXPECT_EQ(report["config"]["layers"][8]["role"], "reindex");
  std::filesystem::remove_all(dir);
}

TEST(Program, FailuresAndUsageErrorsHaveTheirStatus) {
  const Outcome hub = RunProgram("inspect deepseek-ai/DeepSeek-V4.1-Flash");
  EXPECT_EQ(hub.status, 1);
  EXPECT_THAT(hub.output, AllOf(StartsWith("deepinfer: error: "), HasSubstr("Hugging Face hub")));
  for (const char* arguments :
       {"", "inspect", "inspekt x", "inspect --no-such-option x",
        "make-checkpoint --layers 0 --preset slice /tmp/x", "make-checkpoint --layers 4 /tmp/x",
        "make-checkpoint --preset huge /tmp/x"}) {
    const Outcome usage = RunProgram(arguments);
    EXPECT_EQ(usage.status, 2) << arguments << ": " << usage.output;
    EXPECT_THAT(usage.output, StartsWith("deepinfer: error: ")) << arguments;
  }
  for (const auto& [arguments, says] : std::initializer_list<std::pair<const char*, const char*>>{
           {"inspekt", "'inspekt' is no command of deepinfer; commands are generate, "},
           {"bench foo", "'foo' is no command of 'bench'; commands are ops, decode, prefill"},
           {"generate --foo", "'--foo' is no option of 'generate'"},
           {"inspect a b", "'b' is one argument too many for 'inspect'"},
           {"make-checkpoint --seed=-1 /tmp/x", "--seed: Value -1 not in range 0 to "},
           {"make-checkpoint --seed 18446744073709551616 /tmp/x", "--seed: Value 184"}}) {
    const Outcome usage = RunProgram(arguments);
    EXPECT_EQ(usage.status, 2) << arguments;
    EXPECT_THAT(usage.output, HasSubstr(says)) << arguments;
  }
  EXPECT_EQ(RunProgram("--help").status, 0);
  EXPECT_THAT(RunProgram("--version").output, StartsWith("deepinfer "));
}

TEST(Program, AFullStandardOutputIsAFailureWithAReason) {
  for (const char* arguments :
       {"--help", "--version", "inspect " DI_TEST_DATA_DIR "/model/three/checkpoint",
        "inspect --json " DI_TEST_DATA_DIR "/model/three/checkpoint"}) {
    // What RunProgram appends is for the last command of the line.
    const Outcome full = RunProgram(std::string(arguments) + " 2>&1 > /dev/full || exit $?; true");
    EXPECT_EQ(full.status, 1) << arguments;
    EXPECT_THAT(full.output,
                StartsWith("deepinfer: error: writing the standard output failed: No space left"))
        << arguments;
    EXPECT_EQ(RunProgram(std::string(arguments) + " 2> /dev/null >&- || exit $?; true").status, 1)
        << arguments;
  }
}

TEST(Program, OptionsThatOnlyTogetherAreWrongGetTheSameSentenceEverywhere) {
  const std::string model = " --model " DI_TEST_DATA_DIR "/model/three/checkpoint ";
  for (const std::string command : {"plan", "selfcheck", "generate --prompt x"}) {
    for (const auto& [options, says] : std::initializer_list<std::pair<const char*, const char*>>{
             {"--max-num-seqs 600",
              "deepinfer: error: --max-num-batched-tokens is 512; allowed is at least "
              "--max-num-seqs, which is 600.\n"},
             {"--replay-keep-tokens 200",
              "deepinfer: error: --replay-keep-tokens is 200, but --replay is off; "}}) {
      const Outcome usage = RunProgram(command + model + options);
      EXPECT_EQ(usage.status, 2) << command << options;
      EXPECT_THAT(usage.output, StartsWith(says)) << command;
    }
    const Outcome keep = RunProgram(command + model + "--replay compact --replay-keep-tokens 3");
    EXPECT_EQ(keep.status, 1) << command;
    EXPECT_THAT(keep.output, HasSubstr("--replay-keep-tokens is 3; allowed are 0 or at least"));
  }
  const Outcome hits =
      RunProgram("generate --prompt x --no-prefix-cache --approximate-hit-tokens 200" + model);
  EXPECT_EQ(hits.status, 2);
  EXPECT_THAT(hits.output, HasSubstr("--approximate-hit-tokens is 200, but the prefix cache "
                                     "(--no-prefix-cache) is off"));
}

TEST(Program, FilesWithoutANameAreRefusedByOption) {
  const std::string model = " --model " DI_TEST_DATA_DIR "/model/three/checkpoint ";
  for (const auto& [command, option] : std::initializer_list<std::pair<const char*, const char*>>{
           {"generate --prompt x", "--stats"},
           {"generate --prompt x", "--metrics"},
           {"generate --prompt x", "--trace"},
           {"generate --prompt x", "--record-schedule"},
           {"generate", "--input"},
           {"selfcheck", "--json"},
           {"bench decode", "--json"}}) {
    const Outcome usage = RunProgram(command + model + option + " ''");
    EXPECT_EQ(usage.status, 2) << command << option;
    EXPECT_THAT(usage.output, HasSubstr(std::string(option) + ": The name of a file is expected"));
  }
}

TEST(Program, SeedsOfSelfcheckAreNumbersFromZeroOn) {
  const Outcome usage =
      RunProgram("selfcheck --model " DI_TEST_DATA_DIR "/model/three/checkpoint --seed -5");
  EXPECT_EQ(usage.status, 2);
  EXPECT_THAT(usage.output, HasSubstr("--seed: Value -5 not in range 0 to "));
}

TEST(Program, HelpShowsOptionsAsTheyAreTyped) {
  for (const char* command : {"generate", "bench ops", "bench decode"}) {
    const Outcome help = RunProgram(std::string(command) + " --help");
    EXPECT_THAT(help.output, HasSubstr("--"));
    EXPECT_EQ(help.output.find("{false}"), std::string::npos) << command;
    EXPECT_EQ(help.output.find("TEXT:{"), std::string::npos) << command;
  }
  const Outcome help = RunProgram("generate --help");
  for (const char* field : {"user_id", "priority", "timeout_seconds", "cache_salt", "thinking_mode",
                            "reasoning_effort", "sampling_params"}) {
    EXPECT_THAT(help.output, HasSubstr("\"" + std::string(field) + "\"")) << field;
  }
}

TEST(Program, BenchTellsBeforehandWhatCannotWork) {
  const std::string model = " --model " DI_TEST_DATA_DIR "/model/three/checkpoint ";
  for (const auto& [arguments, says] : std::initializer_list<std::pair<std::string, const char*>>{
           {"bench decode --tokens 100000" + model,
            "with --prompt and --tokens a sequence has 100065 tokens; this model supports at most"},
           {"bench prefill --tokens 1000000" + model,
            "with --tokens a sequence has 1000000 tokens; this model supports at most"},
           {"bench serve --tokens 100000" + model,
            "with --prompt and --tokens a sequence has 100032 tokens"},
           {"bench prefill --tokens 64 --replay compact --keep 3" + model,
            "--keep is 3; allowed are 0 or at least 14"},
           {"bench ops --filter nothing",
            "no case has 'nothing' in its name, which begins with the operation; operations are "
            "linear, "}}) {
    const Outcome refused = RunProgram(arguments);
    EXPECT_EQ(refused.status, 1) << arguments;
    EXPECT_THAT(refused.output, StartsWith(std::string("deepinfer: error: ") + says));
  }
  const Outcome json = RunProgram("bench ops --json /nonexistent/x.json");
  EXPECT_EQ(json.status, 1);
  EXPECT_EQ(json.output,
            "deepinfer: error: the output '/nonexistent/x.json' cannot be written: No such file or "
            "directory.\n");
}

TEST(Counted, HasASingular) {
  EXPECT_EQ(Counted(0, "thread"), "0 threads");
  EXPECT_EQ(Counted(1, "thread"), "1 thread");
  EXPECT_EQ(Counted(2, "sequence"), "2 sequences");
}

TEST(Inspect, StateSizesFollowTheFormats) {
  const Result<InspectReport> report =
      InspectCheckpoint(DI_TEST_DATA_DIR "/model/three/checkpoint");
  ASSERT_TRUE(report) << report.error().message;
  // Head 64, index 64: compressed 32 + 4 B, index key 32 + 2 B; one ratio-2 and one ratio-1 source.
  EXPECT_EQ(report->kv_bytes_per_token, 70.0 / 2 + 70.0);
  EXPECT_EQ(report->window_bytes, 6 * 8 * (64 + 2));
  EXPECT_EQ(report->compressor_bytes, 2 * 64 * 4);
  // Two ranks' worth: splitting leaves the replicated part on each.
  EXPECT_LT(report->ranks[1].weight_bytes, report->ranks[0].weight_bytes);
  EXPECT_GT(4 * report->ranks[1].weight_bytes, report->ranks[0].weight_bytes);
}

TEST(HumanBytes, HasThreeSignificantDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1000), "1.00 kB");
  EXPECT_EQ(HumanBytes(999949), "1.00 MB");
  EXPECT_EQ(HumanBytes(13045324), "13.0 MB");
  EXPECT_EQ(HumanBytes(510286023000), "510 GB");
}

}  // namespace
}  // namespace deepinfer
