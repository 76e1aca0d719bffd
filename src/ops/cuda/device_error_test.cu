// A kernel that goes wrong, in a process of its own, because the device is lost to it afterwards.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "device.cuh"
#include "tensor/buffer.h"
#include "tensor/cuda_device.h"
#include "tensor/device_lost.h"

namespace deepinfer::cuda {
namespace {

__global__ void StoreKernel(int* target) {
  *target = 1;
}

// The child's part: status 1, and the sentence on standard error, if all is as it should be.
[[noreturn]] void StoreWhereNothingIs() {
  const Result<std::unique_ptr<Stream>> stream = Stream::CreateCuda(0, 1);
  if (!stream.has_value()) std::exit(10);
  // A place that no allocation has.
  auto* const target = reinterpret_cast<int*>(uintptr_t{16});
  const Status launched = Launch("StoreKernel", &StoreKernel, {}, **stream, target);
  Status seen = launched.has_value() ? (*stream)->Synchronize() : launched;
  if (seen.has_value()) std::exit(11);
  if (!IsDeviceLost(seen.error())) std::exit(12);
  // Everything else fails in the same way, and nothing waits.
  const Result<Buffer> buffer = Buffer::Allocate({DeviceKind::kCuda, 0}, 1 << 20);
  if (buffer.has_value() || !IsDeviceLost(buffer.error())) std::exit(13);
  const Status again = (*stream)->Synchronize();
  if (again.has_value() || !IsDeviceLost(again.error())) std::exit(14);
  std::fprintf(stderr, "%s\n", seen.error().message.c_str());
  std::exit(1);
}

TEST(CudaDeviceError, AnIllegalAddressIsOneSentenceAndEveryLaterCallFailsWithIt) {
  const Result<int> count = DeviceCount();
  if (!count.has_value()) GTEST_SKIP() << count.error().message;
  const Result<DeviceProperties> properties = GetDeviceProperties(0);
  ASSERT_TRUE(properties.has_value());
  if (properties->name == "emulated device") GTEST_SKIP() << "the emulation shares our memory";
  // The child begins anew: a process that has used CUDA cannot be forked.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      StoreWhereNothingIs(), ::testing::ExitedWithCode(1),
      "A kernel has failed on the device, which this process cannot use any more: .*illegal "
      "memory access.*cudaErrorIllegalAddress");
}

}  // namespace
}  // namespace deepinfer::cuda
