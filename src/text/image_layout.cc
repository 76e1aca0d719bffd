#include "text/image_layout.h"

#include <algorithm>
#include <cmath>

namespace deepinfer {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Half to even, whatever the rounding mode of the thread is.
int64_t RoundHalfEven(double value) {
  const double below = std::floor(value);
  const double rest = value - below;
  const bool up = rest > 0.5 || (rest == 0.5 && std::fmod(below, 2.0) != 0.0);
  return static_cast<int64_t>(below) + (up ? 1 : 0);
}

int64_t Floor(double value) {
  return static_cast<int64_t>(std::floor(value));
}

Status CheckInput(ImageSize size, const ImageLayoutConfig& config) {
  constexpr int64_t kMaxSide = int64_t{1} << 31;
  if (size.width < 1 || size.height < 1 || size.width > kMaxSide || size.height > kMaxSide) {
    return Fail(Code::kInvalidArgument,
                fmt::format("An image of {} x {} pixels has no layout; its sides must be 1 to {}.",
                            size.width, size.height, kMaxSide),
                "image");
  }
  // The shortest span has one token beside start, line end and end.
  const bool ratio_makes_sense = !config.max_wh_ratio.has_value() || *config.max_wh_ratio > 0;
  if (config.patch_size < 1 || config.patch_size > 4096 || config.downsample_ratio < 1 ||
      config.downsample_ratio > 4096 || config.max_image_tokens < 4 ||
      config.max_image_tokens > (1 << 20) || config.min_pixels < 0 || !ratio_makes_sense) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The vision configuration is not usable: patch_size {}, "
                            "downsample_ratio {}, max_image_tokens {}, min_pixels {}.",
                            config.patch_size, config.downsample_ratio, config.max_image_tokens,
                            config.min_pixels),
                "vision_config");
  }
  return {};
}

// The canvas of a picture of this size whose span would be too long.
ImageSize ShrunkCanvas(ImageSize size, const ImageLayoutConfig& config) {
  const int64_t patch = config.patch_size;
  const int64_t cell = patch * config.downsample_ratio;
  const int64_t budget = config.max_image_tokens;
  const auto width = static_cast<double>(size.width);
  const auto height = static_cast<double>(size.height);
  const double ratio = height / width;
  // Of rows * (columns + 1) + 2 = budget with rows = columns * ratio.
  const double columns = std::sqrt(static_cast<double>(budget - 2) / ratio + 0.25) - 0.5;
  const double rows = columns * ratio;
  if (columns < 1) return {.width = cell, .height = (budget - 2) / 2 * cell};
  if (rows < 1) return {.width = (budget - 3) * cell, .height = cell};
  const double scale = std::min(static_cast<double>(Floor(columns) * cell) / width,
                                static_cast<double>(Floor(rows) * cell) / height);
  return {.width = Floor(width * scale / static_cast<double>(patch)) * patch,
          .height = Floor(height * scale / static_cast<double>(patch)) * patch};
}

ImageSize GridOf(ImageSize patches, const ImageLayoutConfig& config) {
  return {.width = CeilDiv(patches.width, config.downsample_ratio),
          .height = CeilDiv(patches.height, config.downsample_ratio)};
}

int64_t SpanTokens(ImageSize grid) {
  return grid.height * (grid.width + 1) + 2;
}

void Stretch(ImageLayout* layout) {
  layout->fitted = layout->canvas;
  layout->stretched = true;
}

// Scales the picture into the canvas and centres it there.
void Fit(ImageSize size, ImageLayout* layout) {
  const ImageSize canvas = layout->canvas;
  const auto width = static_cast<double>(size.width);
  const auto height = static_cast<double>(size.height);
  const auto canvas_width = static_cast<double>(canvas.width);
  const auto canvas_height = static_cast<double>(canvas.height);
  const double ratio = width / height;
  const double canvas_ratio = canvas_width / canvas_height;
  layout->fitted = canvas;
  if (ratio > canvas_ratio) {
    layout->fitted.height = RoundHalfEven(height / width * canvas_width);
  } else if (ratio < canvas_ratio) {
    layout->fitted.width = RoundHalfEven(width / height * canvas_height);
  }
  if (layout->fitted.width == 0 || layout->fitted.height == 0) return Stretch(layout);
  if (layout->fitted.width != canvas.width) {
    layout->offset_x =
        RoundHalfEven(static_cast<double>(canvas.width - layout->fitted.width) * 0.5);
  } else {
    layout->offset_y =
        RoundHalfEven(static_cast<double>(canvas.height - layout->fitted.height) * 0.5);
  }
}

}  // namespace

Result<ImageLayout> PlanImage(ImageSize size, const ImageLayoutConfig& config) {
  DI_RETURN_IF_ERROR(CheckInput(size, config));
  ImageSize planned = size;
  bool is_too_wide = false;
  if (config.max_wh_ratio.has_value()) {
    const double widest = static_cast<double>(size.height) * *config.max_wh_ratio;
    is_too_wide = static_cast<double>(size.width) >= widest;
    if (static_cast<double>(size.width) > widest) {
      planned.width = std::max(int64_t{1}, static_cast<int64_t>(widest));
    }
  }
  const int64_t pixels = planned.width * planned.height;
  if (pixels < config.min_pixels) {
    const double scale =
        std::sqrt(static_cast<double>(config.min_pixels) / static_cast<double>(pixels));
    planned.width = static_cast<int64_t>(static_cast<double>(planned.width) * scale);
    planned.height = static_cast<int64_t>(static_cast<double>(planned.height) * scale);
  }
  const int64_t patch = config.patch_size;
  ImageLayout layout;
  layout.canvas = {.width = CeilDiv(planned.width, patch) * patch,
                   .height = CeilDiv(planned.height, patch) * patch};
  const auto patches_of = [&](ImageSize canvas) {
    return ImageSize{.width = canvas.width / patch, .height = canvas.height / patch};
  };
  if (SpanTokens(GridOf(patches_of(layout.canvas), config)) > config.max_image_tokens) {
    layout.canvas = ShrunkCanvas(planned, config);
    layout.shrunk = true;
  }
  layout.patches = patches_of(layout.canvas);
  layout.grid = GridOf(layout.patches, config);
  layout.span_tokens = SpanTokens(layout.grid);
  if (is_too_wide) {
    Stretch(&layout);
  } else {
    Fit(size, &layout);
  }
  return layout;
}

}  // namespace deepinfer
