#include "apps/print.h"

#include "apps/interrupt.h"
#include "apps/output.h"

namespace deepinfer {

int PrintError(const Error& error) {
  if (error.code == Code::kCancelled) return Interrupted() ? kExitInterrupted : kExitBrokenPipe;
  PrintStderr("deepinfer: error: {}\n", error.message);
  return kExitFailure;
}

int ExitStatus(const Status& status) {
  return status.has_value() ? kExitOk : PrintError(status.error());
}

std::string Counted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string ShellQuoted(std::string_view word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,+@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos)
    return std::string(word);
  std::string quoted = "'";
  for (const char c : word) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::string HumanBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  // 999.5 would print as 1000.
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : (value < 99.95 ? 1 : 0),
                     kUnits[unit]);
}

}  // namespace deepinfer
