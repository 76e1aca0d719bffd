// Owning memory on a device, 64-byte aligned (256 on a GPU).
#pragma once

#include <cstdint>
#include <initializer_list>

#include "base/error.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

class Buffer {
 public:
  Buffer() = default;
  // Uninitialised memory. Large CPU buffers are page-aligned with a huge-page hint and committed on
  // first touch. Errors: kResourceExhausted, kUnsupported (no backend for the device in this
  // build).
  static Result<Buffer> Allocate(Device device, int64_t bytes);
  static Result<Buffer> AllocateZeroed(Device device, int64_t bytes);
  // Page-locked host memory: a CPU buffer that CUDA devices can reach as well, at the same address.
  // Errors: as above.
  static Result<Buffer> AllocatePinned(int64_t bytes);

  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const {
    return data_;
  }
  int64_t bytes() const {
    return bytes_;
  }
  Device device() const {
    return device_;
  }
  // A view of the first elements; the shape must fit.
  TensorView View(DType dtype, std::initializer_list<int64_t> shape) const;

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t mapped_bytes_ = 0;  // > 0: obtained by mmap
  bool pinned_ = false;
  Device device_;
};

}  // namespace deepinfer
