#include "base/error.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

Result<int> Half(int x) {
  if (x % 2 != 0)
    return Fail(Code::kInvalidArgument, fmt::format("x is {}; only even numbers have a half.", x),
                "x");
  return x / 2;
}

Result<int> Quarter(int x) {
  DI_ASSIGN_OR_RETURN(const int half, Half(x));
  DI_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

Status OnlyQuarters(int x) {
  DI_RETURN_IF_ERROR(Quarter(x));
  return {};
}

TEST(Error, TravelsUpWithFieldAndMessage) {
  EXPECT_EQ(*Quarter(12), 3);
  const Result<int> bad = Quarter(6);
  ASSERT_FALSE(bad.has_value());
  EXPECT_EQ(bad.error().code, Code::kInvalidArgument);
  EXPECT_EQ(bad.error().field, "x");
  EXPECT_FALSE(OnlyQuarters(7).has_value());
  EXPECT_EQ(Result<int>(WithContext(bad.error(), "line 3")).error().message,
            "line 3: x is 3; only even numbers have a half.");
}

}  // namespace
}  // namespace deepinfer
