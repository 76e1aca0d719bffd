#include "state/sequence_state.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <utility>

#include "state/state_model_for_test.h"

namespace deepinfer {
namespace {

using Ids = std::vector<int32_t>;

// A state of `tokens` tokens.
SequenceState StateOf(StatePools& pools, int64_t tokens) {
  std::optional<SequenceState> state = SequenceState::Create(pools);
  std::vector<StateCommand> commands;
  EXPECT_TRUE(state->Extend(tokens, &commands));
  state->Advance(tokens);
  EXPECT_TRUE(commands.empty());
  return std::move(*state);
}

bool Extend(SequenceState& state, int64_t rows) {
  std::vector<StateCommand> commands;
  if (!state.Extend(rows, &commands)) return false;
  state.Advance(rows);
  return true;
}

// What a prefix hit at `tokens` inside a state would share.
SharedPrefix Share(const SequenceState& state, int64_t tokens, int64_t window) {
  SharedPrefix prefix;
  prefix.num_tokens = tokens;
  const int64_t num_blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  prefix.first_window_page = std::max<int64_t>(0, tokens - window + 1) / kBlockTokens;
  for (int64_t i = 0; i < num_blocks; ++i) {
    prefix.blocks.push_back(state.blocks()[static_cast<size_t>(i)]);
    if (i < prefix.first_window_page) continue;
    prefix.window_pages.push_back(
        state.window_pages()[static_cast<size_t>(i - state.first_window_page())]);
  }
  return prefix;
}

TEST(SequenceState, AnEmptyStateHasASlotOnly) {
  StatePools pools(4, 4, 1, 128, 2);
  std::optional<SequenceState> state = SequenceState::Create(pools);
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->slot(), 0);
  EXPECT_EQ(state->num_tokens(), 0);
  EXPECT_EQ(pools.blocks.num_free(), 4);
  EXPECT_FALSE(SequenceState::Create(pools).has_value());
  state.reset();
  EXPECT_TRUE(SequenceState::Create(pools).has_value());
}

TEST(SequenceState, ExtendTakesWhatNeedForSaysOrNothing) {
  StatePools pools(3, 2, 1, 128, 2);
  std::optional<SequenceState> state = SequenceState::Create(pools);
  EXPECT_EQ(state->NeedFor(0).blocks, 0);
  EXPECT_EQ(state->NeedFor(128).blocks, 1);
  EXPECT_EQ(state->NeedFor(129).blocks, 2);
  EXPECT_EQ(state->NeedFor(129).window_pages, 2);
  std::vector<StateCommand> commands;
  EXPECT_FALSE(state->Extend(257, &commands));  // three pages
  EXPECT_EQ(pools.blocks.num_free(), 3);
  EXPECT_EQ(pools.window_pages.num_free(), 2);
  EXPECT_TRUE(state->Extend(129, &commands));
  EXPECT_EQ(state->blocks(), Ids({0, 1}));
  EXPECT_EQ(state->window_pages(), Ids({0, 1}));
  // Room that is there already costs nothing.
  EXPECT_EQ(state->NeedFor(256).blocks, 0);
  EXPECT_TRUE(state->Extend(256, &commands));
  EXPECT_TRUE(commands.empty());
}

TEST(SequenceState, PagesBehindTheWindowHistoryAreGivenBackByTheNextExtend) {
  StatePools pools(16, 16, 1, 128, 3);
  SequenceState state = StateOf(pools, 300);
  EXPECT_EQ(state.window_pages(), Ids({0, 1, 2}));  // rows of the last step
  EXPECT_TRUE(Extend(state, 1));
  EXPECT_EQ(state.first_window_page(), 1);  // 300 - 130 = 170
  EXPECT_EQ(state.window_begin(), 128);
  EXPECT_EQ(state.window_pages(), Ids({1, 2}));
  EXPECT_TRUE(Extend(state, 84));
  EXPECT_EQ(state.num_tokens(), 385);
  EXPECT_EQ(state.first_window_page(), 1);
  EXPECT_TRUE(Extend(state, 1));
  EXPECT_EQ(state.first_window_page(), 1);  // 385 - 130 = 255 is still in it
  EXPECT_TRUE(Extend(state, 1));
  EXPECT_EQ(state.first_window_page(), 2);
  EXPECT_EQ(state.blocks().size(), 4u);
  EXPECT_EQ(pools.window_pages.num_free(), 14);
}

TEST(SequenceState, AStateAloneGoesOnForEverWithThePagesOfItsHistory) {
  StatePools pools(64, 3, 1, 128, 2);
  SequenceState state = StateOf(pools, 10);
  while (state.num_tokens() < 64 * kBlockTokens) ASSERT_TRUE(Extend(state, 1));
  EXPECT_FALSE(Extend(state, 1));
}

TEST(SequenceState, SharedUnitsAreReplacedBeforeTheyAreWritten) {
  StatePools pools(16, 16, 2, 128, 2);
  SequenceState first = StateOf(pools, 300);
  std::optional<SequenceState> second = SequenceState::Restore(pools, Share(first, 290, 128));
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->num_tokens(), 290);
  EXPECT_EQ(second->blocks(), first.blocks());
  EXPECT_EQ(second->window_pages(), Ids({1, 2}));
  EXPECT_EQ(second->NeedFor(1).blocks, 1);
  EXPECT_EQ(second->NeedFor(100).blocks, 2);
  EXPECT_EQ(second->NeedFor(100).window_pages, 2);
  std::vector<StateCommand> commands;
  ASSERT_TRUE(second->Extend(100, &commands));
  EXPECT_EQ(second->blocks(), Ids({0, 1, 3, 4}));
  EXPECT_EQ(second->window_pages(), Ids({1, 3, 4}));
  ASSERT_EQ(commands.size(), 2u);
  EXPECT_EQ(commands[0].kind, StateCommand::Kind::kCopyBlock);
  EXPECT_EQ(commands[0].source, 2);
  EXPECT_EQ(commands[0].target, 3);
  EXPECT_EQ(commands[1].kind, StateCommand::Kind::kCopyWindowPage);
  EXPECT_EQ(commands[1].source, 2);
  EXPECT_EQ(commands[1].target, 3);
  // The first goes on in its own.
  commands.clear();
  ASSERT_TRUE(first.Extend(10, &commands));
  EXPECT_TRUE(commands.empty());
  EXPECT_EQ(first.blocks(), Ids({0, 1, 2}));
}

TEST(SequenceState, AHitAtTheEndOfABlockNeedsNoCopy) {
  StatePools pools(16, 16, 2, 128, 2);
  const SequenceState first = StateOf(pools, 300);
  std::optional<SequenceState> second = SequenceState::Restore(pools, Share(first, 256, 128));
  std::vector<StateCommand> commands;
  ASSERT_TRUE(second->Extend(5, &commands));
  EXPECT_TRUE(commands.empty());
  EXPECT_EQ(second->blocks(), Ids({0, 1, 3}));
}

TEST(SequenceState, TruncationGoesBackByRollbackInPlace) {
  StatePools pools(16, 16, 1, 128, 3);
  SequenceState state = StateOf(pools, 257);
  EXPECT_TRUE(state.Truncate(257));
  EXPECT_TRUE(state.Truncate(255));
  EXPECT_EQ(state.blocks().size(), 2u);
  EXPECT_TRUE(Extend(state, 1));
  // The most that has been reached counts: the projections of token 252 have been overwritten.
  EXPECT_FALSE(state.Truncate(253));
  EXPECT_EQ(state.num_tokens(), 256);
  EXPECT_TRUE(state.Truncate(254));
  EXPECT_TRUE(state.Truncate(0));
  EXPECT_EQ(pools.blocks.num_free(), 16);
  EXPECT_EQ(pools.window_pages.num_free(), 16);
}

TEST(SequenceState, TruncationBeyondRollbackNeedsAnEvenLengthAndItsPages) {
  StatePools pools(16, 16, 1, 128, 3);
  SequenceState state = StateOf(pools, 300);
  EXPECT_TRUE(Extend(state, 120));
  EXPECT_TRUE(Extend(state, 1));  // pages from 256 on are left
  EXPECT_EQ(state.window_begin(), 256);
  EXPECT_FALSE(state.Truncate(401));
  EXPECT_FALSE(state.Truncate(382));  // reads from 255 on
  EXPECT_TRUE(state.Truncate(384));
  // No group was open there: nothing is known of the tokens before it.
  EXPECT_FALSE(state.Truncate(383));
  EXPECT_TRUE(Extend(state, 1));
  EXPECT_TRUE(Extend(state, 1));
  EXPECT_TRUE(state.Truncate(385));
}

TEST(SequenceState, TruncationDoesNotGoBackBehindARestoredPrefix) {
  StatePools pools(16, 16, 2, 128, 8);
  const SequenceState first = StateOf(pools, 400);
  std::optional<SequenceState> second = SequenceState::Restore(pools, Share(first, 256, 128));
  EXPECT_EQ(second->window_begin(), 128);
  EXPECT_FALSE(second->Truncate(255));  // its remainder is in the other slot
  EXPECT_FALSE(second->Truncate(254));  // reads from 127 on
  EXPECT_TRUE(Extend(*second, 3));
  EXPECT_TRUE(second->Truncate(257));
  EXPECT_TRUE(second->Truncate(256));
}

TEST(SequenceState, RowsThatRunAgainAfterATruncationCanBeTakenBack) {
  StatePools pools(16, 16, 2, 64, 8);
  const SequenceState first = StateOf(pools, 400);
  std::optional<SequenceState> second = SequenceState::Restore(pools, Share(first, 256, 64));
  EXPECT_TRUE(second->Truncate(252));
  EXPECT_TRUE(Extend(*second, 3));
  EXPECT_TRUE(second->Truncate(253));
}

TEST(SequenceState, AnImageBringsTheStateBack) {
  StatePools pools(16, 16, 2, 128, 2);
  std::vector<StateCommand> commands;
  SequenceState state = StateOf(pools, 301);
  EXPECT_TRUE(state.Truncate(300));
  const std::shared_ptr<StateImage> image = state.Save(&commands);
  ASSERT_EQ(commands.size(), 1u);
  EXPECT_EQ(commands[0].kind, StateCommand::Kind::kExport);
  EXPECT_EQ(commands[0].blocks, Ids({0, 1, 2}));
  EXPECT_EQ(commands[0].first_window_page, 1);
  EXPECT_EQ(commands[0].window_pages, Ids({1, 2}));
  EXPECT_EQ(image->num_tokens, 300);
  EXPECT_EQ(image->window_begin, 171);
  EXPECT_EQ(image->remainder_begin, 298);  // of three rows, the last is of what was forgotten
  commands.clear();
  std::optional<SequenceState> other = SequenceState::Restore(pools, image, &commands);
  ASSERT_TRUE(other.has_value());
  ASSERT_EQ(commands.size(), 1u);
  EXPECT_EQ(commands[0].kind, StateCommand::Kind::kImport);
  EXPECT_EQ(commands[0].blocks, Ids({3, 4, 5}));
  EXPECT_EQ(commands[0].window_pages, Ids({3, 4}));
  EXPECT_EQ(other->window_begin(), 171);
  EXPECT_FALSE(other->Truncate(297));
  EXPECT_TRUE(other->Truncate(299));
}

TEST(SequenceState, AnImageOfAFreshPrefixHitHasWhatTheHitBrought) {
  StatePools pools(16, 16, 3, 128, 8);
  const SequenceState first = StateOf(pools, 400);
  const std::optional<SequenceState> second = SequenceState::Restore(pools, Share(first, 260, 128));
  std::vector<StateCommand> commands;
  const std::shared_ptr<StateImage> image = second->Save(&commands);
  EXPECT_EQ(image->window_begin, 128);  // not 125
  EXPECT_EQ(image->remainder_begin, 260);
  const std::optional<SequenceState> third = SequenceState::Restore(pools, image, &commands);
  ASSERT_EQ(commands.size(), 2u);
  EXPECT_EQ(commands[0].window_pages.size(), commands[1].window_pages.size());
  EXPECT_EQ(commands[0].first_window_page, commands[1].first_window_page);
}

TEST(SequenceState, AnImageForWhichThereIsNoRoomChangesNothing) {
  StatePools pools(5, 16, 2, 128, 2);
  std::vector<StateCommand> commands;
  const SequenceState state = StateOf(pools, 300);
  const std::shared_ptr<StateImage> image = state.Save(&commands);
  commands.clear();
  EXPECT_FALSE(SequenceState::Restore(pools, image, &commands).has_value());
  EXPECT_TRUE(commands.empty());
  EXPECT_EQ(pools.blocks.num_free(), 2);
  EXPECT_EQ(pools.slots.num_free(), 1);
}

TEST(SequenceState, APrefixWithoutWindowTakesPagesForTheRowsThatRunAgain) {
  StatePools pools(16, 16, 2, 128, 2);
  const SequenceState first = StateOf(pools, 600);
  SharedPrefix prefix = Share(first, 600, 128);
  prefix.window_pages.clear();
  prefix.first_window_page = 3;
  std::optional<SequenceState> second = SequenceState::Restore(pools, prefix);
  EXPECT_EQ(second->NeedFor(10).window_pages, 2);
  std::vector<StateCommand> commands;
  ASSERT_TRUE(second->Extend(10, &commands));
  EXPECT_EQ(second->window_pages().size(), 2u);
  EXPECT_EQ(second->first_window_page(), 3);
  ASSERT_EQ(commands.size(), 1u);
  EXPECT_EQ(commands[0].kind, StateCommand::Kind::kCopyBlock);
}

TEST(SequenceState, AMovedStateOwnsEverythingOnce) {
  StatePools pools(4, 4, 2, 128, 2);
  SequenceState a = StateOf(pools, 200);
  SequenceState b = StateOf(pools, 100);
  a = std::move(b);
  EXPECT_EQ(pools.blocks.num_free(), 3);
  EXPECT_EQ(pools.slots.num_free(), 1);
  EXPECT_EQ(a.num_tokens(), 100);
  const SequenceState c = std::move(a);
  EXPECT_EQ(c.blocks(), Ids({2}));
  EXPECT_EQ(pools.blocks.num_free(), 3);
}

// States that share directly with each other, without a cache: forks at any even position.
RC_GTEST_PROP(SequenceState, RandomProgramsOfTheVerbsAgreeWithAPlainModel, ()) {
  const auto steps = *rc::gen::scale(
      4.0, rc::gen::container<std::vector<uint32_t>>(rc::gen::inRange<uint32_t>(0, 0xffffffff)));
  StateModel::Options options;
  options.window = *rc::gen::element<int64_t>(1, 2, 8, 128, 129, 300);
  options.rollback = *rc::gen::element<int64_t>(0, 1, 2, 7);
  options.num_blocks = *rc::gen::inRange<int64_t>(4, 24);
  options.num_pages = *rc::gen::inRange<int64_t>(3, 24);
  options.num_slots = 4;
  StateModel model(options);
  int32_t next_token = 1;
  const auto more = [&](std::vector<int32_t>* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) tokens->push_back(next_token++);
  };
  for (const uint32_t step : steps) {
    const int64_t amount = (step >> 8) % 400;
    if (model.sequences.empty()) model.Create({}, "");
    const size_t i = (step >> 4) % std::max<size_t>(1, model.sequences.size());
    StateModel::Sequence& sequence = model.sequences[i];
    const int64_t n = sequence.state.num_tokens();
    switch (step % 8) {
      case 0:
        model.Create({}, "");
        break;
      case 1:
      case 2:
      case 3: {
        const int64_t rows = step % 8 == 1 ? 1 + amount : 1 + amount % 5;
        sequence.tokens.resize(static_cast<size_t>(n));
        more(&sequence.tokens, rows);
        model.Step({{i, rows}});
        break;
      }
      case 4: {
        const int64_t to = std::max<int64_t>(0, n - (step >> 20) % (2 * options.rollback + 3));
        if (model.Truncate(i, (step >> 30) == 0 ? std::min(n, amount) : to))
          sequence.tokens.resize(static_cast<size_t>(sequence.state.num_tokens()));
        break;
      }
      case 5: {
        // A fork, where the pages are still there.
        const int64_t at = std::min(n, amount) / 2 * 2;
        const int64_t oldest = std::max<int64_t>(0, at - options.window + 1);
        if (at == 0 || oldest < sequence.state.window_begin() || options.window == 1) break;
        std::optional<SequenceState> fork =
            SequenceState::Restore(model.pools, Share(sequence.state, at, options.window));
        if (!fork.has_value()) break;
        std::vector<int32_t> tokens = sequence.tokens;
        tokens.resize(static_cast<size_t>(at));
        // The first page of an image is complete in the window only.
        if (oldest / kBlockTokens * kBlockTokens < sequence.state.window_begin()) break;
        model.sequences.push_back({std::move(*fork), std::move(tokens), "", {}});
        break;
      }
      case 6:
        model.Preempt(i);
        break;
      case 7:
        if (!model.saved.empty()) model.Resume(amount % model.saved.size());
        break;
    }
    RC_ASSERT(model.FindViolation() == "");
  }
  RC_ASSERT(model.FindLeak() == "");
}

}  // namespace
}  // namespace deepinfer
