#include "model/random_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "model/config.h"
#include "model/engram_token_map.h"
#include "model/inventory.h"
#include "model/random_values.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RandomCheckpointTest : public ::testing::Test {
 protected:
  RandomCheckpointTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_random_{}", ::getpid())) {
    std::filesystem::create_directories(dir_);
  }
  ~RandomCheckpointTest() override {
    std::filesystem::remove_all(dir_);
  }
  std::string WriteTiny(const std::string& name, uint64_t seed, int threads) {
    RandomCheckpointOptions options;
    options.dir = (dir_ / name).string();
    options.config_json = *TinyConfigJson();
    options.seed = seed;
    options.num_threads = threads;
    const Status status = WriteRandomCheckpoint(options);
    EXPECT_TRUE(status) << status.error().message;
    return options.dir;
  }
  std::filesystem::path dir_;
};

// FNV-1a over names and bytes.
uint64_t Fingerprint(const Checkpoint& checkpoint) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    for (const char c : tensor.name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    for (const std::byte b : tensor.bytes)
      hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3u;
  }
  return hash;
}

TEST_F(RandomCheckpointTest, TinyIsACompleteCheckpointInThePublishedLayout) {
  const std::string dir = WriteTiny("a", 1, 2);
  const Result<ModelConfig> config = LoadModelConfig(dir);
  ASSERT_TRUE(config) << config.error().message;
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Status status = CheckInventory(*checkpoint, *config);
  EXPECT_TRUE(status) << status.error().message;
  EXPECT_EQ(checkpoint->shards().size(), 18u);
  const auto shard_of = [&](const char* name) {
    return checkpoint->shards()[static_cast<size_t>(checkpoint->Find(name)->shard)].name;
  };
  EXPECT_EQ(shard_of("layers.9.attn_norm.weight"), "model-00012-of-00018.safetensors");
  EXPECT_EQ(shard_of("mtp.0.main_norm.weight"), "model-00014-of-00018.safetensors");
  EXPECT_EQ(shard_of("layers.4.engram.embed.weight"), "model-00018-of-00018.safetensors");
  const Result<std::vector<int32_t>> map = LoadEngramTokenMap(*config, dir + "/tokenizer.json");
  EXPECT_TRUE(map) << map.error().message;
}

TEST_F(RandomCheckpointTest, TheSeedAloneDeterminesEveryByte) {
  const Result<Checkpoint> one = Checkpoint::Open(WriteTiny("one", 7, 1));
  const Result<Checkpoint> two = Checkpoint::Open(WriteTiny("two", 7, 2));
  const Result<Checkpoint> other = Checkpoint::Open(WriteTiny("other", 8, 2));
  ASSERT_TRUE(one && two && other);
  EXPECT_EQ(Fingerprint(*one), Fingerprint(*two));
  EXPECT_NE(Fingerprint(*one), Fingerprint(*other));
  // Recorded on x86-64; the same on every machine.
  EXPECT_EQ(Fingerprint(*one), 5476185859491231684u);
}

TEST_F(RandomCheckpointTest, ValuesAreFiniteAndScalesVary) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(WriteTiny("a", 3, 2));
  ASSERT_TRUE(checkpoint);
  for (const TensorEntry& tensor : checkpoint->tensors()) {
    std::set<std::byte> distinct(tensor.bytes.begin(), tensor.bytes.end());
    EXPECT_GT(distinct.size(), 1u) << tensor.name;
    for (const std::byte code : distinct) {
      if (tensor.dtype == StoredDType::kF8E4M3) {
        EXPECT_NE(static_cast<uint8_t>(code) & 0x7f, 0x7f) << tensor.name;
      }
      if (tensor.dtype == StoredDType::kF8E8M0) {
        EXPECT_NE(static_cast<uint8_t>(code), 255) << tensor.name;
      }
    }
    if (tensor.dtype == StoredDType::kF8E8M0) {
      EXPECT_LE(distinct.size(), 3u) << tensor.name;
    }
  }
}

// Standard deviation of gain / sqrt(inputs), times sqrt(1.75) for the block factors 1/2, 1 and 2.
TEST_F(RandomCheckpointTest, QuantisedMatricesHaveTheIntendedDeviation) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(WriteTiny("a", 3, 2));
  ASSERT_TRUE(checkpoint);
  const TensorEntry* weight = checkpoint->Find("layers.0.attn.wq_b.weight");
  const TensorEntry* scale = checkpoint->Find("layers.0.attn.wq_b.scale");
  double sum = 0;
  for (int64_t row = 0; row < 512; ++row) {
    for (int64_t column = 0; column < 64; ++column) {
      const auto code = static_cast<uint8_t>(weight->bytes[static_cast<size_t>(row * 64 + column)]);
      const auto exponent =
          static_cast<uint8_t>(scale->bytes[static_cast<size_t>(row / 32 * 2 + column / 32)]);
      const double value =
          static_cast<double>(E4M3ToF32(code)) * static_cast<double>(E8M0ToF32(exponent));
      sum += value * value;
    }
  }
  EXPECT_NEAR(std::sqrt(sum / (512 * 64)), std::sqrt(1.75 / 64), 0.03);
  const TensorEntry* experts = checkpoint->Find("layers.0.ffn.experts.0.w1.weight");
  const TensorEntry* expert_scale = checkpoint->Find("layers.0.ffn.experts.0.w1.scale");
  sum = 0;
  for (size_t i = 0; i < experts->bytes.size(); ++i) {
    const auto pair = static_cast<uint8_t>(experts->bytes[i]);
    const double s =
        static_cast<double>(E8M0ToF32(static_cast<uint8_t>(expert_scale->bytes[i / 16])));
    for (const uint8_t code : {static_cast<uint8_t>(pair & 15), static_cast<uint8_t>(pair >> 4)}) {
      const double value = static_cast<double>(E2M1ToF32(code)) * s;
      sum += value * value;
    }
  }
  EXPECT_NEAR(std::sqrt(sum / (2.0 * static_cast<double>(experts->bytes.size()))),
              std::sqrt(1.75 / 256), 0.008);
}

TEST_F(RandomCheckpointTest, ADirectoryWithContentIsLeftAlone) {
  const std::string dir = WriteTiny("a", 1, 1);
  RandomCheckpointOptions options;
  options.dir = dir;
  options.config_json = *TinyConfigJson();
  EXPECT_THAT(WriteRandomCheckpoint(options).error().message,
              AllOf(HasSubstr("is not empty, it holds 'config.json'"), HasSubstr("delete them")));
}

TEST_F(RandomCheckpointTest, UnfinishedShardsOfAnInterruptedRunDoNotStopTheNextOne) {
  const std::string dir = (dir_ / "interrupted").string();
  std::filesystem::create_directories(dir);
  const std::string leftover = dir + "/model-00002-of-00018.safetensors.partial";
  const std::string foreign = dir + "/notes.partial";
  std::ofstream(leftover) << "half a shard";
  std::ofstream(foreign) << "somebody's";
  RandomCheckpointOptions options;
  options.dir = dir;
  options.config_json = *TinyConfigJson();
  EXPECT_THAT(WriteRandomCheckpoint(options).error().message, HasSubstr("holds 'notes.partial'"));
  EXPECT_TRUE(std::filesystem::exists(leftover));
  std::filesystem::remove(foreign);
  const Status written = WriteRandomCheckpoint(options);
  ASSERT_TRUE(written) << written.error().message;
  EXPECT_FALSE(std::filesystem::exists(leftover));
}

TEST(SliceConfig, FortyLayersGiveTheReleasedSchedule) {
  SliceOptions options;
  options.layers = 40;
  options.experts = 384;
  options.engram_rows = 384000000;
  options.draft_layers = 3;
  options.draft_experts = 128;
  const Result<std::string> json = SliceConfigJson(options);
  ASSERT_TRUE(json) << json.error().message;
  const Result<ModelConfig> slice = ParseModelConfig(*json);
  ASSERT_TRUE(slice);
  EXPECT_THAT(slice->kv_source_layer_ids, ElementsAre(2, 8, 14, 20));
  EXPECT_THAT(slice->index_source_layer_ids, ElementsAre(2, 8, 14, 20, 24, 28, 32, 36));
  EXPECT_THAT(slice->engram_layer_ids, ElementsAre(1, 14));
  EXPECT_THAT(slice->engram_num_embeddings, ElementsAre(384006168, 384016682));
  EXPECT_THAT(slice->dspark_target_layer_ids, ElementsAre(37, 38, 39));
  EXPECT_EQ(slice->decoder_start(), 20);
}

TEST(SliceConfig, EveryNumberOfLayersIsAValidModel) {
  for (int64_t layers = 1; layers <= 40; ++layers) {
    for (const int64_t draft_layers : {0, 3}) {
      SliceOptions options;
      options.layers = layers;
      options.vocab = 512;
      options.draft_layers = draft_layers;
      const Result<std::string> json = SliceConfigJson(options);
      ASSERT_TRUE(json) << layers << ": " << json.error().message;
    }
  }
  SliceOptions options;
  options.vocab = 512;
  const Result<ModelConfig> four = ParseModelConfig(*SliceConfigJson(options));
  using enum LayerRole;
  const LayerRole roles[] = {kWindowOnly, kFull, kFull, kReindex};
  for (int64_t layer = 0; layer < 4; ++layer) EXPECT_EQ(four->role(layer), roles[layer]) << layer;
  EXPECT_THAT(four->engram_layer_ids, ElementsAre(1));
  options.layers = 41;
  EXPECT_THAT(SliceConfigJson(options).error().message,
              HasSubstr("layers is 41; allowed are 1 to 40"));
}

TEST(NormalQuantiles, FollowTheNormalDistribution) {
  const std::span<const float, 65536> table = NormalQuantiles();
  double square = 0;
  for (size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(table[i], -table[65535 - i]);
    square += static_cast<double>(table[i]) * static_cast<double>(table[i]);
    const double p = 0.5 * std::erfc(-static_cast<double>(table[i]) / std::sqrt(2.0));
    ASSERT_NEAR(p, (static_cast<double>(i) + 0.5) / 65536, 1e-6) << i;
  }
  EXPECT_NEAR(square / 65536, 1, 1e-3);
}

}  // namespace
}  // namespace deepinfer
