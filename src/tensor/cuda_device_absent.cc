// Builds without CUDA: every function says so.
#include "tensor/cuda_device.h"

namespace deepinfer::cuda {
namespace {

tl::unexpected<Error> Absent() {
  return Fail(Code::kUnsupported,
              "This build of DeepInfer has no CUDA backend; build it with the preset cuda-release.",
              "device");
}

}  // namespace

Result<int> DeviceCount() {
  return Absent();
}
Result<DeviceProperties> GetDeviceProperties(int) {
  return Absent();
}
Result<int64_t> FreeMemoryBytes(int) {
  return Absent();
}
Result<void*> Allocate(int, int64_t) {
  return Absent();
}
void Free(int, void*) noexcept {}
Result<void*> AllocatePinned(int64_t) {
  return Absent();
}
void FreePinned(void*) noexcept {}
Result<void*> CreateStream(int) {
  return Absent();
}
void DestroyStream(int, void*) noexcept {}
Status Synchronize(void*) {
  return Absent();
}
Status CopyToDevice(const void*, void*, int64_t, void*) {
  return Absent();
}
Status CopyToHost(const void*, void*, int64_t, void*) {
  return Absent();
}
Status CopyOnDevice(const void*, void*, int64_t, void*) {
  return Absent();
}
Status FillBytes(void*, uint8_t, int64_t, void*) {
  return Absent();
}
Result<void*> CreateEvent(int) {
  return Absent();
}
void DestroyEvent(void*) noexcept {}
Status RecordEvent(void*, void*) {
  return Absent();
}
Status StreamWaitEvent(void*, void*) {
  return Absent();
}
Status SynchronizeEvent(void*) {
  return Absent();
}
Result<float> ElapsedMilliseconds(void*, void*) {
  return Absent();
}
bool RecordsGraphs() {
  return false;
}
Status BeginCapture(void*) {
  return Absent();
}
Result<void*> EndCapture(void*) {
  return Absent();
}
void DestroyGraph(void*) noexcept {}
Status LaunchGraph(void*, void*) {
  return Absent();
}

}  // namespace deepinfer::cuda
