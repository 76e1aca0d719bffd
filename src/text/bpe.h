// Byte-pair encoding proper: turns the bytes of one piece into token ids by merging neighbours in
// the order of the merge list. Knows nothing about added tokens or pieces.
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

// Limits of the packed table of pairs.
inline constexpr size_t kMaxBpeTokens = size_t{1} << 20;
inline constexpr size_t kMaxMerges = (size_t{1} << 24) - 1;

class Bpe {
 public:
  // The pairs of `merges` must be distinct, their ids 0 ... kMaxBpeTokens - 1, and there can be
  // kMaxMerges at most. `byte_ids` are the tokens of single bytes.
  Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids);

  // Appends the tokens of `piece`: repeatedly merges the pair of neighbours with the lowest rank,
  // the leftmost one first, until no pair of the list is left. Takes O(n log n) time and about 50
  // bytes of memory per byte of a long piece. At most 2^31 bytes.
  void Encode(std::string_view piece, std::vector<int32_t>* out) const;

  int32_t byte_id(uint8_t byte) const {
    return byte_ids_[byte];
  }

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;
  // A slot of the table of pairs: left id (20 bits), right id (20 bits), rank (24 bits). Small
  // slots matter: text keeps hitting the whole table at random, and speed is that of the caches.
  static constexpr int kRankBits = 24;
  static constexpr int kIdBits = 20;
  static constexpr uint64_t kEmptySlot = UINT64_MAX;  // its rank is above kMaxMerges

  uint32_t RankOf(int32_t left, int32_t right) const;
  int32_t ResultOf(uint32_t rank) const {
    return results_are_sequential_ ? first_result_ + static_cast<int32_t>(rank) : results_[rank];
  }
  void EncodeShort(std::string_view piece, std::vector<int32_t>* out) const;
  void EncodeLong(std::string_view piece, std::vector<int32_t>* out) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<uint32_t> byte_pair_ranks_;  // [first byte * 256 + second byte]
  std::vector<int32_t> results_;           // by rank
  // In the published vocabulary every merge makes the next id, which saves a look-up.
  bool results_are_sequential_ = true;
  int32_t first_result_ = 0;
  std::vector<uint64_t> slots_;  // open addressing; a power of two, at most a quarter full
  int slot_shift_ = 0;           // the top bits of a hash choose the slot
};

}  // namespace deepinfer
