#include "base/log.h"

#include <fmt/format.h>

#include <mutex>

namespace deepinfer {
namespace {

struct LogState {
  std::mutex mutex;
  LogSink sink;
  LogLevel most_verbose = LogLevel::kError;
};

LogState& State() {
  static LogState state;
  return state;
}

}  // namespace

void SetLogSink(LogSink sink, LogLevel most_verbose) {
  LogState& state = State();
  std::lock_guard lock(state.mutex);
  state.sink = std::move(sink);
  state.most_verbose = most_verbose;
}

namespace internal {

bool LogEnabled(LogLevel level) {
  const LogState& state = State();
  return state.sink && level <= state.most_verbose;
}

void LogLine(LogLevel level, fmt::string_view format, fmt::format_args args) {
  const std::string line = fmt::vformat(format, args);
  LogState& state = State();
  std::lock_guard lock(state.mutex);
  if (state.sink) state.sink(level, line);
}

}  // namespace internal
}  // namespace deepinfer
