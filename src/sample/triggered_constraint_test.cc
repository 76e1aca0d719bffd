#include "sample/triggered_constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "sample/table_constraint_for_test.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
using Verdict = TokenConstraint::Verdict;
constexpr int64_t kVocab = 40;
constexpr int32_t kEnd = 1;

// What may come next; empty: anything.
std::vector<int32_t> Allowed(TokenConstraint& constraint) {
  std::vector<uint32_t> mask((kVocab + 31) / 32, 0xAAAAAAAAu);
  std::vector<int32_t> ids;
  switch (constraint.FillMask(mask)) {
    case Verdict::kFree:
      return {};
    case Verdict::kDeadEnd:
      return {-1};
    case Verdict::kMasked:
      break;
  }
  for (int32_t id = 0; id < kVocab; ++id) {
    if (((mask[static_cast<size_t>(id) / 32] >> (id % 32)) & 1u) != 0) ids.push_back(id);
  }
  return ids;
}

void AcceptAll(TokenConstraint& constraint, std::initializer_list<int32_t> ids) {
  for (const int32_t id : ids) {
    const Status accepted = constraint.Accept(id);
    ASSERT_TRUE(accepted.has_value()) << accepted.error().message;
  }
}

std::unique_ptr<TokenConstraint> Triggered(std::vector<int32_t> ids,
                                           std::optional<int32_t> bound = std::nullopt,
                                           std::vector<int32_t> text = {30, 31, kEnd}) {
  return MakeTriggeredConstraint({std::move(ids), bound},
                                 std::make_unique<TableConstraint>(FixedTokens(kVocab, text)),
                                 kVocab);
}

TEST(TriggeredConstraint, EverythingIsFreeUntilTheTriggerHasBeenDrawn) {
  const auto constraint = Triggered({5, 6});
  EXPECT_THAT(Allowed(*constraint), ::testing::IsEmpty());
  AcceptAll(*constraint, {30, kEnd, 5, 7, 6, 5});
  EXPECT_THAT(Allowed(*constraint), ::testing::IsEmpty());
  AcceptAll(*constraint, {6});
  EXPECT_EQ(Allowed(*constraint), std::vector<int32_t>{30});
  AcceptAll(*constraint, {30});
  EXPECT_EQ(Allowed(*constraint), std::vector<int32_t>{31});
  EXPECT_FALSE(constraint->Accept(30).has_value());
  EXPECT_EQ(constraint->num_accepted(), 8);
}

TEST(TriggeredConstraint, ATriggerThatBeginsInsideOfItselfIsFound) {
  const auto constraint = Triggered({5, 5, 6, 5, 5, 7});
  AcceptAll(*constraint, {5, 5, 5, 6, 5, 5, 6, 5, 5});
  EXPECT_THAT(Allowed(*constraint), ::testing::IsEmpty());
  AcceptAll(*constraint, {7});
  EXPECT_EQ(Allowed(*constraint), std::vector<int32_t>{30});
}

TEST(TriggeredConstraint, ABoundForcesTheRestOfTheTrigger) {
  // The bound is no part of the trigger: all of it follows.
  const auto outside = Triggered({5, 6, 7}, 9);
  AcceptAll(*outside, {5, 6, 9});
  for (const int32_t id : {5, 6, 7}) {
    EXPECT_EQ(Allowed(*outside), std::vector<int32_t>{id});
    EXPECT_THAT(outside->Accept(8).error().message, HasSubstr("requires token"));
    AcceptAll(*outside, {id});
  }
  EXPECT_EQ(Allowed(*outside), std::vector<int32_t>{30});

  // It begins the trigger: the others follow.
  const auto inside = Triggered({5, 6, 7}, 5);
  AcceptAll(*inside, {6, 5});
  EXPECT_EQ(Allowed(*inside), std::vector<int32_t>{6});
  AcceptAll(*inside, {6});
  EXPECT_EQ(Allowed(*inside), std::vector<int32_t>{7});

  // It ends the trigger where that has come by itself.
  const auto last = Triggered({5, 6}, 6);
  AcceptAll(*last, {5, 6});
  EXPECT_EQ(Allowed(*last), std::vector<int32_t>{30});
}

TEST(ConstraintUntilEnd, FreesEverythingBehindAnEndTokenAndTakesItBack) {
  const auto constraint = MakeConstraintUntilEnd(
      {0, kEnd}, std::make_unique<TableConstraint>(FixedTokens(kVocab, {30, kEnd})));
  AcceptAll(*constraint, {30, kEnd});
  EXPECT_THAT(Allowed(*constraint), ::testing::IsEmpty());
  AcceptAll(*constraint, {7, kEnd, 8});
  EXPECT_EQ(constraint->num_accepted(), 5);
  constraint->Rollback(3);
  EXPECT_THAT(Allowed(*constraint), ::testing::IsEmpty());
  constraint->Rollback(1);
  EXPECT_EQ(Allowed(*constraint), std::vector<int32_t>{kEnd});
  EXPECT_EQ(constraint->num_accepted(), 1);
}

// After any accepts and rollbacks the constraint allows what a fresh one does that was given the
// remaining tokens.
RC_GTEST_PROP(TriggeredConstraint, ARollbackEqualsNeverHavingSeenTheTokens, (uint64_t seed)) {
  // Few different tokens, so that triggers happen.
  const auto token = rc::gen::inRange<int32_t>(2, 5);
  const std::vector<int32_t> trigger =
      *rc::gen::resize(4, rc::gen::nonEmpty(rc::gen::container<std::vector<int32_t>>(token)));
  const std::optional<int32_t> bound =
      *rc::gen::arbitrary<bool>() ? std::optional<int32_t>(*token) : std::nullopt;
  const auto make = [&] {
    auto inner = MakeConstraintUntilEnd(
        {kEnd}, std::make_unique<TableConstraint>(RandomTable(kVocab, seed, kEnd)));
    return MakeTriggeredConstraint({trigger, bound}, std::move(inner), kVocab);
  };
  const auto constraint = make();
  std::vector<int32_t> tokens;
  int64_t most_tokens = 0;
  const int steps = *rc::gen::inRange(1, 60);
  for (int i = 0; i < steps; ++i) {
    if (*rc::gen::inRange(0, 4) == 0) {
      const auto most = std::min<int64_t>(
          std::ssize(tokens), constraint->max_rollback() - (most_tokens - std::ssize(tokens)));
      const auto back = *rc::gen::inRange<int64_t>(0, most + 1);
      constraint->Rollback(back);
      tokens.resize(tokens.size() - static_cast<size_t>(back));
    } else {
      std::vector<int32_t> allowed = Allowed(*constraint);
      if (allowed == std::vector<int32_t>{-1}) continue;
      const int32_t id = allowed.empty() ? *token : *rc::gen::elementOf(allowed);
      RC_ASSERT(constraint->Accept(id).has_value());
      tokens.push_back(id);
      most_tokens = std::max<int64_t>(most_tokens, std::ssize(tokens));
    }
    const auto fresh = make();
    for (const int32_t id : tokens) RC_ASSERT(fresh->Accept(id).has_value());
    RC_ASSERT(Allowed(*constraint) == Allowed(*fresh));
    RC_ASSERT(constraint->num_accepted() == std::ssize(tokens));
  }
}

}  // namespace
}  // namespace deepinfer
