// Errors after which this process cannot use its device any more.
#pragma once

#include "base/error.h"

namespace deepinfer {

// A kernel has failed on the device, or the device itself has: everything there is lost, and every
// later call fails in the same way. tensor/cuda_device.h marks such errors.
inline constexpr char kLostDeviceField[] = "device";
inline bool IsDeviceLost(const Error& error) {
  return error.code == Code::kInternal && error.field == kLostDeviceField;
}

}  // namespace deepinfer
