// The token compression of the Engram hash: tokens whose text is the same up to case, accents and
// compatibility forms share one id. Derived from tokenizer.json alone. Model description,
// section 11.1.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/config.h"

namespace deepinfer {

struct TokenCompression {
  std::vector<int32_t> map;  // token id to compressed id, for ids 0 ... number of tokens - 1
  int64_t num_keys = 0;      // compressed ids are 0 ... num_keys - 1, in order of first appearance
};

// Compresses the vocabulary of a byte-level BPE tokenizer.json. Refuses files whose ids have holes
// or repeat.
Result<TokenCompression> CompressVocabulary(std::string_view tokenizer_json);

// The map for one model. The tokenizer must have vocab_size tokens and compress to exactly
// engram_compressed_vocab_size keys; with any other number every hash would be wrong, so anything
// else is refused.
Result<std::vector<int32_t>> EngramTokenMap(const ModelConfig& config,
                                            std::string_view tokenizer_json);

// The same from a file.
Result<std::vector<int32_t>> LoadEngramTokenMap(const ModelConfig& config,
                                                const std::string& tokenizer_path);

}  // namespace deepinfer
