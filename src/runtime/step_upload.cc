#include "runtime/step_upload.h"

#include <cstring>

#include "base/check.h"
#include "tensor/copy.h"

namespace deepinfer {

void StepUpload::Add(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape,
                     TensorView* target) {
  const TensorView view(static_cast<void*>(nullptr), DType::kI32, shape);
  DI_CHECK_EQ(view.num_elements(), std::ssize(values));
  items_.push_back({&values, view, target, bytes_});
  bytes_ += RoundUpScratch(view.num_elements() * 4);
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
    if (!item.values->empty())
      std::memcpy(host + item.offset, item.values->data(), item.values->size() * 4);
    void* data = base + item.offset;
    *item.target = item.shape.rank() == 1
                       ? TensorView(data, DType::kI32, {item.shape.dim(0)}, stream.device())
                       : TensorView(data, DType::kI32, {item.shape.dim(0), item.shape.dim(1)},
                                    stream.device());
  }
  if (!device || bytes_ == 0) return {};
  return CopyToDevice(host, TensorView(base, DType::kU8, {bytes_}, stream.device()), stream);
}

}  // namespace deepinfer
