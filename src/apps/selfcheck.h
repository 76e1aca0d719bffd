// `deepinfer selfcheck`: proves on this machine that nothing that makes generation faster changes
// an answer.
#pragma once

#include <string>

#include "deepinfer/llm.h"
#include "deepinfer/selfcheck.h"

namespace deepinfer {

struct SelfcheckCommandOptions {
  LLMOptions llm;
  SelfcheckOptions check;
  std::string json;  // file for the report; empty: none
};

// Exit status 0: every answer was the same; 5: a difference was found and reported.
int RunSelfcheckCommand(const SelfcheckCommandOptions& options);

}  // namespace deepinfer
