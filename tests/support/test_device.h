// The device that the cross-module tests run on: the CPU, or what DI_TEST_DEVICE says ("cuda:0"),
// so that the same tables hold for every device.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "runtime/device_choice.h"
#include "tensor/cuda_device.h"
#include "tensor/tensor_view.h"

namespace deepinfer::testing_support {

inline Device TestDevice() {
  const char* name = std::getenv("DI_TEST_DEVICE");
  const Result<Device> device = ChooseDevice(name == nullptr ? "cpu" : name);
  EXPECT_TRUE(device.has_value()) << device.error().message;
  return device.value_or(Device{});
}

inline bool OnCuda() {
  return TestDevice().kind == DeviceKind::kCuda;
}

// Overwrites a contiguous view with bytes that are not numbers in any format.
inline void Poison(const TensorView& view) {
  if (view.empty()) return;
  const int64_t bytes = view.num_elements() * DTypeBytes(view.dtype());
  if (view.device().kind == DeviceKind::kCuda) {
    EXPECT_TRUE(cuda::FillBytes(view.data(), 0xff, bytes, nullptr).has_value());
    EXPECT_TRUE(cuda::Synchronize(nullptr).has_value());
    return;
  }
  std::memset(view.data(), 0xff, static_cast<size_t>(bytes));
}

}  // namespace deepinfer::testing_support
