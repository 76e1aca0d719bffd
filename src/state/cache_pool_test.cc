#include "state/cache_pool.h"

#include <gtest/gtest.h>

#include <rapidcheck/gtest.h>
#include <optional>
#include <set>

namespace deepinfer {
namespace {

CacheGeometry SmallGeometry() {
  CacheGeometry geometry;
  geometry.producers = {
      {.ratio = 2, .kv_record_bytes = 36, .index_record_bytes = 34, .remainder_floats = 128},
      {.ratio = 1, .kv_record_bytes = 36, .index_record_bytes = 34, .remainder_floats = 0}};
  geometry.num_layers = 3;
  geometry.window_record_bytes = 66;
  geometry.ring_rows = 8;
  return geometry;
}

TEST(CachePool, GeometryAddsUp) {
  const CacheGeometry geometry = SmallGeometry();
  EXPECT_EQ(geometry.BytesPerBlock(), (64 + 128) * 70);
  EXPECT_EQ(geometry.BytesPerSlot(), 3 * 8 * 66 + 512);
  auto pool = CachePool::Create(geometry, {}, 4, 2);
  ASSERT_TRUE(pool.has_value());
  EXPECT_EQ(pool->KvBlocks(0).ToString(), "U8 [4, 64, 36]");
  EXPECT_EQ(pool->KvBlocks(1).ToString(), "U8 [4, 128, 36]");
  EXPECT_TRUE(pool->Remainders(1).empty());
}

TEST(CachePool, AFailedReserveChangesNothing) {
  auto pool = CachePool::Create(SmallGeometry(), {}, 2, 1);
  ASSERT_TRUE(pool.has_value());
  auto sequence = Sequence::Create(*pool);
  ASSERT_TRUE(sequence.has_value());
  EXPECT_FALSE(Sequence::Create(*pool).has_value());
  const Status status = sequence->Reserve(257);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kResourceExhausted);
  EXPECT_EQ(pool->num_free_blocks(), 2);
  EXPECT_TRUE(sequence->Reserve(256).has_value());
  EXPECT_EQ(pool->num_free_blocks(), 0);
}

// Random programs of create, extend and release against a plain count: every block has exactly one
// owner.
RC_GTEST_PROP(CachePool, EveryBlockAndSlotHasExactlyOneOwner, ()) {
  auto pool = CachePool::Create(SmallGeometry(), {}, 16, 4);
  RC_ASSERT(pool.has_value());
  std::vector<Sequence> live;
  const std::vector<int32_t> ids(300, 7);
  for (int step = 0; step < 60; ++step) {
    const int action = *rc::gen::inRange(0, 3);
    if (action == 0) {
      auto created = Sequence::Create(*pool);
      RC_ASSERT(created.has_value() == (live.size() < 4));
      if (created.has_value()) live.push_back(std::move(*created));
    } else if (!live.empty()) {
      const auto which =
          static_cast<size_t>(*rc::gen::inRange<int>(0, static_cast<int>(live.size())));
      if (action == 1) {
        const int64_t tokens = *rc::gen::inRange(1, 300);
        const bool fits = live[which].BlocksNeeded(tokens) <= pool->num_free_blocks();
        RC_ASSERT(live[which].Reserve(tokens).has_value() == fits);
        if (fits) live[which].Append(ids.data(), tokens);
      } else {
        std::swap(live[which], live.back());
        live.pop_back();
      }
    }
    std::set<int32_t> owned;
    size_t total = 0;
    for (const Sequence& sequence : live) {
      owned.insert(sequence.blocks().begin(), sequence.blocks().end());
      total += sequence.blocks().size();
      RC_ASSERT(static_cast<int64_t>(sequence.blocks().size()) ==
                (sequence.num_tokens() + 127) / 128);
    }
    RC_ASSERT(owned.size() == total);
    RC_ASSERT(static_cast<int64_t>(total) + pool->num_free_blocks() == 16);
    RC_ASSERT(static_cast<int64_t>(live.size()) + pool->num_free_slots() == 4);
  }
}

}  // namespace
}  // namespace deepinfer
