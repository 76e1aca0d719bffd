#include "state/cache_pool.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace deepinfer {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int64_t CacheGeometry::BytesPerBlock() const {
  int64_t bytes = 0;
  for (const Producer& producer : producers) {
    bytes +=
        kBlockTokens / producer.ratio * (producer.kv_record_bytes + producer.index_record_bytes);
  }
  return bytes;
}

int64_t CacheGeometry::BytesPerSlot() const {
  int64_t bytes = num_layers * ring_rows * window_record_bytes;
  for (const Producer& producer : producers) bytes += producer.remainder_floats * 4;
  return bytes;
}

Result<CachePool> CachePool::Create(const CacheGeometry& geometry, Device device,
                                    int64_t num_blocks, int64_t num_slots) {
  DI_CHECK(num_blocks > 0 && num_slots > 0);
  CachePool pool;
  pool.geometry_ = geometry;
  pool.num_blocks_ = num_blocks;
  pool.num_slots_ = num_slots;
  pool.device_ = device;
  for (const CacheGeometry::Producer& producer : geometry.producers) {
    DI_CHECK_EQ(kBlockTokens % producer.ratio, 0);
    const int64_t entries = num_blocks * (kBlockTokens / producer.ratio);
    DI_ASSIGN_OR_RETURN(Buffer kv, Buffer::Allocate(device, entries * producer.kv_record_bytes));
    DI_ASSIGN_OR_RETURN(Buffer index,
                        Buffer::Allocate(device, entries * producer.index_record_bytes));
    DI_ASSIGN_OR_RETURN(Buffer remainder,
                        Buffer::Allocate(device, num_slots * producer.remainder_floats * 4));
    pool.kv_.push_back(std::move(kv));
    pool.index_.push_back(std::move(index));
    pool.remainders_.push_back(std::move(remainder));
  }
  for (int64_t layer = 0; layer < geometry.num_layers; ++layer) {
    DI_ASSIGN_OR_RETURN(Buffer ring, Buffer::Allocate(device, num_slots * geometry.ring_rows *
                                                                  geometry.window_record_bytes));
    pool.rings_.push_back(std::move(ring));
  }
  // Taken from the back, so low ids are handed out first.
  for (int64_t id = num_blocks - 1; id >= 0; --id)
    pool.free_blocks_.push_back(static_cast<int32_t>(id));
  for (int64_t id = num_slots - 1; id >= 0; --id)
    pool.free_slots_.push_back(static_cast<int32_t>(id));
  return pool;
}

TensorView CachePool::KvBlocks(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const CacheGeometry::Producer& g = geometry_.producers[p];
  return kv_[p].View(DType::kU8, {num_blocks_, kBlockTokens / g.ratio, g.kv_record_bytes});
}

TensorView CachePool::IndexBlocks(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const CacheGeometry::Producer& g = geometry_.producers[p];
  return index_[p].View(DType::kU8, {num_blocks_, kBlockTokens / g.ratio, g.index_record_bytes});
}

TensorView CachePool::WindowRings(int64_t layer) const {
  return rings_[static_cast<size_t>(layer)].View(
      DType::kU8, {num_slots_, geometry_.ring_rows, geometry_.window_record_bytes});
}

TensorView CachePool::Remainders(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const int64_t floats = geometry_.producers[p].remainder_floats;
  if (floats == 0) return {};
  return remainders_[p].View(DType::kF32, {num_slots_, floats});
}

Result<Sequence> Sequence::Create(CachePool& pool) {
  if (pool.free_slots_.empty()) {
    return Fail(Code::kResourceExhausted,
                fmt::format("All {} sequence slots are in use.", pool.num_slots_));
  }
  Sequence sequence;
  sequence.pool_ = &pool;
  sequence.slot_ = pool.free_slots_.back();
  pool.free_slots_.pop_back();
  return sequence;
}

Sequence::Sequence(Sequence&& other) noexcept {
  *this = std::move(other);
}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this == &other) return *this;
  Release();
  pool_ = std::exchange(other.pool_, nullptr);
  slot_ = std::exchange(other.slot_, -1);
  blocks_ = std::exchange(other.blocks_, {});
  token_ids_ = std::exchange(other.token_ids_, {});
  return *this;
}

Sequence::~Sequence() {
  Release();
}

void Sequence::Release() {
  if (pool_ == nullptr) return;
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block)
    pool_->free_blocks_.push_back(*block);
  if (slot_ >= 0) pool_->free_slots_.push_back(slot_);
  blocks_.clear();
  token_ids_.clear();
  slot_ = -1;
  pool_ = nullptr;
}

int64_t Sequence::BlocksNeeded(int64_t tokens) const {
  return std::max<int64_t>(
      0, CeilDiv(num_tokens() + tokens, kBlockTokens) - static_cast<int64_t>(blocks_.size()));
}

Status Sequence::Reserve(int64_t tokens) {
  const int64_t needed = BlocksNeeded(tokens);
  if (needed > pool_->num_free_blocks()) {
    return Fail(Code::kResourceExhausted,
                fmt::format("{} more cache blocks of {} tokens are needed and {} of {} are free.",
                            needed, kBlockTokens, pool_->num_free_blocks(), pool_->num_blocks()));
  }
  for (int64_t i = 0; i < needed; ++i) {
    blocks_.push_back(pool_->free_blocks_.back());
    pool_->free_blocks_.pop_back();
  }
  return {};
}

void Sequence::Append(const int32_t* ids, int64_t count) {
  DI_CHECK_LE(num_tokens() + count, static_cast<int64_t>(blocks_.size()) * kBlockTokens);
  token_ids_.insert(token_ids_.end(), ids, ids + count);
}

}  // namespace deepinfer
