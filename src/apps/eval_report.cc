#include "apps/eval_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace deepinfer {
namespace {

std::string Percent(const EvalReport::Row& row) {
  if (row.tasks == 0) return "-";
  return fmt::format("{:.1f} %",
                     100.0 * static_cast<double>(row.correct) / static_cast<double>(row.tasks));
}

nlohmann::ordered_json Counts(const EvalReport::Row& row) {
  nlohmann::ordered_json json = {{"tasks", row.tasks}, {"correct", row.correct}};
  json["accuracy"] = nullptr;
  if (row.tasks > 0)
    json["accuracy"] = static_cast<double>(row.correct) / static_cast<double>(row.tasks);
  return json;
}

}  // namespace

void EvalReport::Add(const std::string& skill, std::optional<int64_t> context, bool correct) {
  Row& row = rows_[{skill, context}];
  ++row.tasks;
  row.correct += correct ? 1 : 0;
}

void EvalReport::AddFailed(const std::string& skill, std::optional<int64_t> context) {
  ++rows_[{skill, context}].failed;
}

EvalReport::Row EvalReport::Total() const {
  Row total;
  for (const auto& [key, row] : rows_) {
    total.tasks += row.tasks;
    total.correct += row.correct;
    total.failed += row.failed;
  }
  return total;
}

std::string EvalReport::Table() const {
  size_t width = 5;
  for (const auto& [key, row] : rows_) width = std::max(width, key.first.size());
  const bool has_failed = failed() > 0;
  std::string table;
  const auto add = [&](std::string_view skill, std::string_view context, std::string_view tasks,
                       std::string_view correct, std::string_view accuracy,
                       std::string_view failed) {
    table += fmt::format("{:<{}}  {:>8}  {:>6}  {:>7}  {:>8}", skill, width, context, tasks,
                         correct, accuracy);
    table += has_failed ? fmt::format("  {:>6}\n", failed) : "\n";
  };
  add("skill", "context", "tasks", "correct", "accuracy", "failed");
  const auto add_row = [&](const std::string& skill, const std::string& context, const Row& row) {
    add(skill, context, fmt::format("{}", row.tasks), fmt::format("{}", row.correct), Percent(row),
        fmt::format("{}", row.failed));
  };
  for (const auto& [key, row] : rows_)
    add_row(key.first, key.second.has_value() ? fmt::format("{}", *key.second) : "-", row);
  Row total = Total();
  total.failed = failed();
  add_row("total", "", total);
  return table;
}

std::string EvalReport::Json() const {
  nlohmann::ordered_json json = {{"rows", nlohmann::ordered_json::array()}};
  for (const auto& [key, row] : rows_) {
    nlohmann::ordered_json line = {{"skill", key.first}, {"context", nullptr}};
    if (key.second.has_value()) line["context"] = *key.second;
    line.update(Counts(row));
    line["failed"] = row.failed;
    json["rows"].push_back(std::move(line));
  }
  json.update(Counts(Total()));
  json["failed"] = failed();
  return json.dump(2) + "\n";
}

}  // namespace deepinfer
