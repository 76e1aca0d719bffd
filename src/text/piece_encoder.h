// Encodes runs of ordinary text: cuts them into pieces and finds the tokens of each piece, from the
// table of pieces that are one token, from a cache of recent pieces, or by merging.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"

namespace deepinfer {

class PieceEncoder {
 public:
  // `tokens` are the byte strings of all ids; those in `is_base` are the vocabulary of `bpe`, the
  // others are never produced. Every base token is encoded once here, to know which of them a piece
  // of the same bytes becomes: some can be reached only as a part of a longer piece.
  PieceEncoder(Bpe bpe, const std::vector<std::string>& tokens, const std::vector<bool>& is_base);

  // Appends the tokens of `text`, which must be valid UTF-8. `text_end` is the end of readable
  // memory, at or after the end of `text`. Thread-safe: the cache belongs to the calling thread.
  void Encode(std::string_view text, const char* text_end, std::vector<int32_t>* out) const;

 private:
  // Pieces of up to 15 bytes are compared as two integers: bytes 0-7, and bytes 8-14 with the
  // length on top.
  static constexpr size_t kMaxInlineBytes = 15;
  struct InlineEntry {
    uint64_t low;
    uint64_t high;  // 0: the slot is empty
    int32_t id;
  };
  struct LongEntry {
    uint32_t hash;
    int32_t id;  // negative: the slot is empty
    uint64_t offset;
    uint64_t size;
  };

  void EncodeInline(const char* piece, size_t size, const char* text_end,
                    std::vector<int32_t>* out) const;
  void EncodeLong(std::string_view piece, std::vector<int32_t>* out) const;
  void EncodeThroughCache(std::string_view piece, uint64_t hash, std::vector<int32_t>* out) const;

  Bpe bpe_;
  uint64_t serial_;  // tells the entries of different encoders in a thread's cache apart
  std::vector<InlineEntry> inline_table_;  // open addressing, a power of two, at most half full
  uint64_t inline_mask_ = 0;
  std::vector<LongEntry> long_table_;
  uint64_t long_mask_ = 0;
  std::string long_bytes_;
};

}  // namespace deepinfer
