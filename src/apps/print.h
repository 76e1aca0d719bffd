// What all commands share when they print: exit statuses, the form of errors, sizes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"

namespace deepinfer {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitSomeLinesFailed = 3;  // finished, but the output has lines with errors
inline constexpr int kExitTooManyErrors = 4;    // stopped by --max-errors
inline constexpr int kExitDifference = 5;       // selfcheck: an answer changed
inline constexpr int kExitInterrupted =
    130;  // as a shell reports Ctrl-C; finished lines are written
inline constexpr int kExitBrokenPipe =
    141;  // as a shell reports a closed pipe; nobody reads the output any more

// Prints "deepinfer: error: sentence" to standard error and returns kExitFailure. Ends that were
// asked for (kCancelled) print nothing: kExitInterrupted after a signal, kExitBrokenPipe if the
// reader of our output has gone.
int PrintError(const Error& error);
// kExitOk, or as PrintError.
int ExitStatus(const Status& status);

// "1 thread", "2 threads".
std::string Counted(int64_t count, std::string_view noun);

// A word of a command line as a POSIX shell reads it.
std::string ShellQuoted(std::string_view word);

// "7.39 GB"; decimal units, three significant digits.
std::string HumanBytes(int64_t bytes);

}  // namespace deepinfer
