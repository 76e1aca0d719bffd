// The larger of the tests of jobs: many kills and many lines.
#include <fstream>
#include <string>
#include <vector>

#include "support/job_test.h"

namespace {

using nlohmann::json;

using GenerateJobTest = deepinfer::testing_support::JobTest;

TEST_F(GenerateJobTest, FiftyKillsOfTwoThousandLinesChangeNothing) {
  KillAndResume(2000, 50, 2);
}

TEST_F(GenerateJobTest, AHundredThousandLinesTakeBoundedMemory) {
  const auto peak = [&](int lines, const std::string& out) {
    std::ofstream input(Path("in.jsonl"));
    for (int i = 0; i < lines; ++i) {
      // One in twenty runs.
      input << R"({"id": "a-rather-long-identifier-of-a-line-)" << i
            << R"(", "sampling_params": {"max_tokens": 1}, )"
            << (i % 20 == 0 ? R"("prompt_token_ids": [1])" : R"("prompt": 5)") << "}\n";
    }
    input.close();
    const Ended ended = RunJob({"--no-progress"}, out);
    EXPECT_EQ(ended.status, 3) << Log();
    EXPECT_EQ(CountLines(Read(Path(out))), static_cast<size_t>(lines));
    return ended.peak_bytes;
  };
  const int64_t small = peak(2'000, "small");
  const int64_t large = peak(100'000, "large");
  RecordProperty("bytes_per_line", static_cast<int>((large - small) / 98'000));
  // The index and the ids: at most 128 bytes a line.
  EXPECT_LT(large - small, int64_t{16} << 20) << small << " " << large;
  const std::vector<json> outputs = ReadLines(Path("large"));
  for (size_t i = 0; i < outputs.size(); i += 997)
    EXPECT_EQ(outputs[i]["id"], "a-rather-long-identifier-of-a-line-" + std::to_string(i));
}

}  // namespace
