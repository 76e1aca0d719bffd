// The one image token that stands for an image in a prompt becomes the image's whole span: every
// position of the span carries the image token's id. Which position of the span is what: see
// text/image_layout.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"

namespace deepinfer {

// `span_tokens` has the length of each image's span, in the order of the images; at least 1 each.
// Errors: kInvalidArgument if the numbers of images and image tokens differ, if a length is not
// positive, or if the prompt becomes longer than an int32 counts.
Result<std::vector<int32_t>> ExpandImageTokens(std::span<const int32_t> ids, int32_t image_token_id,
                                               std::span<const int64_t> span_tokens);

}  // namespace deepinfer
