#include "apps/reports.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/trace.h"

namespace deepinfer {
namespace {

namespace fs = std::filesystem;

class ReportsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("deepinfer-reports-" + std::to_string(getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override {
    fs::remove_all(dir_);
  }
  std::string Path(const std::string& name) const {
    return (dir_ / name).string();
  }
  static std::string ContentsOf(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  fs::path dir_;
};

TEST_F(ReportsTest, AllThreeFilesAreWritten) {
  Result<ReportFiles> files =
      ReportFiles::Create({Path("s.json"), Path("m.prom"), Path("t.json")}, {"-", "-"});
  ASSERT_TRUE(files.has_value()) << files.error().message;
  EXPECT_TRUE(files->wants_trace());
  StatisticsSnapshot statistics;
  statistics.steps = 17;
  TraceRecorder recorder;
  recorder.Complete("step", 1, 2);
  const Status written =
      files->Write(statistics, [&](const ReportFiles::WritePiece& w) { recorder.WriteJson(w); });
  ASSERT_TRUE(written.has_value()) << written.error().message;
  EXPECT_EQ(nlohmann::json::parse(ContentsOf(Path("s.json"))).at("deepinfer_steps_total"), 17);
  EXPECT_NE(ContentsOf(Path("m.prom")).find("\ndeepinfer_steps_total 17\n"), std::string::npos);
  EXPECT_EQ(ContentsOf(Path("t.json")), recorder.ToJson());
}

TEST_F(ReportsTest, NothingIsWrittenUnlessAskedFor) {
  Result<ReportFiles> files = ReportFiles::Create({}, {});
  ASSERT_TRUE(files.has_value());
  EXPECT_FALSE(files->wants_trace());
  const Status written =
      files->Write({}, [](const ReportFiles::WritePiece&) { ADD_FAILURE() << "no trace wanted"; });
  EXPECT_TRUE(written.has_value());
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(ReportsTest, AnOldReportStaysUntilTheNewOneIsWritten) {
  std::ofstream(Path("s.json")) << "old";
  const ReportOptions options = {.stats = Path("s.json"), .trace = Path("t.json")};
  ASSERT_TRUE(ReportFiles::Create(options, {}).has_value());
  EXPECT_EQ(ContentsOf(Path("s.json")), "old");
  EXPECT_FALSE(fs::exists(Path("t.json")));
  Result<ReportFiles> files = ReportFiles::Create(options, {});
  ASSERT_TRUE(files.has_value());
  ASSERT_TRUE(files->Write({}, [](const ReportFiles::WritePiece& write) { write("t"); }));
  EXPECT_EQ(ContentsOf(Path("s.json")), StatisticsJson({}));
  EXPECT_EQ(ContentsOf(Path("t.json")), "t");
}

TEST_F(ReportsTest, PathsThatWouldLoseSomethingAreRefusedBeforeTheWork) {
  std::ofstream(Path("input.jsonl")) << "line\n";
  const std::vector<ReportOptions> refused = {
      {"-", "", ""},
      {"", Path("no/such/directory"), ""},
      {"", "", Path("input.jsonl")},
      {Path("same"), Path("same"), ""},
      {Path("same"), "", Path("./same")},
  };
  for (const ReportOptions& options : refused) {
    const Result<ReportFiles> files = ReportFiles::Create(options, {Path("input.jsonl"), "-"});
    ASSERT_FALSE(files.has_value());
    EXPECT_EQ(files.error().code, Code::kInvalidArgument);
    EXPECT_FALSE(files.error().message.empty());
  }
  EXPECT_EQ(ContentsOf(Path("input.jsonl")), "line\n");
}

}  // namespace
}  // namespace deepinfer
