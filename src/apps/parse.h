// `deepinfer parse`: lines with answers of the model to lines with the messages that they are.
#pragma once

#include <string>

namespace deepinfer {

struct ParseOptions {
  std::string model;      // checkpoint directory; this or `tokenizer` if lines have ids
  std::string tokenizer;  // a tokenizer.json
  std::string input = "-";
  std::string output = "-";
  bool toolkit_policy = false;
};

// Returns the exit status of the program: kExitOk, kExitFailure or kExitSomeLinesFailed.
int RunParse(const ParseOptions& options);

}  // namespace deepinfer
