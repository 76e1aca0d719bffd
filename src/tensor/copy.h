// Explicit transfers between host and device memory: code above ops never dereferences device
// pointers.
#pragma once

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// Copies a contiguous view's bytes to host memory that can hold them, and waits for it.
Status CopyToHost(const TensorView& source, void* target, Stream& stream);
// The same without waiting: the bytes are there when the stream has come that far. The target is
// page-locked memory where the source is on a GPU.
Status CopyToHostInOrder(const TensorView& source, void* target, Stream& stream);
// Copies host bytes into a contiguous view. The source may be changed afterwards unless it is
// page-locked memory (Buffer::AllocatePinned): a GPU reads that later, in the stream's order.
Status CopyToDevice(const void* source, const TensorView& target, Stream& stream);
// Copies between contiguous views of the same number of bytes on the stream's device.
Status CopyOnDevice(const TensorView& source, const TensorView& target, Stream& stream);

}  // namespace deepinfer
