#include "weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/mapped_file.h"

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A file image: 8-byte length, `json`, `data_bytes` zero bytes.
std::string Image(const std::string& json, size_t data_bytes) {
  std::string image;
  for (int i = 0; i < 8; ++i) image += static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return image + json + std::string(data_bytes, '\0');
}

Result<SafetensorsHeader> Parse(const std::string& image) {
  return ParseSafetensorsHeader(std::as_bytes(std::span(image)),
                                static_cast<int64_t>(image.size()));
}

std::string ErrorOf(const std::string& json, size_t data_bytes) {
  const Result<SafetensorsHeader> header = Parse(Image(json, data_bytes));
  return header ? "no error" : header.error().message;
}

TEST(SafetensorsHeader, ReadsTensorsInFileOrderWithMetadata) {
  const Result<SafetensorsHeader> header = Parse(Image(
      R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"format":"pt"},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}, "empty":{"dtype":"U8","shape":[0,7],"data_offsets":[4,4]}}    )",
      16));
  ASSERT_TRUE(header) << header.error().message;
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].name, "a");
  EXPECT_EQ(header->entries[1].name, "empty");
  EXPECT_EQ(header->entries[2].name, "b");
  EXPECT_EQ(header->entries[2].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header->entries[2].dtype, StoredDType::kBf16);
  ASSERT_EQ(header->metadata.size(), 1u);
  EXPECT_EQ(header->metadata[0].second, "pt");
}

TEST(SafetensorsHeader, EveryViolationHasASentenceOfItsOwn) {
  struct Case {
    const char* json;
    size_t data_bytes;
    const char* message;
  };
  const Case cases[] = {
      {R"({"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}})", 4, "dtype 'X9'"},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4,
       "dtype of tensor 'a' is not a string"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "has the entry -1"},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4, "has the entry 1.5"},
      {R"({"a":{"dtype":"F32","shape":"x","data_offsets":[0,4]}})", 4, "is not a list"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4,
       "overflows"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4]}})", 4,
       "overflows"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4,
       "two integers 0 <= begin <= end"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "two integers"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4, "two integers"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4, "two integers"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "i.e. 8 bytes, but its data_offsets [0, 4) span 4"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "lacks data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4,
       "unknown or repeated key 'x'"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4,
       "repeated key 'dtype'"},
      {R"({"a":3})", 0, "not a JSON object"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "'a' occurs twice"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, "belong to no tensor"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 3,
       "2 bytes after its last tensor"},
      {R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 3,
       "truncated: its header describes 9 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
       5, "not a multiple of its element size 4"},
      {R"({"__metadata__":{"a":1}})", 0, "not a string"},
      {R"({"__metadata__":[]})", 0, "not a JSON object"},
      {R"({"a":)", 0, "not valid JSON"},
      {R"([1, 2])", 0, "does not start with '{'"},
      {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "not valid JSON"},
  };
  for (const Case& c : cases)
    EXPECT_THAT(ErrorOf(c.json, c.data_bytes), HasSubstr(c.message)) << c.json;
}

TEST(SafetensorsHeader, BrokenLengthsAreRefused) {
  EXPECT_THAT(Parse("").error().message, HasSubstr("has 0 bytes"));
  EXPECT_THAT(Parse("1234567").error().message, HasSubstr("has 7 bytes"));
  EXPECT_THAT(Parse(std::string(8, '\xff')).error().message,
              HasSubstr("header length is 18446744073709551615"));
  EXPECT_THAT(Parse(std::string("\x20\0\0\0\0\0\0\0{}", 10)).error().message,
              HasSubstr("header needs 40 bytes, the file has 10"));
  EXPECT_THAT(Parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\n").error().message,
              HasSubstr("Git LFS pointer"));
}

TEST(SafetensorsHeader, EveryTruncationOfAFileIsAnError) {
  const std::string image = Image(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}})", 5);
  ASSERT_TRUE(Parse(image));
  for (size_t size = 0; size < image.size(); ++size) {
    const Result<SafetensorsHeader> header = Parse(image.substr(0, size));
    ASSERT_FALSE(header) << size;
    EXPECT_EQ(header.error().code, Code::kDataLoss) << size;
  }
}

RC_GTEST_PROP(SafetensorsHeader, BuiltHeadersParseBack, ()) {
  std::vector<StoredTensor> tensors;
  const size_t count = *rc::gen::inRange<size_t>(0, 6);
  for (size_t i = 0; i < count; ++i) {
    StoredTensor tensor;
    tensor.name = fmt::format("t\"\\\n{}", i);
    // Equal element sizes keep every tensor aligned.
    tensor.dtype = *rc::gen::element(StoredDType::kF32, StoredDType::kI32, StoredDType::kU32);
    tensor.shape = *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 5));
    if (tensor.shape.size() > 5) tensor.shape.resize(5);
    tensors.push_back(std::move(tensor));
  }
  const std::pair<std::string, std::string> metadata[] = {{"k", "v"}};
  const Result<std::string> built = BuildSafetensorsHeader(tensors, metadata);
  RC_ASSERT(built.has_value());
  RC_ASSERT(built->size() % 8 == 0u);
  int64_t bytes = 0;
  for (const StoredTensor& tensor : tensors) bytes += StoredBytes(tensor);
  const Result<SafetensorsHeader> header = ParseSafetensorsHeader(
      std::as_bytes(std::span(*built)), static_cast<int64_t>(built->size()) + bytes);
  RC_ASSERT(header.has_value());
  RC_ASSERT(header->entries.size() == tensors.size());
  for (const StoredTensor& tensor : tensors) {
    const auto it = std::find_if(header->entries.begin(), header->entries.end(),
                                 [&](const auto& e) { return e.name == tensor.name; });
    RC_ASSERT(it != header->entries.end());
    RC_ASSERT(it->dtype == tensor.dtype);
    RC_ASSERT(it->shape == tensor.shape);
  }
}

TEST(SafetensorsHeader, UnwritableTensorsAreRefused) {
  const auto error = [](std::vector<StoredTensor> tensors) {
    return BuildSafetensorsHeader(tensors).error().message;
  };
  EXPECT_THAT(error({{"a", StoredDType::kU8, {1}}, {"a", StoredDType::kU8, {1}}}),
              HasSubstr("twice"));
  EXPECT_THAT(error({{"__metadata__", StoredDType::kU8, {1}}}), HasSubstr("cannot be the name"));
  EXPECT_THAT(error({{"", StoredDType::kU8, {1}}}), HasSubstr("cannot be the name"));
  EXPECT_THAT(error({{"\xff", StoredDType::kU8, {1}}}), HasSubstr("UTF-8"));
  EXPECT_THAT(error({{"a", StoredDType::kU8, {-1}}}), HasSubstr("overflows"));
  EXPECT_THAT(error({{"a", StoredDType::kF64, {int64_t{1} << 61}}}), HasSubstr("overflows"));
}

class SafetensorsWriterTest : public ::testing::Test {
 protected:
  SafetensorsWriterTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_writer_{}", ::getpid())) {
    std::filesystem::create_directories(dir_);
  }
  ~SafetensorsWriterTest() override {
    std::filesystem::remove_all(dir_);
  }
  std::filesystem::path dir_;
};

TEST_F(SafetensorsWriterTest, WrittenBytesAreReadBack) {
  const std::string path = (dir_ / "a.safetensors").string();
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {3}}, {"y", StoredDType::kU8, {2}}};
  Result<SafetensorsWriter> writer = SafetensorsWriter::Create(path, tensors);
  ASSERT_TRUE(writer) << writer.error().message;
  const char bytes[] = {1, 2, 3, 4, 5};
  ASSERT_TRUE(writer->Write(std::as_bytes(std::span(bytes).first(4))));
  ASSERT_TRUE(writer->Write(std::as_bytes(std::span(bytes).last(1))));
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(writer->Finish());
  const Result<MappedFile> file = MappedFile::Open(path);
  ASSERT_TRUE(file);
  const Result<SafetensorsHeader> header =
      ParseSafetensorsHeader(file->bytes(), static_cast<int64_t>(file->bytes().size()));
  ASSERT_TRUE(header) << header.error().message;
  EXPECT_EQ(static_cast<int>(
                file->bytes()[static_cast<size_t>(header->data_begin + header->entries[1].begin)]),
            4);
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
}

TEST_F(SafetensorsWriterTest, AnAbandonedFileLeavesNothingBehind) {
  const std::string path = (dir_ / "b.safetensors").string();
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {3}}};
  {
    const Result<SafetensorsWriter> writer = SafetensorsWriter::Create(path, tensors);
    ASSERT_TRUE(writer);
    EXPECT_TRUE(std::filesystem::exists(path + ".partial"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

TEST_F(SafetensorsWriterTest, AFullDiskIsAnErrorThatNamesTheFile) {
  // A file size limit stands in for a full disk: both fail in write().
  struct rlimit old_limit {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = old_limit;
  limit.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string path = (dir_ / "c.safetensors").string();
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {1 << 20}}};
  const std::vector<std::byte> bytes(1 << 20);
  Status status;
  {
    Result<SafetensorsWriter> writer = SafetensorsWriter::Create(path, tensors);
    if (writer) status = writer->Write(bytes);
  }
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, Code::kResourceExhausted);
  EXPECT_THAT(status.error().message, HasSubstr("c.safetensors"));
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

TEST_F(SafetensorsWriterTest, ASymbolicLinkStaysAndItsTargetIsReplaced) {
  namespace fs = std::filesystem;
  fs::create_directories(dir_ / "real");
  fs::create_directories(dir_ / "links");
  std::ofstream(dir_ / "real/old.safetensors") << "old";
  fs::create_symlink("../real/old.safetensors", dir_ / "links/old");
  fs::create_symlink(dir_ / "real/new.safetensors", dir_ / "links/new");  // no such file yet
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {3}}};
  for (const char* name : {"old", "new"}) {
    const fs::path link = dir_ / "links" / name;
    Result<SafetensorsWriter> writer = SafetensorsWriter::Create(link.string(), tensors);
    ASSERT_TRUE(writer) << writer.error().message;
    const fs::path target = dir_ / "real" / (std::string(name) + ".safetensors");
    EXPECT_TRUE(fs::exists(target.string() + ".partial"));
    ASSERT_TRUE(writer->Write(std::vector<std::byte>(3)));
    ASSERT_TRUE(writer->Finish());
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_GT(fs::file_size(target), 3u);
  }
  fs::create_symlink("loop", dir_ / "links/loop");
  EXPECT_THAT(SafetensorsWriter::Create((dir_ / "links/loop").string(), tensors).error().message,
              HasSubstr("too many levels of symbolic links"));
}

TEST_F(SafetensorsWriterTest, WhatIsNotARegularFileIsNeverReplaced) {
  namespace fs = std::filesystem;
  const fs::path fifo = dir_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  fs::create_directories(dir_ / "folder");
  fs::create_symlink("fifo", dir_ / "link");
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {3}}};
  const std::pair<const char*, const char*> cases[] = {
      {"fifo", "it is a FIFO"}, {"folder", "it is a directory"}, {"link", "it is a FIFO"}};
  for (const auto& [name, kind] : cases) {
    const std::string path = (dir_ / name).string();
    const Result<SafetensorsWriter> writer = SafetensorsWriter::Create(path, tensors);
    ASSERT_FALSE(writer);
    EXPECT_EQ(writer.error().code, Code::kInvalidArgument);
    EXPECT_THAT(writer.error().message, AllOf(HasSubstr(path), HasSubstr(kind)));
  }
  EXPECT_TRUE(fs::is_fifo(fifo));
  // Nor is a FIFO in the place of the partial file waited for.
  ASSERT_EQ(::mkfifo((dir_ / "d.partial").c_str(), 0600), 0);
  EXPECT_THAT(SafetensorsWriter::Create((dir_ / "d").string(), tensors).error().message,
              HasSubstr("d.partial"));
}

TEST_F(SafetensorsWriterTest, AnUnwritableDirectoryIsAnError) {
  const StoredTensor tensors[] = {{"x", StoredDType::kU8, {3}}};
  EXPECT_THAT(SafetensorsWriter::Create("/no/such/dir/x.safetensors", tensors).error().message,
              HasSubstr("Cannot create"));
}

}  // namespace
}  // namespace deepinfer
