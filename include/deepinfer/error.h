// Errors as values: what every function of the public interface returns when its input or its
// environment is at fault. Part of the public interface; the engine's own sources include
// base/error.h, which adds macros and formatting.
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace deepinfer {

// std::source_location in the two members we use; Clang 14, which builds the fuzz targets, cannot
// compile libstdc++'s.
class SourceLocation {
 public:
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          unsigned line = __builtin_LINE()) {
    SourceLocation location;
    location.file_ = file;
    location.line_ = line;
    return location;
  }
  constexpr const char* file_name() const {
    return file_;
  }
  constexpr unsigned line() const {
    return line_;
  }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
};

enum class Code {
  kInvalidArgument,    // the input is wrong; the same call will fail again
  kNotFound,           // a file or an entry is missing
  kUnsupported,        // valid, but this build or machine cannot do it
  kResourceExhausted,  // memory, slots, blocks
  kDeadline,           // a time limit passed
  kCancelled,          // the caller asked to stop
  kUnavailable,        // try again later
  kDataLoss,           // truncated or corrupted bytes
  kInternal,           // our fault, contained to one request
};

// "invalid_argument", "not_found", ...
std::string_view CodeName(Code code);

struct Error {
  Code code = Code::kInternal;
  std::string message;  // a sentence for a person, with the values in it
  std::string field;    // option name or JSON path when the input is at fault, else empty
  SourceLocation where = SourceLocation::current();
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

// The failed value of any Result<T>. `field` names the option or JSON path at fault.
inline tl::unexpected<Error> Fail(Code code, std::string message, std::string field = {},
                                  SourceLocation where = SourceLocation::current()) {
  return tl::unexpected<Error>(Error{code, std::move(message), std::move(field), where});
}

}  // namespace deepinfer
