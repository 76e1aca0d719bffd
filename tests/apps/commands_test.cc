// The commands render, tokenize, detokenize and logits as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program_test.h"

namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kProgram[] = DI_BINARY_DIR "/deepinfer";
constexpr char kModel[] = DI_TEST_DATA_DIR "/model/two/checkpoint";

class CommandsTest : public deepinfer::testing_support::ProgramTest {
 protected:
  static int Run(const std::string& arguments) {
    return Shell(std::string(kProgram) + " " + arguments);
  }
  // The bytes of one tensor of a safetensors file, and its shape.
  static std::string Tensor(const std::string& path, const std::string& name,
                            std::vector<int64_t>* shape = nullptr) {
    const std::string content = Read(path);
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, content.data(), sizeof(header_bytes));
    const json entry = json::parse(content.substr(8, header_bytes)).at(name);
    if (shape != nullptr) *shape = entry["shape"].get<std::vector<int64_t>>();
    const size_t begin = entry["data_offsets"][0];
    const size_t end = entry["data_offsets"][1];
    return content.substr(8 + header_bytes + begin, end - begin);
  }
};

// Every recorded request gives the recorded prompt or is refused, as the program is run.
TEST_F(CommandsTest, RenderGivesTheRecordedPrompts) {
  for (const std::string name : {"render", "convert"}) {
    const std::string input = DI_TEST_DATA_DIR "/encoding/" + name + ".jsonl";
    EXPECT_EQ(Run("render --input " + input + " --output " + Path("out")), 3);
    const std::vector<json> recorded = ReadLines(input);
    const std::vector<json> rendered = ReadLines(Path("out"));
    ASSERT_EQ(rendered.size(), recorded.size());
    for (size_t i = 0; i < recorded.size(); ++i) {
      SCOPED_TRACE(recorded[i]["id"].get<std::string>());
      EXPECT_EQ(rendered[i]["id"], recorded[i]["id"]);
      if (recorded[i].contains("error")) {
        EXPECT_EQ(rendered[i]["line"], i + 1);
        EXPECT_EQ(rendered[i]["error"]["code"], "invalid_argument");
        EXPECT_THAT(rendered[i]["error"]["field"].get<std::string>(), HasSubstr("request"));
        continue;
      }
      for (const char* field : {"prompt", "special", "images", "parser"})
        EXPECT_EQ(rendered[i][field], recorded[i][field]) << field;
      for (const auto& [field, value] : recorded[i]["sampling"].items())
        EXPECT_EQ(rendered[i]["sampling"][field], value) << field;
      EXPECT_EQ(rendered[i].contains("namespaces"), recorded[i].contains("namespaces"));
      EXPECT_FALSE(rendered[i].contains("ids"));
    }
  }
}

TEST_F(CommandsTest, RenderTakesThreeFormsAndNamesWhatIsWrong) {
  const std::string input = Write(
      "forms",
      "{\"id\": 1, \"conversation\": {\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], "
      "\"thinking\": false}}\n"
      "{\"id\": 2, \"messages\": [{\"role\": \"user\", \"content\": \"b\"}], \"mode\": \"chat\"}\n"
      "{\"id\": 3}\n"
      "{\"id\": 4, \"request\": {}, \"messages\": []}\n"
      "{\"id\": 5, \"request\": {}, \"options\": {\"nonsense\": 1}}\n"
      "{\"id\": {}}\nnonsense\n");
  EXPECT_EQ(Run("render < " + input + " > " + Path("out")), 3);
  const std::vector<json> out = ReadLines(Path("out"));
  ASSERT_EQ(out.size(), 7u);
  EXPECT_THAT(out[0]["prompt"].get<std::string>(), HasSubstr("<｜User｜>a<｜Assistant｜></think>"));
  EXPECT_FALSE(out[0].contains("sampling"));
  EXPECT_THAT(out[1]["prompt"].get<std::string>(), HasSubstr("<｜User｜>b<｜Assistant｜></think>"));
  EXPECT_EQ(out[2]["id"], 3);
  EXPECT_THAT(out[2]["error"]["message"].get<std::string>(), HasSubstr("needs a request"));
  EXPECT_EQ(out[3]["error"]["field"], "messages");
  EXPECT_EQ(out[4]["error"]["field"], "options.nonsense");
  EXPECT_EQ(out[5]["id"], nullptr);
  EXPECT_EQ(out[5]["error"]["field"], "id");
  EXPECT_EQ(out[6]["line"], 7);
  EXPECT_EQ(Run("render --profile other < " + input + " 2> " + Path("err")), 2);
  EXPECT_EQ(Run("render --input " + input + " --output " + input + " 2> " + Path("err")), 1);
}

TEST_F(CommandsTest, TokenizeAndDetokenizeAreInverse) {
  const std::string text = Write(
      "text",
      "{\"id\": \"a\", \"text\": \"The <｜User｜> café\\n😀\"}\n\n{\"id\": 2, \"text\": \"\"}\n");
  EXPECT_EQ(Run("tokenize --model " + std::string(kModel) + " --input " + text + " --output " +
                Path("ids")),
            0);
  EXPECT_EQ(Run("detokenize --tokenizer " + std::string(kModel) + "/tokenizer.json < " +
                Path("ids") + " > " + Path("back")),
            0);
  const std::vector<json> back = ReadLines(Path("back"));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0], (json{{"id", "a"}, {"text", "The <｜User｜> café\n😀"}}));
  EXPECT_EQ(back[1], (json{{"id", 2}, {"text", ""}}));

  EXPECT_EQ(Run("tokenize --no-special --model " + std::string(kModel) + " --input " + text +
                " --output " + Path("plain")),
            0);
  const std::vector<int> ids = ReadLines(Path("ids"))[0]["ids"];
  const std::vector<int> plain = ReadLines(Path("plain"))[0]["ids"];
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 501), 1);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 501), 0);
}

TEST_F(CommandsTest, FaultyLinesOfTokenizeAreErrorsOfTheirOwn) {
  const std::string input =
      Write("in", "{\"id\": 1, \"text\": \"\xff\"}\n{\"id\": 2, \"text\": \"x\"}\nnonsense\n");
  EXPECT_EQ(Run("tokenize --model " + std::string(kModel) + " --input " + input + " --output " +
                Path("out")),
            3);
  const std::vector<json> lines = ReadLines(Path("out"));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0]["error"]["field"], "text");
  EXPECT_EQ(lines[0]["id"], 1);
  EXPECT_TRUE(lines[1].contains("ids"));
  EXPECT_TRUE(lines[2]["id"].is_null());
  const std::string ids = Write("ids", "{\"id\": 1, \"ids\": [5, 512]}");
  EXPECT_EQ(Run("detokenize --model " + std::string(kModel) + " --input " + ids + " --output " +
                Path("out")),
            3);
  EXPECT_EQ(ReadLines(Path("out"))[0]["error"]["field"], "ids[1]");
}

TEST_F(CommandsTest, LogitsDoNotDependOnChunksAndLastKeepsTheLastRows) {
  json ids = json::array();
  for (int i = 0; i < 40; ++i) ids.push_back(i * 37 % 512);
  const std::string input = Write(
      "in", json{{"id", "whole"}, {"token_ids", ids}}.dump() + "\n" +
                json{{"id", "cut"}, {"token_ids", ids}, {"chunks", {1, 7, 30, 2}}}.dump() + "\n");
  const std::string command =
      "logits --model " + std::string(kModel) + " --input " + input + " --output ";
  ASSERT_EQ(Run(command + Path("all")), 0);
  std::vector<int64_t> shape;
  const std::string whole = Tensor(Path("all"), "whole", &shape);
  EXPECT_EQ(shape, (std::vector<int64_t>{40, 512}));
  EXPECT_TRUE(whole == Tensor(Path("all"), "cut"));

  ASSERT_EQ(Run(command + Path("last") + " --last 5 --dump-layers"), 0);
  const std::string last = Tensor(Path("last"), "cut", &shape);
  EXPECT_EQ(shape, (std::vector<int64_t>{5, 512}));
  EXPECT_TRUE(last == whole.substr(whole.size() - last.size()));
  Tensor(Path("last"), "cut/streams.1", &shape);
  EXPECT_EQ(shape, (std::vector<int64_t>{5, 4, 256}));
  for (const std::string name :
       {"streams.0", "streams.1", "experts.0", "experts.1", "selected.1"}) {
    EXPECT_TRUE(Tensor(Path("last"), "whole/" + name) == Tensor(Path("last"), "cut/" + name))
        << name;
  }

  ASSERT_EQ(Run(command + Path("reference") + " --numerics reference"), 0);
  EXPECT_FALSE(Tensor(Path("reference"), "whole") == whole);
}

TEST_F(CommandsTest, DraftsOfLogitsStandBehindEveryStep) {
  json ids = json::array();
  for (int i = 0; i < 40; ++i) ids.push_back(i * 37 % 512);
  const std::string input = Write(
      "in", json{{"id", "whole"}, {"token_ids", ids}}.dump() + "\n" +
                json{{"id", "cut"}, {"token_ids", ids}, {"chunks", {1, 7, 30, 2}}}.dump() + "\n");
  ASSERT_EQ(Run("logits --model " + std::string(kModel) + " --input " + input + " --output " +
                Path("out") + " --last 1 --drafts"),
            0);
  std::vector<int64_t> shape;
  const auto ints = [&](const std::string& name) {
    const std::string bytes = Tensor(Path("out"), name, &shape);
    std::vector<int32_t> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  EXPECT_EQ(ints("cut/draft_pos"), (std::vector<int32_t>{1, 8, 38, 40}));
  const std::vector<int32_t> tokens = ints("cut/draft_tokens");
  EXPECT_EQ(shape, (std::vector<int64_t>{4, 4}));
  // The anchors are the line's next tokens.
  for (const int i : {0, 1, 2}) EXPECT_EQ(tokens[4 * i], (i == 0 ? 1 : i == 1 ? 8 : 38) * 37 % 512);
  EXPECT_EQ(ints("whole/draft_tokens"), (std::vector<int32_t>{tokens.begin() + 12, tokens.end()}));
  for (const char* name : {"draft_conf", "draft_gap"}) {
    const std::string cut = Tensor(Path("out"), std::string("cut/") + name, &shape);
    EXPECT_EQ(shape, (std::vector<int64_t>{4, 3}));
    EXPECT_TRUE(cut.substr(3 * 12) == Tensor(Path("out"), std::string("whole/") + name)) << name;
  }
  Tensor(Path("out"), "cut/draft_logits", &shape);
  EXPECT_EQ(shape, (std::vector<int64_t>{4, 3, 512}));
}

TEST_F(CommandsTest, TheInputIsNeverTheOutput) {
  const std::string content = "{\"id\": 1, \"text\": \"x\"}\n";
  const std::string input = Write("in", content);
  const std::string model = " --model " + std::string(kModel);
  for (const char* command : {"tokenize", "detokenize", "logits"}) {
    EXPECT_EQ(
        Run(command + model + " --input " + input + " --output " + input + " 2> " + Path("log")),
        1);
    EXPECT_THAT(Read(Path("log")), HasSubstr("input and output are the same file"));
    EXPECT_EQ(Read(input), content) << command;
  }
  EXPECT_EQ(Run("tokenize" + model + " < " + input + " 1<> " + input + " 2> /dev/null"), 1);
  EXPECT_EQ(Run("tokenize" + model + " --output " + input + " < " + input + " 2> /dev/null"), 1);
  EXPECT_EQ(Read(input), content);
}

TEST_F(CommandsTest, AnInterruptedTokenizeHasWrittenWhatItRead) {
  ASSERT_EQ(Shell("mkfifo " + Path("pipe")), 0);
  for (const char* signal : {"INT", "TERM"}) {
    EXPECT_EQ(
        Shell("exec 3<> " + Path("pipe") + "; echo '{\"id\": 7, \"text\": \"x\"}' >&3; " +
              std::string(kProgram) + " tokenize --model " + kModel + " --output " + Path("out") +
              " < " + Path("pipe") + " 2> " + Path("log") + " & pid=$!; until [ -s " + Path("out") +
              " ]; do sleep 0.05; kill -0 $pid || exit 99; done; sleep 0.5; kill -" + signal +
              " $pid; wait $pid"),
        130);
    const std::vector<json> lines = ReadLines(Path("out"));
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_EQ(lines[0]["id"], 7);
    EXPECT_THAT(Read(Path("log")), HasSubstr("interrupted; 1 line written."));
    std::filesystem::remove(Path("out"));
  }
}

TEST_F(CommandsTest, AReaderThatGoesAwayEndsTokenizeQuietly) {
  const std::string input = Write("in", "{\"id\": 1, \"text\": \"x\"}\n");
  EXPECT_EQ(Shell("bash -c '(sleep 0.3; cat " + input + ") | " + std::string(kProgram) +
                  " tokenize --model " + kModel + " 2> " + Path("log") +
                  " | true; exit ${PIPESTATUS[1]}'"),
            141);
  EXPECT_EQ(Read(Path("log")), "");
}

TEST_F(CommandsTest, LogitsTakesWhatTokenizeWrites) {
  const std::string text = Write("text", "{\"id\": \"a\", \"text\": \"The cat\"}\n");
  const std::string model = " --model " + std::string(kModel);
  ASSERT_EQ(Run("tokenize" + model + " --input " + text + " --output " + Path("ids")), 0);
  ASSERT_EQ(Run("logits" + model + " --input " + Path("ids") + " --output " + Path("out")), 0);
  std::vector<int64_t> shape;
  Tensor(Path("out"), "a", &shape);
  EXPECT_EQ(shape[0], static_cast<int64_t>(ReadLines(Path("ids"))[0]["ids"].size()));
  EXPECT_EQ(Run("logits" + model + " --input " + Path("ids") + " --output - 2> " + Path("log")), 2);
  EXPECT_THAT(Read(Path("log")),
              HasSubstr("--output: A safetensors file cannot go to the standard output"));
}

TEST_F(CommandsTest, LogitsRefusesFaultyInputAndWritesNothing) {
  const std::string input = Write("in",
                                  "{\"id\": 1, \"token_ids\": [1]}\n{\"id\": 2, \"token_ids\": "
                                  "[512]}\n{\"id\": 1, \"token_ids\": [3]}\n");
  EXPECT_EQ(Run("logits --model " + std::string(kModel) + " --input " + input + " --output " +
                Path("out") + " 2> " + Path("log")),
            1);
  EXPECT_THAT(Read(Path("log")),
              HasSubstr("line 2: token_ids[0] is 512; token ids of this model are 0 ... 511."));
  EXPECT_THAT(Read(Path("log")), HasSubstr("line 3: id '1' was used in line 1"));
  EXPECT_FALSE(std::filesystem::exists(Path("out")));
}

TEST_F(CommandsTest, AnInterruptedLogitsLeavesNoOutput) {
  std::string input;
  for (int i = 0; i < 500; ++i)
    input += json{{"id", i}, {"token_ids", std::vector<int>(1000, 7)}}.dump() + "\n";
  const pid_t pid =
      Start({kProgram, "logits", "--model", kModel, "--input", Write("in.jsonl", input), "--output",
             Path("out.safetensors"), "--last", "1"},
            Path("log"));
  while (!std::filesystem::exists(Path("out.safetensors.partial")))
    ASSERT_EQ(::waitpid(pid, nullptr, WNOHANG), 0) << Read(Path("log"));
  ::kill(pid, SIGINT);
  EXPECT_EQ(Wait(pid).status, 130);
  EXPECT_THAT(Read(Path("log")), HasSubstr("interrupted; nothing was written."));
  EXPECT_FALSE(std::filesystem::exists(Path("out.safetensors")));
  EXPECT_FALSE(std::filesystem::exists(Path("out.safetensors.partial")));
}

}  // namespace
