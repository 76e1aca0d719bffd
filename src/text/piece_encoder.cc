#include "text/piece_encoder.h"

#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "text/pre_tokenizer.h"

namespace deepinfer {
namespace {

static_assert(std::endian::native == std::endian::little,
              "Inline keys are loaded as little-endian integers.");

inline uint64_t MultiplyFold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t HashInline(uint64_t low, uint64_t high) {
  return MultiplyFold(low ^ 0xA0761D6478BD642Fu, high ^ 0xE7037ED1A0B428DBu);
}

inline uint64_t Load64(const char* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// At least 16 bytes.
uint64_t HashLong(std::string_view bytes) {
  uint64_t hash = bytes.size() * 0x8EBC6AF09C88C6E3u;
  size_t at = 0;
  for (; at + 16 < bytes.size(); at += 16) {
    hash = MultiplyFold(Load64(&bytes[at]) ^ 0xA0761D6478BD642Fu, Load64(&bytes[at + 8]) ^ hash);
  }
  const char* tail = bytes.data() + bytes.size() - 16;
  return MultiplyFold(Load64(tail) ^ 0xE7037ED1A0B428DBu, Load64(tail + 8) ^ hash);
}

struct InlineMask {
  uint64_t low;
  uint64_t high;
  uint64_t size;  // in the top byte
};

constexpr std::array<InlineMask, 16> MakeInlineMasks() {
  std::array<InlineMask, 16> masks{};
  for (size_t size = 0; size < 16; ++size) {
    masks[size].low = size >= 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * size) - 1;
    masks[size].high = size > 8 ? (uint64_t{1} << 8 * (size - 8)) - 1 : 0;
    masks[size].size = uint64_t{size} << 56;
  }
  return masks;
}
constexpr std::array<InlineMask, 16> kInlineMasks = MakeInlineMasks();

struct InlineKey {
  uint64_t low;
  uint64_t high;
};

inline InlineKey MakeInlineKey(const char* piece, size_t size, const char* text_end) {
  const InlineMask& mask = kInlineMasks[size];
  uint64_t low;
  uint64_t high;
  if (text_end - piece >= 16) {
    low = Load64(piece);
    high = Load64(piece + 8);
  } else {
    char padded[16] = {};
    std::memcpy(padded, piece, size);
    low = Load64(padded);
    high = Load64(padded + 8);
  }
  return {low & mask.low, (high & mask.high) | mask.size};
}

// A thread's recent pieces of more than one token. Direct-mapped: a new piece replaces the one in
// its slot, so that the size is fixed (512 KiB) and no text can make it slow.
constexpr size_t kCacheEntries = 4096;
constexpr size_t kMaxCachedBytes = 48;
constexpr size_t kMaxCachedIds = 14;
struct CacheEntry {
  uint64_t hash = 0;
  uint64_t serial = 0;  // of the encoder; 0: empty
  uint32_t size = 0;
  uint32_t count = 0;
  char bytes[kMaxCachedBytes] = {};
  int32_t ids[kMaxCachedIds] = {};
};
static_assert(sizeof(CacheEntry) == 128);

std::unique_ptr<std::array<CacheEntry, kCacheEntries>>& ThreadCache() {
  thread_local std::unique_ptr<std::array<CacheEntry, kCacheEntries>> cache;
  return cache;
}

uint64_t NextSerial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

PieceEncoder::PieceEncoder(Bpe bpe, const std::vector<std::string>& tokens,
                           const std::vector<bool>& is_base)
    : bpe_(std::move(bpe)), serial_(NextSerial()) {
  std::vector<int32_t> single;  // tokens that a piece of the same bytes becomes
  std::vector<int32_t> ids;
  size_t num_inline = 0;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!is_base[id]) continue;
    ids.clear();
    bpe_.Encode(tokens[id], &ids);
    if (ids.size() != 1 || ids[0] != static_cast<int32_t>(id)) continue;
    single.push_back(ids[0]);
    if (tokens[id].size() <= kMaxInlineBytes) ++num_inline;
  }
  inline_table_.assign(std::bit_ceil(num_inline * 2 + 1), InlineEntry{0, 0, 0});
  inline_mask_ = inline_table_.size() - 1;
  long_table_.assign(std::bit_ceil((single.size() - num_inline) * 2 + 1), LongEntry{0, -1, 0, 0});
  long_mask_ = long_table_.size() - 1;
  for (const int32_t id : single) {
    const std::string& bytes = tokens[static_cast<size_t>(id)];
    if (bytes.size() <= kMaxInlineBytes) {
      const InlineKey key = MakeInlineKey(bytes.data(), bytes.size(), bytes.data() + bytes.size());
      uint64_t slot = HashInline(key.low, key.high) & inline_mask_;
      while (inline_table_[slot].high != 0) slot = (slot + 1) & inline_mask_;
      inline_table_[slot] = InlineEntry{key.low, key.high, id};
    } else {
      const uint64_t hash = HashLong(bytes);
      uint64_t slot = hash & long_mask_;
      while (long_table_[slot].id >= 0) slot = (slot + 1) & long_mask_;
      long_table_[slot] =
          LongEntry{static_cast<uint32_t>(hash >> 32), id, long_bytes_.size(), bytes.size()};
      long_bytes_ += bytes;
    }
  }
}

void PieceEncoder::Encode(std::string_view text, const char* text_end,
                          std::vector<int32_t>* out) const {
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) {
    const char* next = EndOfPiece(p, end);
    const auto size = static_cast<size_t>(next - p);
    if (size <= kMaxInlineBytes) {
      EncodeInline(p, size, text_end, out);
    } else {
      EncodeLong({p, size}, out);
    }
    p = next;
  }
}

inline void PieceEncoder::EncodeInline(const char* piece, size_t size, const char* text_end,
                                       std::vector<int32_t>* out) const {
  if (size == 1) {
    out->push_back(bpe_.byte_id(static_cast<uint8_t>(*piece)));
    return;
  }
  const InlineKey key = MakeInlineKey(piece, size, text_end);
  const uint64_t hash = HashInline(key.low, key.high);
  uint64_t slot = hash & inline_mask_;
  while (inline_table_[slot].high != 0) {
    const InlineEntry& entry = inline_table_[slot];
    if (entry.low == key.low && entry.high == key.high) {
      out->push_back(entry.id);
      return;
    }
    slot = (slot + 1) & inline_mask_;
  }
  EncodeThroughCache({piece, size}, hash, out);
}

void PieceEncoder::EncodeLong(std::string_view piece, std::vector<int32_t>* out) const {
  const uint64_t hash = HashLong(piece);
  uint64_t slot = hash & long_mask_;
  while (long_table_[slot].id >= 0) {
    const LongEntry& entry = long_table_[slot];
    if (entry.hash == static_cast<uint32_t>(hash >> 32) && entry.size == piece.size() &&
        std::memcmp(long_bytes_.data() + entry.offset, piece.data(), piece.size()) == 0) {
      out->push_back(entry.id);
      return;
    }
    slot = (slot + 1) & long_mask_;
  }
  if (piece.size() <= kMaxCachedBytes) {
    EncodeThroughCache(piece, hash, out);
  } else {
    bpe_.Encode(piece, out);
  }
}

void PieceEncoder::EncodeThroughCache(std::string_view piece, uint64_t hash,
                                      std::vector<int32_t>* out) const {
  DI_DCHECK(piece.size() <= kMaxCachedBytes);
  auto& cache = ThreadCache();
  if (cache == nullptr) cache = std::make_unique<std::array<CacheEntry, kCacheEntries>>();
  // The low bits chose the slot of the table; the cache uses others.
  CacheEntry& entry = (*cache)[hash >> 40 & (kCacheEntries - 1)];
  if (entry.hash == hash && entry.serial == serial_ && entry.size == piece.size() &&
      std::memcmp(entry.bytes, piece.data(), piece.size()) == 0) {
    out->insert(out->end(), entry.ids, entry.ids + entry.count);
    return;
  }
  const size_t before = out->size();
  bpe_.Encode(piece, out);
  const size_t count = out->size() - before;
  if (count > kMaxCachedIds) return;
  entry.hash = hash;
  entry.serial = serial_;
  entry.size = static_cast<uint32_t>(piece.size());
  entry.count = static_cast<uint32_t>(count);
  std::memcpy(entry.bytes, piece.data(), piece.size());
  std::memcpy(entry.ids, out->data() + before, count * sizeof(int32_t));
}

}  // namespace deepinfer
