// `deepinfer eval`: runs tasks whose answers are known and reports how many are right, by skill and
// context length. docs/evaluation.md is the contract.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "deepinfer/llm.h"

namespace deepinfer {

struct EvalOptions {
  LLMOptions llm;
  std::string suite;               // of the checkpoint; either this or `tasks`
  std::vector<std::string> tasks;  // files of JSON lines
  std::string output;              // file for every answer and its verdict; empty: none
  std::string json;                // file for the report; empty: none
  int64_t limit = 0;               // tasks of each skill and context; 0: all
  int64_t max_tokens = 512;        // of an answer, unless the task says
  uint64_t seed = 0;               // decides which tasks a limit takes
  bool show_progress = true;
};

// The files of a suite, in the order of their names: MODEL/eval/SUITE/*.jsonl. Errors: kNotFound,
// with the suites that there are; kInvalidArgument for a name that is none.
Result<std::vector<std::string>> SuiteFiles(const std::string& model_dir, const std::string& suite);

// Exit status: kExitOk when every task was run, whatever the answers; kExitSomeLinesFailed when a
// line was no task or a task could not be run; kExitFailure, kExitInterrupted, kExitBrokenPipe.
int RunEval(const EvalOptions& options);

}  // namespace deepinfer
