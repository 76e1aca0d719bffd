#include "weights/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void WriteText(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A directory of two shards: a.safetensors with x and y, b.safetensors with z.
class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_checkpoint_{}", ::getpid())) {
    std::filesystem::create_directories(dir_);
    WriteShard("a.safetensors", {{"x", StoredDType::kBf16, {2, 4}}, {"y", StoredDType::kF32, {3}}});
    WriteShard("b.safetensors", {{"z", StoredDType::kI8, {8}}});
    WriteIndex(R"("x":"a.safetensors","y":"a.safetensors","z":"b.safetensors")", 36);
  }
  ~CheckpointTest() override {
    std::filesystem::remove_all(dir_);
  }

  // Byte i of the data section of a shard is i.
  void WriteShard(const std::string& name, const std::vector<StoredTensor>& tensors) {
    Result<SafetensorsWriter> writer = SafetensorsWriter::Create((dir_ / name).string(), tensors);
    ASSERT_TRUE(writer) << writer.error().message;
    std::vector<std::byte> bytes(static_cast<size_t>(writer->data_bytes()));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
    ASSERT_TRUE(writer->Write(bytes));
    ASSERT_TRUE(writer->Finish());
  }
  void WriteIndex(const std::string& map, int64_t total) {
    WriteText(
        dir_ / "model.safetensors.index.json",
        fmt::format("{{\"metadata\":{{\"total_size\":{}}},\"weight_map\":{{{}}}}}", total, map));
  }
  std::string Error() const {
    const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
    return checkpoint ? "no error" : checkpoint.error().message;
  }

  std::filesystem::path dir_;
};

TEST_F(CheckpointTest, FindsEveryTensorWithItsBytes) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->tensors().size(), 3u);
  EXPECT_EQ(checkpoint->total_bytes(), 36);
  EXPECT_EQ(checkpoint->Find("w"), nullptr);
  const TensorEntry* y = checkpoint->Find("y");
  ASSERT_NE(y, nullptr);
  EXPECT_EQ(y->bytes.size(), 12u);
  EXPECT_EQ(static_cast<int>(y->bytes[0]), 16);
  EXPECT_EQ(checkpoint->shards()[static_cast<size_t>(y->shard)].name, "a.safetensors");
  const Result<TensorView> x = checkpoint->Find("x")->View();
  ASSERT_TRUE(x);
  EXPECT_EQ(x->dtype(), DType::kBf16);
  EXPECT_EQ(x->dim(1), 4);
  EXPECT_EQ(checkpoint->Find("z")->View()->dtype(), DType::kFp4x2);
}

TEST_F(CheckpointTest, OneLeadingModelPrefixIsStripped) {
  WriteShard("b.safetensors", {{"model.z", StoredDType::kI8, {8}}});
  WriteIndex(R"("model.x":"a.safetensors","y":"a.safetensors","model.z":"b.safetensors")", 36);
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_NE(checkpoint->Find("z"), nullptr);
}

TEST_F(CheckpointTest, ASingleFileNeedsNoIndex) {
  std::filesystem::remove(dir_ / "model.safetensors.index.json");
  EXPECT_THAT(Error(), HasSubstr("neither model.safetensors.index.json nor model.safetensors"));
  std::filesystem::rename(dir_ / "a.safetensors", dir_ / "model.safetensors");
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  EXPECT_EQ(checkpoint->tensors().size(), 2u);
}

TEST_F(CheckpointTest, AMissingShardAndATruncatedOneAreBothReported) {
  std::filesystem::remove(dir_ / "b.safetensors");
  const auto size = std::filesystem::file_size(dir_ / "a.safetensors");
  std::filesystem::resize_file(dir_ / "a.safetensors", size - 5);
  EXPECT_THAT(
      Error(),
      AllOf(HasSubstr("2 problems"),
            HasSubstr("Shard b.safetensors is missing; the index places 1 tensors"),
            HasSubstr("Shard a.safetensors: The file is truncated: its header describes 28 bytes"),
            HasSubstr(fmt::format("has only {} bytes", size - 5))));
}

TEST_F(CheckpointTest, IndexAndShardsMustAgree) {
  WriteIndex(R"("x":"a.safetensors","y":"b.safetensors","z":"b.safetensors","w":"a.safetensors")",
             36);
  EXPECT_THAT(
      Error(),
      AllOf(
          HasSubstr("2 problems"),
          HasSubstr("places tensor 'y' in shard b.safetensors, but it is stored in a.safetensors"),
          HasSubstr("places tensor 'w' in shard a.safetensors, which does not hold it")));
  WriteIndex(R"("x":"a.safetensors","z":"b.safetensors")", 36);
  EXPECT_THAT(
      Error(),
      HasSubstr(
          "Tensor 'y' (F32 [3]) is stored in shard a.safetensors but missing from the index"));
  WriteIndex(R"("x":"a.safetensors","y":"a.safetensors","z":"b.safetensors")", 35);
  EXPECT_THAT(Error(), HasSubstr("total_size of the index is 35 bytes, but the shards hold 36"));
}

TEST_F(CheckpointTest, ATensorInTwoShardsIsReported) {
  WriteShard("b.safetensors", {{"z", StoredDType::kI8, {8}}, {"x", StoredDType::kI8, {8}}});
  EXPECT_THAT(Error(),
              HasSubstr("Tensor 'x' is stored twice, in a.safetensors and in b.safetensors"));
  WriteShard("b.safetensors", {{"z", StoredDType::kI8, {8}}, {"model.z", StoredDType::kI8, {8}}});
  EXPECT_THAT(Error(), HasSubstr("Tensor 'z' is stored twice"));
}

TEST_F(CheckpointTest, ManyProblemsAreCountedAndCut) {
  std::string map = R"("x":"a.safetensors","y":"a.safetensors","z":"b.safetensors")";
  for (int i = 0; i < 100; ++i) map += fmt::format(",\"t{}\":\"a.safetensors\"", i);
  WriteIndex(map, 36);
  EXPECT_THAT(Error(), AllOf(HasSubstr("100 problems"), HasSubstr("... and 60 more")));
}

TEST_F(CheckpointTest, AMissingDirectoryIsExplained) {
  EXPECT_THAT(Checkpoint::Open("/no/such/dir").error().message, HasSubstr("does not exist"));
}

TEST(CheckpointIndex, MalformedIndexesAreRefused) {
  const auto error = [](std::string_view json) {
    const Result<CheckpointIndex> index = ParseCheckpointIndex(json);
    return index ? std::string("no error") : index.error().message;
  };
  EXPECT_THAT(error("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error("[]"), HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(error(R"({"weight_map":[]})"), HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(error(R"({"weight_map":{"a":1}})"), HasSubstr("tensor 'a' in '1'"));
  EXPECT_THAT(error(R"({"weight_map":{"a":""}})"), HasSubstr("tensor 'a'"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"../b.safetensors"}})"),
              HasSubstr("a file in the same directory"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"/etc/b.safetensors"}})"),
              HasSubstr("a file in the same directory"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"b.bin"}})"), HasSubstr("a file in the same directory"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"b.safetensors","a":"c.safetensors"}})"),
              HasSubstr("twice"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"b.safetensors","model.a":"c.safetensors"}})"),
              HasSubstr("twice"));
  EXPECT_THAT(error(R"({"weight_map":{},"metadata":{"total_size":-1}})"), HasSubstr("total_size"));
  EXPECT_THAT(error(R"({"weight_map":{},"metadata":{"total_size":"9"}})"), HasSubstr("total_size"));
  EXPECT_EQ(*ParseCheckpointIndex(R"({"weight_map":{},"metadata":{"total_size":9.0}})")->total_size,
            9);
  EXPECT_FALSE(ParseCheckpointIndex(R"({"weight_map":{}})")->total_size.has_value());
}

TEST_F(CheckpointTest, AShardThatIsNotAFileIsCalledByItsKind) {
  std::filesystem::remove(dir_ / "a.safetensors");
  std::filesystem::create_directories(dir_ / "a.safetensors");
  std::filesystem::remove(dir_ / "b.safetensors");
  ASSERT_EQ(::mkfifo((dir_ / "b.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(Error(), AllOf(HasSubstr("Shard a.safetensors cannot be read"),
                             HasSubstr("not a regular file, it is a directory"),
                             HasSubstr("not a regular file, it is a FIFO"),
                             ::testing::Not(HasSubstr("missing"))));
}

TEST_F(CheckpointTest, AnIndexThatIsAFifoIsAnErrorAndNotAnEndlessWait) {
  std::filesystem::remove(dir_ / "model.safetensors.index.json");
  ASSERT_EQ(::mkfifo((dir_ / "model.safetensors.index.json").c_str(), 0600), 0);
  EXPECT_THAT(Error(), HasSubstr("not a regular file, it is a FIFO"));
}

TEST_F(CheckpointTest, WhatCannotBeReachedIsNotCalledMissing) {
  const auto loop = [&](const char* name) {
    std::filesystem::remove(dir_ / name);
    std::filesystem::create_symlink(name, dir_ / name);
  };
  loop("a.safetensors");
  EXPECT_THAT(Error(), AllOf(HasSubstr("Shard a.safetensors cannot be read"),
                             HasSubstr("symbolic links"), ::testing::Not(HasSubstr("missing"))));
  loop("model.safetensors.index.json");
  EXPECT_THAT(Error(), HasSubstr("Too many levels of symbolic links"));
  std::filesystem::remove(dir_ / "model.safetensors.index.json");
  loop("model.safetensors");
  EXPECT_THAT(Error(), HasSubstr("Too many levels of symbolic links"));
  loop("directory");
  const Result<Checkpoint> checkpoint = Checkpoint::Open((dir_ / "directory").string());
  ASSERT_FALSE(checkpoint);
  EXPECT_THAT(checkpoint.error().message, HasSubstr("Too many levels of symbolic links"));
}

TEST_F(CheckpointTest, TensorsStayReadableAfterTheirPagesAreDropped) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir_.string());
  ASSERT_TRUE(checkpoint);
  checkpoint->DropResidentPages();
  EXPECT_EQ(checkpoint->Find("z")->bytes[7], std::byte{7});
}

}  // namespace
}  // namespace deepinfer
