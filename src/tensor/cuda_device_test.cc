#include "tensor/cuda_device.h"

#include <gtest/gtest.h>

#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

// Without a CUDA build, driver or device, every way to a device ends with a sentence that says so.
TEST(CudaDevice, WithoutADeviceEverythingSaysSoAndNothingElseHappens) {
  const Result<int> count = cuda::DeviceCount();
  if (count.has_value()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(count.error().code, Code::kUnsupported);
  EXPECT_EQ(count.error().field, "device");
  EXPECT_NE(count.error().message.find("CUDA"), std::string::npos);
  const auto stream = Stream::CreateCuda(0, 1);
  ASSERT_FALSE(stream.has_value());
  EXPECT_EQ(stream.error().code, Code::kUnsupported);
  const auto buffer = Buffer::Allocate({DeviceKind::kCuda, 0}, 64);
  ASSERT_FALSE(buffer.has_value());
  EXPECT_EQ(buffer.error().code, Code::kUnsupported);
  EXPECT_EQ(Buffer::AllocatePinned(64).error().code, Code::kUnsupported);
}

TEST(CudaDevice, AnAllocationThatDoesNotFitIsASentenceAndTheNextOneWorks) {
  if (!cuda::DeviceCount().has_value()) GTEST_SKIP() << "this machine has no CUDA device";
  const auto properties = cuda::GetDeviceProperties(0);
  ASSERT_TRUE(properties.has_value());
  if (properties->name == "emulated device") GTEST_SKIP() << "host memory is overcommitted";
  const auto buffer = Buffer::Allocate({DeviceKind::kCuda, 0}, 2 * properties->memory_bytes);
  ASSERT_FALSE(buffer.has_value());
  EXPECT_EQ(buffer.error().code, Code::kResourceExhausted);
  EXPECT_NE(buffer.error().message.find("Cannot allocate"), std::string::npos);
  const auto small = Buffer::AllocateZeroed({DeviceKind::kCuda, 0}, 1 << 20);
  EXPECT_TRUE(small.has_value());
}

TEST(CudaDevice, ADeviceThatTheMachineDoesNotHaveIsRefusedByNumber) {
  const Result<int> count = cuda::DeviceCount();
  if (!count.has_value()) GTEST_SKIP() << "this machine has no CUDA device";
  for (const int index : {-1, *count}) {
    const auto stream = Stream::CreateCuda(index, 1);
    ASSERT_FALSE(stream.has_value());
    EXPECT_EQ(stream.error().code, Code::kInvalidArgument);
    EXPECT_NE(stream.error().message.find(fmt::format("There is no CUDA device {}", index)),
              std::string::npos)
        << stream.error().message;
  }
}

}  // namespace
}  // namespace deepinfer
