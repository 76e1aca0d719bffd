#include "text/marker_matcher.h"

#include <utility>

#include "base/check.h"

namespace deepinfer {

MarkerSet::MarkerSet(std::vector<Marker> markers) {
  patterns_.reserve(markers.size());
  for (Marker& marker : markers) {
    const std::string& text = marker.text;
    DI_CHECK(!text.empty());
    std::vector<uint32_t> borders(text.size() + 1, 0);
    for (uint32_t i = 1, border = 0; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = borders[border];
      if (text[i] == text[border]) ++border;
      borders[i + 1] = border;
    }
    starts_[static_cast<uint8_t>(text[0])] = true;
    if (marker.newlines_before) starts_['\n'] = true;
    patterns_.push_back({std::move(marker), std::move(borders)});
  }
}

void MarkerMatcher::Watch(const MarkerSet& set) {
  DI_CHECK(held() == 0);
  set_ = &set;
  progress_.assign(set.size(), Progress());
  first_ = true;
  idle_ = true;
}

size_t MarkerMatcher::Advance(const MarkerSet::Pattern& pattern, char byte, bool special,
                              Progress* progress) const {
  const Marker& marker = pattern.marker;
  if (marker.only_first) return first_ && byte == marker.text[0] ? 1 : 0;
  uint32_t matched = progress->matched;
  if (matched == 0 && marker.newlines_before && byte == '\n') {
    ++progress->newlines;
    return 0;
  }
  while (matched > 0 && byte != marker.text[matched]) {
    matched = pattern.borders[matched];
    progress->newlines = 0;
  }
  if (matched == 0) progress->spoilt = false;
  if (byte == marker.text[matched]) {
    if (!special && matched >= marker.special_begin && matched < marker.special_end)
      progress->spoilt = true;
    ++matched;
  } else {
    progress->newlines = 0;
  }
  if (matched == marker.text.size()) {
    if (!progress->spoilt) return progress->newlines + matched;
    matched = pattern.borders[matched];
    progress->newlines = 0;
  }
  progress->matched = matched;
  return 0;
}

MarkerMatcher::Step MarkerMatcher::Scan(std::string_view input, bool special) {
  const char* const begin = input.data();
  const char* const end = begin + input.size();
  const char* p = begin;
  while (p != end) {
    if (idle_) {
      const char* const from = p;
      while (p != end && !set_->starts_[static_cast<uint8_t>(*p)]) ++p;
      if (p != from) first_ = false;
      if (p == end) break;
    }
    const char byte = *p;
    ++p;
    bool idle = true;
    for (size_t i = 0; i < progress_.size(); ++i) {
      const size_t length = Advance(set_->patterns_[i], byte, special, &progress_[i]);
      if (length > 0) return {static_cast<size_t>(p - begin), static_cast<int>(i), length};
      idle = idle && progress_[i].matched == 0 && progress_[i].newlines == 0;
    }
    idle_ = idle;
    first_ = false;
  }
  return {input.size(), kNone, 0};
}

size_t MarkerMatcher::InDoubt() const {
  if (idle_) return 0;
  size_t in_doubt = 0;
  for (const Progress& progress : progress_) {
    if (!progress.spoilt) in_doubt = std::max(in_doubt, progress.newlines + progress.matched);
  }
  return in_doubt;
}

void MarkerMatcher::Hold(std::string_view bytes) {
  // Moves what is held to the front only when that is paid for by what has been released.
  if (held_begin_ == held_.size()) {
    held_.clear();
    held_begin_ = 0;
  } else if (held_begin_ > 64 && held_begin_ > held_.size() / 2) {
    held_.erase(0, held_begin_);
    held_begin_ = 0;
  }
  held_.append(bytes);
}

}  // namespace deepinfer
