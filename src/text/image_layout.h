// How large an image is to the model: from its width and height follow the canvas that it is fitted
// into, the grid of patches, and the span of tokens in the prompt. Integers and doubles only, no
// pixels.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.h"

namespace deepinfer {

struct ImageSize {
  int64_t width = 0;
  int64_t height = 0;
  friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

// The checkpoint's vision configuration, as far as sizes go.
struct ImageLayoutConfig {
  int64_t patch_size = 14;       // pixels
  int64_t downsample_ratio = 3;  // patches along each side of a token
  int64_t max_image_tokens = 1024;
  int64_t min_pixels = 295936;  // smaller images are planned as if they had this many
  std::optional<double> max_wh_ratio = std::nullopt;  // wider images are squeezed
};

struct ImageLayout {
  ImageSize canvas;   // pixels, whole patches
  ImageSize patches;  // columns and rows
  ImageSize grid;     // columns and rows of tokens
  // The span: a start, every row with a line end behind it, an end.
  int64_t span_tokens = 0;
  bool shrunk = false;  // the span would have been longer than allowed
  // Where the picture is on the canvas; the rest is border.
  ImageSize fitted;
  int64_t offset_x = 0;
  int64_t offset_y = 0;
  // The picture fills the canvas without keeping its proportions: one side would vanish, or it is
  // wider than max_wh_ratio.
  bool stretched = false;
};

// Errors: kInvalidArgument for a side below 1 or above 2^31, or a configuration without sense.
Result<ImageLayout> PlanImage(ImageSize size, const ImageLayoutConfig& config = {});

}  // namespace deepinfer
