#include "apps/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

class OutputTest : public ::testing::Test {
 protected:
  OutputTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_output_{}", ::getpid())) {
    std::filesystem::create_directories(dir_);
    std::ofstream(dir_ / "a") << "x";
  }
  ~OutputTest() override {
    std::filesystem::remove_all(dir_);
  }
  std::filesystem::path dir_;
};

TEST_F(OutputTest, TheSameFileIsFoundUnderEveryName) {
  std::filesystem::create_symlink("a", dir_ / "link");
  std::filesystem::create_hard_link(dir_ / "a", dir_ / "hard");
  std::ofstream(dir_ / "b") << "x";
  const std::string input = dir_ / "a";
  for (const char* same : {"a", "link", "hard", "../" /* the folder's name follows */}) {
    const std::string output =
        same == std::string("../") ? dir_ / same / dir_.filename() / "a" : dir_ / same;
    const Status status = CheckNotTheSameFile(input, output);
    ASSERT_FALSE(status.has_value()) << output;
    EXPECT_THAT(status.error().message, HasSubstr("the same file"));
  }
  EXPECT_TRUE(CheckNotTheSameFile(input, dir_ / "b").has_value());
  EXPECT_TRUE(CheckNotTheSameFile(input, dir_ / "new").has_value());
  EXPECT_TRUE(CheckNotTheSameFile("/dev/null", "/dev/null").has_value());
}

TEST_F(OutputTest, FilesToComeAreComparedByTheirNames) {
  std::filesystem::create_directory_symlink(dir_, dir_ / "here");
  const std::string path = dir_ / "new";
  EXPECT_FALSE(CheckNotTheSameFile(path, path).has_value());
  EXPECT_FALSE(CheckNotTheSameFile(path, dir_ / "here" / "." / "new").has_value());
  EXPECT_FALSE(CheckNotTheSameFile("new", std::filesystem::current_path() / "new").has_value());
  EXPECT_TRUE(CheckNotTheSameFile(path, dir_ / "other").has_value());
}

TEST_F(OutputTest, AFileForLaterKeepsWhatItHoldsUntilItIsWritten) {
  const auto content = [&](const char* name) {
    std::ifstream file(dir_ / name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::ofstream(dir_ / "a") << "a long old report";
  std::filesystem::create_symlink("a", dir_ / "link");
  {
    Result<OutputFile> unused = OutputFile::CreateForLater(dir_ / "a");
    ASSERT_TRUE(unused.has_value());
    Result<OutputFile> new_file = OutputFile::CreateForLater(dir_ / "new");
    ASSERT_TRUE(new_file.has_value());
    const OutputFile moved = std::move(*new_file);
    EXPECT_TRUE(std::filesystem::exists(dir_ / "new"));
  }
  EXPECT_EQ(content("a"), "a long old report");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "new"));
  for (const char* name : {"link", "new"}) {
    Result<OutputFile> file = OutputFile::CreateForLater(dir_ / name);
    ASSERT_TRUE(file.has_value());
    EXPECT_TRUE(file->Write("one ").has_value());
    EXPECT_TRUE(file->Write("two").has_value());
  }
  EXPECT_EQ(content("a"), "one two");
  EXPECT_EQ(content("new"), "one two");
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ / "link"));
  const Result<OutputFile> none = OutputFile::CreateForLater(dir_ / "no" / "a");
  ASSERT_FALSE(none.has_value());
  EXPECT_THAT(none.error().message, HasSubstr("No such file or directory."));
  EXPECT_TRUE(OutputFile::CreateForLater("/dev/null")->Write("x").has_value());
}

TEST_F(OutputTest, AFileIsReplacedAndItsErrorsHaveAReason) {
  {
    Result<OutputFile> file = OutputFile::Create(dir_ / "a");
    ASSERT_TRUE(file.has_value());
    EXPECT_TRUE(file->Write("one\n").has_value());
    OutputFile moved = std::move(*file);
    EXPECT_TRUE(moved.Write("two\n").has_value());
  }
  std::ifstream file(dir_ / "a");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), "one\ntwo\n");
  const Result<OutputFile> none = OutputFile::Create(dir_ / "no" / "a");
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().code, Code::kInvalidArgument);
  EXPECT_THAT(none.error().message, HasSubstr("No such file or directory."));
  Result<OutputFile> full = OutputFile::Create("/dev/full");
  ASSERT_TRUE(full.has_value());
  const Status status = full->Write("x");
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kResourceExhausted);
  EXPECT_THAT(status.error().message, HasSubstr("No space left on device."));
}

TEST_F(OutputTest, AReplacementIsThereWhollyOrNotAtAll) {
  const auto content = [&](const char* name) {
    std::ifstream file(dir_ / name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::filesystem::create_symlink("a", dir_ / "a.tmp");  // not followed
  {
    Result<ReplacementFile> file = ReplacementFile::Create(dir_ / "a", dir_ / "a.tmp");
    ASSERT_TRUE(file.has_value());
    EXPECT_TRUE(file->Write(std::string(1 << 20, 'y')).has_value());
    EXPECT_EQ(content("a"), "x");
  }
  EXPECT_FALSE(std::filesystem::exists(dir_ / "a.tmp"));
  EXPECT_EQ(content("a"), "x");
  std::filesystem::permissions(dir_ / "a", std::filesystem::perms::owner_read);
  Result<ReplacementFile> file = ReplacementFile::Create(dir_ / "a", dir_ / "a.tmp");
  EXPECT_TRUE(file->Write("one ").has_value());
  EXPECT_TRUE(file->Write("two").has_value());
  EXPECT_TRUE(file->Commit().has_value());
  EXPECT_EQ(content("a"), "one two");
  EXPECT_EQ(std::filesystem::status(dir_ / "a").permissions(), std::filesystem::perms::owner_read);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "a.tmp"));
  EXPECT_FALSE(ReplacementFile::Create(dir_ / "no/a", dir_ / "no/a.tmp").has_value());
}

TEST_F(OutputTest, APathIsResolvedThroughLinks) {
  std::filesystem::create_symlink("a", dir_ / "link");
  std::filesystem::create_symlink("nothing", dir_ / "dangling");
  EXPECT_EQ(ResolvedPath(dir_ / "link"), std::filesystem::canonical(dir_ / "a").string());
  EXPECT_EQ(ResolvedPath(dir_ / "dangling"), (dir_ / "dangling").string());
  EXPECT_EQ(ResolvedPath("new"), "new");
}

}  // namespace
}  // namespace deepinfer
