// What an evaluation found, by skill and context length.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace deepinfer {

class EvalReport {
 public:
  struct Row {
    int64_t tasks = 0;
    int64_t correct = 0;
    int64_t failed = 0;  // could not be run or read; not among the tasks
  };
  // Rows are in the order of skill and context; no context comes first.
  using Key = std::pair<std::string, std::optional<int64_t>>;

  void Add(const std::string& skill, std::optional<int64_t> context, bool correct);
  // A task that could not be run.
  void AddFailed(const std::string& skill, std::optional<int64_t> context);
  // A line that is no task.
  void AddUnreadable() {
    ++unreadable_;
  }

  Row Total() const;
  int64_t failed() const {
    return Total().failed + unreadable_;
  }
  // Lines with their ends: a row of names, one for each skill and context, the total.
  std::string Table() const;
  // {"rows": [{"skill", "context", "tasks", "correct", "accuracy", "failed"}, ...], "tasks",
  // "correct", "accuracy", "failed"}; accuracy is null without tasks.
  std::string Json() const;

 private:
  std::map<Key, Row> rows_;
  int64_t unreadable_ = 0;
};

}  // namespace deepinfer
