#include "tensor/copy.h"

#include <cstring>

#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

size_t Bytes(const TensorView& view) {
  DI_CHECK(view.contiguous());
  return static_cast<size_t>(view.num_elements() * DTypeBytes(view.dtype()));
}

}  // namespace

Status CopyToHostInOrder(const TensorView& source, void* target, Stream& stream) {
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::CopyToHost(source.data(), target, static_cast<int64_t>(Bytes(source)),
                            stream.cuda_stream());
  }
  if (source.num_elements() > 0) std::memcpy(target, source.data(), Bytes(source));
  return {};
}

Status CopyToHost(const TensorView& source, void* target, Stream& stream) {
  DI_RETURN_IF_ERROR(CopyToHostInOrder(source, target, stream));
  return stream.Synchronize();
}

Status CopyOnDevice(const TensorView& source, const TensorView& target, Stream& stream) {
  DI_CHECK_EQ(Bytes(source), Bytes(target));
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::CopyOnDevice(source.data(), target.data(), static_cast<int64_t>(Bytes(source)),
                              stream.cuda_stream());
  }
  if (target.num_elements() > 0) std::memmove(target.data(), source.data(), Bytes(target));
  return {};
}

Status CopyToDevice(const void* source, const TensorView& target, Stream& stream) {
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::CopyToDevice(source, target.data(), static_cast<int64_t>(Bytes(target)),
                              stream.cuda_stream());
  }
  if (target.num_elements() > 0) std::memcpy(target.data(), source, Bytes(target));
  return {};
}

}  // namespace deepinfer
