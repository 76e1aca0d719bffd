#include "state/block_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <vector>

namespace deepinfer {
namespace {

std::vector<int32_t> Reclaimable(const BlockPool& pool) {
  std::vector<int32_t> ids;
  for (int32_t id = pool.FirstReclaimable(); id >= 0; id = pool.NextReclaimable(id))
    ids.push_back(id);
  return ids;
}

TEST(BlockPool, TakesLowIdsFirstAndThenTheLatestReleased) {
  BlockPool pool(4);
  EXPECT_EQ(pool.Take(), 0);
  EXPECT_EQ(pool.Take(), 1);
  EXPECT_EQ(pool.Take(), 2);
  pool.Release(0);
  pool.Release(1);
  EXPECT_EQ(pool.Take(), 1);
  EXPECT_EQ(pool.Take(), 0);
  EXPECT_EQ(pool.Take(), 3);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(pool.FindViolation(), "");
}

TEST(BlockPool, AnIdIsFreeWhenNobodyRefersToIt) {
  BlockPool pool(2);
  const int32_t id = pool.Take();
  pool.Retain(id);
  pool.RetainForCache(id);
  EXPECT_EQ(pool.references(id), 3);
  pool.Release(id);
  pool.Release(id);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.num_reclaimable(), 1);
  pool.ReleaseFromCache(id);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_reclaimable(), 0);
}

TEST(BlockPool, AnIdOfTheCacheThatIsUsedAgainIsNotReclaimable) {
  BlockPool pool(2);
  const int32_t id = pool.Take();
  pool.RetainForCache(id);
  pool.Release(id);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({id}));
  pool.Retain(id);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>());
  pool.ReleaseFromCache(id);
  pool.Release(id);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.FindViolation(), "");
}

TEST(BlockPool, ReclaimableIdsAreInTheOrderOfTheirLastUse) {
  BlockPool pool(6);
  for (int32_t id = 0; id < 6; ++id) {
    pool.Take();
    pool.RetainForCache(id);
  }
  for (const int32_t id : {3, 1, 4, 0, 5}) pool.Release(id);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({3, 1, 4, 0, 5}));
  pool.Touch(1);
  pool.Touch(2);  // in use: nothing happens
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({3, 4, 0, 5, 1}));
  pool.SetRank(4, 1, BlockPool::Place::kLast);
  pool.SetRank(3, 1, BlockPool::Place::kFirst);
  pool.SetRank(2, 1, BlockPool::Place::kFirst);
  pool.Release(2);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({0, 5, 1, 3, 4, 2}));
  pool.SetRank(3, 0, BlockPool::Place::kFirst);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({3, 0, 5, 1, 4, 2}));
  EXPECT_EQ(pool.FindViolation(), "");
}

TEST(BlockPool, ARankEndsWithTheReferenceOfTheCache) {
  BlockPool pool(2);
  for (int32_t id = 0; id < 2; ++id) {
    pool.Take();
    pool.RetainForCache(id);
  }
  pool.SetRank(0, 1, BlockPool::Place::kLast);
  pool.ReleaseFromCache(0);
  pool.RetainForCache(0);
  pool.Release(0);
  pool.Release(1);
  EXPECT_EQ(Reclaimable(pool), std::vector<int32_t>({0, 1}));
}

TEST(BlockPool, AnEmptyPoolHasNothing) {
  BlockPool pool(0);
  EXPECT_EQ(pool.FirstReclaimable(), -1);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(pool.FindViolation(), "");
}

TEST(BlockPoolDeathTest, ReferencesThatDoNotExistCannotBeGivenBack) {
  BlockPool pool(1);
  EXPECT_DEATH(pool.Release(0), "");
  EXPECT_DEATH(pool.Retain(0), "");
  EXPECT_DEATH(pool.ReleaseFromCache(0), "");
  const int32_t id = pool.Take();
  pool.RetainForCache(id);
  EXPECT_DEATH(pool.RetainForCache(id), "");
  EXPECT_DEATH(pool.Take(), "");
  pool.Release(id);
  EXPECT_DEATH(pool.Release(id), "");  // what is left is the reference of the cache
}

// Against plain counts and a list.
RC_GTEST_PROP(BlockPool, RandomProgramsAgreeWithPlainCounts, (const std::vector<uint16_t>& steps)) {
  constexpr int32_t kCount = 5;
  BlockPool pool(kCount);
  std::vector<int> users(kCount, 0);
  std::vector<bool> cached(kCount, false);
  std::vector<int> rank(kCount, 0);
  std::vector<int32_t> order[2];
  const auto remove = [&](int32_t id) {
    for (auto& ids : order) std::erase(ids, id);
  };
  for (const uint16_t step : steps) {
    const int32_t id = (step >> 4) % kCount;
    const auto i = static_cast<size_t>(id);
    const bool reclaimable = cached[i] && users[i] == 0;
    switch (step % 7) {
      case 0:
        if (pool.num_free() > 0) {
          const auto taken = static_cast<size_t>(pool.Take());
          RC_ASSERT(users[taken] == 0 && !cached[taken]);
          users[taken] = 1;
        }
        break;
      case 1:
        if (users[i] == 0 && !cached[i]) break;
        pool.Retain(id);
        ++users[i];
        remove(id);
        break;
      case 2:
        if (users[i] == 0) break;
        pool.Release(id);
        if (--users[i] == 0 && cached[i]) order[rank[i]].push_back(id);
        break;
      case 3:
        if (users[i] == 0 || cached[i]) break;
        pool.RetainForCache(id);
        cached[i] = true;
        rank[i] = 0;
        break;
      case 4:
        if (!cached[i]) break;
        pool.ReleaseFromCache(id);
        cached[i] = false;
        remove(id);
        break;
      case 5:
        pool.Touch(id);
        if (!reclaimable) break;
        remove(id);
        order[rank[i]].push_back(id);
        break;
      case 6: {
        if (!cached[i]) break;
        const int to = (step >> 12) % 2;
        const bool first = (step >> 13) % 2 == 0;
        pool.SetRank(id, to, first ? BlockPool::Place::kFirst : BlockPool::Place::kLast);
        if (rank[i] == to) break;
        rank[i] = to;
        if (!reclaimable) break;
        remove(id);
        order[to].insert(first ? order[to].begin() : order[to].end(), id);
        break;
      }
    }
    RC_ASSERT(pool.FindViolation() == "");
    std::vector<int32_t> expected = order[0];
    expected.insert(expected.end(), order[1].begin(), order[1].end());
    RC_ASSERT(Reclaimable(pool) == expected);
    RC_ASSERT(pool.num_reclaimable() == static_cast<int64_t>(expected.size()));
    int64_t num_free = 0;
    for (size_t k = 0; k < kCount; ++k) {
      RC_ASSERT(pool.references(static_cast<int32_t>(k)) == users[k] + (cached[k] ? 1 : 0));
      num_free += users[k] == 0 && !cached[k] ? 1 : 0;
    }
    RC_ASSERT(pool.num_free() == num_free);
  }
}

}  // namespace
}  // namespace deepinfer
