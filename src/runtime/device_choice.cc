#include "runtime/device_choice.h"

#include <charconv>
#include <string>

#include "base/log.h"
#include "tensor/cuda_device.h"

namespace deepinfer {

Result<Device> ChooseDevice(std::string_view name) {
  if (name == "cpu") return Device{};
  if (name == "auto") {
    const Result<int> count = cuda::DeviceCount();
    if (count.has_value()) return Device{DeviceKind::kCuda, 0};
    Log(LogLevel::kInfo, "no CUDA device is used reason='{}'", count.error().message);
    return Device{};
  }
  constexpr std::string_view kCuda = "cuda";
  if (name.starts_with(kCuda)) {
    std::string_view rest = name.substr(kCuda.size());
    int index = 0;
    bool valid = rest.empty();
    if (rest.starts_with(':')) {
      rest.remove_prefix(1);
      const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), index);
      valid = error == std::errc() && end == rest.data() + rest.size() && index >= 0;
    }
    if (valid) {
      DI_ASSIGN_OR_RETURN(const int count, cuda::DeviceCount());
      if (index >= count) {
        return Fail(
            Code::kInvalidArgument,
            fmt::format("device is '{}'; this machine has {}.", name,
                        count == 1 ? std::string("one CUDA device, cuda:0")
                                   : fmt::format("CUDA devices cuda:0 to cuda:{}", count - 1)),
            "device");
      }
      return Device{DeviceKind::kCuda, index};
    }
  }
  return Fail(Code::kInvalidArgument,
              fmt::format("device is '{}'; allowed are auto, cpu, cuda and cuda:N.", name),
              "device");
}

std::string DeviceName(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

}  // namespace deepinfer
