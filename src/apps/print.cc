#include "apps/print.h"

#include <cstdio>

namespace deepinfer {

int PrintError(const Error& error) {
  fmt::print(stderr, "deepinfer: error: {}\n", error.message);
  return kExitFailure;
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
