#include "base/mapped_file.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

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

TEST(MappedFile, AMissingFileIsNotFound) {
  const Result<MappedFile> missing = MappedFile::Open("/nonexistent/x");
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("/nonexistent/x"), std::string::npos);
}

TEST(MappedFile, WhatIsNotARegularFileIsNamedWithoutWaitingForIt) {
  const std::string fifo = ::testing::TempDir() + "/mapped_file_test.fifo";
  std::filesystem::remove(fifo);
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::pair<std::string, std::string> cases[] = {
      {::testing::TempDir(), "directory"}, {fifo, "FIFO"}, {"/dev/zero", "character device"}};
  for (const auto& [path, kind] : cases) {
    const Result<MappedFile> file = MappedFile::Open(path);
    ASSERT_FALSE(file.has_value()) << path;
    EXPECT_EQ(file.error().code, Code::kInvalidArgument);
    EXPECT_EQ(file.error().message, "'" + path + "' is not a regular file, it is a " + kind + ".");
  }
  std::filesystem::remove(fifo);
}

TEST(MappedFile, AFileThatCannotBeReachedIsNotCalledMissing) {
  const std::string loop = ::testing::TempDir() + "/mapped_file_test.loop";
  std::filesystem::remove(loop);
  std::filesystem::create_symlink(loop, loop);
  const Result<MappedFile> file = MappedFile::Open(loop);
  std::filesystem::remove(loop);
  ASSERT_FALSE(file.has_value());
  EXPECT_EQ(file.error().code, Code::kUnavailable);
  EXPECT_NE(file.error().message.find("symbolic links"), std::string::npos);
}

// Resident pages of the mapping that starts at `data`, from /proc/self/smaps.
int64_t ResidentKilobytes(const void* data) {
  std::ifstream smaps("/proc/self/smaps");
  const std::string start = fmt::format("{:x}-", reinterpret_cast<uintptr_t>(data));
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.starts_with(start)) inside = true;
    if (inside && line.starts_with("Rss:")) return std::stoll(line.substr(4));
  }
  return -1;
}

TEST(MappedFile, DroppedPagesLeaveTheProcessAndAreReadAgain) {
  const std::string path = ::testing::TempDir() + "/mapped_file_test.big";
  std::ofstream(path) << std::string(size_t{1} << 20, 'x');
  const Result<MappedFile> file = MappedFile::Open(path);
  ASSERT_TRUE(file.has_value());
  const auto count = [&] {
    return std::count(file->bytes().begin(), file->bytes().end(), std::byte{'x'});
  };
  EXPECT_EQ(count(), 1 << 20);
  EXPECT_GE(ResidentKilobytes(file->bytes().data()), 1024);
  file->DropResidentPages();
  EXPECT_EQ(ResidentKilobytes(file->bytes().data()), 0);
  EXPECT_EQ(count(), 1 << 20);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace deepinfer
