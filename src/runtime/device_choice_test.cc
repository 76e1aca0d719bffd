#include "runtime/device_choice.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

TEST(DeviceChoice, TheCpuIsAlwaysThere) {
  EXPECT_EQ(ChooseDevice("cpu").value(), Device{});
  EXPECT_EQ(DeviceName(Device{}), "cpu");
}

TEST(DeviceChoice, AutoNeverFails) {
  EXPECT_TRUE(ChooseDevice("auto").has_value());
}

TEST(DeviceChoice, AnUnknownNameIsRefusedWithWhatIsAllowed) {
  for (const char* name : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0x", "cudaa", "CPU"}) {
    const Result<Device> device = ChooseDevice(name);
    ASSERT_FALSE(device.has_value()) << name;
    EXPECT_EQ(device.error().field, "device");
    EXPECT_NE(device.error().message.find("allowed are auto, cpu, cuda and cuda:N"),
              std::string::npos)
        << device.error().message;
  }
}

TEST(DeviceChoice, ADeviceThatIsNotThereIsRefusedBeforeAnythingIsLoaded) {
  const Result<Device> device = ChooseDevice("cuda:4000");
  ASSERT_FALSE(device.has_value());
  EXPECT_EQ(device.error().field, "device");
}

}  // namespace
}  // namespace deepinfer
