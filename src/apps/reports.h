// The files a command can write about itself beside its results: statistics as JSON and as
// Prometheus' text, and a trace. Formats: docs/metrics.md and base/trace.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "deepinfer/statistics.h"

namespace deepinfer {

class LLM;
class OutputFile;

// Paths; empty: not wanted.
struct ReportOptions {
  std::string stats = {};     // JSON
  std::string metrics = {};   // Prometheus' text
  std::string trace = {};     // for a trace viewer
  std::string schedule = {};  // replays without a model
};

class ReportFiles {
 public:
  // Creates the files, before the work rather than after it, so that a path that cannot be written
  // costs no results. Files that exist keep what they hold until Write. Errors: kInvalidArgument,
  // also for the standard output, and for one of `other_files` (inputs and outputs of the command,
  // already created) or the same file twice.
  static Result<ReportFiles> Create(const ReportOptions& options,
                                    const std::vector<std::string>& other_files);
  ReportFiles(ReportFiles&&) noexcept;
  ReportFiles& operator=(ReportFiles&&) noexcept;
  ~ReportFiles();

  bool wants_trace() const {
    return trace_ != nullptr;
  }

  // Once, at the end. `write_trace` hands the trace over in pieces to the function it is given
  // until that returns false; it is called only if a trace is wanted.
  using WritePiece = std::function<bool(std::string_view)>;
  Status Write(const StatisticsSnapshot& statistics,
               const std::function<void(const WritePiece&)>& write_trace);
  // What `llm` has done.
  Status Write(LLM& llm);

 private:
  ReportFiles();

  std::unique_ptr<OutputFile> stats_;
  std::unique_ptr<OutputFile> metrics_;
  std::unique_ptr<OutputFile> trace_;
  std::unique_ptr<OutputFile> schedule_;
};

}  // namespace deepinfer
