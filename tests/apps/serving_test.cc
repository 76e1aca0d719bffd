// How requests are served, as a user asks for it: no option that only decides who runs, what is
// reused or how the cache is kept changes a byte of the output; what does change it says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program_test.h"

namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kProgram[] = DI_BINARY_DIR "/deepinfer";
constexpr char kModel[] = DI_TEST_DATA_DIR "/model/three/checkpoint";

class ServingTest : public deepinfer::testing_support::ProgramTest {
 protected:
  // With enough decoder layers that a replayed prompt has other logits than a whole one.
  std::string DeepModel() {
    const std::string dir = Path("tiny");
    EXPECT_EQ(Shell(std::string(kProgram) + " make-checkpoint " + dir + " --preset tiny > " +
                    Path("log") + " 2>&1"),
              0);
    return dir;
  }
  // Prompts with common beginnings, several users, drawn and greedy, n > 1.
  std::string Input() {
    std::string lines;
    for (int i = 0; i < 24; ++i) {
      std::vector<int> ids;
      for (int t = 0; t < 20 + i * 11; ++t) ids.push_back(t < i * 9 ? t * 7 % 500 : (t * i) % 500);
      json line = {{"id", i},
                   {"prompt_token_ids", ids},
                   {"user_id", std::to_string(i % 3)},
                   {"priority", i % 2},
                   {"sampling_params",
                    {{"max_tokens", 1 + i % 9},
                     {"temperature", i % 3 == 0 ? 0.0 : 0.9},
                     {"n", 1 + i % 2},
                     {"seq_seed", i},
                     {"logprobs", 1}}}};
      lines += line.dump() + "\n";
    }
    return Write("in.jsonl", lines);
  }
  int Generate(const std::string& input, const std::string& output, const std::string& options,
               const std::string& environment = "") {
    return Shell(environment + " " + kProgram + " generate --model " + model_ + " --input " +
                 input + " --output " + output + " --no-timings --no-progress " + options + " 2> " +
                 Path("log"));
  }

  std::string model_ = kModel;
};

TEST_F(ServingTest, OptionsOfSchedulingChangeNoByte) {
  const std::string input = Input();
  ASSERT_EQ(Generate(input, Path("plain"),
                     "--no-prefix-cache --no-async-scheduling --max-num-seqs 1 "
                     "--max-num-batched-tokens 512 --threads 1"),
            0);
  const std::string plain = Read(Path("plain"));
  for (const char* options :
       {"", "--no-async-scheduling", "--no-prefix-cache", "--max-chunk-tokens 7",
        "--cache-tokens 768 --preemption save", "--cache-tokens 768 --preemption recompute",
        "--cache-format bf16", "--max-num-batched-tokens 64 --max-num-seqs 3"}) {
    ASSERT_EQ(Generate(input, Path("out"), options), 0) << options << Read(Path("log"));
    EXPECT_TRUE(Read(Path("out")) == plain) << options;
  }
}

TEST_F(ServingTest, ReplayIsOneFunctionHoweverItIsComputed) {
  model_ = DeepModel();
  const std::string input = Input();
  const std::string keep = " --replay-keep-tokens 14";
  ASSERT_EQ(Generate(input, Path("full"), ""), 0);
  ASSERT_EQ(Generate(input, Path("mask"), "--replay mask --no-prefix-cache" + keep), 0);
  const std::string mask = Read(Path("mask"));
  EXPECT_TRUE(mask != Read(Path("full")));
  for (const std::string options : {"--replay compact", "--replay compact --max-chunk-tokens 5",
                                    "--replay mask", "--replay compact --cache-tokens 768"}) {
    ASSERT_EQ(Generate(input, Path("out"), options + keep), 0) << options;
    EXPECT_TRUE(Read(Path("out")) == mask) << options;
  }
  ASSERT_EQ(Generate(input, Path("out"), "",
                     "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact "
                     "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS=14"),
            0);
  EXPECT_TRUE(Read(Path("out")) == mask);
  // An option on the command line counts more than the environment.
  ASSERT_EQ(Generate(input, Path("out"), "--replay off",
                     "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=compact"),
            0);
  EXPECT_TRUE(Read(Path("out")) == Read(Path("full")));
}

TEST_F(ServingTest, WrongReplayOptionsAreRefusedByName) {
  const std::string input = Input();
  const auto refused = [&](const std::string& options, const std::string& environment, int status,
                           const std::string& says) {
    EXPECT_EQ(Generate(input, Path("out"), options, environment), status) << says;
    EXPECT_THAT(Read(Path("log")), HasSubstr(says));
  };
  refused("--replay compact --replay-keep-tokens 3", "", 1,
          "--replay-keep-tokens is 3; allowed are 0 or at least");
  refused("--replay-keep-tokens 200", "", 2, "--replay-keep-tokens is 200, but --replay is off");
  refused("--approximate-hit-tokens 2", "", 1, "--approximate-hit-tokens is 2");
  refused("--replay half", "", 2, "--replay");
  refused("", "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=half", 2, "half");
}

TEST_F(ServingTest, TheEnvironmentConcernsOnlyCommandsThatRunPrompts) {
  const std::string wrong = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=half ";
  EXPECT_EQ(Shell(wrong + kProgram + " metrics > " + Path("page")), 0);
  EXPECT_EQ(Generate(Input(), Path("out"), "--replay off", wrong), 0);
}

// Prompt log-probabilities need every row, so such a request runs whole, all of its completions.
TEST_F(ServingTest, CompletionsOfAScoredPromptAreOneFunctionWithReplay) {
  model_ = DeepModel();
  std::vector<int> ids;
  for (int t = 0; t < 150; ++t) ids.push_back(t * 13 % 500);
  const auto line = [&](int id, int n, uint64_t seed) {
    return json{{"id", id},
                {"prompt_token_ids", ids},
                {"sampling_params",
                 {{"n", n}, {"seq_seed", seed}, {"max_tokens", 6}, {"prompt_logprobs", 0}}}}
               .dump() +
           "\n";
  };
  const std::string replay = "--replay compact --replay-keep-tokens 14";
  ASSERT_EQ(Generate(Write("three.jsonl", line(0, 3, 5)), Path("three"), replay), 0);
  const json outputs = ReadLines(Path("three"))[0]["outputs"];
  for (const json& output : outputs) {
    const std::string one = Write("one.jsonl", line(1, 1, output["seq_seed"].get<uint64_t>()));
    ASSERT_EQ(Generate(one, Path("one"), replay), 0);
    const json alone = ReadLines(Path("one"))[0]["outputs"][0];
    EXPECT_EQ(alone["token_ids"], output["token_ids"]);
    EXPECT_EQ(alone["token_logprobs"], output["token_logprobs"]);
  }
}

TEST_F(ServingTest, ReportsDoNotOverwriteAJobsFiles) {
  const std::string input = Input();
  for (const char* suffix : {"", ".partial", ".partial.sorted"}) {
    EXPECT_EQ(Generate(input, Path("job"), "--stats " + Path("job") + suffix), 1) << suffix;
    EXPECT_THAT(Read(Path("log")), HasSubstr("the same file as")) << suffix;
  }
  // A report that cannot be written withholds no result.
  EXPECT_EQ(Generate(input, Path("job"), "--overwrite --stats /dev/full"), 1);
  EXPECT_EQ(ReadLines(Path("job")).size(), 24u);
}

TEST_F(ServingTest, AFailureBeforeTheRunKeepsTheOldReport) {
  const std::string report = Write("stats", "old");
  EXPECT_EQ(Shell(std::string(kProgram) + " generate --prompt x --model " + Path("no-model") +
                  " --stats " + report + " --trace " + Path("trace") + " 2> " + Path("log")),
            1);
  EXPECT_EQ(Read(report), "old");
  EXPECT_FALSE(std::filesystem::exists(Path("trace")));
  EXPECT_EQ(Generate(Input(), Path("out"), "--stats " + report), 0);
  EXPECT_FALSE(json::parse(Read(report)).empty());
}

TEST_F(ServingTest, StatisticsCountEveryLineOnce) {
  const std::string input = Write("in.jsonl", R"({"id": 0, "prompt_token_ids": [5]}
no request

{"id": 1, "prompt": ""}
{"id": 2, "prompt_token_ids": [512]}
{"id": 0, "prompt": "a"}
{"id": 3, "prompt": "a", "priority": 2000000}
)");
  EXPECT_EQ(Generate(input, Path("out"),
                     "--sampling-params '{\"max_tokens\": 2, \"ignore_eos\": true}' --stats " +
                         Path("stats")),
            3);
  const json statistics = json::parse(Read(Path("stats")));
  EXPECT_EQ(statistics["deepinfer_requests_submitted_total"], 6);
  EXPECT_EQ(statistics["deepinfer_requests_ended_total"]["length"], 1);
  EXPECT_EQ(statistics["deepinfer_requests_ended_total"]["refused"], 5);
}

TEST_F(ServingTest, FieldsOfServiceAreCheckedAndDeadlinesHold) {
  const std::string input = Write("in.jsonl",
                                  R"({"id": 0, "prompt": "a", "priority": 2000000}
{"id": 1, "prompt": "a", "priority": "high"}
{"id": 2, "prompt": "a", "timeout_seconds": 0}
{"id": 3, "prompt": "a", "timeout_seconds": -1.5}
{"id": 4, "prompt": "a", "user_id": 7}
{"id": 5, "prompt": "a", "cache_salt": ")" +
                                      std::string(300, 's') + R"("}
{"id": 6, "prompt": "a", "timeout_seconds": 0.000001}
{"id": 7, "prompt": "a", "timeout_seconds": 600, "priority": -3, "user_id": "u", "cache_salt": "", "sampling_params": {"max_tokens": 2, "ignore_eos": true}}
)");
  EXPECT_EQ(Generate(input, Path("out"), ""), 3);
  const std::vector<json> lines = ReadLines(Path("out"));
  ASSERT_EQ(lines.size(), 8u);
  const char* fields[] = {"priority",        "priority", "timeout_seconds",
                          "timeout_seconds", "user_id",  "cache_salt"};
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(lines[i]["error"]["field"], fields[i]) << lines[i];
  EXPECT_EQ(lines[6]["outputs"][0]["finish_reason"], "deadline");
  EXPECT_EQ(lines[7]["outputs"][0]["token_ids"].size(), 2u);
}

TEST_F(ServingTest, ARecordedScheduleIsRepeatedWithoutTheModel) {
  ASSERT_EQ(Generate(Input(), Path("out"),
                     "--cache-tokens 768 --record-schedule " + Path("schedule") + " --stats " +
                         Path("stats") + " --trace " + Path("trace")),
            0);
  const std::string replay = std::string(kProgram) + " replay-schedule ";
  EXPECT_EQ(Shell(replay + Path("schedule") + " > " + Path("said")), 0);
  EXPECT_THAT(Read(Path("said")), HasSubstr("Every decision is the recorded one."));
  const json statistics = json::parse(Read(Path("stats")));
  EXPECT_FALSE(statistics.empty());
  EXPECT_FALSE(json::parse(Read(Path("trace"))).empty());

  std::string changed = Read(Path("schedule"));
  changed[changed.size() / 2] ^= 1;
  EXPECT_EQ(Shell(replay + Write("changed", changed) + " 2> " + Path("log")), 1);
  EXPECT_EQ(Shell(replay + Write("empty", "") + " 2> " + Path("log")), 1);
  EXPECT_EQ(Shell(replay + Path("nothing") + " 2> " + Path("log")), 1);
}

TEST_F(ServingTest, SelfcheckFindsEveryAnswerTheSame) {
  const std::string command =
      std::string(kProgram) + " selfcheck --model " + kModel + " --threads 1 ";
  EXPECT_EQ(Shell(command + "--requests 6 --json " + Path("report") + " > " + Path("said") +
                  " 2> " + Path("log")),
            0);
  EXPECT_THAT(Read(Path("said")), HasSubstr("Every answer is the same: 6 requests in 12 ways"));
  const json report = json::parse(Read(Path("report")));
  EXPECT_EQ(report["passed"], true);
  EXPECT_GT(report["cached_tokens"], 0);
  EXPECT_GT(report["preemptions"], 0);
  EXPECT_EQ(Shell(command + "--requests 1 2> " + Path("log")), 2);
}

TEST_F(ServingTest, AnInterruptedSelfcheckEndsWithinAWayOfRunning) {
  // The plain way alone takes many seconds.
  const pid_t pid = Start({kProgram, "selfcheck", "--model", kModel, "--threads", "1", "--requests",
                           "1024", "--max-output-tokens", "64"},
                          Path("log"));
  while (Read(Path("log")).find("selfcheck: 1/13: plain") == std::string::npos) {
    ASSERT_EQ(::waitpid(pid, nullptr, WNOHANG), 0) << Read(Path("log"));
    ::usleep(10000);
  }
  ::kill(pid, SIGINT);
  EXPECT_EQ(Wait(pid).status, 130);
  EXPECT_EQ(Read(Path("log")),
            "selfcheck: 1/13: plain\ndeepinfer: interrupted; nothing was compared.\n");
}

}  // namespace
