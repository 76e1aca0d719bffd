// The released model at full size, 96,085 tensors and 510 GB, as sparse files: right headers, right
// sizes, no data. Everything that a user can get wrong with it has its own sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "apps/inspect.h"
#include "model/inventory.h"
#include "weights/checkpoint.h"

namespace deepinfer {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string ReadText(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

void WriteText(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Resident set now, in MB. Pages of the mapped files count as well.
double ResidentMegabytes() {
  int64_t total = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / 1e6;
}

std::string ShardName(size_t shard) {
  return fmt::format("model-{:05}-of-00048.safetensors", shard + 1);
}

// Written once for all tests of the suite; a test that damages the directory restores it.
class FullSizeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = fs::temp_directory_path() / fmt::format("deepinfer_full_{}", ::getpid());
    fs::create_directories(dir_);
    const std::string config_json = ReadText(DI_TEST_DATA_DIR "/configs/released.json");
    const Result<ModelConfig> config = ParseModelConfig(config_json);
    ASSERT_TRUE(config) << config.error().message;
    std::vector<std::vector<StoredTensor>> shards(NumPublishedShards(*config));
    ASSERT_EQ(shards.size(), 48u);
    std::string index = "{\"metadata\": {\"total_size\": 510286023000}, \"weight_map\": {";
    const char* separator = "";
    for (TensorSpec& tensor : ExpectedTensors(*config)) {
      const size_t shard = PublishedShard(tensor, *config);
      index += fmt::format("{}\n  \"{}\": \"{}\"", separator, tensor.name, ShardName(shard));
      separator = ",";
      shards[shard].push_back(std::move(tensor));
    }
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      if (!WriteSparse(ShardName(shard), shards[shard])) {
        skip_ = fmt::format("this file system cannot hold a sparse file of the size of {}",
                            ShardName(shard));
        return;
      }
    }
    WriteText(dir_ / "model.safetensors.index.json", index + "}}\n");
    WriteText(dir_ / "config.json", config_json);
  }
  static void TearDownTestSuite() {
    fs::remove_all(dir_);
  }
  void SetUp() override {
    if (!skip_.empty()) GTEST_SKIP() << skip_;
  }

  static bool WriteSparse(const std::string& name, const std::vector<StoredTensor>& tensors) {
    const Result<std::string> header = BuildSafetensorsHeader(tensors);
    EXPECT_TRUE(header);
    int64_t size = static_cast<int64_t>(header->size());
    for (const StoredTensor& tensor : tensors) size += StoredBytes(tensor);
    WriteText(dir_ / name, *header);
    std::error_code error;
    fs::resize_file(dir_ / name, static_cast<uintmax_t>(size), error);
    return !error;
  }

  // The error of opening and comparing the directory as it is now.
  static std::string Error() {
    const Result<InspectReport> report = InspectCheckpoint(dir_.string());
    return report ? "no error" : report.error().message;
  }

  static fs::path dir_;
  static std::string skip_;
};

fs::path FullSizeTest::dir_;
std::string FullSizeTest::skip_;

TEST_F(FullSizeTest, OpensChecksAndReportsWithinSecondsAndLittleMemory) {
  const double before = ResidentMegabytes();
  const auto start = std::chrono::steady_clock::now();
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
  const double open_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const double megabytes = ResidentMegabytes() - before;
  EXPECT_EQ(checkpoint->tensors().size(), 96085u);
  EXPECT_EQ(checkpoint->total_bytes(), 510286023000);

  const Result<InspectReport> report = InspectCheckpoint(dir_.string());
  const double all_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(report) << report.error().message;
  std::printf("open %.2f s, open and inspect %.2f s, %.0f MB resident\n", open_seconds, all_seconds,
              megabytes);
  // Generous for loaded machines; about 0.2 s on an idle one. A scan of the data would take
  // minutes.
  EXPECT_LT(open_seconds, 10);
  EXPECT_LT(megabytes, 400);

  // Model description, section 16 and 4.4.
  EXPECT_EQ(report->kv_bytes_per_token, 890);
  EXPECT_EQ(report->window_bytes, 2703360 + 202752);
  EXPECT_EQ(report->compressor_bytes, 3 * 4096);
  EXPECT_EQ(report->ranks[0].weight_bytes, 510286023000);
  EXPECT_THAT(ReportText(*report),
              AllOf(HasSubstr("96085 in 48 shards, 510286023000 bytes (510 GB)"),
                    HasSubstr("890 B"), HasSubstr("0-1 window, 2 full/2, 3-7 reuse/2, 8 full/2")));
}

TEST_F(FullSizeTest, ATruncatedShardIsNamedWithBothSizes) {
  const fs::path shard = dir_ / ShardName(7);
  const auto size = fs::file_size(shard);
  fs::resize_file(shard, size - 4096);
  EXPECT_THAT(Error(),
              AllOf(HasSubstr("1 problem"),
                    HasSubstr("Shard model-00008-of-00048.safetensors: The file is truncated"),
                    HasSubstr(fmt::format("the file has only {} bytes", size - 4096)),
                    HasSubstr("(4096 bytes are missing)")));
  fs::resize_file(shard, size);
  EXPECT_EQ(Error(), "no error");
}

TEST_F(FullSizeTest, MissingShardsAreCounted) {
  fs::rename(dir_ / ShardName(46), dir_ / "away");
  fs::rename(dir_ / ShardName(2), dir_ / "away2");
  EXPECT_THAT(
      Error(),
      AllOf(
          HasSubstr("2 problems"),
          HasSubstr(
              "Shard model-00047-of-00048.safetensors is missing; the index places 6 tensors"),
          HasSubstr(
              "Shard model-00003-of-00048.safetensors is missing; the index places 2334 tensors")));
  fs::rename(dir_ / "away", dir_ / ShardName(46));
  fs::rename(dir_ / "away2", dir_ / ShardName(2));
}

TEST_F(FullSizeTest, AShardOfAnotherModelIsRecognised) {
  const fs::path shard = dir_ / ShardName(5);
  fs::rename(shard, dir_ / "away");
  ASSERT_TRUE(WriteSparse(
      ShardName(5), {{"layers.3.self_attn.q_proj.weight", StoredDType::kBf16, {4096, 4096}}}));
  EXPECT_THAT(
      Error(),
      AllOf(
          HasSubstr("1 problem"),
          HasSubstr("Shard model-00006-of-00048.safetensors does not belong to this checkpoint: it "
                    "holds none of the 2334 tensors that the index places in it, but 1 others")));
  fs::remove(shard);
  fs::rename(dir_ / "away", shard);
}

TEST_F(FullSizeTest, ATensorStoredTwiceIsNamedWithBothShards) {
  const fs::path shard = dir_ / ShardName(42);
  fs::rename(shard, dir_ / "away");
  ASSERT_TRUE(WriteSparse(ShardName(42), {{"head.weight", StoredDType::kBf16, {129280, 5120}},
                                          {"norm.weight", StoredDType::kBf16, {5120}},
                                          {"embed.weight", StoredDType::kBf16, {129280, 5120}}}));
  EXPECT_THAT(
      Error(),
      AllOf(HasSubstr("1 problem"),
            HasSubstr("Tensor 'embed.weight' is stored twice, in model-00001-of-00048.safetensors "
                      "and in model-00043-of-00048.safetensors")));
  fs::remove(shard);
  fs::rename(dir_ / "away", shard);
}

TEST_F(FullSizeTest, AConfigurationOfV4IsExplainedBeforeAnyShardIsRead) {
  const std::string config = ReadText(dir_ / "config.json");
  WriteText(
      dir_ / "config.json",
      R"({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096})");
  EXPECT_THAT(Error(), HasSubstr("This is a DeepSeek-V4 checkpoint"));
  WriteText(dir_ / "config.json", config);
}

TEST_F(FullSizeTest, AConfigurationOfOtherWidthsListsTheDifferences) {
  const std::string config = ReadText(dir_ / "config.json");
  std::string other = config;
  const std::string from = "\"moe_intermediate_size\": 2304";
  other.replace(other.find(from), from.size(), "\"moe_intermediate_size\": 2048");
  WriteText(dir_ / "config.json", other);
  EXPECT_THAT(
      Error(),
      AllOf(
          HasSubstr("of 96085 expected tensors 0 are missing and 94722 have another type or shape"),
          HasSubstr("expected F8_E8M0 [64, 160], found F8_E8M0 [72, 160] in "
                    "model-00003-of-00048.safetensors at offset"),
          HasSubstr("more different")));
  WriteText(dir_ / "config.json", config);
}

}  // namespace
}  // namespace deepinfer
