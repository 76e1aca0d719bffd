#include "apps/generate_job.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "apps/model_fingerprint.h"
#include "apps/print.h"
#include "base/error.h"

namespace deepinfer {
namespace {

TEST(LineSeed, IsAFunctionOfJobAndLine) {
  std::set<uint64_t> seeds;
  for (uint64_t job = 0; job < 20; ++job) {
    for (int64_t line = 1; line <= 100; ++line) seeds.insert(LineSeed(job, line));
  }
  EXPECT_EQ(seeds.size(), 2000u);
  // Fixed for ever: the first 64 bits of SHA-256 of "seed 5 line 1". A resumed job relies on it.
  EXPECT_EQ(LineSeed(5, 1), 0xaef49c973d96536au);
}

TEST(ModelFingerprint, ChangesWithNamesSizesAndContent) {
  namespace fs = std::filesystem;
  const fs::path dir = fs::temp_directory_path() / fmt::format("deepinfer_model_{}", ::getpid());
  fs::create_directories(dir);
  const auto write = [&](const char* name, const std::string& content) {
    std::ofstream(dir / name, std::ios::binary) << content;
  };
  std::set<std::string> seen;
  const auto is_new = [&] { return seen.insert(ModelFingerprint(dir)).second; };
  EXPECT_TRUE(is_new());
  write("config.json", "{}");
  EXPECT_TRUE(is_new());
  write("a.safetensors", std::string(1 << 20, 'a'));
  EXPECT_TRUE(is_new());
  std::string weights(1 << 20, 'a');
  weights.back() = 'b';
  write("a.safetensors", weights);
  EXPECT_TRUE(is_new());
  weights[(1 << 17) - 1] = 'b';  // the last byte of the second sixteenth
  write("a.safetensors", weights);
  EXPECT_TRUE(is_new());
  write("a.safetensors", weights + "x");
  EXPECT_TRUE(is_new());
  fs::rename(dir / "a.safetensors", dir / "b.safetensors");
  EXPECT_TRUE(is_new());
  write("README.md", "no part of the model");
  EXPECT_FALSE(is_new());
  fs::copy(dir, dir.string() + "_copy");
  EXPECT_EQ(ModelFingerprint(dir), ModelFingerprint(dir.string() + "_copy"));
  fs::remove_all(dir);
  fs::remove_all(dir.string() + "_copy");
}

TEST(ShellQuoted, QuotesWhatAShellWouldRead) {
  EXPECT_EQ(ShellQuoted("a-b/c.d=1"), "a-b/c.d=1");
  EXPECT_EQ(ShellQuoted(""), "''");
  EXPECT_EQ(ShellQuoted("it's $5"), "'it'\\''s $5'");
  EXPECT_EQ(ShellQuoted("{\"n\": 1}"), "'{\"n\": 1}'");
}

}  // namespace
}  // namespace deepinfer
