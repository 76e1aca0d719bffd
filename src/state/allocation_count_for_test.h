// Counts the allocations of the test executable that it is linked into.
#pragma once

#include <cstdint>

namespace deepinfer {

int64_t AllocationCount();

}  // namespace deepinfer
