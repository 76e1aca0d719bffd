// Results of tools are put into the order of their calls. Each profile and dialect has its own idea
// of which results are looked at; this is what they share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "deepinfer/chat.h"

namespace deepinfer {

// Call id -> position in the list of calls. The calls must outlive it.
class CallPositions {
 public:
  enum class Repeated { kFirst, kLast };  // which place of an id that occurs twice counts

  CallPositions(const std::vector<ToolCall>& calls, Repeated repeated) {
    for (size_t i = 0; i < calls.size(); ++i) {
      if (repeated == Repeated::kLast) {
        positions_[calls[i].id] = i;
      } else {
        positions_.emplace(calls[i].id, i);
      }
    }
  }

  size_t Of(std::string_view id, size_t unknown) const {
    const auto found = positions_.find(id);
    return found == positions_.end() ? unknown : found->second;
  }

 private:
  std::unordered_map<std::string_view, size_t> positions_;
};

// Sorts the items at these ascending places among each other, stably, by `position_of`.
template <typename Item, typename PositionOf>
void SortAtPlaces(std::vector<Item>* items, const std::vector<size_t>& places,
                  PositionOf position_of) {
  std::vector<Item> sorted;
  for (const size_t place : places) sorted.push_back((*items)[place]);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const Item& a, const Item& b) { return position_of(a) < position_of(b); });
  for (size_t i = 0; i < places.size(); ++i) (*items)[places[i]] = sorted[i];
}

}  // namespace deepinfer
