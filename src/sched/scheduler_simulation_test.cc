#include "sched/simulated_world.h"

namespace deepinfer {
namespace {

TEST(SchedulerSimulation, TwoHundredThousandStepsGiveTheTokensOfThePlainModel) {
  RunWorlds(1, 200'000);
}

}  // namespace
}  // namespace deepinfer
