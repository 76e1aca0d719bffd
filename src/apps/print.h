// What all commands share when they print: exit statuses, the form of errors, sizes.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace deepinfer {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitSomeLinesFailed = 3;  // finished, but the output has lines with errors
inline constexpr int kExitInterrupted =
    130;  // as a shell reports Ctrl-C; finished lines are written

// Prints "deepinfer: error: sentence" to standard error and returns kExitFailure.
int PrintError(const Error& error);

// "7.39 GB"; decimal units, three significant digits.
std::string HumanBytes(int64_t bytes);

}  // namespace deepinfer
