// Reads a tokenizer file (Hugging Face `tokenizer.json`) with a byte-level BPE model into plain
// tables. Everything that would change the result and that this program does not implement is
// refused by name; only Tokenizer uses this.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "text/added_tokens.h"
#include "text/bpe.h"

namespace deepinfer {

struct TokenizerFile {
  std::vector<std::string> tokens;  // the bytes of every id; ids have no holes
  std::vector<bool> is_base;  // by id: made of bytes by the model; the others are only added tokens
  std::vector<AddedToken> added_tokens;
  std::vector<Merge> merges;  // pairs are distinct
  std::array<int32_t, 256> byte_ids{};
};

// Larger files are refused; the published one has 6.4 MB.
inline constexpr size_t kMaxTokenizerFileBytes = size_t{64} << 20;
// Longer contents of added tokens are refused: matching takes up to this many steps per byte of
// text.
inline constexpr size_t kMaxAddedTokenBytes = 1024;

// Errors: kInvalidArgument (broken or contradictory), kUnsupported (another kind of tokenizer).
Result<TokenizerFile> ParseTokenizerFile(std::string_view json);

}  // namespace deepinfer
