// The tokenizer that a command's options --model and --tokenizer name.
#pragma once

#include <optional>
#include <string>

#include "text/tokenizer.h"

namespace deepinfer {

// `tokenizer`: the file itself; else that of the checkpoint directory `model`; nullopt if both are
// empty. Errors: as Tokenizer::Load.
inline Result<std::optional<Tokenizer>> LoadTokenizer(const std::string& model,
                                                      const std::string& tokenizer) {
  if (model.empty() && tokenizer.empty()) return std::optional<Tokenizer>();
  DI_ASSIGN_OR_RETURN(Tokenizer loaded,
                      Tokenizer::Load(tokenizer.empty() ? model + "/tokenizer.json" : tokenizer));
  return std::optional<Tokenizer>(std::move(loaded));
}

}  // namespace deepinfer
