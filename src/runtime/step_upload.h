// The arrays of a step, or of its draws, on their way to the device: collected on the host, moved
// with one copy.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "base/error.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

class StepUpload {
 public:
  // Plans an array: `target` becomes a view of `shape` when Finish has run; both pointers must live
  // until then.
  void Add(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape,
           TensorView* target) {
    Add(values.data(), std::ssize(values) * 4, DType::kI32, shape, target);
  }
  void Add(const void* data, int64_t bytes, DType dtype, std::initializer_list<int64_t> shape,
           TensorView* target);
  // Bytes that Finish will take from its scope.
  int64_t bytes() const {
    return bytes_;
  }
  // Takes device memory from the scope, copies everything there in the stream's order and sets the
  // targets. `staging` is page-locked memory that the copy reads (grown as needed, unused on a
  // CPU): it may be used again when the stream has come that far.
  Status Finish(ScratchScope& scope, Buffer* staging, Stream& stream);

 private:
  struct Item {
    const void* data;
    int64_t bytes;
    TensorView shape;  // without memory
    TensorView* target;
    int64_t offset;
  };
  std::vector<Item> items_;
  int64_t bytes_ = 0;
};

}  // namespace deepinfer
