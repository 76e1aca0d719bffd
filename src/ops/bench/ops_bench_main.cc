// The ops_bench program: RunOpsBench for machines without the rest of the engine.
//   ops_bench [--threads N] [--runs N] [--filter TEXT] [--all-levels] [--no-compare]
//   [--thread-cpu-time] [--json FILE]
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "ops/bench/ops_bench.h"

int main(int argc, char** argv) {
  deepinfer::OpsBenchOptions options;
  std::string json_path;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (arg == "--all-levels") {
      options.all_levels = true;
    } else if (arg == "--thread-cpu-time") {
      options.thread_cpu_time = true;
    } else if (arg == "--no-compare") {
      options.compare = false;
    } else if (i + 1 >= argc) {
      std::fprintf(stderr, "ops_bench: %s is unknown or lacks its value.\n", argv[i]);
      return 2;
    } else if (arg == "--threads") {
      options.threads = std::atoi(value);
      ++i;
    } else if (arg == "--runs") {
      options.runs = std::atoi(value);
      ++i;
    } else if (arg == "--filter") {
      options.filter = value;
      ++i;
    } else if (arg == "--json") {
      json_path = value;
      ++i;
    } else {
      std::fprintf(stderr, "ops_bench: unknown option %s.\n", argv[i]);
      return 2;
    }
  }
  options.progress = [](std::string_view line) {
    std::printf("%.*s\n", static_cast<int>(line.size()), line.data());
    std::fflush(stdout);
  };
  std::string json;
  const deepinfer::Status status = deepinfer::RunOpsBench(options, &json);
  if (!status.has_value()) {
    std::fprintf(stderr, "ops_bench: %s\n", status.error().message.c_str());
    return 1;
  }
  if (!json_path.empty()) {
    std::ofstream file(json_path);
    file << json;
    if (!file.flush()) {
      std::fprintf(stderr, "ops_bench: cannot write %s.\n", json_path.c_str());
      return 1;
    }
  }
  return 0;
}
