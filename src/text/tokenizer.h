// The tokenizer of a checkpoint: text to token ids and back, from its `tokenizer.json` (byte-level
// BPE with the published pre-tokenizer). Immutable after loading; all functions may be called from
// any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "text/added_tokens.h"
#include "text/piece_encoder.h"

namespace deepinfer {

struct TokenizerFile;

struct EncodeOptions {
  // Strings of added tokens become their ids. Off: they are text like any other, as text from users
  // must be.
  bool parse_special = true;
  // Puts the beginning-of-sentence id in front.
  bool add_bos = false;
};

// Longer texts are refused: merging a piece takes about 50 bytes of memory per byte.
inline constexpr size_t kMaxTextBytes = size_t{256} << 20;

class Tokenizer {
 public:
  // Errors: those of MappedFile::Open and of Parse, with the path in front.
  static Result<Tokenizer> Load(const std::string& path);
  // Errors: kInvalidArgument (broken or contradictory file), kUnsupported (a tokenizer of another
  // kind).
  static Result<Tokenizer> Parse(std::string_view json);

  // Errors: kInvalidArgument (not UTF-8, with the offset of the first bad byte; too long),
  // kUnsupported (add_bos, but the file has no such token). The time is linear in the size of the
  // text, up to a logarithm of the longest piece.
  Result<std::vector<int32_t>> Encode(std::string_view text,
                                      const EncodeOptions& options = {}) const;
  // The same, appended to `ids`, which is unchanged after an error.
  Status EncodeTo(std::string_view text, const EncodeOptions& options,
                  std::vector<int32_t>* ids) const;

  // The text of `ids`; invalid UTF-8 becomes U+FFFD. Ids outside of the vocabulary decode to
  // nothing, like ids flagged special if `skip_special`.
  std::string Decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The bytes of one id, not always whole characters; empty for ids outside of the vocabulary.
  // Valid as long as the tokenizer is.
  std::string_view TokenBytes(int32_t id) const {
    if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(vocab_size())) return {};
    const auto index = static_cast<size_t>(id);
    return std::string_view(bytes_).substr(offsets_[index], offsets_[index + 1] - offsets_[index]);
  }

  // The id of the added token with this content.
  std::optional<int32_t> IdOf(std::string_view content) const {
    return added_tokens_.IdOf(content);
  }

  // Ids are 0 ... vocab_size() - 1, without holes.
  int32_t vocab_size() const {
    return static_cast<int32_t>(offsets_.size()) - 1;
  }
  // Whether the file flags `id` as special. Chat markers like <think> are added tokens, but not
  // special.
  bool is_special(int32_t id) const {
    return static_cast<uint32_t>(id) < special_.size() && special_[static_cast<size_t>(id)];
  }

  // The added tokens of these roles, by their published names.
  std::optional<int32_t> bos_id() const {
    return bos_id_;
  }
  std::optional<int32_t> eos_id() const {
    return eos_id_;
  }
  std::optional<int32_t> pad_id() const {
    return pad_id_;
  }

 private:
  explicit Tokenizer(TokenizerFile file);

  AddedTokenMatcher added_tokens_;
  PieceEncoder pieces_;
  std::string bytes_;              // of all tokens, one after the other
  std::vector<uint32_t> offsets_;  // [vocab_size + 1] into bytes_
  std::vector<bool> special_;
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> eos_id_;
  std::optional<int32_t> pad_id_;
};

}  // namespace deepinfer
