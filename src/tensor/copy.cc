#include "tensor/copy.h"

#include <cstring>

namespace deepinfer {
namespace {

size_t Bytes(const TensorView& view) {
  DI_CHECK(view.contiguous());
  return static_cast<size_t>(view.num_elements() * DTypeBytes(view.dtype()));
}

}  // namespace

Status CopyToHost(const TensorView& source, void* target, Stream&) {
  if (source.num_elements() > 0) std::memcpy(target, source.data(), Bytes(source));
  return {};
}

Status CopyOnDevice(const TensorView& source, const TensorView& target, Stream&) {
  DI_CHECK_EQ(Bytes(source), Bytes(target));
  if (target.num_elements() > 0) std::memmove(target.data(), source.data(), Bytes(target));
  return {};
}

Status CopyToDevice(const void* source, const TensorView& target, Stream&) {
  if (target.num_elements() > 0) std::memcpy(target.data(), source, Bytes(target));
  return {};
}

}  // namespace deepinfer
