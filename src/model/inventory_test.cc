#include "model/inventory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig ConfigFrom(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  Result<ModelConfig> config = ParseModelConfig(text.str());
  EXPECT_TRUE(config) << config.error().message;
  return *config;
}

ModelConfig Released() {
  return ConfigFrom(DI_TEST_DATA_DIR "/configs/released.json");
}

// Counts and sizes of the model description, sections 4.1, 4.2 and 4.4.
TEST(Inventory, ReleasedConfigurationGivesThePublishedTotals) {
  const std::vector<TensorSpec> tensors = ExpectedTensors(Released());
  EXPECT_EQ(tensors.size(), 96085u);
  int64_t bytes = 0;
  std::set<std::string> names;
  int64_t draft_tensors = 0;
  int64_t plain_layer_bytes = 0;
  for (const TensorSpec& tensor : tensors) {
    bytes += StoredBytes(tensor);
    names.insert(tensor.name);
    if (tensor.name.starts_with("mtp.")) ++draft_tensors;
    if (tensor.name.starts_with("layers.0.")) plain_layer_bytes += StoredBytes(tensor);
  }
  EXPECT_EQ(bytes, 510286023000);
  EXPECT_EQ(names.size(), tensors.size());
  EXPECT_EQ(draft_tensors, 2401);
  EXPECT_EQ(plain_layer_bytes, 7389500888);
  const auto sizes = SizesByGroup(tensors);
  EXPECT_EQ(sizes[static_cast<size_t>(TensorGroup::kRoutedExperts)].bytes, 288777830400);
  EXPECT_EQ(sizes[static_cast<size_t>(TensorGroup::kEngramTable)].bytes, 202758032400);
  EXPECT_EQ(sizes[static_cast<size_t>(TensorGroup::kSharedExperts)].bytes, 1416960000);
  EXPECT_EQ(sizes[static_cast<size_t>(TensorGroup::kDraft)].bytes +
                sizes[static_cast<size_t>(TensorGroup::kDraftExperts)].bytes,
            7932874632);
  EXPECT_EQ(sizes[static_cast<size_t>(TensorGroup::kVision)].tensors, 259 + 4 + 3);
}

TEST(Inventory, RecordedCheckpointsMatchExactly) {
  for (const char* name : {"two", "three"}) {
    const std::string dir = std::string(DI_TEST_DATA_DIR "/model/") + name + "/checkpoint";
    const Result<ModelConfig> config = LoadModelConfig(dir);
    ASSERT_TRUE(config) << config.error().message;
    const Result<Checkpoint> checkpoint = Checkpoint::Open(dir);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const Status status = CheckInventory(*checkpoint, *config);
    EXPECT_TRUE(status) << status.error().message;
  }
}

TEST(Inventory, LargerRecordedCheckpointsMatchExactly) {
  if (!std::filesystem::exists(DI_SHARED_DIR "/golden/model"))
    GTEST_SKIP() << "no recordings beside the checkout";
  for (const char* name : {"tiny", "wide-three"}) {
    const std::string dir = std::string(DI_SHARED_DIR "/golden/model/") + name + "/checkpoint";
    const Result<ModelConfig> config = LoadModelConfig(dir);
    ASSERT_TRUE(config) << config.error().message;
    const Result<Checkpoint> checkpoint = Checkpoint::Open(dir);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const Status status = CheckInventory(*checkpoint, *config);
    EXPECT_TRUE(status) << status.error().message;
    // The published shards hold the tensors in the order of the list.
    std::vector<const TensorEntry*> previous(checkpoint->shards().size(), nullptr);
    for (const TensorSpec& spec : ExpectedTensors(*config)) {
      const TensorEntry* entry = checkpoint->Find(spec.name);
      const TensorEntry*& before = previous[static_cast<size_t>(entry->shard)];
      EXPECT_TRUE(before == nullptr || before->file_offset < entry->file_offset) << spec.name;
      before = entry;
    }
  }
}

class InventoryErrorTest : public ::testing::Test {
 protected:
  InventoryErrorTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_inventory_{}", ::getpid())) {
    std::filesystem::create_directories(dir_);
    config_ = ConfigFrom(DI_TEST_DATA_DIR "/model/two/checkpoint/config.json");
  }
  ~InventoryErrorTest() override {
    std::filesystem::remove_all(dir_);
  }
  // Writes one file of zeros with these tensors and compares it with the configuration.
  Status Check(std::vector<StoredTensor> tensors) {
    Result<SafetensorsWriter> writer =
        SafetensorsWriter::Create((dir_ / "model.safetensors").string(), tensors);
    if (!writer) return tl::unexpected<Error>(writer.error());
    DI_RETURN_IF_ERROR(
        writer->Write(std::vector<std::byte>(static_cast<size_t>(writer->data_bytes()))));
    DI_RETURN_IF_ERROR(writer->Finish());
    DI_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir_.string()));
    return CheckInventory(checkpoint, config_);
  }
  std::vector<StoredTensor> Expected() const {
    std::vector<StoredTensor> tensors;
    for (const TensorSpec& spec : ExpectedTensors(config_)) tensors.push_back(spec);
    return tensors;
  }

  std::filesystem::path dir_;
  ModelConfig config_;
};

TEST_F(InventoryErrorTest, MissingUnexpectedAndMisshapenTensorsAreAllNamed) {
  std::vector<StoredTensor> tensors = Expected();
  ASSERT_TRUE(Check(tensors));
  const auto find = [&](const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const StoredTensor& t) { return t.name == name; });
  };
  find("norm.weight")->shape = {128, 2};
  find("layers.0.attn.attn_sink")->dtype = StoredDType::kI32;
  find("mtp.1.ffn.experts.3.w2.weight")->name = "mtp.1.ffn.experts.3.w2.wieght";
  tensors.erase(find("layers.1.attn.indexer.k_norm.weight"));
  const Status status = Check(tensors);
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message,
              AllOf(HasSubstr("2 are missing and 2 have another type or shape; 1 of the"),
                    HasSubstr("norm.weight differs: expected BF16 [256], found BF16 [128, 2] in "
                              "model.safetensors at offset"),
                    HasSubstr("layers.0.attn.attn_sink differs: expected F32 [8], found I32 [8]"),
                    HasSubstr("mtp.1.ffn.experts.3.w2.weight is missing: expected I8 [256, 32]"),
                    HasSubstr("'mtp.1.ffn.experts.3.w2.wieght' is unexpected: found I8 [256, 32]"),
                    HasSubstr("layers.1.attn.indexer.k_norm.weight is missing")));
}

TEST_F(InventoryErrorTest, ShardsOfAnotherModelAreRecognised) {
  const Status status = Check({{"layers.0.self_attn.q_proj.weight", StoredDType::kBf16, {8, 8}}});
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message,
              AllOf(HasSubstr("the shards of another model"), HasSubstr("... and"),
                    HasSubstr("Shard model.safetensors belongs to another model")));
}

}  // namespace
}  // namespace deepinfer
