#include "apps/option_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deepinfer/llm.h"
#include "deepinfer/selfcheck.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

std::string Renamed(const std::string& message) {
  return WithOptionNames({Code::kInvalidArgument, message, "field"}).message;
}

TEST(OptionNames, FieldsInASentenceGetTheNamesOfOptions) {
  EXPECT_EQ(Renamed("max_num_batched_tokens is 5; allowed is at least max_num_seqs, which is 9."),
            "--max-num-batched-tokens is 5; allowed is at least --max-num-seqs, which is 9.");
  EXPECT_EQ(Renamed("the need: cache_tokens (now 3)"), "the need: --cache-tokens (now 3)");
  const Error kept = WithOptionNames({Code::kNotFound, "model_dir", "model_dir"});
  EXPECT_EQ(kept.code, Code::kNotFound);
  EXPECT_EQ(kept.field, "model_dir");
}

TEST(OptionNames, PathsQuotedTextAndLongerNamesStay) {
  for (const char* same : {"", "'cache_tokens' is no file", "/data/max_num_seqs/config.json",
                           "text_config.max_model_len", "max_model_len_x is 3", "--max_num_seqs"}) {
    EXPECT_EQ(Renamed(same), same);
  }
}

// Every sentence of the checks of options begins with an option after the translation.
TEST(OptionNames, EveryFieldThatOptionsSetIsKnown) {
  LLMOptions bad;
  bad.num_threads = bad.max_model_len = -1;
  bad.max_num_seqs = bad.max_num_batched_tokens = bad.max_chunk_tokens = -1;
  bad.replay_keep_tokens = bad.approximate_hit_tokens = bad.cache_tokens = -1;
  std::vector<Error> problems = bad.Validate();
  EXPECT_EQ(problems.size(), 9u);
  SelfcheckOptions check;
  check.num_requests = check.max_prompt_tokens = check.max_output_tokens = -1;
  for (const Error& problem : check.Validate()) problems.push_back(problem);
  EXPECT_EQ(problems.size(), 12u);
  for (const Error& problem : problems) {
    EXPECT_EQ(WithOptionNames(problem).message.rfind("--", 0), 0u) << problem.message;
  }
}

}  // namespace
}  // namespace deepinfer
