// Task files of `deepinfer eval`: JSON lines, each a task (a prompt or conversation, what is
// expected, how the answer is scored) or a document that later tasks of the file share.
// docs/evaluation.md is the contract.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "apps/eval_scorer.h"
#include "apps/jsonl.h"
#include "base/error.h"
#include "base/json_value.h"
#include "deepinfer/llm.h"

namespace deepinfer {

struct EvalTask {
  std::string skill;
  std::optional<int64_t> context;  // the length that the author names; rows of the report
  std::string scorer_name;
  std::unique_ptr<const Scorer> scorer;
  JsonValue expected;
  Request request;
};

// One file, read line by line.
class EvalTaskReader {
 public:
  // `defaults`: sampling parameters that a task does not give.
  explicit EvalTaskReader(SamplingParams defaults) : defaults_(std::move(defaults)) {}

  // A task; null where the line is a document. Errors: kInvalidArgument with the field. `id` is
  // filled whenever the line has a usable one.
  Result<std::unique_ptr<EvalTask>> Read(std::string_view line, int64_t number,
                                         std::optional<LineId>* id);

 private:
  Status AddDocument(const JsonValue& line);
  Status InsertDocument(const std::string& name, JsonValue* line) const;

  SamplingParams defaults_;
  IdRegister ids_;
  std::unordered_map<std::string, std::string> documents_;  // text by name
};

}  // namespace deepinfer
