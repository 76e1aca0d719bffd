// Errors as values. Every function that can fail because of its input or its environment returns
// Result<T> or Status; bugs go to DI_CHECK (base/check.h) instead. Used by every module; the types
// themselves are public (deepinfer/error.h).
#pragma once

#include <fmt/core.h>

#include <string_view>
#include <utility>
#include <vector>

#include "deepinfer/error.h"

namespace deepinfer {

// Puts "context: " in front of the message on the way up.
inline tl::unexpected<Error> WithContext(Error error, std::string_view context) {
  error.message = fmt::format("{}: {}", context, error.message);
  return tl::unexpected<Error>(std::move(error));
}

// Several problems, at least one, as one error: the first field, all messages.
Error Joined(const std::vector<Error>& problems);

}  // namespace deepinfer

#define DI_CONCAT_INNER_(a, b) a##b
#define DI_CONCAT_(a, b) DI_CONCAT_INNER_(a, b)

// Returns the error of a Status or Result expression to the caller.
#define DI_RETURN_IF_ERROR(expr)                                                  \
  do {                                                                            \
    auto di_status_ = (expr);                                                     \
    if (!di_status_.has_value()) {                                                \
      return ::tl::unexpected<::deepinfer::Error>(std::move(di_status_.error())); \
    }                                                                             \
  } while (false)

// DI_ASSIGN_OR_RETURN(auto x, F()): assigns the value or returns the error.
#define DI_ASSIGN_OR_RETURN(lhs, expr) \
  DI_ASSIGN_OR_RETURN_IMPL_(DI_CONCAT_(di_result_, __LINE__), lhs, expr)
#define DI_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr)                        \
  auto tmp = (expr);                                                     \
  if (!tmp.has_value()) {                                                \
    return ::tl::unexpected<::deepinfer::Error>(std::move(tmp.error())); \
  }                                                                      \
  lhs = std::move(*tmp)
