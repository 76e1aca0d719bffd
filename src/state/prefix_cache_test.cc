#include "state/prefix_cache.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "state/allocation_count_for_test.h"
#include "state/state_model_for_test.h"

namespace deepinfer {
namespace {

// `count` tokens that no other seed has.
std::vector<int32_t> Tokens(int32_t seed, int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), seed * 100000);
  return tokens;
}

std::vector<int32_t> Concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<int32_t> First(const std::vector<int32_t>& tokens, int64_t count) {
  return {tokens.begin(), tokens.begin() + count};
}

// A model with helpers that run whole sequences.
class Cache : public StateModel {
 public:
  explicit Cache(const Options& with) : StateModel(with) {}

  // Runs the last started sequence to `end`, publishing after each chunk. False: no room.
  bool RunTo(int64_t end, int64_t chunk = 64) {
    const size_t last = sequences.size() - 1;
    while (sequences[last].state.num_tokens() < end) {
      const int64_t begin = sequences[last].state.num_tokens();
      if (Step({{last, std::min(chunk, end - begin)}}) == 0) return false;
      Insert(last, sequences[last].state.num_tokens(), false, true);
    }
    return true;
  }

  // A request from beginning to end: looked up with all tokens but one, run, and published. The
  // number of tokens found, or -1 if there was no room.
  int64_t Serve(const std::vector<int32_t>& tokens, const std::string& salt = "") {
    const int64_t found = Start(tokens, salt, std::ssize(tokens) - 1);
    if (found < 0) return -1;
    const bool done = RunTo(std::ssize(tokens));
    if (done) Insert(sequences.size() - 1, std::ssize(tokens), true, true);
    End(sequences.size() - 1);
    return done ? found : -1;
  }

  int64_t Found(const std::vector<int32_t>& tokens, int64_t limit = 1 << 30,
                const std::string& salt = "") {
    return FindChecked(tokens, salt, limit, WindowNeed::kExact).num_tokens;
  }
  int64_t FoundBlocks(const std::vector<int32_t>& tokens, const std::string& salt = "") {
    return FindChecked(tokens, salt, 1 << 30, WindowNeed::kNone).num_tokens;
  }
};

TEST(PrefixCache, AnEmptyCacheFindsNothing) {
  Cache cache({});
  EXPECT_EQ(cache.Found(Tokens(1, 300)), 0);
  EXPECT_EQ(cache.Found({}), 0);
  EXPECT_EQ(cache.cache->counters().lookups, 2);
  EXPECT_EQ(cache.cache->counters().hits, 0);
}

TEST(PrefixCache, AHitIsTheLongestCommonBeginningRoundedDownToEven) {
  Cache cache({.num_blocks = 16, .num_pages = 16});
  const std::vector<int32_t> tokens = Tokens(1, 301);
  cache.Serve(tokens);
  for (const int64_t common : {1, 2, 3, 77, 127, 128, 129, 130, 255, 256, 257, 299, 300, 301}) {
    EXPECT_EQ(cache.Found(Concat(First(tokens, common), Tokens(2, 200))), common / 2 * 2);
    EXPECT_EQ(cache.Found(tokens, common), common / 2 * 2);
  }
  EXPECT_EQ(cache.Found(tokens, 0), 0);
  EXPECT_EQ(cache.Found(tokens, -3), 0);
  EXPECT_EQ(cache.FindViolation(), "");
  EXPECT_EQ(cache.FindLeak(), "");
}

TEST(PrefixCache, SaltsShareNothing) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 200);
  cache.Serve(tokens, "a");
  EXPECT_EQ(cache.Found(tokens, 1000, "a"), 200);
  EXPECT_EQ(cache.Found(tokens, 1000, "b"), 0);
  EXPECT_EQ(cache.Found(tokens, 1000, ""), 0);
}

TEST(PrefixCache, BlocksWithEqualHashesAreToldApart) {
  Cache cache({.hash_mask = 0});
  const std::vector<int32_t> a = Tokens(1, 300);
  const std::vector<int32_t> b = Tokens(2, 300);
  const std::vector<int32_t> c = Concat(First(a, 128), Tokens(3, 172));
  for (const auto& tokens : {a, b, c}) cache.Serve(tokens);
  for (const auto& tokens : {a, b, c}) EXPECT_EQ(cache.Found(tokens), 300);
  EXPECT_EQ(cache.Found(Tokens(4, 300)), 0);
  EXPECT_EQ(cache.FindViolation(), "");
  EXPECT_EQ(cache.FindLeak(), "");
}

TEST(PrefixCache, OnlyFullBlocksOfARunningSequenceAreRecorded) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 200);
  cache.Start(tokens, "", 199);
  cache.RunTo(127);
  EXPECT_EQ(cache.Found(tokens), 0);
  cache.RunTo(200);
  EXPECT_EQ(cache.Found(tokens), 128);
  cache.Insert(0, 200, true, true);
  EXPECT_EQ(cache.Found(tokens), 200);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, ALongerPartlyFilledBlockReplacesAShorterOneAndAShorterOneIsKnown) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 300);
  cache.Serve(First(tokens, 150));
  EXPECT_EQ(cache.cache->num_nodes(), 2);
  cache.Serve(First(tokens, 170));
  EXPECT_EQ(cache.cache->num_nodes(), 2);
  cache.Serve(First(tokens, 160));
  EXPECT_EQ(cache.cache->num_nodes(), 2);
  EXPECT_EQ(cache.Found(tokens), 170);
  cache.Serve(Concat(First(tokens, 150), Tokens(2, 20)));
  EXPECT_EQ(cache.cache->num_nodes(), 3);  // neither extends the other
  cache.Serve(tokens);
  EXPECT_EQ(cache.cache->num_nodes(), 4);
  EXPECT_EQ(cache.Found(tokens), 300);
  EXPECT_EQ(cache.Found(Concat(First(tokens, 150), Tokens(2, 20))), 170);
  EXPECT_EQ(cache.FindViolation(), "");
  EXPECT_EQ(cache.FindLeak(), "");
}

TEST(PrefixCache, AKnownBlockKeepsItsOwnMemory) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 256);
  cache.Create(tokens, "");
  cache.Create(tokens, "");
  cache.Step({{0, 256}, {1, 256}});
  cache.Insert(0, 256, false, false);
  cache.Insert(1, 256, false, false);
  EXPECT_EQ(cache.FindChecked(tokens, "", 256, WindowNeed::kNone).blocks,
            cache.sequences[0].state.blocks());
  EXPECT_EQ(cache.cache->counters().inserted_blocks, 2);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, AMissingWindowPageIsTakenOver) {
  Cache cache({.window = 16});
  const std::vector<int32_t> tokens = Tokens(1, 512);
  cache.Create(tokens, "");
  cache.Step({{0, 512}});
  cache.Step({});
  // The pages of the first blocks have been given back by the time of the insertion.
  std::vector<StateCommand> commands;
  EXPECT_TRUE(cache.sequences[0].state.Extend(1, &commands));
  cache.Insert(0, 512, true, false);
  EXPECT_EQ(cache.FoundBlocks(First(tokens, 200)), 200);
  EXPECT_EQ(cache.Found(First(tokens, 200)), 0);
  EXPECT_EQ(cache.Found(tokens), 512);
  cache.Create(tokens, "");
  cache.Step({{1, 256}});
  cache.Insert(1, 256, false, false);
  EXPECT_EQ(cache.Found(First(tokens, 200)), 200);
  EXPECT_EQ(cache.Found(First(tokens, 300)), 256);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, AnIncompletePageOfARestoredImageIsNotTaken) {
  Cache cache({.window = 16, .rollback = 0});
  const std::vector<int32_t> tokens = Tokens(1, 400);
  cache.Create(tokens, "");
  cache.Step({{0, 100}});
  cache.Preempt(0);
  ASSERT_TRUE(cache.Resume(0));
  cache.RunTo(400);
  cache.Insert(0, 400, true, false);
  EXPECT_EQ(cache.FoundBlocks(First(tokens, 120)), 120);
  EXPECT_EQ(cache.Found(First(tokens, 120)), 0);  // rows before 85 are not in the first page
  EXPECT_EQ(cache.Found(First(tokens, 200)), 200);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, WindowsOfAnySizeAreHeldByTheHit) {
  for (const int64_t window : {1, 2, 8, 127, 128, 129, 130, 256, 300, 640}) {
    Cache cache({.num_blocks = 32, .num_pages = 32, .window = window});
    const std::vector<int32_t> tokens = Tokens(1, 1000);
    cache.Serve(tokens);
    for (const int64_t common : {2, 100, 128, 130, 257, 640, 700, 999, 1000}) {
      const SharedPrefix prefix = cache.FindChecked(tokens, "", common, WindowNeed::kExact);
      EXPECT_EQ(prefix.num_tokens, common / 2 * 2) << window;
      const int64_t first = std::max<int64_t>(0, common / 2 * 2 - window + 1) / kBlockTokens;
      EXPECT_EQ(prefix.first_window_page, first) << window;
      EXPECT_EQ(std::ssize(prefix.window_pages),
                window == 1 ? 0 : std::ssize(prefix.blocks) - first);
    }
    EXPECT_EQ(cache.FindViolation(), "");
    EXPECT_EQ(cache.FindLeak(), "");
  }
}

TEST(PrefixCache, TheLeastRecentlyUsedBranchGoesFirstAndFromItsEnd) {
  Cache cache({.num_blocks = 6, .num_pages = 16});
  const std::vector<int32_t> a = Tokens(1, 384);
  const std::vector<int32_t> b = Tokens(2, 384);
  cache.Serve(a);
  cache.Serve(b);
  EXPECT_EQ(cache.Found(a), 384);  // used: now b is the older one
  cache.Serve(Tokens(3, 128));
  EXPECT_EQ(cache.Found(b), 256);
  cache.Serve(Tokens(4, 256));
  EXPECT_EQ(cache.Found(a), 128);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, ASharedBeginningOutlivesItsBranches) {
  Cache cache({.num_blocks = 6, .num_pages = 16});
  const std::vector<int32_t> system = Tokens(1, 256);
  for (int32_t i = 2; i < 20; ++i)
    EXPECT_EQ(cache.Serve(Concat(system, Tokens(i, 200))), i == 2 ? 0 : 256);
}

TEST(PrefixCache, NothingThatASequenceUsesIsReclaimed) {
  Cache cache({.num_blocks = 6, .num_pages = 16});
  const std::vector<int32_t> a = Tokens(1, 384);
  cache.Serve(a);
  EXPECT_EQ(cache.Start(a, "", 383), 382);
  EXPECT_EQ(cache.Serve(Tokens(2, 500)), -1);
  EXPECT_EQ(cache.Serve(Tokens(3, 384)), 0);
  EXPECT_EQ(cache.Found(a), 384);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, AnAncestorThatIsNotUsedCanBeReclaimedBelowUsedDescendants) {
  Cache cache({.num_blocks = 7, .num_pages = 16});
  const std::vector<int32_t> tokens = Tokens(1, 384);
  // Both run the first 256 tokens; the cache has those of the first, and the third block of the
  // second.
  cache.Create(First(tokens, 256), "");
  cache.Create(tokens, "");
  cache.Step({{0, 256}, {1, 256}});
  cache.Insert(0, 256, true, false);
  cache.Step({{1, 128}});
  cache.Insert(1, 384, false, true);
  cache.End(0);
  EXPECT_EQ(cache.pools.blocks.num_reclaimable(), 2);
  EXPECT_EQ(cache.pools.blocks.num_free(), 2);
  // The deepest ancestor goes, together with what the cache knew below it.
  cache.Create(Tokens(2, 384), "");
  EXPECT_EQ(cache.Step({{1, 384}}), 1);
  EXPECT_EQ(cache.FoundBlocks(tokens), 128);
  EXPECT_EQ(cache.FindViolation(), "");
  // The sequence still has its block, and brings it back.
  cache.End(1);
  cache.Insert(0, 384, true, true);
  EXPECT_EQ(cache.FoundBlocks(tokens), 384);
  EXPECT_EQ(cache.FindViolation(), "");
  EXPECT_EQ(cache.FindLeak(), "");
}

TEST(PrefixCache, AnUnusedLeafGoesBeforeAnOlderAncestorOfUsedBlocks) {
  Cache cache({.num_blocks = 7, .num_pages = 16});
  const std::vector<int32_t> tokens = Tokens(1, 384);
  cache.Create(First(tokens, 256), "");
  cache.Create(tokens, "");
  cache.Step({{0, 256}, {1, 256}});
  cache.Insert(0, 256, true, false);
  cache.Step({{1, 128}});
  cache.Insert(1, 384, false, true);
  cache.End(0);
  cache.Serve(Tokens(2, 128));
  cache.Create(Tokens(3, 256), "");
  EXPECT_EQ(cache.Step({{1, 256}}), 1);
  EXPECT_EQ(cache.FoundBlocks(Tokens(2, 128)), 0);
  EXPECT_EQ(cache.FoundBlocks(tokens), 384);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, AnInsertionOfKnownBlocksIsAUse) {
  Cache cache({.num_blocks = 6, .num_pages = 16});
  const std::vector<int32_t> a = Tokens(1, 256);
  const std::vector<int32_t> b = Tokens(2, 256);
  cache.Serve(a);
  cache.Serve(b);
  cache.Create(a, "");
  cache.Step({{0, 256}});
  cache.Insert(0, 256, true, false);
  cache.End(0);
  cache.Serve(Tokens(3, 384));
  EXPECT_EQ(cache.FoundBlocks(b), 128);
  EXPECT_EQ(cache.FoundBlocks(a), 256);
}

TEST(PrefixCache, ABlockIsRecordedUnderOneSaltOnly) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 300);
  cache.Create(tokens, "a");
  cache.Step({{0, 300}});
  cache.Insert(0, 300, true, false);
  cache.cache->Insert("b", tokens, cache.sequences[0].state, true);
  EXPECT_EQ(cache.Found(tokens, 300, "a"), 300);
  EXPECT_EQ(cache.Found(tokens, 300, "b"), 0);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, WindowPagesInTheMiddleOfABranchGoBeforeThoseAtEndsAndBranchPoints) {
  Cache cache({.num_blocks = 64, .num_pages = 12, .window = 128});
  const std::vector<int32_t> a = Tokens(1, 1024);
  cache.Serve(a);  // eight pages
  cache.Serve(Concat(First(a, 512), Tokens(2, 128)));
  // Nine pages are cached; needed are those of blocks 6 and 7, 3 and 2, and of the second branch.
  cache.Create(Tokens(3, 700), "");
  EXPECT_EQ(cache.Step({{0, 700}}), 1);
  EXPECT_EQ(cache.cache->counters().evicted_window_pages, 3);
  EXPECT_EQ(cache.Found(a), 1024);
  EXPECT_EQ(cache.Found(First(a, 1023)), 1022);
  EXPECT_EQ(cache.Found(First(a, 512)), 512);
  EXPECT_EQ(cache.Found(Concat(First(a, 512), Tokens(2, 128))), 640);
  EXPECT_EQ(cache.FoundBlocks(First(a, 700)), 700);
  EXPECT_EQ(cache.Found(First(a, 700)), 512);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, AClearedCacheLeavesSequencesAlone) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 300);
  cache.Serve(tokens, "a");
  cache.Serve(Tokens(2, 300), "b");
  EXPECT_EQ(cache.Start(tokens, "a", 300), 300);
  cache.cache->Clear();
  EXPECT_EQ(cache.cache->num_nodes(), 0);
  EXPECT_EQ(cache.Found(tokens, 300, "a"), 0);
  EXPECT_EQ(cache.pools.blocks.num_free(), 64 - 3);
  EXPECT_EQ(cache.FindViolation(), "");
  // A cursor from before is no longer good, and that is noticed.
  cache.Insert(0, 300, true, true);
  EXPECT_EQ(cache.Found(tokens, 300, "a"), 300);
  EXPECT_EQ(cache.FindLeak(), "");
}

TEST(PrefixCache, CountersAddUp) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 300);
  cache.Serve(tokens);
  cache.Serve(tokens);
  const PrefixCacheCounters& counters = cache.cache->counters();
  EXPECT_EQ(counters.lookups, 2);
  EXPECT_EQ(counters.hits, 1);
  EXPECT_EQ(counters.looked_up_tokens, 600);
  EXPECT_EQ(counters.hit_tokens, 298);
  EXPECT_EQ(counters.inserted_blocks, 3);
  EXPECT_EQ(counters.evicted_blocks, 0);
}

TEST(PrefixCache, NothingIsAllocatedWhereNothingNewIsRecorded) {
  Cache cache({});
  const std::vector<int32_t> tokens = Tokens(1, 400);
  cache.Start(tokens, "", 399);
  cache.RunTo(300);
  const std::vector<int32_t> other = Tokens(2, 400);
  const int64_t before = AllocationCount();
  for (int i = 0; i < 10; ++i) {
    cache.cache->Insert("", std::span(tokens).first(300), cache.sequences[0].state, false,
                        &cache.sequences[0].cursor);
    cache.cache->Insert("", std::span(tokens).first(300), cache.sequences[0].state, false);
    cache.cache->Find("", other, 399, WindowNeed::kExact);
    cache.cache->Find("salt", tokens, 399, WindowNeed::kExact);
  }
  EXPECT_EQ(AllocationCount(), before);
}

// Public failure cases of other engines.

TEST(PrefixCache, T055AHitBringsTheWindowAlongAtEveryLength) {
  for (int64_t length = 2; length <= 300; length += 7) {
    Cache cache({.num_blocks = 16, .num_pages = 16, .window = 8});
    const std::vector<int32_t> tokens = Tokens(1, length);
    EXPECT_EQ(cache.Serve(tokens), 0);
    EXPECT_EQ(cache.Serve(Tokens(2, 300)), 0);
    EXPECT_EQ(cache.Serve(tokens), (length - 1) / 2 * 2);  // contents are checked on the way
    EXPECT_EQ(cache.FindViolation(), "");
  }
}

TEST(PrefixCache, T056ShortPromptsAreFound) {
  Cache cache({.num_blocks = 64, .num_pages = 64});
  for (const int64_t length : {3, 32, 64, 128, 256, 512}) {
    const std::vector<int32_t> tokens = Tokens(static_cast<int32_t>(length), length);
    EXPECT_EQ(cache.Serve(tokens), 0);
    EXPECT_EQ(cache.Serve(tokens), (length - 1) / 2 * 2);
  }
}

TEST(PrefixCache, T058ARequestThatIsSentAgainIsFoundEachTime) {
  Cache cache({.num_blocks = 12, .num_pages = 8});
  const std::vector<int32_t> tokens = Tokens(1, 700);
  cache.Serve(tokens);
  for (int32_t i = 0; i < 10; ++i) {
    cache.Serve(Tokens(2 + i, 300));
    EXPECT_EQ(cache.Serve(tokens), 698);
  }
}

TEST(PrefixCache, T059APromptThatALivingSequenceBeginsWithIsFound) {
  Cache cache({.num_blocks = 32, .num_pages = 32});
  const std::vector<int32_t> tokens = Tokens(1, 800);
  const std::vector<int32_t> prompt = First(tokens, 601);
  cache.Start(tokens, "", 600);
  cache.RunTo(800);
  EXPECT_EQ(cache.Found(prompt, 600), 600);  // while it runs
  cache.Insert(0, 777, true, true);          // and aborted
  cache.End(0);
  EXPECT_EQ(cache.Serve(prompt), 600);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, T061TwoLongSessionsDoNotEvictEachOthersEnds) {
  Cache cache({.num_blocks = 256, .num_pages = 8, .window = 128});
  std::vector<int32_t> a = Tokens(1, 2000);
  std::vector<int32_t> b = Tokens(2, 2000);
  cache.Serve(a);
  cache.Serve(b);
  for (int32_t turn = 0; turn < 6; ++turn) {
    const int64_t length = std::ssize(a);
    a = Concat(a, Tokens(10 + turn, 150));
    b = Concat(b, Tokens(20 + turn, 150));
    EXPECT_EQ(cache.Serve(a), length);
    EXPECT_EQ(cache.Serve(b), length);
  }
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, T109AJointHitOfBlocksAndPagesEndsWhereBothAre) {
  Cache cache({.num_blocks = 64, .num_pages = 6, .window = 8});
  const std::vector<int32_t> tokens = Tokens(1, 1000);
  cache.Start(tokens, "", 999);
  cache.RunTo(700);
  EXPECT_EQ(cache.Found(First(tokens, 128)), 128);  // so that the first page outlives the next two
  cache.RunTo(1000);
  EXPECT_EQ(cache.FoundBlocks(First(tokens, 300)), 300);
  EXPECT_EQ(cache.Found(First(tokens, 300)), 128);
  EXPECT_EQ(cache.FindViolation(), "");
}

TEST(PrefixCache, T111AHitLeavesTokensToCompute) {
  for (int64_t length = 1; length <= 200; ++length) {
    Cache cache({.num_blocks = 8, .num_pages = 8});
    const std::vector<int32_t> tokens = Tokens(1, length);
    EXPECT_EQ(cache.Serve(tokens), 0);
    EXPECT_EQ(cache.Found(tokens, length - 1), (length - 1) / 2 * 2);
    EXPECT_EQ(cache.Serve(tokens), (length - 1) / 2 * 2);
  }
}

// Random programs. Draws come from `next`, so that a shrinking list and a long stream both serve.
template <typename Next>
class Program {
 public:
  Program(StateModel& model, Next next, bool evicts)
      : model_(model), next_(next), evicts_(evicts) {}

  // One operation. Empty, or what is wrong.
  std::string Run() {
    const uint32_t kind = next_() % 16;
    if (kind < 2 || model_.sequences.empty()) {
      Start();
    } else if (kind < 8) {
      Step();
    } else if (kind < 10) {
      const size_t i = Pick(model_.sequences.size());
      const StateModel::Sequence& sequence = model_.sequences[i];
      model_.Insert(i, Upto(sequence.state.num_tokens()), next_() % 2 == 0, false);
    } else if (kind < 11) {
      const size_t i = Pick(model_.sequences.size());
      const int64_t n = model_.sequences[i].state.num_tokens();
      if (next_() % 2 == 0) model_.Insert(i, n, true, true);
      model_.End(i);
    } else if (kind < 13) {
      const size_t i = Pick(model_.sequences.size());
      const int64_t n = model_.sequences[i].state.num_tokens();
      const int64_t back = next_() % 4 == 0 ? Upto(n) : Upto(model_.options.rollback + 2);
      // Another continuation, so that stale rows are noticed.
      if (back <= n && model_.Truncate(i, n - back)) {
        std::vector<int32_t>& tokens = model_.sequences[i].tokens;
        tokens.resize(static_cast<size_t>(n - back));
        Continue(&tokens);
      }
    } else if (kind < 14 && evicts_) {
      model_.Preempt(Pick(model_.sequences.size()));
    } else if (kind < 15 && evicts_) {
      if (!model_.saved.empty()) model_.Resume(Pick(model_.saved.size()));
    } else {
      Look();
    }
    if (evicts_ && next_() % 256 == 0) model_.cache->Clear();
    return model_.FindViolation();
  }

 private:
  size_t Pick(size_t count) {
    return next_() % count;
  }
  int64_t Upto(int64_t limit) {
    return static_cast<int64_t>(next_() % static_cast<uint64_t>(limit + 1));
  }

  void Continue(std::vector<int32_t>* tokens) {
    const int64_t count = 1 + Upto(300);
    // Runs of equal tokens, so that branches agree for a while.
    int32_t token = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (i % 50 == 0) token = static_cast<int32_t>(next_() % 2);
      tokens->push_back(token);
    }
  }

  // A beginning of a known sequence, and something else.
  std::vector<int32_t> Draw(std::string* salt) {
    std::vector<int32_t> tokens;
    *salt = next_() % 8 == 0 ? "other" : "";
    if (!known_.empty() && next_() % 4 != 0) {
      tokens = known_[Pick(known_.size())];
      tokens.resize(static_cast<size_t>(Upto(std::ssize(tokens))));
    }
    if (tokens.size() < 400) Continue(&tokens);
    return tokens;
  }

  void Start() {
    std::string salt;
    std::vector<int32_t> tokens = Draw(&salt);
    if (known_.size() < 20) known_.push_back(tokens);
    model_.Start(tokens, salt, Upto(3) == 0 ? Upto(std::ssize(tokens)) : std::ssize(tokens) - 1);
  }

  void Step() {
    std::vector<StateModel::Rows> plan;
    for (size_t i = 0; i < model_.sequences.size(); ++i) {
      StateModel::Sequence& sequence = model_.sequences[i];
      const int64_t left = std::ssize(sequence.tokens) - sequence.state.num_tokens();
      if (left == 0 || next_() % 4 == 0) continue;
      plan.push_back({i, std::min(left, next_() % 2 == 0 ? 1 + Upto(4) : 1 + Upto(300))});
    }
    model_.Step(plan);
    for (const StateModel::Rows& chunk : plan) {
      if (!evicts_ || next_() % 4 != 0)
        model_.Insert(chunk.sequence, model_.sequences[chunk.sequence].state.num_tokens(), false,
                      true);
    }
  }

  void Look() {
    std::string salt;
    const std::vector<int32_t> tokens = Draw(&salt);
    const int64_t limit = Upto(std::ssize(tokens));
    const int64_t blocks = model_.FindChecked(tokens, salt, limit, WindowNeed::kNone).num_tokens;
    const int64_t exact = model_.FindChecked(tokens, salt, limit, WindowNeed::kExact).num_tokens;
    if (exact > blocks) model_.Fail("an exact hit of {} exceeds {}", exact, blocks);
    if (evicts_) return;
    // Without eviction everything that was published is found, with its pages.
    const int64_t longest = model_.LongestRecorded(tokens, salt, limit);
    if (blocks != longest) model_.Fail("{} blocks' tokens of {} are found", blocks, longest);
    if (exact != longest) model_.Fail("{} tokens of {} are found", exact, longest);
  }

  StateModel& model_;
  Next next_;
  const bool evicts_;
  std::vector<std::vector<int32_t>> known_;
};

struct Draws {
  const std::vector<uint32_t>* values;
  size_t position = 0;
  uint32_t operator()() {
    const uint32_t value = (*values)[position % values->size()];
    return value ^ static_cast<uint32_t>(position++ / values->size());
  }
};

struct Stream {
  uint64_t state;
  uint32_t operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((state ^ (state >> 18)) >> 27);
  }
};

std::vector<uint32_t> DrawValues() {
  return *rc::gen::scale(4.0, rc::gen::nonEmpty(rc::gen::container<std::vector<uint32_t>>(
                                  rc::gen::inRange<uint32_t>(0, 0xffffffff))));
}

StateModel::Options DrawOptions(bool evicts) {
  StateModel::Options options;
  options.window = *rc::gen::element<int64_t>(1, 2, 8, 127, 128, 129, 200, 257, 400);
  options.rollback = *rc::gen::element<int64_t>(0, 1, 3, 8);
  options.hash_mask = *rc::gen::element<uint64_t>(0, 1, ~uint64_t{0});
  options.num_slots = *rc::gen::inRange<int64_t>(1, 6);
  options.num_blocks = evicts ? *rc::gen::inRange<int64_t>(4, 24) : 1000;
  options.num_pages = evicts ? *rc::gen::inRange<int64_t>(4, 24) : 1000;
  return options;
}

RC_GTEST_PROP(PrefixCache, RandomProgramsAgreeWithAPlainModel, ()) {
  StateModel model(DrawOptions(true));
  const std::vector<uint32_t> values = DrawValues();
  Program program(model, Draws{&values}, true);
  for (size_t i = 0; i < values.size(); ++i) RC_ASSERT(program.Run() == "");
  RC_ASSERT(model.FindLeak() == "");
}

RC_GTEST_PROP(PrefixCache, WithoutEvictionTheLongestCommonPrefixIsFound, ()) {
  StateModel model(DrawOptions(false));
  const std::vector<uint32_t> values = DrawValues();
  Program program(model, Draws{&values}, false);
  for (size_t i = 0; i < values.size(); ++i) RC_ASSERT(program.Run() == "");
  RC_ASSERT(model.FindLeak() == "");
}

// So little memory that nearly everything that is taken has to be reclaimed.
TEST(PrefixCache, TinyPoolsSurviveALongRandomProgram) {
  int64_t evicted_blocks = 0;
  int64_t evicted_pages = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Stream stream{seed * 77};
    StateModel model({.num_blocks = 2 + stream() % 5,
                      .num_pages = 2 + stream() % 5,
                      .num_slots = 1 + stream() % 4,
                      .window = 1 + stream() % 200,
                      .rollback = stream() % 6});
    Program program(model, stream, true);
    for (int i = 0; i < 500; ++i) ASSERT_EQ(program.Run(), "") << "seed " << seed << ", step " << i;
    evicted_blocks += model.cache->counters().evicted_blocks;
    evicted_pages += model.cache->counters().evicted_window_pages;
    ASSERT_EQ(model.FindLeak(), "") << "seed " << seed;
  }
  EXPECT_GT(evicted_blocks, 500);
  EXPECT_GT(evicted_pages, 500);
}

}  // namespace
}  // namespace deepinfer
