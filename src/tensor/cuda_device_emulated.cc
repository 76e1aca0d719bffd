// Tests without a GPU: device memory is host memory and everything runs at once. Kernels run in the
// same way (ops/cuda/emulated). Recorded graphs are not emulated.
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "tensor/cuda_device.h"

namespace deepinfer::cuda {
namespace {

using Clock = std::chrono::steady_clock;

Result<void*> AlignedMemory(int64_t bytes) {
  constexpr size_t kAlignment = 1024;
  const size_t rounded = (static_cast<size_t>(bytes < 1 ? 1 : bytes) + kAlignment - 1) / kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded * kAlignment);
  if (data == nullptr)
    return Fail(Code::kResourceExhausted, fmt::format("Cannot allocate {} bytes.", bytes));
  std::memset(data, 0xff, rounded * kAlignment);  // NaN everywhere: unwritten outputs show
  return data;
}

Status Copy(const void* source, void* target, int64_t bytes) {
  if (bytes > 0) std::memmove(target, source, static_cast<size_t>(bytes));
  return {};
}

}  // namespace

Result<int> DeviceCount() {
  return 1;
}
Result<DeviceProperties> GetDeviceProperties(int) {
  return DeviceProperties{.name = "emulated device",
                          .sm_count = 4,
                          .compute_major = 9,
                          .compute_minor = 0,
                          .memory_bytes = int64_t{8} << 30,
                          .l2_bytes = int64_t{1} << 20};
}
Result<int64_t> FreeMemoryBytes(int) {
  return int64_t{8} << 30;
}
Result<void*> Allocate(int, int64_t bytes) {
  return AlignedMemory(bytes);
}
void Free(int, void* data) noexcept {
  std::free(data);
}
Result<void*> AllocatePinned(int64_t bytes) {
  return AlignedMemory(bytes);
}
void FreePinned(void* data) noexcept {
  std::free(data);
}
Result<void*> CreateStream(int) {
  return std::malloc(1);
}
void DestroyStream(int, void* stream) noexcept {
  std::free(stream);
}
Status Synchronize(void*) {
  return {};
}
Status CopyToDevice(const void* source, void* target, int64_t bytes, void*) {
  return Copy(source, target, bytes);
}
Status CopyToHost(const void* source, void* target, int64_t bytes, void*) {
  return Copy(source, target, bytes);
}
Status CopyOnDevice(const void* source, void* target, int64_t bytes, void*) {
  return Copy(source, target, bytes);
}
Status FillBytes(void* target, uint8_t value, int64_t bytes, void*) {
  if (bytes > 0) std::memset(target, value, static_cast<size_t>(bytes));
  return {};
}
Result<void*> CreateEvent(int) {
  return static_cast<void*>(new Clock::time_point());
}
void DestroyEvent(void* event) noexcept {
  delete static_cast<Clock::time_point*>(event);
}
Status RecordEvent(void* event, void*) {
  *static_cast<Clock::time_point*>(event) = Clock::now();
  return {};
}
Status StreamWaitEvent(void*, void*) {
  return {};
}
Status SynchronizeEvent(void*) {
  return {};
}
Result<float> ElapsedMilliseconds(void* begin, void* end) {
  return std::chrono::duration<float, std::milli>(*static_cast<Clock::time_point*>(end) -
                                                  *static_cast<Clock::time_point*>(begin))
      .count();
}
bool RecordsGraphs() {
  return false;
}
Status BeginCapture(void*) {
  return Fail(Code::kUnsupported, "The emulated device records no graphs.");
}
Result<void*> EndCapture(void*) {
  return Fail(Code::kUnsupported, "The emulated device records no graphs.");
}
void DestroyGraph(void*) noexcept {}
Status LaunchGraph(void*, void*) {
  return Fail(Code::kUnsupported, "The emulated device records no graphs.");
}

}  // namespace deepinfer::cuda
