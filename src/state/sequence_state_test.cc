#include "state/sequence_state.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

TEST(SequenceState, AnEmptyStateHasASlotOnly) {
  StatePools pools(4, 4, 1, 128, 2);
  std::optional<SequenceState> state = SequenceState::Create(pools);
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->slot(), 0);
  EXPECT_EQ(state->num_tokens(), 0);
  EXPECT_FALSE(SequenceState::Create(pools).has_value());
  state.reset();
  EXPECT_TRUE(SequenceState::Create(pools).has_value());
}

}  // namespace
}  // namespace deepinfer
