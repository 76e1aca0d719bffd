// The scheduler's choices as pure functions over small values: who is served next, who gives way,
// how much a prompt may take. Replace one here to change a policy; the scheduler relies only on
// what each comment promises.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

namespace deepinfer {

// What the order of waiting sequences depends on.
struct WaitingKey {
  int32_t priority = 0;
  bool overtaken = false;    // as often as is allowed
  bool preempted = false;    // has run before
  int64_t user_service = 0;  // rows that its user has been given
  int64_t arrival = 0;       // serial number, unique
};

// Service order of waiting sequences. A strict order: arrival numbers differ.
inline bool ServedBefore(const WaitingKey& a, const WaitingKey& b) {
  return std::tuple(b.priority, !a.overtaken, !a.preempted, a.user_service, a.arrival) <
         std::tuple(a.priority, !b.overtaken, !b.preempted, b.user_service, b.arrival);
}

struct RunningKey {
  int32_t priority = 0;
  int64_t arrival = 0;
};

// Service order of running sequences. It does not change while they run, so that the first one
// stays first until it ends or one of a larger priority comes: this is why there is always
// progress.
inline bool RunsBefore(const RunningKey& a, const RunningKey& b) {
  return std::tuple(b.priority, a.arrival) < std::tuple(a.priority, b.arrival);
}

// Which of the running sequences, in service order, gives way when the pools are short: the last
// one, which is the one that came last and has the least work to lose. Never one before the
// sequence that needs room.
inline size_t VictimIndex(size_t num_running) {
  return num_running - 1;
}

// Blocks (and likewise window pages) that an admission leaves to the running sequences: what their
// known tokens will need, and one for each to grow into, so that the newcomer is not preempted in
// the next step.
inline int64_t AdmissionReserve(int64_t num_running, int64_t promised) {
  return num_running + promised;
}

// How many of the rows that are left one running prompt may take before waiting sequences have had
// their turn. What they leave is given to the prompts afterwards, so that nothing is lost by it,
// and a long prompt does not keep short ones out.
inline int64_t PromptShare(int64_t rows_left, bool someone_waits) {
  return someone_waits ? (rows_left + 1) / 2 : rows_left;
}

// Waiting sequences that do not fit and are looked past in one step.
inline constexpr int64_t kMaxPassedOver = 128;

// Steps after which a waiting sequence that did not fit is looked up in the prefix cache again
// although the pools have not gained what it lacked.
inline constexpr int64_t kStepsBetweenLookups = 16;

}  // namespace deepinfer
