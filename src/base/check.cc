#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace deepinfer {

void CheckFailed(const char* file, int line, const char* expression, const std::string& values) {
  std::fprintf(stderr, "deepinfer: internal check failed: %s%s%s (%s:%d)\n", expression,
               values.empty() ? "" : ": ", values.c_str(), file, line);
  std::fflush(stderr);
  std::abort();
}

}  // namespace deepinfer
