#include "text/prompt_builder.h"

#include <cstddef>

#include "text/chat_template.h"

namespace deepinfer {

void PromptBuilder::Special(std::string_view marker) {
  prompt_.specials.push_back({prompt_.text.size(), prompt_.text.size() + marker.size()});
  prompt_.text += marker;
}

void PromptBuilder::Literal(std::string_view text) {
  while (!text.empty()) {
    size_t first = text.size();
    std::string_view found;
    for (const std::string_view marker : {kDsmlMarker, kThinkBeginMarker, kThinkEndMarker}) {
      const size_t at = text.find(marker);
      if (at < first) {
        first = at;
        found = marker;
      }
    }
    Text(text.substr(0, first));
    if (!found.empty()) Special(found);
    text.remove_prefix(first + found.size());
  }
}

void PromptBuilder::Add(const Content& content) {
  const std::string_view text = content.text;
  size_t at = 0;
  for (size_t i = 0; i < content.image_offsets.size(); ++i) {
    Text(text.substr(at, content.image_offsets[i] - at));
    Special(image_marker_);
    prompt_.images.push_back(content.images[i]);
    at = content.image_offsets[i];
  }
  Text(text.substr(at));
  const auto without_place =
      content.images.begin() + static_cast<std::ptrdiff_t>(content.image_offsets.size());
  prompt_.images.insert(prompt_.images.end(), without_place, content.images.end());
}

}  // namespace deepinfer
