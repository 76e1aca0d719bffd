#include "apps/reports.h"

#include <fmt/core.h>

#include <utility>

#include "apps/output.h"
#include "deepinfer/llm.h"

namespace deepinfer {

ReportFiles::ReportFiles() = default;
ReportFiles::ReportFiles(ReportFiles&&) noexcept = default;
ReportFiles& ReportFiles::operator=(ReportFiles&&) noexcept = default;
ReportFiles::~ReportFiles() = default;

Result<ReportFiles> ReportFiles::Create(const ReportOptions& options,
                                        const std::vector<std::string>& other_files) {
  ReportFiles files;
  std::vector<std::string> taken = other_files;
  const auto create = [&](const char* name, const std::string& path,
                          std::unique_ptr<OutputFile>* file) -> Status {
    if (path.empty()) return {};
    if (path == "-") {
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} is '-'; reports go to files, give a path.", name), name);
    }
    for (const std::string& other : taken) {
      if (other == "-" || CheckNotTheSameFile(other, path).has_value()) continue;
      return Fail(
          Code::kInvalidArgument,
          fmt::format("{} is '{}', the same file as '{}', which would be lost.", name, path, other),
          name);
    }
    DI_ASSIGN_OR_RETURN(OutputFile created, OutputFile::CreateForLater(path));
    *file = std::make_unique<OutputFile>(std::move(created));
    taken.push_back(path);
    return {};
  };
  DI_RETURN_IF_ERROR(create("stats", options.stats, &files.stats_));
  DI_RETURN_IF_ERROR(create("metrics", options.metrics, &files.metrics_));
  DI_RETURN_IF_ERROR(create("trace", options.trace, &files.trace_));
  DI_RETURN_IF_ERROR(create("record-schedule", options.schedule, &files.schedule_));
  return files;
}

Status ReportFiles::Write(const StatisticsSnapshot& statistics,
                          const std::function<void(const WritePiece&)>& write_trace) {
  // What fails in one file does not keep the others from being written.
  Status status;
  const auto write = [&status](OutputFile& file, std::string_view text) {
    Status written = file.Write(text);
    const bool fine = written.has_value();
    if (!fine && status.has_value()) status = std::move(written);
    return fine;
  };
  if (stats_ != nullptr) write(*stats_, StatisticsJson(statistics));
  if (metrics_ != nullptr) write(*metrics_, StatisticsPrometheus(statistics));
  if (trace_ != nullptr) {
    write_trace([&](std::string_view piece) { return write(*trace_, piece); });
  }
  return status;
}

Status ReportFiles::Write(LLM& llm) {
  Status status =
      Write(llm.Statistics(), [&llm](const WritePiece& piece) { llm.WriteTrace(piece); });
  if (schedule_ != nullptr) {
    Status written = schedule_->Write(llm.TakeSchedule());
    if (status.has_value()) status = std::move(written);
  }
  return status;
}

}  // namespace deepinfer
