#include "model/decoder_replay.h"

#include <gtest/gtest.h>

#include <functional>

namespace deepinfer {
namespace {

// Roles as in the released model, in fewer layers; the decoder half begins at 6.
ModelConfig Config() {
  ModelConfig config;
  config.num_hidden_layers = 10;
  config.compress_ratios = {0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0};
  config.kv_source_layer_ids = {2, 4, 6};
  config.index_source_layer_ids = {2, 4, 6, 8};
  config.candidate_source_layer_id = 6;
  config.engram_layer_ids = {1, 4};
  config.dspark_target_layer_ids = {7, 8, 9};
  return config;
}

std::string FieldAfter(const std::function<void(ModelConfig&)>& change) {
  ModelConfig config = Config();
  change(config);
  const Status status = CheckDecoderReplay(config);
  return status.has_value() ? "" : status.error().field;
}

TEST(DecoderReplay, ModelsWhoseDecoderNeedsMoreOfDroppedRowsAreRefused) {
  EXPECT_EQ(FieldAfter([](ModelConfig&) {}), "");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) { c.dspark_target_layer_ids = {1, 2}; }), "");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) { c.candidate_source_layer_id = -1; }), "");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) { c.compress_ratios = {0, 0, 2, 2, 2, 2, 2, 2, 2, 2}; }),
            "text_config.compress_ratios");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) {
              c.engram_layer_ids = {1, 6};
            }),
            "text_config.engram_layer_ids");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) {
              c.kv_source_layer_ids = {2, 4};
            }),
            "text_config.kv_source_layer_ids");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) {
              c.kv_source_layer_ids = {2, 4, 6, 8};
            }),
            "text_config.kv_source_layer_ids");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) {
              c.index_source_layer_ids = {2, 4, 8};
            }),
            "text_config.index_source_layer_ids");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) { c.candidate_source_layer_id = 4; }),
            "text_config.candidate_source_layer_id");
  EXPECT_EQ(FieldAfter([](ModelConfig& c) {
              c.dspark_target_layer_ids = {5, 7};
            }),
            "text_config.dspark_target_layer_ids");
}

}  // namespace
}  // namespace deepinfer
