// Which device a program runs on, from what its user said.
#pragma once

#include <string_view>

#include "base/error.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// "cpu", "cuda", "cuda:N", or "auto": the first CUDA device that this build and machine can use,
// else the CPU. Errors: kInvalidArgument with field "device"; for an explicit CUDA device that
// cannot be used kUnsupported, or kInvalidArgument where there is no device of that number.
Result<Device> ChooseDevice(std::string_view name);

// "cpu" or "cuda:0".
std::string DeviceName(Device device);

}  // namespace deepinfer
