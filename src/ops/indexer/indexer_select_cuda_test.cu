// The selection kernel on scores made for it: orders that its groups, lists and histograms do not
// like.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "ops/cuda/cuda_test_util.h"
#include "ops/indexer/indexer_cuda.cuh"

namespace deepinfer {
namespace {

using testing::DeviceTensor;
using testing::OwnedTensor;

class SelectionCuda : public testing::CudaTest {
 protected:
  // One row of n scores: the k best entries and the best `blocks` blocks of eight, against the
  // functions for the host.
  void ExpectBest(const char* what, int64_t n, int64_t k, int64_t blocks,
                  const std::function<float(int64_t)>& score) {
    SCOPED_TRACE(::testing::Message() << what << ": " << k << " of " << n);
    const int64_t stride = (n + 127) / 128 * 128;
    OwnedTensor scores(DType::kF32, {1, stride});
    OwnedTensor maxima(DType::kF32, {1, stride / cuda::kScoreBlock});
    for (int64_t i = 0; i < n; ++i) scores.Row<float>(0)[i] = score(i);
    for (int64_t b = 0; b < stride / cuda::kScoreBlock; ++b) {
      float largest = -std::numeric_limits<float>::infinity();
      for (int64_t i = 8 * b; i < std::min(n, 8 * b + 8); ++i)
        largest = std::fmax(largest, scores.Row<float>(0)[i]);
      maxima.Row<float>(0)[b] = largest;
    }
    OwnedTensor position(DType::kI32, {1});
    position.Row<int32_t>(0)[0] = static_cast<int32_t>(n - 1);
    const DeviceTensor d_scores(scores.view(), stream());
    const DeviceTensor d_maxima(maxima.view(), stream());
    const DeviceTensor d_position(position.view(), stream());
    const DeviceTensor selected(DType::kI32, {1, k}, stream());
    const DeviceTensor candidates(DType::kI32, {1, blocks}, stream());
    cuda::IndexerProblem problem = {};
    problem.positions = d_position.view().Row<int32_t>(0);
    problem.candidates_out = candidates.view().Row<int32_t>(0);
    problem.num_candidates_out = static_cast<int>(blocks);
    problem.candidate_block_size = cuda::kScoreBlock;
    problem.selected = selected.view().Row<int32_t>(0);
    problem.topk = static_cast<int>(k);
    problem.ratio = 1;
    problem.entries_per_block = 128;
    problem.max_blocks = static_cast<int>(stride / 128);
    problem.row_end = 1;
    problem.score_stride = static_cast<int>(stride);
    problem.scores = d_scores.view().Row<float>(0);
    problem.maxima = d_maxima.view().Row<float>(0);
    problem.candidate_maxima = problem.maxima;
    problem.candidate_maxima_stride = static_cast<int>(stride / cuda::kScoreBlock);
    ASSERT_TRUE(cuda::SelectionSupported(problem));
    const Status status = cuda::LaunchSelection(problem, stream());
    ASSERT_TRUE(status.has_value()) << status.error().message;

    const std::span<const float> row(scores.Row<float>(0), static_cast<size_t>(n));
    std::vector<int32_t> best(static_cast<size_t>(k));
    std::vector<int32_t> best_blocks(static_cast<size_t>(blocks));
    SelectTopK(row, best);
    SelectCandidateBlocks(row, cuda::kScoreBlock, best_blocks);
    const OwnedTensor chosen = selected.Download(stream());
    const OwnedTensor chosen_blocks = candidates.Download(stream());
    EXPECT_TRUE(std::equal(best.begin(), best.end(), chosen.Row<int32_t>(0)));
    EXPECT_TRUE(std::equal(best_blocks.begin(), best_blocks.end(), chosen_blocks.Row<int32_t>(0)));
  }
};

TEST_F(SelectionCuda, OrdersThatDefeatGroupsAndLists) {
  if (IsSkipped()) return;
  testing::Random random(1);
  std::vector<float> noise(200000);
  for (float& x : noise) x = static_cast<float>(random.Below(1 << 20)) * 0x1p-20f - 0.5f;
  const auto at = [&](int64_t i) { return noise[static_cast<size_t>(i)]; };
  // Blocks of scores: fewer than one per group, more, and more than lists hold.
  for (int64_t n : {3000, 9001, 40000, 70003, 140001}) {
    ExpectBest("noise", n, 512, 2048, at);
    ExpectBest("all equal", n, 512, 300, [](int64_t) { return 1.5f; });
    ExpectBest("ascending", n, 512, 300, [](int64_t i) { return static_cast<float>(i); });
    ExpectBest("descending", n, 512, 300, [](int64_t i) { return -static_cast<float>(i); });
    ExpectBest("two values", n, 512, 300,
               [&](int64_t i) { return i % 3 == 0 ? 1.0f : 1.0f + 0x1p-23f; });
    ExpectBest("large values in few groups", n, 512, 300,
               [&](int64_t i) { return at(i) + (i / 8 % 4096 < 64 ? 8.0f : 0.0f); });
    ExpectBest("the newest are best", n, 512, 300,
               [&](int64_t i) { return at(i) + (i > n - 2000 ? 8.0f : 0.0f); });
    ExpectBest("one finite value", n, 512, 300,
               [](int64_t i) { return i == 77 ? 0.0f : -std::numeric_limits<float>::infinity(); });
    ExpectBest("NaN and both infinities", n, 512, 300, [&](int64_t i) {
      if (i % 7 == 0) return std::numeric_limits<float>::quiet_NaN();
      if (i % 11 == 0) return -std::numeric_limits<float>::infinity();
      return i % 1001 == 0 ? std::numeric_limits<float>::infinity() : at(i);
    });
    ExpectBest("zeros of both signs", n, 512, 300,
               [&](int64_t i) { return i % 2 == 0 ? 0.0f : -0.0f; });
    ExpectBest("an outlier far below", n, 512, 300,
               [&](int64_t i) { return i == 5 ? -1e30f : 1000.0f + at(i) * 0x1p-6f; });
  }
}

TEST_F(SelectionCuda, SmallAndLargeChoices) {
  if (IsSkipped()) return;
  testing::Random random(2);
  std::vector<float> noise(40000);
  for (float& x : noise) x = static_cast<float>(random.Below(5000));
  const auto at = [&](int64_t i) { return noise[static_cast<size_t>(i)]; };
  for (int64_t k : {1, 7, 511, 513, 1024, 2048, 4096})
    for (int64_t n : {k + 1, 8 * k - 3, int64_t{32771}}) ExpectBest("noise", n, k, 17, at);
}

}  // namespace
}  // namespace deepinfer
