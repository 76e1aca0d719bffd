// State of sequences on a real model: sharing pages, setting back, saving and restoring must leave
// no trace in the bits of the logits, and a step that does not fit must change nothing.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "support/model_runs.h"

namespace deepinfer {
namespace {

using namespace testing_support;  // NOLINT

std::span<const int32_t> First(const std::vector<int32_t>& ids, int64_t count) {
  return std::span(ids).first(static_cast<size_t>(count));
}
std::span<const int32_t> From(const std::vector<int32_t>& ids, int64_t begin) {
  return std::span(ids).subspan(static_cast<size_t>(begin));
}

// What a later sequence may share of a state that holds at least `tokens` tokens.
SharedPrefix PrefixOf(const SequenceState& state, int64_t tokens, int64_t window) {
  SharedPrefix prefix;
  prefix.num_tokens = tokens;
  const int64_t units = (tokens + kBlockTokens - 1) / kBlockTokens;
  prefix.blocks = {state.blocks().begin(), state.blocks().begin() + units};
  prefix.first_window_page = std::max<int64_t>(0, tokens - window + 1) / kBlockTokens;
  const auto pages = state.window_pages().begin() - state.first_window_page();
  prefix.window_pages = {pages + prefix.first_window_page, pages + units};
  return prefix;
}

Rows RowsOf(const TensorView& logits, int64_t begin, int64_t end) {
  Rows rows;
  for (int64_t r = begin; r < end; ++r)
    rows.emplace_back(logits.Row<float>(r), logits.Row<float>(r) + logits.dim(1));
  return rows;
}

// `executor` runs what is tested, `cold` the same rows in fresh state: each has memory of its own.
class StateTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    executor_ = LoadExecutor(GetParam(), 2);
    cold_ = LoadExecutor(GetParam(), 2);
  }
  Executor& executor() {
    return *executor_;
  }
  // Logits of the rows from `begin` on of a sequence that runs in one step.
  Rows Cold(const std::vector<int32_t>& ids, int64_t begin) {
    return RowsFrom(RunAlone(*cold_, ids, {std::ssize(ids)}), begin);
  }

 private:
  std::unique_ptr<Executor> executor_, cold_;
};

TEST_P(StateTest, ContinuingFromSharedPagesEqualsTheColdRun) {
  const int64_t window = executor().config().sliding_window;
  const std::vector<int32_t> ids = RandomIds(280, 1);
  const Rows whole = Cold(ids, 0);
  const std::vector<int32_t> other = RandomIds(11, 2);
  std::vector<int64_t> lengths;
  for (int64_t length = 2; length <= 40; length += 2) lengths.push_back(length);
  for (int64_t length = 118; length <= 138; length += 2) lengths.push_back(length);
  for (int64_t length = 252; length <= 260; length += 4) lengths.push_back(length);
  for (int64_t length : lengths) {
    StatePools pools = MakeStatePools(executor());
    PoisonUnreferenced(executor(), pools);
    // The first sequence goes on behind the shared prefix, in the units that it shares.
    Session first = *Session::Create(executor(), pools);
    Rows rows;
    AppendRows(first, First(ids, length + 5), &rows);
    const SharedPrefix prefix = PrefixOf(first.state(), length, window);
    Session same = *Session::Continue(executor(), pools, prefix, First(ids, length));
    Session branch = *Session::Continue(executor(), pools, prefix, First(ids, length));
    PoisonUnreferenced(executor(), pools);
    // All three write to the same positions, or right behind, within one step.
    const Session::Part parts[] = {{&same, From(ids, length).first(11), 11},
                                   {&branch, other, 11},
                                   {&first, From(ids, length + 5).first(1), 1}};
    auto logits = Session::Step(parts);
    ASSERT_TRUE(logits.has_value()) << logits.error().message;
    ASSERT_EQ(FirstDifference(RowsOf(*logits, 0, 11), RowsFrom(whole, length, length + 11)), "")
        << length;
    ASSERT_EQ(
        FirstDifference(RowsOf(*logits, 11, 22), Cold(Concat(First(ids, length), other), length)),
        "")
        << length;
    ASSERT_EQ(FirstDifference(RowsOf(*logits, 22, 23), RowsFrom(whole, length + 5, length + 6)), "")
        << length;
    PoisonUnreferenced(executor(), pools);
    // And on, one token after the other.
    for (int64_t i = 0; i < 3; ++i) {
      Rows one;
      AppendRows(same, From(ids, length + 11 + i).first(1), &one);
      ASSERT_EQ(FirstDifference(one, RowsFrom(whole, length + 11 + i, length + 12 + i)), "")
          << length;
    }
  }
}

TEST_P(StateTest, ASequenceThatWasSetBackEqualsAFreshOne) {
  const int64_t rollback = executor().options().rollback_tokens;
  ASSERT_EQ(rollback, 6);
  const std::vector<int32_t> ids = RandomIds(300, 3);
  for (int64_t reached : {9, 14, 128, 131, 134}) {
    for (int64_t back = 1; back <= rollback; ++back) {
      for (bool stepwise : {false, true}) {
        StatePools pools = MakeStatePools(executor());
        PoisonUnreferenced(executor(), pools);
        Session session = *Session::Create(executor(), pools);
        Rows rows;
        if (stepwise) AppendRows(session, First(ids, reached - 8), &rows);
        while (std::ssize(session.tokens()) < reached) {
          const int64_t at = std::ssize(session.tokens());
          AppendRows(session, From(ids, at).first(static_cast<size_t>(stepwise ? 1 : reached)),
                     &rows);
        }
        const int64_t kept = reached - back;
        ASSERT_TRUE(session.Truncate(kept));
        PoisonUnreferenced(executor(), pools);
        const std::vector<int32_t> other = RandomIds(9, static_cast<uint32_t>(reached * 8 + back));
        rows.clear();
        AppendRows(session, std::span(other).first(1), &rows);
        AppendRows(session, std::span(other).subspan(1), &rows);
        ASSERT_EQ(FirstDifference(rows, Cold(Concat(First(ids, kept), other), kept)), "")
            << "from " << reached << " by " << back;
        // Drafts that are rejected again and again: back to one accepted token each time.
        std::vector<int32_t> accepted = Concat(First(ids, kept), std::span(other).first(8));
        ASSERT_TRUE(session.Truncate(kept + 8));
        for (uint32_t round = 0; stepwise && round < 4; ++round) {
          rows.clear();
          AppendRows(session, RandomIds(6, 1000 + round), &rows);
          ASSERT_TRUE(session.Truncate(std::ssize(session.tokens()) - 5));
          accepted = session.tokens();
        }
        rows.clear();
        AppendRows(session, other, &rows);
        ASSERT_EQ(FirstDifference(rows, Cold(Concat(accepted, other), std::ssize(accepted))), "");
      }
    }
  }
}

TEST_P(StateTest, ASavedStateGoesOnInOtherUnitsAndInAnotherExecutor) {
  auto elsewhere = LoadExecutor(GetParam(), 1);
  const std::vector<int32_t> ids = RandomIds(300, 4);
  const Rows whole = Cold(ids, 0);
  for (int64_t length : {1, 2, 3, 8, 13, 127, 128, 129, 141, 142, 261}) {
    StatePools pools = MakeStatePools(executor());
    StatePools other_pools = MakeStatePools(*elsewhere);
    PoisonUnreferenced(executor(), pools);
    PoisonUnreferenced(*elsewhere, other_pools);
    std::shared_ptr<StateImage> image;
    {
      Session session = *Session::Create(executor(), pools);
      Rows rows;
      AppendRows(session, First(ids, length), &rows);
      image = *session.Save();
    }
    Session occupant = *Session::Create(executor(), pools);  // so that other units are free
    Rows ignored;
    AppendRows(occupant, RandomIds(200, 8), &ignored);
    PoisonUnreferenced(executor(), pools);
    Session back = *Session::Restore(executor(), pools, image, First(ids, length));
    Session away = *Session::Restore(*elsewhere, other_pools, image, First(ids, length));
    EXPECT_NE(back.state().slot(), away.state().slot());
    PoisonUnreferenced(executor(), pools);
    for (Session* session : {&back, &away}) {
      Rows rows;
      AppendRows(*session, From(ids, length).first(5), &rows);
      AppendRows(*session, From(ids, length + 5).first(7), &rows);
      ASSERT_EQ(FirstDifference(rows, RowsFrom(whole, length, length + 12)), "") << length;
    }
    // A restored state can be set back like the one that was saved.
    for (int64_t kept = std::max<int64_t>(1, length - 6); kept < length; ++kept) {
      Session set_back = *Session::Restore(*elsewhere, other_pools, image, First(ids, length));
      ASSERT_TRUE(set_back.Truncate(kept));
      Rows rows;
      AppendRows(set_back, From(ids, kept).first(9), &rows);
      ASSERT_EQ(FirstDifference(rows, RowsFrom(whole, kept, kept + 9)), "")
          << length << " back to " << kept;
    }
  }
}

TEST_P(StateTest, AnImageOfAnotherModelIsRefused) {
  auto elsewhere = LoadExecutor(std::string(GetParam()) == "two" ? "three" : "two", 1);
  StatePools pools = MakeStatePools(executor());
  StatePools other_pools = MakeStatePools(*elsewhere);
  Session session = *Session::Create(executor(), pools);
  Rows rows;
  AppendRows(session, RandomIds(20, 1), &rows);
  auto image = *session.Save();
  const auto restored = Session::Restore(*elsewhere, other_pools, image, RandomIds(20, 1));
  ASSERT_FALSE(restored.has_value());
  EXPECT_EQ(restored.error().code, Code::kDataLoss);
  EXPECT_EQ(other_pools.blocks.num_free(), other_pools.blocks.size());
}

// Window history that is not in the cache is computed again: with windows cut where the
// recomputation begins, every layer is exact from `window - 1` positions later than the one before.
TEST_P(StateTest, RecomputedWindowHistoryWritesNoEntriesAndBecomesExact) {
  const int64_t window = executor().config().sliding_window;
  const int64_t layers = executor().config().num_hidden_layers;
  const std::vector<int32_t> ids = RandomIds(170, 5);
  const Rows whole = Cold(ids, 0);
  constexpr int64_t kKnown = 140;
  const int64_t begin = (kKnown - layers * (window - 1)) / 2 * 2;
  StatePools pools = MakeStatePools(executor());
  Session first = *Session::Create(executor(), pools);
  Rows rows;
  AppendRows(first, First(ids, kKnown), &rows);
  const CacheMemory& memory = executor().memory();
  const auto entries = [&] {
    std::vector<uint8_t> bytes;
    for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
      for (const TensorView& view : {memory.KvBlocks(p), memory.IndexBlocks(p)}) {
        for (int32_t block : first.state().blocks()) {
          const auto* from = view.Row<uint8_t>(block);
          bytes.insert(bytes.end(), from, from + view.row_size());
        }
      }
    }
    return bytes;
  };
  const std::vector<uint8_t> before = entries();
  const int32_t pages[] = {pools.TakeWindowPage(), pools.TakeWindowPage()};
  PoisonUnreferenced(executor(), pools);
  StepPlan plan;
  StepChunk chunk{.slot = pools.slots.Take(),
                  .begin = begin,
                  .num_rows = kKnown - begin,
                  .tokens = std::span(ids).subspan(static_cast<size_t>(begin),
                                                   static_cast<size_t>(kKnown - begin)),
                  .blocks = first.state().blocks(),
                  .window_pages = pages,
                  .first_window_page = begin / kBlockTokens,
                  .window_begin = begin,
                  .entries_begin = kKnown};
  for (int64_t i = 0; i < kMaxLookback; ++i)
    chunk.lookback[static_cast<size_t>(i)] = ids[static_cast<size_t>(begin - 1 - i)];
  plan.chunks.push_back(chunk);
  ASSERT_TRUE(executor().Step(plan).has_value());
  EXPECT_EQ(entries(), before);
  // New tokens behind it; the first sequence is not needed any more, so its block may be written.
  plan.chunks[0].begin = kKnown;
  plan.chunks[0].num_rows = 20;
  plan.chunks[0].tokens = std::span(ids).subspan(kKnown, 20);
  plan.chunks[0].num_logit_rows = 20;
  for (int64_t i = 0; i < kMaxLookback; ++i)
    plan.chunks[0].lookback[static_cast<size_t>(i)] = ids[static_cast<size_t>(kKnown - 1 - i)];
  auto logits = executor().Step(plan);
  ASSERT_TRUE(logits.has_value()) << logits.error().message;
  EXPECT_EQ(FirstDifference(RowsOf(*logits, 0, 20), RowsFrom(whole, kKnown, kKnown + 20)), "");
}

TEST_P(StateTest, ARowWithoutATokenTakesTheOneThatWasSampled) {
  const std::vector<int32_t> ids = RandomIds(30, 6);
  const Rows whole = Cold(ids, 0);
  StatePools pools = MakeStatePools(executor());
  Session session = *Session::Create(executor(), pools);
  Rows rows;
  AppendRows(session, First(ids, 20), &rows);
  executor().SetSampledToken(session.state().slot(), ids[20]);
  StepPlan plan;
  plan.chunks.push_back({.slot = session.state().slot(),
                         .begin = 20,
                         .num_rows = 1,
                         .lookback = {ids[19], ids[18], ids[17]},
                         .blocks = session.state().blocks(),
                         .window_pages = session.state().window_pages(),
                         .first_window_page = session.state().first_window_page(),
                         .num_logit_rows = 1});
  auto logits = executor().Step(plan);
  ASSERT_TRUE(logits.has_value()) << logits.error().message;
  EXPECT_EQ(FirstDifference(RowsOf(*logits, 0, 1), RowsFrom(whole, 20, 21)), "");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, StateTest, ::testing::Values("two", "three"));

TEST(Executor, AStepThatDoesNotFitIsRefusedWithTheFieldAndChangesNothing) {
  auto executor = LoadExecutor("three", 1);
  const CacheMemory& memory = executor->memory();
  StatePools pools = MakeStatePools(*executor);
  PoisonUnreferenced(*executor, pools);
  const auto contents = [&] {
    std::vector<uint8_t> bytes;
    const auto add = [&bytes](const TensorView& view) {
      if (view.empty()) return;
      const auto* from = static_cast<const uint8_t*>(view.data());
      bytes.insert(bytes.end(), from, from + view.num_elements() * DTypeBytes(view.dtype()));
    };
    for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
      add(memory.KvBlocks(p));
      add(memory.IndexBlocks(p));
      add(memory.Remainders(p));
    }
    for (int64_t layer = 0; layer < memory.geometry().num_layers; ++layer)
      add(memory.WindowPages(layer));
    return bytes;
  };
  const std::vector<uint8_t> before = contents();
  std::vector<int32_t> ids = RandomIds(150, 1);
  const std::vector<int32_t> blocks = {3, 0}, other_blocks = {5, 6};
  std::vector<int32_t> pages = {2, 1}, other_pages = {4, 7};
  StepPlan good;
  good.commands.push_back({.kind = StateCommand::Kind::kCopyBlock, .source = 1, .target = 3});
  good.chunks.push_back({.slot = 0,
                         .num_rows = 150,
                         .tokens = ids,
                         .blocks = blocks,
                         .window_pages = pages,
                         .num_logit_rows = 1});
  good.chunks.push_back({.slot = 1,
                         .begin = 140,
                         .num_rows = 2,
                         .tokens = First(ids, 2),
                         .lookback = {1, 2, 3},
                         .blocks = other_blocks,
                         .window_pages = other_pages});
  const auto field_of = [&](const std::function<void(StepPlan&, StepChunk&)>& spoil) {
    StepPlan plan = good;
    spoil(plan, plan.chunks[1]);
    const auto result = executor->Step(plan);
    EXPECT_EQ(contents() == before, !result.has_value());
    if (result.has_value()) return std::string("none");
    EXPECT_EQ(result.error().code, Code::kInvalidArgument);
    EXPECT_NE(result.error().message, "");
    return result.error().field;
  };
  using P = StepPlan;
  using C = StepChunk;
  EXPECT_EQ(field_of([](P& p, C&) { p = {}; }), "chunks");
  EXPECT_EQ(field_of([](P&, C& c) { c.slot = -1; }), "slot");
  EXPECT_EQ(field_of([](P&, C& c) { c.slot = 16; }), "slot");
  EXPECT_EQ(field_of([](P&, C& c) { c.slot = 0; }), "slot");
  EXPECT_EQ(field_of([](P&, C& c) { c.num_rows = 0; }), "num_rows");
  EXPECT_EQ(field_of([](P&, C& c) { c.begin = -1; }), "num_rows");
  EXPECT_EQ(field_of([](P&, C& c) { c.begin = 1023; }), "num_rows");
  EXPECT_EQ(field_of([](P&, C& c) { c.num_rows = INT64_MAX; }), "num_rows");
  EXPECT_EQ(field_of([](P&, C& c) { c.num_rows = 3; }), "tokens");
  EXPECT_EQ(field_of([](P&, C& c) { c.tokens = {}; }), "tokens");
  EXPECT_EQ(field_of([](P&, C& c) {
              c.tokens = {};
              c.num_rows = 1;
            }),
            "tokens");
  std::vector<int32_t> bad = {5, 512};
  EXPECT_EQ(field_of([&](P&, C& c) { c.tokens = bad; }), "tokens");
  bad[1] = -1;
  EXPECT_EQ(field_of([&](P&, C& c) { c.tokens = bad; }), "tokens");
  EXPECT_EQ(field_of([](P&, C& c) { c.lookback[1] = 512; }), "lookback");
  EXPECT_EQ(field_of([](P& p, C&) { p.chunks[0].lookback[0] = 4; }), "lookback");
  EXPECT_EQ(field_of([](P&, C& c) { c.num_logit_rows = 3; }), "num_logit_rows");
  EXPECT_EQ(field_of([](P&, C& c) { c.window_begin = 143; }), "window_begin");
  EXPECT_EQ(field_of([](P&, C& c) { c.entries_begin = -2; }), "entries_begin");
  EXPECT_EQ(field_of([](P&, C& c) { c.decoder_begin = 100; }), "decoder_begin");
  EXPECT_EQ(field_of([&](P&, C& c) { c.blocks = c.blocks.first(1); }), "blocks");
  bad = {5, 128};
  EXPECT_EQ(field_of([&](P&, C& c) { c.blocks = bad; }), "blocks");
  bad = {5, 3};  // written by the other chunk
  EXPECT_EQ(field_of([&](P&, C& c) { c.blocks = bad; }), "blocks");
  bad = {3, 5};
  EXPECT_EQ(field_of([&](P&, C& c) { c.blocks = bad; }), "blocks");
  bad = {5, 5};
  EXPECT_EQ(field_of([&](P&, C& c) { c.blocks = bad; }), "blocks");
  EXPECT_EQ(field_of([](P&, C& c) { c.window_pages = c.window_pages.first(1); }), "window_pages");
  EXPECT_EQ(field_of([](P&, C& c) { c.first_window_page = 2; }), "window_pages");
  EXPECT_EQ(field_of([](P&, C& c) { c.first_window_page = -1; }), "window_pages");
  bad = {4, 2};
  EXPECT_EQ(field_of([&](P&, C& c) { c.window_pages = bad; }), "window_pages");
  bad = {4, 100000};
  EXPECT_EQ(field_of([&](P&, C& c) { c.window_pages = bad; }), "window_pages");
  EXPECT_EQ(field_of([](P& p, C&) { p.commands[0].target = 1 << 20; }), "commands");
  EXPECT_EQ(field_of([](P&, C&) {}), "none");
}

TEST(Session, AStepThatIsRefusedLeavesItsSequencesAsTheyWere) {
  auto executor = LoadExecutor("two", 1);
  StatePools pools = MakeStatePools(*executor);
  Session session = *Session::Create(*executor, pools);
  const auto append = [&](const std::vector<int32_t>& ids, int64_t logit_rows = 0) {
    auto result = session.Append(ids, logit_rows);
    return result.has_value() ? std::string() : result.error().message;
  };
  EXPECT_NE(append({1, 512}).find("512"), std::string::npos);
  EXPECT_NE(append({-1}).find("-1"), std::string::npos);
  EXPECT_NE(append({}), "");
  EXPECT_NE(append({1}, 2), "");
  EXPECT_NE(append(std::vector<int32_t>(1025, 3)).find("1024"), std::string::npos);
  EXPECT_NE(append(std::vector<int32_t>(20000, 3)).find("cache blocks"), std::string::npos);
  EXPECT_EQ(session.state().num_tokens(), 0);
  EXPECT_EQ(append({1, 2, 3}, 1), "");
  EXPECT_EQ(session.state().num_tokens(), 3);
}

TEST(Session, SlotsRunOutWithASentence) {
  auto executor = LoadExecutor("two", 1);
  StatePools pools = MakeStatePools(*executor);
  std::vector<Session> sessions;
  for (int64_t i = 0; i < pools.slots.size(); ++i)
    sessions.push_back(std::move(*Session::Create(*executor, pools)));
  const auto more = Session::Create(*executor, pools);
  ASSERT_FALSE(more.has_value());
  EXPECT_EQ(more.error().code, Code::kResourceExhausted);
}

}  // namespace
}  // namespace deepinfer
