#include "base/mapped_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace deepinfer {
namespace {

TEST(MappedFile, MapsTheBytesOfAFileAndAnEmptyFile) {
  const std::string dir = ::testing::TempDir();
  const std::string path = dir + "/mapped_file_test.bin";
  std::ofstream(path) << "abc";
  Result<MappedFile> file = MappedFile::Open(path);
  ASSERT_TRUE(file.has_value());
  ASSERT_EQ(file->bytes().size(), 3u);
  EXPECT_EQ(static_cast<char>(file->bytes()[2]), 'c');
  std::ofstream(path, std::ios::trunc) << "";
  Result<MappedFile> empty = MappedFile::Open(path);
  ASSERT_TRUE(empty.has_value());
  EXPECT_TRUE(empty->bytes().empty());
  std::filesystem::remove(path);
}

TEST(MappedFile, MissingFilesAndDirectoriesAreNotFound) {
  const Result<MappedFile> missing = MappedFile::Open("/nonexistent/x");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("/nonexistent/x"), std::string::npos);
  const Result<MappedFile> directory = MappedFile::Open("/tmp");
  ASSERT_FALSE(directory.has_value());
  EXPECT_EQ(directory.error().code, Code::kNotFound);
}

}  // namespace
}  // namespace deepinfer
