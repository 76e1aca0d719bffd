#include "runtime/step_upload.h"

#include <cstring>

#include "base/check.h"
#include "tensor/copy.h"

namespace deepinfer {

void StepUpload::Add(const void* data, int64_t bytes, DType dtype,
                     std::initializer_list<int64_t> shape, TensorView* target) {
  const TensorView view(static_cast<void*>(nullptr), dtype, shape);
  DI_CHECK_EQ(view.num_elements() * DTypeBytes(dtype), bytes);
  items_.push_back({data, bytes, view, target, bytes_});
  bytes_ += RoundUpScratch(bytes);
}

Status StepUpload::Finish(ScratchScope& scope, Buffer* staging, Stream& stream) {
  auto* base = static_cast<char*>(scope.AllocateBytes(bytes_));
  const bool device = stream.device().kind != DeviceKind::kCpu;
  if (device && staging->bytes() < bytes_) {
    // A copy out of the old memory may still be under way.
    DI_RETURN_IF_ERROR(stream.Synchronize());
    DI_ASSIGN_OR_RETURN(*staging, Buffer::AllocatePinned(2 * bytes_));
  }
  char* host = device ? static_cast<char*>(staging->data()) : base;
  for (const Item& item : items_) {
    if (item.bytes > 0) std::memcpy(host + item.offset, item.data, static_cast<size_t>(item.bytes));
    void* data = base + item.offset;
    const DType dtype = item.shape.dtype();
    *item.target =
        item.shape.rank() == 1
            ? TensorView(data, dtype, {item.shape.dim(0)}, stream.device())
            : TensorView(data, dtype, {item.shape.dim(0), item.shape.dim(1)}, stream.device());
  }
  if (!device || bytes_ == 0) return {};
  return CopyToDevice(host, TensorView(base, DType::kU8, {bytes_}, stream.device()), stream);
}

}  // namespace deepinfer
