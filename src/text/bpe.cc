#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/check.h"

namespace deepinfer {
namespace {

// Up to here repeated scans over the ranks beat a heap.
constexpr size_t kMaxShortPiece = 96;

// Multiplicative hashing: the top bits of the product depend on all bits of the key.
constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15u;

}  // namespace

Bpe::Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids)
    : byte_ids_(byte_ids), byte_pair_ranks_(256 * 256, kNoRank) {
  DI_CHECK_LE(merges.size(), kMaxMerges);
  const size_t num_slots = std::bit_ceil(merges.size() * 4 + 2);
  slots_.assign(num_slots, kEmptySlot);
  slot_shift_ = 64 - std::countr_zero(num_slots);
  results_.reserve(merges.size());
  if (!merges.empty()) first_result_ = merges[0].result;
  for (const Merge& merge : merges) {
    DI_CHECK_LT(static_cast<uint32_t>(merge.left), kMaxBpeTokens);
    DI_CHECK_LT(static_cast<uint32_t>(merge.right), kMaxBpeTokens);
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(merge.left)} << kIdBits | static_cast<uint32_t>(merge.right);
    uint64_t slot = key * kHashFactor >> slot_shift_;
    while (slots_[slot] != kEmptySlot) slot = (slot + 1) & (num_slots - 1);
    const size_t rank = results_.size();
    slots_[slot] = key << kRankBits | rank;
    if (merge.result != first_result_ + static_cast<int32_t>(rank)) results_are_sequential_ = false;
    results_.push_back(merge.result);
  }
  for (size_t first = 0; first < 256; ++first) {
    for (size_t second = 0; second < 256; ++second) {
      byte_pair_ranks_[first * 256 + second] = RankOf(byte_ids_[first], byte_ids_[second]);
    }
  }
}

inline uint32_t Bpe::RankOf(int32_t left, int32_t right) const {
  const uint64_t key =
      uint64_t{static_cast<uint32_t>(left)} << kIdBits | static_cast<uint32_t>(right);
  uint64_t slot = key * kHashFactor >> slot_shift_;
  while (true) {
    const uint64_t found = slots_[slot];
    if (found >> kRankBits == key)
      return static_cast<uint32_t>(found & ((uint64_t{1} << kRankBits) - 1));
    if (found == kEmptySlot) return kNoRank;
    slot = (slot + 1) & (slots_.size() - 1);
  }
}

void Bpe::Encode(std::string_view piece, std::vector<int32_t>* out) const {
  DI_CHECK_LE(piece.size(), size_t{1} << 31);
  if (piece.size() <= kMaxShortPiece) {
    EncodeShort(piece, out);
  } else {
    EncodeLong(piece, out);
  }
}

void Bpe::EncodeShort(std::string_view piece, std::vector<int32_t>* out) const {
  int32_t ids[kMaxShortPiece];
  uint64_t
      ranks[kMaxShortPiece];  // of the pair (i, i + 1), shifted up by 32 to leave room for i below
  size_t count = piece.size();
  if (count == 0) return;
  constexpr uint64_t kNone = uint64_t{kNoRank} << 32;
  for (size_t i = 0; i < count; ++i) ids[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < count; ++i) {
    ranks[i] = uint64_t{byte_pair_ranks_[static_cast<uint8_t>(piece[i]) * size_t{256} +
                                         static_cast<uint8_t>(piece[i + 1])]}
               << 32;
  }
  ranks[count - 1] = kNone;
  while (count > 1) {
    // The minimum of rank and position together needs no branches, which could not be predicted.
    uint64_t best = kNone;
    for (size_t i = 0; i + 1 < count; ++i) best = std::min(best, ranks[i] | i);
    if (best >= kNone) break;
    const size_t at = best & UINT32_MAX;
    ids[at] = ResultOf(static_cast<uint32_t>(best >> 32));
    --count;
    for (size_t i = at + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
    }
    ranks[at] = at + 1 < count ? uint64_t{RankOf(ids[at], ids[at + 1])} << 32 : kNone;
    if (at > 0) ranks[at - 1] = uint64_t{RankOf(ids[at - 1], ids[at])} << 32;
  }
  out->insert(out->end(), ids, ids + count);
}

void Bpe::EncodeLong(std::string_view piece, std::vector<int32_t>* out) const {
  // A doubly linked list of symbols by position, and a heap of candidates. Candidates are not
  // removed when a merge changes their pair: one that no longer has the rank of the pair at its
  // position is skipped when it comes up.
  struct Symbol {
    int32_t id;
    uint32_t previous;
    uint32_t next;
    uint32_t rank;  // of the pair with the next symbol; kNoRank also for merged-away symbols
  };
  const auto count = static_cast<uint32_t>(piece.size());
  const uint32_t none = count;
  std::vector<Symbol> symbols(count);
  std::vector<uint64_t> heap;  // rank << 32 | position: the lowest rank first, then the leftmost
  heap.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(piece[i]);
    const uint32_t rank =
        i + 1 < count ? byte_pair_ranks_[byte * size_t{256} + static_cast<uint8_t>(piece[i + 1])]
                      : kNoRank;
    symbols[i] = Symbol{byte_ids_[byte], i == 0 ? none : i - 1, i + 1, rank};
    if (rank != kNoRank) heap.push_back(uint64_t{rank} << 32 | i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto set_rank = [&](uint32_t position) {
    Symbol& symbol = symbols[position];
    symbol.rank = symbol.next == none ? kNoRank : RankOf(symbol.id, symbols[symbol.next].id);
    if (symbol.rank != kNoRank) {
      heap.push_back(uint64_t{symbol.rank} << 32 | position);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(heap.back() >> 32);
    const auto position = static_cast<uint32_t>(heap.back());
    heap.pop_back();
    Symbol& symbol = symbols[position];
    if (symbol.rank != rank) continue;
    Symbol& absorbed = symbols[symbol.next];
    symbol.id = ResultOf(rank);
    symbol.next = absorbed.next;
    absorbed.rank = kNoRank;
    if (symbol.next != none) symbols[symbol.next].previous = position;
    set_rank(position);
    if (symbol.previous != none) set_rank(symbol.previous);
  }
  for (uint32_t i = 0; i != none; i = symbols[i].next) out->push_back(symbols[i].id);
}

}  // namespace deepinfer
