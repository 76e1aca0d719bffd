#include "tensor/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

constexpr int64_t kAlignment = 64;
// From here on mmap: zeroed and committed lazily by the kernel, and worth a huge page.
constexpr int64_t kMapThresholdBytes = int64_t{4} << 20;

}  // namespace

Result<Buffer> Buffer::Allocate(Device device, int64_t bytes) {
  DI_CHECK_GE(bytes, 0);
  Buffer buffer;
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  if (device.kind == DeviceKind::kCuda) {
    DI_ASSIGN_OR_RETURN(buffer.data_, cuda::Allocate(device.index, bytes));
    return buffer;
  }
  if (bytes >= kMapThresholdBytes) {
    void* data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("Cannot allocate {} bytes of memory.", bytes));
    }
    ::madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    buffer.data_ = data;
    buffer.mapped_bytes_ = bytes;
    return buffer;
  }
  const int64_t rounded = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  buffer.data_ = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
  if (buffer.data_ == nullptr) {
    return Fail(Code::kResourceExhausted,
                fmt::format("Cannot allocate {} bytes of memory.", bytes));
  }
  return buffer;
}

Result<Buffer> Buffer::AllocateZeroed(Device device, int64_t bytes) {
  DI_ASSIGN_OR_RETURN(Buffer buffer, Allocate(device, bytes));
  if (device.kind == DeviceKind::kCuda) {
    // The default stream: other streams of ours do not wait for it, so the host does.
    DI_RETURN_IF_ERROR(cuda::FillBytes(buffer.data_, 0, bytes, nullptr));
    DI_RETURN_IF_ERROR(cuda::Synchronize(nullptr));
  } else if (buffer.mapped_bytes_ == 0) {
    std::memset(buffer.data_, 0, static_cast<size_t>(bytes));
  }
  return buffer;
}

Result<Buffer> Buffer::AllocatePinned(int64_t bytes) {
  DI_CHECK_GE(bytes, 0);
  Buffer buffer;
  buffer.bytes_ = bytes;
  buffer.pinned_ = true;
  DI_ASSIGN_OR_RETURN(buffer.data_, cuda::AllocatePinned(bytes));
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept {
  *this = std::move(other);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(pinned_, other.pinned_);
  std::swap(device_, other.device_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (pinned_) {
    cuda::FreePinned(data_);
  } else if (device_.kind == DeviceKind::kCuda) {
    cuda::Free(device_.index, data_);
  } else if (mapped_bytes_ > 0) {
    ::munmap(data_, static_cast<size_t>(mapped_bytes_));
  } else {
    std::free(data_);
  }
}

TensorView Buffer::View(DType dtype, std::initializer_list<int64_t> shape) const {
  TensorView view(data_, dtype, shape, device_);
  DI_CHECK_LE(view.num_elements() * DTypeBytes(dtype), bytes_);
  return view;
}

}  // namespace deepinfer
