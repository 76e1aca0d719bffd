// `deepinfer generate`: text for a file of prompts, or for one prompt as it is generated. Formats:
// docs/generate.md.
#pragma once

#include <string>

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
};

// Returns the exit status of the program: kExitOk, kExitFailure, kExitSomeLinesFailed,
// kExitInterrupted or kExitBrokenPipe.
int RunGenerate(const GenerateOptions& options);

}  // namespace deepinfer
