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
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  std::string json;
  const Status status = RunOpsBench(bench, &json);
  if (!status.has_value()) return PrintError(status.error());
  if ((*file).has_value()) {
    const Status saved = (*file)->Write(json);
    if (!saved.has_value()) return PrintError(saved.error());
  }
  return ExitStatus(printed);
}

}  // namespace deepinfer
