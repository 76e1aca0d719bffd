#include <cstdio>
#include <fstream>

#include "apps/bench.h"
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
  bench.progress = [](std::string_view line) {
    std::printf("%.*s\n", static_cast<int>(line.size()), line.data());
    std::fflush(stdout);
  };
  std::string json;
  const Status status = RunOpsBench(bench, &json);
  if (!status.has_value()) return PrintError(status.error());
  if (options.json.empty()) return kExitOk;
  std::ofstream file(options.json);
  file << json << '\n';
  if (!file)
    return PrintError(
        {Code::kUnavailable, fmt::format("Cannot write '{}'.", options.json), "--json"});
  return kExitOk;
}

}  // namespace deepinfer
