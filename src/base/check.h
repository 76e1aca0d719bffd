// Assertions against bugs. Nothing that a file or a client can send may reach one of these: input
// is validated with Status (base/error.h). A failed check prints both values and the location and
// stops the process.
#pragma once

#include <fmt/core.h>

#include <string>

namespace deepinfer {

[[noreturn]] void CheckFailed(const char* file, int line, const char* expression,
                              const std::string& values);

template <class A, class B>
[[noreturn]] void CheckOpFailed(const char* file, int line, const char* expression, const A& a,
                                const B& b) {
  CheckFailed(file, line, expression, fmt::format("{} versus {}", a, b));
}

}  // namespace deepinfer

#define DI_CHECK(cond)                                         \
  do {                                                         \
    if (!(cond)) [[unlikely]]                                  \
      ::deepinfer::CheckFailed(__FILE__, __LINE__, #cond, ""); \
  } while (false)

#define DI_CHECK_OP_(a, op, b)                                                         \
  do {                                                                                 \
    const auto& di_a_ = (a);                                                           \
    const auto& di_b_ = (b);                                                           \
    if (!(di_a_ op di_b_)) [[unlikely]]                                                \
      ::deepinfer::CheckOpFailed(__FILE__, __LINE__, #a " " #op " " #b, di_a_, di_b_); \
  } while (false)

#define DI_CHECK_EQ(a, b) DI_CHECK_OP_(a, ==, b)
#define DI_CHECK_NE(a, b) DI_CHECK_OP_(a, !=, b)
#define DI_CHECK_LT(a, b) DI_CHECK_OP_(a, <, b)
#define DI_CHECK_LE(a, b) DI_CHECK_OP_(a, <=, b)
#define DI_CHECK_GT(a, b) DI_CHECK_OP_(a, >, b)
#define DI_CHECK_GE(a, b) DI_CHECK_OP_(a, >=, b)

#ifdef NDEBUG
#define DI_DCHECK(cond) \
  do {                  \
  } while (false && (cond))
#else
#define DI_DCHECK(cond) DI_CHECK(cond)
#endif
