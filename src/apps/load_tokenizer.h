// The tokenizer that a command's options --model and --tokenizer name.
#pragma once

#include <optional>
#include <string>

#include "text/tokenizer.h"

namespace deepinfer {

// `tokenizer`: the file itself; empty: that of the checkpoint directory `model`.
inline std::string TokenizerPath(const std::string& model, const std::string& tokenizer) {
  return tokenizer.empty() ? model + "/tokenizer.json" : tokenizer;
}

// Nullopt if both are empty. Errors: as Tokenizer::Load.
inline Result<std::optional<Tokenizer>> LoadTokenizer(const std::string& model,
                                                      const std::string& tokenizer) {
  if (model.empty() && tokenizer.empty()) return std::optional<Tokenizer>();
  DI_ASSIGN_OR_RETURN(Tokenizer loaded, Tokenizer::Load(TokenizerPath(model, tokenizer)));
  return std::optional<Tokenizer>(std::move(loaded));
}

}  // namespace deepinfer
