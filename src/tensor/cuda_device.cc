// The CUDA runtime behind tensor/cuda_device.h. Links the static runtime, which looks for the
// driver when it is first used: the program starts on machines that have none.
#include "tensor/cuda_device.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "tensor/device_lost.h"

namespace deepinfer::cuda {
namespace {

tl::unexpected<Error> Failure(const char* call, cudaError_t status) {
  cudaGetLastError();  // an error that does not break the device is not reported twice
  switch (status) {
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInitializationError:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorStubLibrary:
      return Fail(Code::kUnsupported,
                  fmt::format("This machine has no usable CUDA device or driver: {} ({}).",
                              cudaGetErrorString(status), call),
                  "device");
    case cudaErrorMemoryAllocation:
      return Fail(Code::kResourceExhausted,
                  fmt::format("The device's memory does not suffice: {} ({}).",
                              cudaGetErrorString(status), call));
    // What a kernel or the hardware has done; such errors stay, whatever is called.
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorECCUncorrectable:
      return Fail(
          Code::kInternal,
          fmt::format("A kernel has failed on the device, which this process cannot use any "
                      "more: {} ({}, seen by {}; with CUDA_LAUNCH_BLOCKING=1 in the "
                      "environment and without graphs the launch is named).",
                      cudaGetErrorString(status), cudaGetErrorName(status), call),
          kLostDeviceField);
    default:
      return Fail(Code::kInternal,
                  fmt::format("CUDA call {} failed: {} ({}).", call, cudaGetErrorString(status),
                              cudaGetErrorName(status)));
  }
}

Status ToStatus(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return {};
  return Failure(call, status);
}

#define DI_CUDA_RETURN_IF_ERROR(call)                                               \
  do {                                                                              \
    if (const cudaError_t di_cuda_status_ = (call); di_cuda_status_ != cudaSuccess) \
      return Failure(#call, di_cuda_status_);                                       \
  } while (false)

cudaStream_t ToStream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t ToEvent(void* event) {
  return static_cast<cudaEvent_t>(event);
}

Status Copy(const void* source, void* target, int64_t bytes, cudaMemcpyKind kind, void* stream) {
  if (bytes == 0) return {};
  return ToStatus("cudaMemcpyAsync", cudaMemcpyAsync(target, source, static_cast<size_t>(bytes),
                                                     kind, ToStream(stream)));
}

}  // namespace

Result<int> DeviceCount() {
  int count = 0;
  DI_CUDA_RETURN_IF_ERROR(cudaGetDeviceCount(&count));
  if (count == 0) return Failure("cudaGetDeviceCount", cudaErrorNoDevice);
  return count;
}

Result<DeviceProperties> GetDeviceProperties(int device) {
  cudaDeviceProp found;
  DI_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&found, device));
  DeviceProperties properties;
  properties.name = found.name;
  properties.sm_count = found.multiProcessorCount;
  properties.compute_major = found.major;
  properties.compute_minor = found.minor;
  properties.memory_bytes = static_cast<int64_t>(found.totalGlobalMem);
  properties.l2_bytes = found.l2CacheSize;
  return properties;
}

Result<int64_t> FreeMemoryBytes(int device) {
  DI_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  DI_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  return static_cast<int64_t>(free_bytes);
}

Result<void*> Allocate(int device, int64_t bytes) {
  DI_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes < 1 ? 1 : bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    return Fail(Code::kResourceExhausted,
                fmt::format("Cannot allocate {} bytes on CUDA device {}: {} of its {} bytes are "
                            "free.",
                            bytes, device, free_bytes, total_bytes));
  }
  if (status != cudaSuccess) return Failure("cudaMalloc", status);
  return data;
}

void Free(int device, void* data) noexcept {
  cudaSetDevice(device);
  cudaFree(data);
}

Result<void*> AllocatePinned(int64_t bytes) {
  void* data = nullptr;
  DI_CUDA_RETURN_IF_ERROR(cudaHostAlloc(&data, static_cast<size_t>(bytes < 1 ? 1 : bytes),
                                        cudaHostAllocPortable | cudaHostAllocMapped));
  return data;
}

void FreePinned(void* data) noexcept {
  cudaFreeHost(data);
}

Result<void*> CreateStream(int device) {
  DI_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  cudaStream_t stream = nullptr;
  DI_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return static_cast<void*>(stream);
}

void DestroyStream(int device, void* stream) noexcept {
  cudaSetDevice(device);
  cudaStreamDestroy(ToStream(stream));
}

Status Synchronize(void* stream) {
  return ToStatus("cudaStreamSynchronize", cudaStreamSynchronize(ToStream(stream)));
}

Status CopyToDevice(const void* source, void* target, int64_t bytes, void* stream) {
  return Copy(source, target, bytes, cudaMemcpyHostToDevice, stream);
}
Status CopyToHost(const void* source, void* target, int64_t bytes, void* stream) {
  return Copy(source, target, bytes, cudaMemcpyDeviceToHost, stream);
}
Status CopyOnDevice(const void* source, void* target, int64_t bytes, void* stream) {
  return Copy(source, target, bytes, cudaMemcpyDeviceToDevice, stream);
}
Status FillBytes(void* target, uint8_t value, int64_t bytes, void* stream) {
  if (bytes == 0) return {};
  return ToStatus("cudaMemsetAsync",
                  cudaMemsetAsync(target, value, static_cast<size_t>(bytes), ToStream(stream)));
}

Result<void*> CreateEvent(int device) {
  DI_CUDA_RETURN_IF_ERROR(cudaSetDevice(device));
  cudaEvent_t event = nullptr;
  DI_CUDA_RETURN_IF_ERROR(cudaEventCreate(&event));
  return static_cast<void*>(event);
}
void DestroyEvent(void* event) noexcept {
  cudaEventDestroy(ToEvent(event));
}
Status RecordEvent(void* event, void* stream) {
  return ToStatus("cudaEventRecord", cudaEventRecord(ToEvent(event), ToStream(stream)));
}
Status StreamWaitEvent(void* stream, void* event) {
  return ToStatus("cudaStreamWaitEvent", cudaStreamWaitEvent(ToStream(stream), ToEvent(event), 0));
}
Status SynchronizeEvent(void* event) {
  return ToStatus("cudaEventSynchronize", cudaEventSynchronize(ToEvent(event)));
}
Result<float> ElapsedMilliseconds(void* begin, void* end) {
  float milliseconds = 0.0f;
  DI_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&milliseconds, ToEvent(begin), ToEvent(end)));
  return milliseconds;
}

bool RecordsGraphs() {
  return true;
}
Status BeginCapture(void* stream) {
  return ToStatus("cudaStreamBeginCapture",
                  cudaStreamBeginCapture(ToStream(stream), cudaStreamCaptureModeThreadLocal));
}

Result<void*> EndCapture(void* stream) {
  cudaGraph_t graph = nullptr;
  DI_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(ToStream(stream), &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  if (status != cudaSuccess) return Failure("cudaGraphInstantiate", status);
  return static_cast<void*>(executable);
}

void DestroyGraph(void* graph) noexcept {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

Status LaunchGraph(void* graph, void* stream) {
  return ToStatus("cudaGraphLaunch",
                  cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), ToStream(stream)));
}

}  // namespace deepinfer::cuda
