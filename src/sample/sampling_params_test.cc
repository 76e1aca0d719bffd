#include "deepinfer/sampling_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> Fields(const std::vector<Error>& errors) {
  std::vector<std::string> fields;
  for (const Error& error : errors) fields.push_back(error.field);
  return fields;
}

TEST(SamplingParams, DefaultsAreValidAndNeutral) {
  const SamplingParams params;
  EXPECT_TRUE(params.Validate(512).empty());
  EXPECT_EQ(params.temperature, 1.0);
  EXPECT_EQ(params.top_k, -1);
  EXPECT_EQ(params.top_p, 1.0);
  EXPECT_EQ(params.min_p, 0.0);
  EXPECT_FALSE(params.max_tokens.has_value());
}

TEST(SamplingParams, AnImpossibleMaximumDoesNotAccuseTheMinimum) {
  SamplingParams params;
  params.max_tokens = -1;
  EXPECT_EQ(Fields(params.Validate()), std::vector<std::string>{"max_tokens"});
}

struct Case {
  const char* field;
  std::function<void(SamplingParams&)> change;
  const char* says;
};

TEST(SamplingParams, EachBadValueIsNamedWithItsRange) {
  const Case cases[] = {
      {"temperature", [](SamplingParams& p) { p.temperature = NAN; },
       "temperature is nan; allowed is a number from 0"},
      {"temperature", [](SamplingParams& p) { p.temperature = -0.1; }, "-0.1"},
      {"temperature", [](SamplingParams& p) { p.temperature = INFINITY; }, "inf"},
      {"temperature", [](SamplingParams& p) { p.temperature = 100.5; }, "to 100"},
      {"top_k", [](SamplingParams& p) { p.top_k = 0; },
       "top_k is 0; allowed are -1 (all tokens) and 1 ... 2147483647."},
      {"top_k", [](SamplingParams& p) { p.top_k = -2; }, "-2"},
      {"top_k", [](SamplingParams& p) { p.top_k = int64_t{1} << 31; }, "2147483648"},
      {"top_p", [](SamplingParams& p) { p.top_p = 0; }, "above 0"},
      {"top_p", [](SamplingParams& p) { p.top_p = 1.0001; }, "up to 1"},
      {"top_p", [](SamplingParams& p) { p.top_p = NAN; }, "nan"},
      {"min_p", [](SamplingParams& p) { p.min_p = -1e-9; }, "from 0"},
      {"min_p", [](SamplingParams& p) { p.min_p = 1.5; }, "to 1"},
      {"presence_penalty", [](SamplingParams& p) { p.presence_penalty = 2.5; }, "from -2 to 2"},
      {"frequency_penalty", [](SamplingParams& p) { p.frequency_penalty = NAN; }, "from -2 to 2"},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = 0; }, "1 is neutral"},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = INFINITY; }, "inf"},
      {"logit_bias[-1]",
       [](SamplingParams& p) {
         p.logit_bias = {{-1, 0.0}};
       },
       "token -1; token ids of this model are 0 ... 511."},
      {"logit_bias[512]",
       [](SamplingParams& p) {
         p.logit_bias = {{512, 0.0}};
       },
       "512"},
      {"logit_bias[7]",
       [](SamplingParams& p) {
         p.logit_bias = {{7, 1e9}};
       },
       "from -100 to 100"},
      {"logit_bias[7]",
       [](SamplingParams& p) {
         p.logit_bias = {{7, NAN}};
       },
       "nan"},
      {"allowed_token_ids", [](SamplingParams& p) { p.allowed_token_ids.emplace(); }, "is empty"},
      {"allowed_token_ids[1]",
       [](SamplingParams& p) {
         p.allowed_token_ids = {0, 512};
       },
       "512"},
      {"bad_words[0]", [](SamplingParams& p) { p.bad_words = {""}; }, "0 bytes"},
      {"bad_words_token_ids[0]", [](SamplingParams& p) { p.bad_words_token_ids = {{}}; },
       "0 entries"},
      {"bad_words_token_ids[0][1]",
       [](SamplingParams& p) {
         p.bad_words_token_ids = {{1, -3}};
       },
       "-3"},
      {"min_tokens", [](SamplingParams& p) { p.min_tokens = -1; }, "-1"},
      {"min_tokens", [](SamplingParams& p) { p.min_tokens = 5, p.max_tokens = 4; },
       "max_tokens, which is 4"},
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = -1; }, "allowed are 0"},
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = int64_t{1} << 40; }, "1099511627776"},
      {"stop", [](SamplingParams& p) { p.stop.assign(65, "x"); }, "65 entries"},
      {"stop[1]",
       [](SamplingParams& p) {
         p.stop = {"a", ""};
       },
       "0 bytes"},
      {"stop[0]", [](SamplingParams& p) { p.stop = {std::string(1025, 'a')}; }, "1025 bytes"},
      {"stop_token_ids[0]", [](SamplingParams& p) { p.stop_token_ids = {int64_t{1} << 31}; },
       "2147483648"},
      {"structured_output.schema", [](SamplingParams& p) { p.structured_output.emplace(); },
       "is empty"},
      {"structured_output.schema",
       [](SamplingParams& p) {
         p.structured_output.emplace().schema.assign((size_t{1} << 20) + 1, 'x');
       },
       "1048577 bytes"},
      {"structured_output.schema",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = StructuredOutput::Kind::kJsonObject;
         p.structured_output->schema = "{}";
       },
       "no use for it"},
      {"structured_output.kind",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = static_cast<StructuredOutput::Kind>(17);
       },
       "kind is 17"},
      {"structured_output.choices",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = StructuredOutput::Kind::kChoice;
       },
       "0 entries"},
      {"structured_output.choices",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = StructuredOutput::Kind::kChoice;
         p.structured_output->choices.assign(4097, "x");
       },
       "4097 entries"},
      {"structured_output.choices",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = StructuredOutput::Kind::kChoice;
         p.structured_output->choices.assign(2, std::string(600'000, 'x'));
       },
       "1200000 bytes"},
      {"structured_output.choices[1]",
       [](SamplingParams& p) {
         p.structured_output.emplace().kind = StructuredOutput::Kind::kChoice;
         p.structured_output->choices = {"a", ""};
       },
       "is empty"},
      {"structured_output.choices",
       [](SamplingParams& p) { p.structured_output.emplace().choices = {"a"}; }, "no use for them"},
      {"structured_output.max_whitespace",
       [](SamplingParams& p) { p.structured_output.emplace().max_whitespace = 65; }, "0 ... 64"},
      {"structured_output.trigger_token_ids",
       [](SamplingParams& p) { p.structured_output.emplace().trigger_token_ids.assign(1025, 1); },
       "1025 entries"},
      {"structured_output.trigger_token_ids[1]",
       [](SamplingParams& p) {
         p.structured_output.emplace().trigger_token_ids = {1, 512};
       },
       "512"},
      {"structured_output.bound_token_id",
       [](SamplingParams& p) { p.structured_output.emplace().bound_token_id = 4; },
       "whose rest it could force"},
      {"structured_output.bound_token_id",
       [](SamplingParams& p) { p.structured_output.emplace().bound_token_id = -4; }, "is -4"},
      {"n", [](SamplingParams& p) { p.n = 0; }, "n is 0; allowed are 1 ... 1024."},
      {"logprobs", [](SamplingParams& p) { p.logprobs = 1001; }, "0 ... 1000"},
      {"prompt_logprobs", [](SamplingParams& p) { p.prompt_logprobs = -1; }, "-1"},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    c.change(params);
    const std::vector<Error> errors = params.Validate(512);
    bool found = false;
    for (const Error& error : errors) {
      found = found || (error.field == c.field && error.message.find(c.says) != std::string::npos);
      EXPECT_EQ(error.code, Code::kInvalidArgument);
    }
    EXPECT_TRUE(found) << c.field << ", " << c.says << ": "
                       << (errors.empty() ? "no error"
                                          : errors[0].field + ": " + errors[0].message);
  }
}

TEST(SamplingParams, AllProblemsAreReportedAtOnce) {
  SamplingParams params;
  params.temperature = -1;
  params.top_k = 0;
  params.stop = {""};
  params.n = 0;
  EXPECT_EQ(Fields(params.Validate()),
            (std::vector<std::string>{"temperature", "top_k", "stop[0]", "n"}));
}

TEST(SamplingParams, TokenIdsAreCheckedAgainstTheVocabularyWhenItIsKnown) {
  SamplingParams params;
  params.stop_token_ids = {512};
  EXPECT_TRUE(params.Validate().empty());
  EXPECT_THAT(params.Validate(512).at(0).message, HasSubstr("0 ... 511"));
  EXPECT_TRUE(params.Validate(513).empty());
}

}  // namespace
}  // namespace deepinfer
