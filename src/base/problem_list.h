// Collects every problem of an input, so that one message names them all instead of one per
// attempt. The printed lines are capped; the total is always given.
#pragma once

#include <fmt/core.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace deepinfer {

class ProblemList {
 public:
  explicit ProblemList(size_t max_lines = 40) : max_lines_(max_lines) {}

  // One problem, a sentence. `field` of the first problem that has one becomes the field of the
  // error.
  void Add(std::string sentence, std::string field = {}) {
    ++count_;
    if (field_.empty()) field_ = std::move(field);
    if (lines_.size() < max_lines_) lines_.push_back(std::move(sentence));
  }
  bool empty() const {
    return count_ == 0;
  }
  size_t size() const {
    return count_;
  }

  // "summary" and one line per problem; a single problem follows its summary on the same line.
  tl::unexpected<Error> ToError(Code code, const std::string& summary) const {
    std::string message = summary + ":";
    if (count_ == 1) {
      message += " " + lines_[0];
    } else {
      for (const std::string& line : lines_) message += "\n  - " + line;
      if (count_ > lines_.size())
        message += fmt::format("\n  - ... and {} more", count_ - lines_.size());
    }
    return Fail(code, std::move(message), field_);
  }

 private:
  size_t max_lines_;
  size_t count_ = 0;
  std::string field_;
  std::vector<std::string> lines_;
};

}  // namespace deepinfer
