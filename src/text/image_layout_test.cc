#include "text/image_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "text/text_test_data.h"

namespace deepinfer {
namespace {

using nlohmann::json;

json Pair(ImageSize size) {
  return json::array({size.width, size.height});
}

TEST(ImageLayout, RecordedLayouts) {
  size_t num_checked = 0;
  for (const json& recorded : ReadCases("encoding/image_layout.jsonl")) {
    const auto layout = PlanImage({recorded["size"][0], recorded["size"][1]});
    ASSERT_TRUE(layout.has_value()) << recorded["size"] << layout.error().message;
    EXPECT_EQ(Pair(layout->canvas), recorded["canvas"]) << recorded["size"];
    EXPECT_EQ(Pair(layout->patches), recorded["patches"]) << recorded["size"];
    EXPECT_EQ(Pair(layout->grid), recorded["grid"]) << recorded["size"];
    EXPECT_EQ(layout->span_tokens, recorded["tokens"].get<int64_t>()) << recorded["size"];
    EXPECT_EQ(layout->shrunk, recorded["shrunk"].get<bool>()) << recorded["size"];
    EXPECT_EQ(Pair(layout->fitted), recorded["fitted"]) << recorded["size"];
    EXPECT_EQ(json::array({layout->offset_x, layout->offset_y}), recorded["offset"])
        << recorded["size"];
    EXPECT_EQ(layout->stretched, recorded["stretched"].get<bool>()) << recorded["size"];
    ++num_checked;
  }
  EXPECT_EQ(num_checked, 132u);
}

TEST(ImageLayout, WideImagesAreSqueezedIfTheConfigurationSaysSo) {
  const ImageLayoutConfig config{.max_wh_ratio = 2.0};
  const auto wide = PlanImage({4000, 1000}, config);
  const auto square = PlanImage({2000, 1000}, config);
  ASSERT_TRUE(wide.has_value() && square.has_value());
  EXPECT_EQ(wide->canvas, square->canvas);
  EXPECT_TRUE(wide->stretched);
  EXPECT_EQ(wide->fitted, wide->canvas);
  EXPECT_FALSE(PlanImage({1000, 1000}, config)->stretched);
}

TEST(ImageLayout, SidesThatNoImageHasAreRefused) {
  for (const ImageSize size : {ImageSize{0, 1}, ImageSize{1, -1}, ImageSize{int64_t{1} << 40, 1}}) {
    EXPECT_FALSE(PlanImage(size).has_value());
  }
  EXPECT_FALSE(PlanImage({1, 1}, {.patch_size = 0}).has_value());
  EXPECT_FALSE(PlanImage({1, 1}, {.max_image_tokens = 3}).has_value());
}

RC_GTEST_PROP(ImageLayout, SpansAreWithinTheLimitAndPicturesWithinTheCanvas, ()) {
  const int64_t width = *rc::gen::inRange<int64_t>(1, 200000);
  const int64_t height = *rc::gen::inRange<int64_t>(1, 200000);
  const auto layout = PlanImage({width, height});
  RC_ASSERT(layout.has_value());
  RC_ASSERT(layout->span_tokens <= 1024);
  RC_ASSERT(layout->span_tokens == layout->grid.height * (layout->grid.width + 1) + 2);
  RC_ASSERT(layout->canvas.width == layout->patches.width * 14);
  RC_ASSERT(layout->canvas.height == layout->patches.height * 14);
  RC_ASSERT(layout->patches.width > 0 && layout->patches.height > 0);
  RC_ASSERT(layout->fitted.width > 0 && layout->fitted.height > 0);
  RC_ASSERT(layout->offset_x >= 0 &&
            layout->offset_x + layout->fitted.width <= layout->canvas.width);
  RC_ASSERT(layout->offset_y >= 0 &&
            layout->offset_y + layout->fitted.height <= layout->canvas.height);
}

}  // namespace
}  // namespace deepinfer
