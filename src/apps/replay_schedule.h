// `deepinfer replay-schedule`: repeats a recorded run of the scheduler without a model.
#pragma once

#include <string>

namespace deepinfer {

// Exit status 0: the same decisions; kExitDifference: one differs.
int RunReplaySchedule(const std::string& path);

}  // namespace deepinfer
