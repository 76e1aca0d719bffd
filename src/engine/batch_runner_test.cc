#include "engine/batch_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "engine/fake_backend.h"
#include "engine/resolve_request.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

const Tokenizer& TestTokenizer() {
  static const Tokenizer tokenizer =
      *Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json");
  return tokenizer;
}

class BatchRunnerTest : public ::testing::Test {
 protected:
  BatchRunnerTest() : backend(512, 20, 20, 4), engine(backend, TestTokenizer(), Options(), {}) {}

  static EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = 100;
    options.scheduler.max_num_seqs = 4;
    options.scheduler.max_num_batched_tokens = 16;
    options.end_ids = EndOfTurnIds(TestTokenizer(), 1, 512);
    return options;
  }

  std::vector<RequestOutput> RunAll(const std::vector<Request>& requests,
                                    const GenerateCallbacks& callbacks = {}) {
    return RunBatch({engine, TestTokenizer(), [this] { return ++fresh_seeds; }}, requests,
                    callbacks);
  }

  FakeBackend backend;
  Engine engine;
  uint64_t fresh_seeds = 1000;
};

Request Text(std::string id, std::string text) {
  Request request;
  request.id = std::move(id);
  request.prompt = std::move(text);
  request.sampling_params.max_tokens = 5;
  request.sampling_params.ignore_eos = true;
  return request;
}

TEST_F(BatchRunnerTest, EveryRequestGetsOneOutputInOrder) {
  std::vector<Request> requests;
  for (int i = 0; i < 50; ++i) {
    requests.push_back(Text(std::to_string(i), std::string(static_cast<size_t>(i % 9) + 1, 'a')));
    requests.back().sampling_params.max_tokens = 1 + i % 11;
    if (i % 10 == 3) requests.back().prompt = std::string();
    if (i % 10 == 4) requests.back().prompt = std::vector<int64_t>{1, 2, 99999999999};
    if (i % 10 == 5) {
      Chat chat;
      chat.reasoning_effort = 101;
      requests.back().prompt = chat;
    }
    if (i % 10 == 6)
      requests.back().sampling_params.temperature = std::numeric_limits<double>::quiet_NaN();
    if (i % 10 == 7) requests.back().prompt = std::string(300, 'x') + "\xff";
  }
  std::set<size_t> finished;
  GenerateCallbacks callbacks;
  callbacks.on_finished = [&](size_t index, const RequestOutput& output) {
    EXPECT_TRUE(finished.insert(index).second);
    EXPECT_EQ(output.id, std::to_string(index));
  };
  const std::vector<RequestOutput> outputs = RunAll(requests, callbacks);
  ASSERT_EQ(outputs.size(), 50u);
  EXPECT_EQ(finished.size(), 50u);
  const char* const fields[] = {"prompt", "prompt_token_ids[2]", "reasoning_effort", "temperature",
                                "prompt"};
  for (int i = 0; i < 50; ++i) {
    const RequestOutput& output = outputs[static_cast<size_t>(i)];
    EXPECT_EQ(output.id, std::to_string(i));
    if (i % 10 >= 3 && i % 10 <= 7) {
      ASSERT_TRUE(output.error.has_value()) << i;
      EXPECT_EQ(output.error->field, fields[i % 10 - 3]);
      EXPECT_TRUE(output.outputs.empty());
    } else {
      ASSERT_FALSE(output.error.has_value()) << output.error->message;
      EXPECT_EQ(output.outputs.at(0).token_ids.size(), static_cast<size_t>(1 + i % 11));
    }
  }
}

TEST_F(BatchRunnerTest, StatisticsHaveEveryRequestAlsoThoseThatNeverReachedTheEngine) {
  EngineStatistics statistics("model");
  EngineOptions options = Options();
  options.statistics = &statistics;
  Engine counting(backend, TestTokenizer(), options, {});
  std::vector<Request> requests = {Text("good", "the"), Text("empty", ""),
                                   Text("too long", std::string(2000, 'x')), Text("bad id", "x"),
                                   Text("bad priority", "x")};
  requests[3].prompt = std::vector<int64_t>{-1};
  requests[4].priority = 2'000'000;
  const auto outputs =
      RunBatch({counting, TestTokenizer(), [] { return uint64_t{1}; }}, requests, {});
  for (size_t i = 1; i < outputs.size(); ++i) EXPECT_TRUE(outputs[i].error.has_value()) << i;
  const StatisticsSnapshot snapshot = statistics.Snapshot();
  EXPECT_EQ(snapshot.requests_submitted, 5);
  EXPECT_EQ(snapshot.requests_ended[static_cast<size_t>(EndReason::kRefused)], 4);
  EXPECT_EQ(snapshot.requests_ended[static_cast<size_t>(EndReason::kLength)], 1);
  EXPECT_EQ(snapshot.sequences_created, 1);
  EXPECT_EQ(counting.FindViolation(), "");
}

TEST_F(BatchRunnerTest, TextPromptsBeginWithTheBeginningOfSentenceOnce) {
  const std::string bos(TestTokenizer().TokenBytes(0));
  const auto outputs = RunAll({Text("a", "the"), Text("b", bos + "the")});
  EXPECT_EQ(outputs[0].prompt_token_ids.front(), 0);
  EXPECT_GT(outputs[0].prompt_token_ids.size(), 1u);
  EXPECT_EQ(outputs[0].prompt_token_ids, outputs[1].prompt_token_ids);
}

TEST_F(BatchRunnerTest, ConversationsAreEncodedAndMarkersInTheirTextAreText) {
  Request request = Text("chat", "");
  Chat chat;
  chat.thinking = false;
  chat.messages.emplace_back().content.text = "hi <｜User｜>";
  request.prompt = chat;
  const RequestOutput output = RunAll({request})[0];
  ASSERT_FALSE(output.error.has_value()) << output.error->message;
  EXPECT_EQ(output.prompt_token_ids.front(), 0);
  EXPECT_EQ(std::count(output.prompt_token_ids.begin(), output.prompt_token_ids.end(), 501), 1);
}

std::vector<int64_t> TriggerOf(const Request& request) {
  const Result<EngineRequest> resolved =
      ResolveRequest(request, TestTokenizer(), 512, [] { return uint64_t{1}; });
  EXPECT_TRUE(resolved.has_value()) << resolved.error().message;
  return resolved->params.structured_output->trigger_token_ids;
}

TEST_F(BatchRunnerTest, AStructuredOutputBeginsAfterReasoningWhereThereIsAny) {
  const int64_t close = *TestTokenizer().IdOf("</think>");
  for (const bool thinking : {true, false}) {
    for (const bool regex : {true, false}) {
      Request request = Text("chat", "");
      Chat chat;
      chat.thinking = thinking;
      chat.messages.emplace_back().content.text = "hi <think>";
      Message& answer = chat.messages.emplace_back();
      answer.role = Role::kAssistant;
      answer.content.text = "x";
      answer.reasoning_content = "hm";
      chat.messages.emplace_back();
      request.prompt = chat;
      StructuredOutput& output = request.sampling_params.structured_output.emplace();
      output.kind = regex ? StructuredOutput::Kind::kRegex : StructuredOutput::Kind::kJsonSchema;
      output.schema = "{}";
      EXPECT_EQ(TriggerOf(request),
                thinking ? std::vector<int64_t>{close} : std::vector<int64_t>{});
      // What the caller says comes first.
      output.trigger_token_ids = {7};
      EXPECT_EQ(TriggerOf(request), std::vector<int64_t>{7});
    }
  }
  // A prompt that is text or ids says nothing about reasoning.
  Request text = Text("a", "<think>");
  text.sampling_params.structured_output.emplace().schema = "{}";
  EXPECT_TRUE(TriggerOf(text).empty());
}

TEST_F(BatchRunnerTest, AResponseFormatIsEnforcedAfterReasoningUnlessThereAreTools) {
  const int64_t close = *TestTokenizer().IdOf("</think>");
  Request request = Text("chat", "");
  Chat chat;
  chat.messages.emplace_back().content.text = "As json, please.";
  chat.response_format.kind = ResponseFormat::Kind::kJsonSchema;
  chat.response_format.schema = R"({"type":"integer"})";
  const auto resolved = [&](const Chat& conversation) {
    request.prompt = conversation;
    return ResolveRequest(request, TestTokenizer(), 512, [] { return uint64_t{1}; });
  };
  for (const bool thinking : {true, false}) {
    chat.thinking = thinking;
    const auto result = resolved(chat);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    ASSERT_TRUE(result->params.structured_output.has_value());
    EXPECT_EQ(result->params.structured_output->kind, StructuredOutput::Kind::kJsonSchema);
    EXPECT_EQ(result->params.structured_output->schema, chat.response_format.schema);
    EXPECT_EQ(result->params.structured_output->trigger_token_ids,
              thinking ? std::vector<int64_t>{close} : std::vector<int64_t>{});
  }
  // A model with tools may call in place of answering.
  Chat with_tools = chat;
  Tool& tool = with_tools.tools.emplace_back();
  tool.name = "f";
  tool.function = R"({"name": "f"})";
  const auto tools = resolved(with_tools);
  ASSERT_TRUE(tools.has_value()) << tools.error().message;
  EXPECT_FALSE(tools->params.structured_output.has_value());
  // Hidden ones it cannot call.
  with_tools.tool_choice = ToolChoice::kNone;
  EXPECT_TRUE(resolved(with_tools)->params.structured_output.has_value());
  // From the middle of an answer no format can be enforced.
  Chat continued = chat;
  continued.messages.emplace_back().role = Role::kAssistant;
  continued.messages.back().content.text = "{";
  continued.messages.back().prefix = true;
  const auto middle = resolved(continued);
  ASSERT_FALSE(middle.has_value());
  EXPECT_EQ(middle.error().field, "response_format");
  // Two descriptions are one too many.
  request.sampling_params.structured_output.emplace().schema = "{}";
  const auto both = resolved(chat);
  ASSERT_FALSE(both.has_value());
  EXPECT_EQ(both.error().field, "response_format");
  EXPECT_THAT(both.error().message, HasSubstr("both given"));
}

TEST_F(BatchRunnerTest, ForcedAndStrictCallsFollowTheirToolsSchemas) {
  const int64_t marker = *TestTokenizer().IdOf("｜DSML｜");
  Request request = Text("chat", "");
  Chat chat;
  chat.thinking = false;
  chat.messages.emplace_back().content.text = "Go.";
  Tool& tool = chat.tools.emplace_back();
  tool.name = "f";
  tool.function = R"({"name": "f", "parameters": {"type": "object"}})";
  const auto resolved = [&] {
    request.prompt = chat;
    return ResolveRequest(request, TestTokenizer(), 512, [] { return uint64_t{1}; });
  };
  EXPECT_FALSE(resolved()->params.structured_output.has_value());
  // Calls of strict tools begin where the model draws the marker.
  chat.tools[0].strict = true;
  chat.tools[0].recipe_parameters = R"({"type": "object", "properties": {}})";
  const auto strict = resolved();
  ASSERT_TRUE(strict.has_value()) << strict.error().message;
  ASSERT_TRUE(strict->params.structured_output.has_value());
  EXPECT_EQ(strict->params.structured_output->kind, StructuredOutput::Kind::kToolCalls);
  EXPECT_FALSE(strict->params.structured_output->inside_block);
  EXPECT_EQ(strict->params.structured_output->trigger_token_ids, std::vector<int64_t>{marker});
  EXPECT_EQ(strict->params.structured_output->schema,
            R"([{"type":"function","function":{"name":"f","parameters":)"
            R"({"type":"object","properties":{}}}}])");
  // A forced call has begun with the prompt.
  chat.tools[0].strict = false;
  chat.tool_choice = ToolChoice::kRequired;
  const auto forced = resolved();
  ASSERT_TRUE(forced.has_value()) << forced.error().message;
  EXPECT_TRUE(forced->params.structured_output->inside_block);
  EXPECT_TRUE(forced->params.structured_output->trigger_token_ids.empty());
  EXPECT_EQ(forced->constraint_field, "tools");
  request.sampling_params.structured_output.emplace().schema = "{}";
  const auto both = resolved();
  ASSERT_FALSE(both.has_value());
  EXPECT_EQ(both.error().field, "tool_choice");
  chat.tool_choice = ToolChoice::kNone;
  EXPECT_EQ(resolved()->params.structured_output->kind, StructuredOutput::Kind::kJsonSchema);
}

TEST_F(BatchRunnerTest, DescriptionsThatAreNotUtf8AreRefusedByName) {
  Request request = Text("a", "the");
  request.sampling_params.structured_output.emplace().schema = "a\xff";
  EXPECT_EQ(RunAll({request})[0].error->field, "structured_output.schema");
  request.sampling_params.structured_output->kind = StructuredOutput::Kind::kChoice;
  request.sampling_params.structured_output->schema.clear();
  request.sampling_params.structured_output->choices = {"a", "\xff"};
  EXPECT_EQ(RunAll({request})[0].error->field, "structured_output.choices[1]");
}

TEST_F(BatchRunnerTest, RequestsWithoutASeedGetOneEachEvenFromSharedParameters) {
  const auto outputs = RunAll({Text("a", "the"), Text("b", "the"), Text("c", "the")});
  std::set<uint64_t> seeds;
  for (const RequestOutput& output : outputs) seeds.insert(output.outputs[0].seq_seed);
  EXPECT_EQ(seeds, (std::set<uint64_t>{1001, 1002, 1003}));
  Request again = Text("d", "the");
  again.sampling_params.seq_seed = 1002;
  EXPECT_EQ(RunAll({again})[0].outputs[0].token_ids, outputs[1].outputs[0].token_ids);
}

TEST_F(BatchRunnerTest, BadWordsAreKeptOutWithAndWithoutASpace) {
  Request request = Text("a", "the");
  request.sampling_params.temperature = 0;
  const RequestOutput free = RunAll({request})[0];
  std::vector<int32_t> first = {free.outputs[0].token_ids[0]};
  request.sampling_params.bad_words_token_ids = {{first[0]}};
  EXPECT_NE(RunAll({request})[0].outputs[0].token_ids[0], first[0]);
  const Result<EngineRequest> resolved = [&] {
    request.sampling_params.bad_words = {"the"};
    return ResolveRequest(request, TestTokenizer(), 512, [] { return uint64_t{1}; });
  }();
  ASSERT_EQ(resolved->bad_words.size(), 3u);
  EXPECT_EQ(TestTokenizer().Decode(resolved->bad_words[1]), "the");
  EXPECT_EQ(TestTokenizer().Decode(resolved->bad_words[2]), " the");
}

TEST_F(BatchRunnerTest, APromptThatIsTooLongIsBlamedOnTheFieldThatHoldsIt) {
  Request request = Text("a", "");
  request.prompt = std::vector<int64_t>(100, 5);
  const RequestOutput output = RunAll({request})[0];
  ASSERT_TRUE(output.error.has_value());
  EXPECT_EQ(output.error->field, "prompt_token_ids");
  EXPECT_THAT(output.error->message, HasSubstr("has 100 tokens, but the context limit is 100"));
}

TEST_F(BatchRunnerTest, StoppingEndsWhatRunsAndRefusesTheRest) {
  std::vector<Request> requests(20, Text("x", "the"));
  GenerateCallbacks callbacks;
  int steps = 0;
  callbacks.on_progress = [&](const Progress& progress) {
    EXPECT_EQ(progress.requests_total, 20);
    return ++steps < 3;
  };
  const auto outputs = RunAll(requests, callbacks);
  EXPECT_EQ(outputs[0].outputs.at(0).finish_reason, FinishReason::kAbort);
  EXPECT_EQ(outputs[0].outputs[0].token_ids.size(), 2u);  // the third is still being drawn
  ASSERT_TRUE(outputs[19].error.has_value());
  EXPECT_EQ(outputs[19].error->code, Code::kCancelled);
}

TEST_F(BatchRunnerTest, AStreamTakesRequestsOnlyALittleAheadOfWhatRuns) {
  size_t taken = 0;
  size_t done = 0;
  size_t most_open = 0;
  std::set<size_t> finished;
  const RequestSource next = [&](bool may_wait) -> NextRequest {
    EXPECT_EQ(may_wait, taken == done);
    if (taken == 2000) return EndOfRequests{};
    const size_t index = taken++;
    most_open = std::max(most_open, taken - done);
    // Some that cannot start and some of several completions are among them.
    Request request = Text(std::to_string(index), index % 7 == 3 ? "" : "the");
    request.sampling_params.max_tokens = 1 + static_cast<int64_t>(index % 5);
    request.sampling_params.n = 1 + static_cast<int64_t>(index % 3);
    return request;
  };
  GenerateCallbacks callbacks;
  callbacks.on_finished = [&](size_t index, const RequestOutput& output) {
    EXPECT_TRUE(finished.insert(index).second);
    EXPECT_EQ(output.id, std::to_string(index));
    EXPECT_EQ(output.error.has_value(), index % 7 == 3);
    ++done;
  };
  callbacks.on_progress = [&](const Progress& progress) {
    EXPECT_EQ(progress.requests_total, taken == 2000 ? progress.requests_total : -1);
    EXPECT_EQ(progress.requests_done, static_cast<int64_t>(done));
    return true;
  };
  RunStream({engine, TestTokenizer(), [this] { return ++fresh_seeds; }}, next, callbacks);
  EXPECT_EQ(finished.size(), 2000u);
  EXPECT_LE(most_open, 6u);
}

TEST_F(BatchRunnerTest, AStreamRunsWhatItHasWhileItsSourceHasNothingYet) {
  // The next request becomes available only after the output of the one before it, as over a pair
  // of pipes.
  size_t taken = 0;
  size_t done = 0;
  int idle_questions = 0;
  const RequestSource next = [&](bool may_wait) -> NextRequest {
    if (taken == 5) return EndOfRequests{};
    if (taken > done) {
      EXPECT_FALSE(may_wait);
      return NoRequestYet{};
    }
    EXPECT_TRUE(may_wait);
    if (++idle_questions % 3 != 0) return NoRequestYet{};  // the wait was cut short
    return Text(std::to_string(taken++), "the");
  };
  GenerateCallbacks callbacks;
  callbacks.on_finished = [&](size_t index, const RequestOutput& output) {
    EXPECT_EQ(index, done++);
    EXPECT_EQ(output.outputs.at(0).token_ids.size(), 5u);
  };
  RunStream({engine, TestTokenizer(), [this] { return ++fresh_seeds; }}, next, callbacks);
  EXPECT_EQ(done, 5u);
  EXPECT_EQ(idle_questions, 15);
}

TEST_F(BatchRunnerTest, AStreamThatIsStoppedAbortsWhatItTookAndAsksForNoMore) {
  size_t taken = 0;
  size_t aborted = 0;
  int steps = 0;
  GenerateCallbacks callbacks;
  callbacks.on_finished = [&](size_t, const RequestOutput& output) {
    if (output.outputs.at(0).finish_reason == FinishReason::kAbort) ++aborted;
  };
  callbacks.on_progress = [&](const Progress&) { return ++steps < 3; };
  RunStream(
      {engine, TestTokenizer(), [this] { return ++fresh_seeds; }},
      [&](bool) -> NextRequest { return Text(std::to_string(taken++), "the"); }, callbacks);
  EXPECT_EQ(taken, 5u);
  EXPECT_EQ(aborted, 5u);
}

TEST_F(BatchRunnerTest, EndOfTurnIdsHaveTheMarkersThatBeginATurn) {
  EXPECT_EQ(Options().end_ids, (std::vector<int32_t>{1, 0, 500, 501, 502}));
  EXPECT_EQ(EndOfTurnIds(TestTokenizer(), 1, 501), (std::vector<int32_t>{1, 0, 500}));
}

TEST(LLMOptions, WhatHasNoMeaningTogetherIsRefused) {
  LLMOptions llm_options;
  llm_options.model_dir = "model";
  EXPECT_TRUE(llm_options.Validate().empty());
  llm_options.max_num_seqs = 600;
  llm_options.replay_keep_tokens = 200;
  llm_options.approximate_hit_tokens = 200;
  llm_options.prefix_caching = false;
  const std::vector<Error> problems = llm_options.Validate();
  ASSERT_EQ(problems.size(), 3u);
  EXPECT_EQ(problems[0].field, "max_num_batched_tokens");
  EXPECT_EQ(problems[1].field, "replay_keep_tokens");
  EXPECT_EQ(problems[2].field, "approximate_hit_tokens");
  llm_options.max_num_batched_tokens = 600;
  llm_options.decoder_replay = DecoderReplay::kMask;
  llm_options.prefix_caching = true;
  EXPECT_TRUE(llm_options.Validate().empty());
}

TEST(LLMOptions, EveryProblemIsReported) {
  LLMOptions llm_options;
  llm_options.num_threads = -1;
  llm_options.max_num_seqs = 0;
  const std::vector<Error> problems = llm_options.Validate();
  ASSERT_EQ(problems.size(), 3u);
  EXPECT_EQ(problems[0].field, "model_dir");
  EXPECT_EQ(problems[1].field, "num_threads");
  EXPECT_THAT(problems[2].message, HasSubstr("max_num_seqs is 0; allowed are 1 ... 4096."));
}

}  // namespace
}  // namespace deepinfer
