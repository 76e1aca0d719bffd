// Errors as values. Every function that can fail because of its input or its environment returns Result<T> or Status;
// bugs go to DI_CHECK (base/check.h) instead. Used by every module.
#pragma once

#include <fmt/core.h>

#include <source_location>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace deepinfer {

// Clang 14, which builds the fuzz targets, cannot compile libstdc++'s std::source_location.
#ifdef __cpp_lib_source_location
using SourceLocation = std::source_location;
#else
class SourceLocation {
 public:
  static constexpr SourceLocation current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
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
#endif

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

// Puts "context: " in front of the message on the way up.
inline tl::unexpected<Error> WithContext(Error error, std::string_view context) {
  error.message = fmt::format("{}: {}", context, error.message);
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace deepinfer

#define DI_CONCAT_INNER_(a, b) a##b
#define DI_CONCAT_(a, b) DI_CONCAT_INNER_(a, b)

// Returns the error of a Status or Result expression to the caller.
#define DI_RETURN_IF_ERROR(expr)                                              \
  do {                                                                        \
    auto di_status_ = (expr);                                                 \
    if (!di_status_.has_value()) {                                            \
      return ::tl::unexpected<::deepinfer::Error>(std::move(di_status_.error())); \
    }                                                                         \
  } while (false)

// DI_ASSIGN_OR_RETURN(auto x, F()): assigns the value or returns the error.
#define DI_ASSIGN_OR_RETURN(lhs, expr) \
  DI_ASSIGN_OR_RETURN_IMPL_(DI_CONCAT_(di_result_, __LINE__), lhs, expr)
#define DI_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr)                          \
  auto tmp = (expr);                                                       \
  if (!tmp.has_value()) {                                                  \
    return ::tl::unexpected<::deepinfer::Error>(std::move(tmp.error()));       \
  }                                                                        \
  lhs = std::move(*tmp)
