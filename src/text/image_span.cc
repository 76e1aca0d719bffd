#include "text/image_span.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace deepinfer {

Result<std::vector<int32_t>> ExpandImageTokens(std::span<const int32_t> ids, int32_t image_token_id,
                                               std::span<const int64_t> span_tokens) {
  const auto num_places = static_cast<size_t>(std::count(ids.begin(), ids.end(), image_token_id));
  if (num_places != span_tokens.size()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The prompt has {} image tokens, but there are {} images.", num_places,
                            span_tokens.size()),
                "images");
  }
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
  int64_t num_tokens = static_cast<int64_t>(ids.size() - num_places);
  for (size_t i = 0; i < span_tokens.size(); ++i) {
    if (span_tokens[i] < 1 || span_tokens[i] > kMaxTokens - num_tokens) {
      return Fail(
          Code::kInvalidArgument,
          fmt::format("Image {} takes {} tokens; it must be at least 1, and the whole prompt "
                      "at most {}.",
                      i, span_tokens[i], kMaxTokens),
          "images");
    }
    num_tokens += span_tokens[i];
  }
  std::vector<int32_t> expanded;
  expanded.reserve(static_cast<size_t>(num_tokens));
  size_t image = 0;
  for (const int32_t id : ids) {
    const auto count = id == image_token_id ? static_cast<size_t>(span_tokens[image++]) : 1;
    expanded.insert(expanded.end(), count, id);
  }
  return expanded;
}

}  // namespace deepinfer
