// Byte-pair encoding proper: turns the bytes of one piece into token ids by merging neighbours in the order of the merge
// list. Knows nothing about added tokens or pieces.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace deepinfer {

// The neighbours `left` and `right` become `result`. A merge's rank is its index in the list.
struct Merge {
  int32_t left;
  int32_t right;
  int32_t result;
};

class Bpe {
 public:
  // The pairs of `merges` must be distinct. `byte_ids` are the tokens of single bytes.
  Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids);

  // Appends the tokens of `piece`: repeatedly merges the pair of neighbours with the lowest rank, the leftmost one first,
  // until no pair of the list is left. Takes O(n log n) time and about 50 bytes of memory per byte of a long piece.
  // At most 2^31 bytes.
  void Encode(std::string_view piece, std::vector<int32_t>* out) const;

  int32_t byte_id(uint8_t byte) const {
    return byte_ids_[byte];
  }

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;

  struct Pair {
    int32_t left;
    int32_t right;
    uint32_t rank;  // kNoRank: the slot is empty
  };

  uint32_t RankOf(int32_t left, int32_t right) const;
  void EncodeShort(std::string_view piece, std::vector<int32_t>* out) const;
  void EncodeLong(std::string_view piece, std::vector<int32_t>* out) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<uint32_t> byte_pair_ranks_;  // [first byte * 256 + second byte]
  std::vector<int32_t> results_;           // by rank
  std::vector<Pair> pairs_;                // open addressing; a power of two, at most half full
  uint64_t pair_mask_ = 0;
};

}  // namespace deepinfer
