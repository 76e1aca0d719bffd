#include "apps/bench_layer.h"

#include <gtest/gtest.h>

#include <tuple>
#include <utility>
#include <vector>

namespace deepinfer {
namespace {

TEST(BenchLayerTest, TheTwoSlicesDifferInPlainLayersOnly) {
  const Result<LayerSetup> setup = ResolveLayer({}, 64);
  ASSERT_TRUE(setup.has_value()) << setup.error().message;
  const ModelConfig& smaller = setup->smaller.config;
  const ModelConfig& larger = setup->larger.config;
  EXPECT_EQ(larger.num_hidden_layers - smaller.num_hidden_layers, kPlainLayers);
  EXPECT_EQ(larger.kv_source_layer_ids.size(), smaller.kv_source_layer_ids.size());
  EXPECT_EQ(larger.index_source_layer_ids.size(), smaller.index_source_layer_ids.size());
  EXPECT_EQ(larger.engram_layer_ids.size(), smaller.engram_layer_ids.size());
  const auto without_keys = [](const ModelConfig& config) {
    int64_t layers = 0;
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer)
      layers += config.ratio(layer) == 0;
    return layers;
  };
  EXPECT_EQ(without_keys(larger), without_keys(smaller));
  // Sources cost by their ratio, and selections by whether they see all keys or candidates.
  const auto kinds = [](const ModelConfig& config) {
    std::vector<std::pair<int64_t, bool>> found;
    for (const int64_t layer : config.index_source_layer_ids)
      found.emplace_back(config.ratio(layer), layer > config.candidate_source_layer_id);
    return found;
  };
  EXPECT_EQ(kinds(larger), kinds(smaller));
}

TEST(BenchLayerTest, TheBoundOfALayerIsThePublishedSum) {
  for (const auto& [batch, experts, us] :
       {std::tuple{1, 6, 67.0}, std::tuple{64, 244, 1117.0}, std::tuple{256, 377, 1795.0}}) {
    const Result<LayerSetup> setup = ResolveLayer({}, batch);
    ASSERT_TRUE(setup.has_value());
    const auto times_of = [&](const SliceSetup& slice, double median_s) {
      SliceTimes times;
      times.median_s = median_s;
      times.work = {.sequences = batch,
                    .before = slice.shape.before,
                    .rows = 1,
                    .decoder_rows = 1,
                    .expert_rows = {},
                    .touched_experts = {}};
      const auto layers = static_cast<size_t>(slice.config.num_hidden_layers);
      times.work.expert_rows.assign(layers, batch * 6);
      times.work.touched_experts.assign(layers, experts);
      times.part_visits.fill(slice.config.num_hidden_layers);
      times.part_visits[static_cast<size_t>(StepPart::kHead)] = 1;
      times.part_s.fill(median_s / 10);
      return times;
    };
    const LayerTimes layer =
        DivideByLayers(*setup, times_of(setup->smaller, 0.010), times_of(setup->larger, 0.014), {});
    EXPECT_NEAR(layer.bound_s * 1e6, us, 0.04 * us) << batch;
    EXPECT_NEAR(layer.seconds, 0.001, 1e-12);
    EXPECT_EQ(layer.part_visits[static_cast<size_t>(StepPart::kHead)], 0);
    EXPECT_EQ(layer.part_visits[static_cast<size_t>(StepPart::kExperts)], 1);
    EXPECT_NEAR(layer.part_s[static_cast<size_t>(StepPart::kExperts)], 0.0001, 1e-12);
    EXPECT_EQ(layer.touched_experts, experts);
    // What only special layers do is not part of the difference.
    EXPECT_NEAR(layer.costs[static_cast<size_t>(StepPart::kIndexer)].bytes, 0, 1);
    EXPECT_NEAR(layer.costs[static_cast<size_t>(StepPart::kCompressor)].bytes, 0, 1);
  }
}

TEST(BenchLayerTest, OptionsThatCannotBeAreRefused) {
  const Result<LayerSetup> setup = ResolveLayer({}, 5000);
  ASSERT_FALSE(setup.has_value());
  EXPECT_EQ(setup.error().message, "--batch is 5000; allowed are 1 to 4096.");
}

}  // namespace
}  // namespace deepinfer
