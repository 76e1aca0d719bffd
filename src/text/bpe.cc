#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/check.h"

namespace deepinfer {
namespace {

// Up to here repeated scans over the ranks beat a heap.
constexpr size_t kMaxShortPiece = 96;

inline uint64_t HashPair(int32_t left, int32_t right) {
  const uint64_t key = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  const uint64_t mixed = key * 0x9E3779B97F4A7C15u;
  return mixed ^ mixed >> 32;
}

}  // namespace

Bpe::Bpe(std::span<const Merge> merges, const std::array<int32_t, 256>& byte_ids)
    : byte_ids_(byte_ids), byte_pair_ranks_(256 * 256, kNoRank) {
  pairs_.assign(std::bit_ceil(merges.size() * 2 + 1), Pair{0, 0, kNoRank});
  pair_mask_ = pairs_.size() - 1;
  results_.reserve(merges.size());
  for (const Merge& merge : merges) {
    uint64_t slot = HashPair(merge.left, merge.right) & pair_mask_;
    while (pairs_[slot].rank != kNoRank) slot = (slot + 1) & pair_mask_;
    pairs_[slot] = Pair{merge.left, merge.right, static_cast<uint32_t>(results_.size())};
    results_.push_back(merge.result);
  }
  for (size_t first = 0; first < 256; ++first) {
    for (size_t second = 0; second < 256; ++second) {
      byte_pair_ranks_[first * 256 + second] = RankOf(byte_ids_[first], byte_ids_[second]);
    }
  }
}

inline uint32_t Bpe::RankOf(int32_t left, int32_t right) const {
  uint64_t slot = HashPair(left, right) & pair_mask_;
  while (true) {
    const Pair& pair = pairs_[slot];
    if (pair.rank == kNoRank || (pair.left == left && pair.right == right)) return pair.rank;
    slot = (slot + 1) & pair_mask_;
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
  uint32_t ranks[kMaxShortPiece];  // of the pair (i, i + 1); the last one is a sentinel
  size_t count = piece.size();
  if (count == 0) return;
  for (size_t i = 0; i < count; ++i) ids[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < count; ++i) {
    ranks[i] = byte_pair_ranks_[static_cast<uint8_t>(piece[i]) * size_t{256} +
                                static_cast<uint8_t>(piece[i + 1])];
  }
  ranks[count - 1] = kNoRank;
  while (count > 1) {
    uint32_t best = ranks[0];
    size_t at = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < best) {
        best = ranks[i];
        at = i;
      }
    }
    if (best == kNoRank) break;
    ids[at] = results_[best];
    --count;
    for (size_t i = at + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
    }
    ranks[at] = at + 1 < count ? RankOf(ids[at], ids[at + 1]) : kNoRank;
    if (at > 0) ranks[at - 1] = RankOf(ids[at - 1], ids[at]);
  }
  out->insert(out->end(), ids, ids + count);
}

void Bpe::EncodeLong(std::string_view piece, std::vector<int32_t>* out) const {
  // A doubly linked list of symbols by position, and a heap of candidates. Candidates are not removed when a merge changes
  // their pair: one that no longer has the rank of the pair at its position is skipped when it comes up.
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
        i + 1 < count ? byte_pair_ranks_[byte * size_t{256} + static_cast<uint8_t>(piece[i + 1])] : kNoRank;
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
    symbol.id = results_[rank];
    symbol.next = absorbed.next;
    absorbed.rank = kNoRank;
    if (symbol.next != none) symbols[symbol.next].previous = position;
    set_rank(position);
    if (symbol.previous != none) set_rank(symbol.previous);
  }
  for (uint32_t i = 0; i != none; i = symbols[i].next) out->push_back(symbols[i].id);
}

}  // namespace deepinfer
