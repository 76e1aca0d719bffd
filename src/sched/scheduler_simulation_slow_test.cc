#include "sched/simulated_world.h"

namespace deepinfer {
namespace {

TEST(SchedulerSimulation, AMillionOtherStepsGiveTheTokensOfThePlainModel) {
  RunWorlds(1'000'000, 1'000'000);
}

}  // namespace
}  // namespace deepinfer
