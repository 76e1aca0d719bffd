// Life-cycle messages of the library: one event per line, a sentence first, then key=value. The
// library itself never writes to a stream; the program installs a sink (apps/) and without one
// nothing is printed.
#pragma once

#include <fmt/core.h>

#include <functional>
#include <string_view>
#include <utility>

namespace deepinfer {

enum class LogLevel { kError, kWarn, kInfo, kDebug };

using LogSink = std::function<void(LogLevel, std::string_view line)>;

// Replaces the sink; messages above `most_verbose` are not formatted. Call before threads start.
void SetLogSink(LogSink sink, LogLevel most_verbose);

namespace internal {
bool LogEnabled(LogLevel level);
void LogLine(LogLevel level, fmt::string_view format, fmt::format_args args);
}  // namespace internal

template <class... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (internal::LogEnabled(level)) internal::LogLine(level, format, fmt::make_format_args(args...));
}

}  // namespace deepinfer
