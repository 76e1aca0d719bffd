// `deepinfer tokenize` and `deepinfer detokenize`: lines of text to lines of token ids and back.
#pragma once

#include <string>

namespace deepinfer {

struct TokenizeOptions {
  std::string model;      // checkpoint directory; either this or `tokenizer`
  std::string tokenizer;  // a tokenizer.json
  std::string input = "-";
  std::string output = "-";
  bool no_special = false;  // tokenize: special tokens in text are plain text
};

// Both return the exit status of the program: kExitOk, kExitFailure or kExitSomeLinesFailed.
int RunTokenize(const TokenizeOptions& options);
int RunDetokenize(const TokenizeOptions& options);

}  // namespace deepinfer
