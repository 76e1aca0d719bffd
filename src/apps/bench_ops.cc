#include <optional>

#include "apps/bench.h"
#include "apps/output.h"
#include "apps/print.h"
#include "ops/bench/ops_bench.h"

namespace deepinfer {

int RunBenchOps(const BenchOpsOptions& options) {
  OpsBenchOptions bench;
  bench.threads = options.threads;
  bench.runs = options.runs;
  bench.all_levels = options.all_levels;
  bench.compare = options.compare;
  bench.filter = options.filter;
  Status printed;
  bench.progress = [&](std::string_view line) {
    if (printed.has_value()) printed = Print("{}\n", line);
  };
  // Before the measurement, which takes minutes.
  std::optional<OutputFile> file;
  if (!options.json.empty()) {
    Result<OutputFile> created = OutputFile::Create(options.json);
    if (!created.has_value()) return PrintError(created.error());
    file.emplace(std::move(*created));
  }
  std::string json;
  const Status status = RunOpsBench(bench, &json);
  if (!status.has_value()) return PrintError(status.error());
  if (file.has_value()) {
    const Status saved = file->Write(json);
    if (!saved.has_value()) return PrintError(saved.error());
  }
  return ExitStatus(printed);
}

}  // namespace deepinfer
