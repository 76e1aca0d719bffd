// What the rest of the engine needs of the CUDA runtime, without its headers: memory, copies,
// streams, events and graphs of one process's devices. Three implementations, chosen by the build
// (DI_CUDA): the real one; one that fails with kUnsupported, in builds without CUDA; and an
// emulation on the host for tests of kernels. Device code is in ops.
//
// Errors of all functions: kUnsupported (this build has no CUDA backend, or the machine has no
// usable driver or device; the sentence says which), kResourceExhausted (memory), kInternal
// (everything else; the sentence names the call and the runtime's own words).
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace deepinfer::cuda {

// Devices that this process can use, at least 1.
Result<int> DeviceCount();

struct DeviceProperties {
  std::string name;
  int sm_count = 0;
  int compute_major = 0;
  int compute_minor = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};
Result<DeviceProperties> GetDeviceProperties(int device);
// Bytes that can be allocated now.
Result<int64_t> FreeMemoryBytes(int device);

// 256-byte aligned device memory, uninitialised.
Result<void*> Allocate(int device, int64_t bytes);
void Free(int device, void* data) noexcept;
// Page-locked host memory that devices can read and write at the same address.
Result<void*> AllocatePinned(int64_t bytes);
void FreePinned(void* data) noexcept;

// Streams order their work and run beside each other.
Result<void*> CreateStream(int device);
void DestroyStream(int device, void* stream) noexcept;
// Waits for the work of the stream; reports errors of kernels that ran since the last call.
Status Synchronize(void* stream);

// Copies and fills in the stream's order. Host memory that is not page-locked makes the host wait.
Status CopyToDevice(const void* source, void* target, int64_t bytes, void* stream);
Status CopyToHost(const void* source, void* target, int64_t bytes, void* stream);
Status CopyOnDevice(const void* source, void* target, int64_t bytes, void* stream);
Status FillBytes(void* target, uint8_t value, int64_t bytes, void* stream);

// Events mark a place in a stream.
Result<void*> CreateEvent(int device);
void DestroyEvent(void* event) noexcept;
Status RecordEvent(void* event, void* stream);
// The stream goes on when the event's place has been reached; the host does not wait.
Status StreamWaitEvent(void* stream, void* event);
Status SynchronizeEvent(void* event);
// Milliseconds between two recorded events that have been reached.
Result<float> ElapsedMilliseconds(void* begin, void* end);

// Between Begin and End, work of the stream (and of streams that wait for its events) is recorded
// instead of run. The result can be launched any number of times.
bool RecordsGraphs();  // false where the functions below are not supported
Status BeginCapture(void* stream);
Result<void*> EndCapture(void* stream);
void DestroyGraph(void* graph) noexcept;
Status LaunchGraph(void* graph, void* stream);

}  // namespace deepinfer::cuda
