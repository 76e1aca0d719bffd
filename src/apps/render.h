// `deepinfer render`: lines with requests or conversations to lines with prompts.
#pragma once

#include <string>

namespace deepinfer {

struct RenderOptions {
  std::string model;      // checkpoint directory, for its tokenizer; empty: see `tokenizer`
  std::string tokenizer;  // a tokenizer.json; both empty: prompts without ids
  std::string input = "-";
  std::string output = "-";
  std::string profile = "recipe";  // or "checkpoint"
  // "v4.1" or "v4"; empty: the tokenizer's, v4.1 without one.
  std::string dialect;
};

// Returns the exit status of the program: kExitOk, kExitFailure or kExitSomeLinesFailed.
int RunRender(const RenderOptions& options);

}  // namespace deepinfer
