// `deepinfer eval` as a user runs it, with a tiny random checkpoint: what it answers is what
// `generate` answers greedily, so right and wrong expectations can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/program_test.h"

namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kProgram[] = DI_BINARY_DIR "/deepinfer";
constexpr char kModel[] = DI_TEST_DATA_DIR "/model/three/checkpoint";

class EvalTest : public deepinfer::testing_support::ProgramTest {
 protected:
  int Eval(const std::string& options, const std::string& model = kModel) {
    return Shell(std::string(kProgram) + " eval --model " + model + " --no-progress " + options +
                 " > " + Path("table") + " 2> " + Path("log"));
  }
  std::string Table() const {
    return Read(Path("table"));
  }
  std::string Log() const {
    return Read(Path("log"));
  }

  // What `generate` makes of each prompt with 6 tokens.
  std::vector<std::string> Answers(const std::vector<std::string>& prompts) {
    std::string lines;
    for (size_t i = 0; i < prompts.size(); ++i) {
      lines += json{{"id", i},
                    {"prompt", prompts[i]},
                    {"sampling_params", {{"temperature", 0}, {"max_tokens", 6}}}}
                   .dump() +
               "\n";
    }
    EXPECT_EQ(Shell(std::string(kProgram) + " generate --model " + kModel + " --no-progress " +
                    "--input " + Write("prompts", lines) + " --output " + Path("answers")),
              0);
    std::vector<std::string> texts;
    for (const json& line : ReadLines(Path("answers"))) texts.push_back(line["outputs"][0]["text"]);
    return texts;
  }
};

TEST_F(EvalTest, CountsRightAnswersBySkillAndContext) {
  const std::vector<std::string> prompts = {"One", "Two", "Three", "Four"};
  const std::vector<std::string> answers = Answers(prompts);
  ASSERT_EQ(answers.size(), 4u);
  std::string tasks;
  for (size_t i = 0; i < 4; ++i) {
    json task = {{"id", i},
                 {"skill", i < 3 ? "say" : "tell"},
                 {"prompt", prompts[i]},
                 {"expected", i == 1 ? "something else" : answers[i]},
                 {"scorer", "exact"}};
    if (i < 3) task["context"] = i < 2 ? 10 : 20;
    tasks += task.dump() + "\n";
  }
  const std::string file = Write("tasks.jsonl", tasks);
  ASSERT_EQ(Eval("--max-tokens 6 --tasks " + file + " --output " + Path("out") + " --json " +
                 Path("json")),
            0)
      << Log();
  EXPECT_EQ(Table(),
            "skill   context   tasks  correct  accuracy\n"
            "say          10       2        1    50.0 %\n"
            "say          20       1        1   100.0 %\n"
            "tell          -       1        1   100.0 %\n"
            "total                 4        3    75.0 %\n");
  EXPECT_EQ(json::parse(Read(Path("json")))["accuracy"], 0.75);
  const std::vector<json> lines = ReadLines(Path("out"));
  ASSERT_EQ(lines.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(lines[i]["id"], i);
    EXPECT_EQ(lines[i]["file"], "tasks.jsonl");
    EXPECT_EQ(lines[i]["correct"], i != 1);
    EXPECT_EQ(lines[i]["answer"]["content"], answers[i]);
    EXPECT_EQ(lines[i]["completion_tokens"], 6);
    EXPECT_EQ(lines[i]["finish_reason"], "length");
  }
}

TEST_F(EvalTest, WrongLinesCostOnlyThemselves) {
  const std::string answer = Answers({"One"})[0];
  const std::string file = Write(
      "tasks.jsonl",
      "{\"id\": 1, \"skill\": \"say\", \"prompt\": \"One\", \"expected\": \"x\", \"scorer\": "
      "\"almost\"}\n"
      "{broken\n" +
          json{{"id", 2},
               {"skill", "say"},
               {"prompt", "One"},
               {"expected", answer},
               {"scorer", "exact"}}
              .dump() +
          "\n"
          "{\"id\": 3, \"skill\": \"say\", \"prompt_token_ids\": [99999999], \"expected\": \"x\", "
          "\"scorer\": \"exact\"}\n");
  ASSERT_EQ(Eval("--max-tokens 6 --tasks " + file + " --output " + Path("out")), 3) << Log();
  EXPECT_EQ(Table(),
            "skill   context   tasks  correct  accuracy  failed\n"
            "say           -       1        1   100.0 %       1\n"
            "total                 1        1   100.0 %       3\n");
  EXPECT_THAT(Log(), AllOf(HasSubstr("tasks.jsonl, line 1: scorer is 'almost'"),
                           HasSubstr("tasks.jsonl, line 2: the line is not valid JSON"),
                           HasSubstr("tasks.jsonl, line 4: ")));
  const std::vector<json> lines = ReadLines(Path("out"));
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0]["error"]["field"], "scorer");
  EXPECT_TRUE(lines[1]["id"].is_null());
  EXPECT_EQ(lines[1]["line"], 2);
  EXPECT_EQ(lines[2]["correct"], true);
  EXPECT_EQ(lines[3]["id"], 3);
  EXPECT_EQ(lines[3]["error"]["code"], "invalid_argument");
}

TEST_F(EvalTest, ALimitDrawsTasksOfEachSkillWithTheSeed) {
  std::string tasks;
  for (int i = 0; i < 40; ++i) {
    tasks += json{{"id", i},
                  {"skill", i % 2 == 0 ? "even" : "odd"},
                  {"prompt", "One"},
                  {"expected", "x"},
                  {"scorer", "contains"}}
                 .dump() +
             "\n";
  }
  const std::string file = Write("tasks.jsonl", tasks);
  std::vector<std::set<int>> drawn;
  for (const char* seed : {"1", "1", "2"}) {
    ASSERT_EQ(Eval("--max-tokens 1 --limit 5 --seed " + std::string(seed) + " --tasks " + file +
                   " --output " + Path("out")),
              0)
        << Log();
    std::set<int> ids;
    int even = 0;
    for (const json& line : ReadLines(Path("out"))) {
      ids.insert(line["id"].get<int>());
      even += line["skill"] == "even" ? 1 : 0;
    }
    EXPECT_EQ(ids.size(), 10u);
    EXPECT_EQ(even, 5);
    drawn.push_back(ids);
  }
  EXPECT_EQ(drawn[0], drawn[1]);
  EXPECT_NE(drawn[0], drawn[2]);
}

TEST_F(EvalTest, ASuiteIsAFolderOfTheCheckpoint) {
  namespace fs = std::filesystem;
  const fs::path model = dir_ / "model";
  fs::create_directories(model / "eval" / "small");
  for (const auto& file : fs::directory_iterator(kModel))
    fs::create_symlink(file.path(), model / file.path().filename());
  const std::string task = R"(", "prompt": "One", "expected": "", "scorer": "prefix"})"
                           "\n";
  Write("model/eval/small/b.jsonl", R"({"id": 1, "skill": "b)" + task);
  Write("model/eval/small/a.jsonl", R"({"id": 1, "skill": "a)" + task);
  Write("model/eval/small/notes.txt", "not a task\n");
  ASSERT_EQ(Eval("--max-tokens 1 --suite small --output - --limit 1", model.string()), 0) << Log();
  // The answers are on the standard output, the table is not.
  EXPECT_THAT(Log(), HasSubstr("total                 2        2   100.0 %"));
  const std::vector<json> lines = ReadLines(Path("table"));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["file"], "a.jsonl");
  EXPECT_EQ(lines[1]["file"], "b.jsonl");
  EXPECT_EQ(Eval("--suite large", model.string()), 1);
  EXPECT_THAT(Log(), AllOf(HasSubstr("has no suite 'large'"), HasSubstr("its suites are small")));
  EXPECT_EQ(Eval("--suite ../small", model.string()), 1);
  EXPECT_THAT(Log(), HasSubstr("--suite is '../small'"));
  EXPECT_EQ(Eval("--suite demo"), 1);
  EXPECT_THAT(Log(), HasSubstr("it has no suites"));
}

TEST_F(EvalTest, WrongUsageIsRefused) {
  const std::string file = Write("tasks.jsonl", "");
  EXPECT_EQ(Eval(""), 2);
  EXPECT_THAT(Log(), HasSubstr("--suite or --tasks"));
  EXPECT_EQ(Eval("--suite demo --tasks " + file), 2);
  EXPECT_EQ(Eval("--tasks " + file + " --max-tokens 0"), 2);
  EXPECT_EQ(Eval("--tasks " + file), 1);
  EXPECT_THAT(Log(), HasSubstr("the task files have no tasks"));
  EXPECT_EQ(Eval("--tasks " + Path("none.jsonl")), 1);
  EXPECT_THAT(Log(), HasSubstr("none.jsonl"));
  EXPECT_EQ(Eval("--tasks " + file + " --output " + file), 1);
}

}  // namespace
