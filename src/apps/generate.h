// `deepinfer generate`: text for a file of prompts, or for one prompt as it is generated. Formats:
// docs/generate.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "apps/reports.h"
#include "deepinfer/llm.h"

namespace deepinfer {

struct GenerateOptions {
  LLMOptions llm;
  std::string input;  // JSON lines; "-" is the standard input. Either this or `prompt`
  std::string output = "-";
  std::string prompt;                  // prints its completion
  bool chat = false;                   // `prompt` is a user's message instead of plain text
  std::string sampling_params = "{}";  // JSON; what lines do not give
  bool show_progress = true;
  ReportOptions reports;

  // Of jobs (`input`).
  bool resume = false;           // continue what a journal beside the output has
  bool overwrite = false;        // begin anew although there is a journal
  std::optional<uint64_t> seed;  // lines that give none get theirs from it; absent: a fresh one
  std::optional<int64_t> max_errors;  // stop when more lines have failed
  bool with_timings = true;
  std::string resume_command;  // what continues this job, for messages
};

// Returns the exit status of the program: kExitOk, kExitFailure, kExitSomeLinesFailed,
// kExitTooManyErrors, kExitInterrupted or kExitBrokenPipe.
int RunGenerate(const GenerateOptions& options);

}  // namespace deepinfer
