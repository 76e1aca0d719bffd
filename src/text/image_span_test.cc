#include "text/image_span.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace deepinfer {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int32_t kImage = 9;

TEST(ImageSpan, EveryImageTokenBecomesItsSpan) {
  const std::vector<int32_t> ids = {1, kImage, 2, kImage, kImage};
  const std::vector<int64_t> spans = {3, 1, 2};
  EXPECT_THAT(ExpandImageTokens(ids, kImage, spans).value(),
              ElementsAre(1, kImage, kImage, kImage, 2, kImage, kImage, kImage));
  EXPECT_THAT(ExpandImageTokens(std::vector<int32_t>{1, 2}, kImage, {}).value(), ElementsAre(1, 2));
  EXPECT_TRUE(ExpandImageTokens({}, kImage, {})->empty());
}

TEST(ImageSpan, AsManyImagesAsImageTokensAreNeeded) {
  const std::vector<int32_t> ids = {1, kImage};
  for (const std::vector<int64_t>& spans : {std::vector<int64_t>{}, {1, 1}}) {
    const auto expanded = ExpandImageTokens(ids, kImage, spans);
    ASSERT_FALSE(expanded.has_value());
    EXPECT_THAT(expanded.error().message, HasSubstr("1 image tokens, but there are"));
  }
}

TEST(ImageSpan, LengthsWithoutSenseAreRefused) {
  const std::vector<int32_t> ids = {1, kImage, kImage};
  for (const int64_t length : {int64_t{0}, int64_t{-5}, int64_t{1} << 31, int64_t{1} << 62}) {
    const std::vector<int64_t> spans = {1, length};
    EXPECT_FALSE(ExpandImageTokens(ids, kImage, spans).has_value()) << length;
  }
}

}  // namespace
}  // namespace deepinfer
