// Where memory lives, and a non-owning typed view of it. Views never own; the buffer
// (tensor/buffer.h) behind one must outlive it. Whether a pointer may be dereferenced by host code
// is decided by `device`, and only by ops.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/check.h"
#include "tensor/dtype.h"

namespace deepinfer {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(Device, Device) = default;
};

inline constexpr int kMaxRank = 4;

// Up to four axes; strides count elements. Rows (all axes but the first) may be padded, i.e.
// stride(0) may exceed the product of the inner axes; inner axes are contiguous.
class TensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});
  TensorView(const void* data, DType dtype, std::initializer_list<int64_t> shape,
             Device device = {})
      : TensorView(const_cast<void*>(data), dtype, shape, device) {}

  bool empty() const {
    return data_ == nullptr;
  }
  int rank() const {
    return rank_;
  }
  DType dtype() const {
    return dtype_;
  }
  Device device() const {
    return device_;
  }
  int64_t dim(int axis) const {
    DI_DCHECK(axis >= 0 && axis < rank_);
    return shape_[static_cast<size_t>(axis)];
  }
  int64_t rows() const {
    return rank_ == 0 ? 0 : shape_[0];
  }
  // Elements per row: product of all axes but the first.
  int64_t row_size() const;
  int64_t row_stride() const {
    return row_stride_;
  }
  int64_t num_elements() const {
    return rank_ == 0 ? 0 : shape_[0] * row_size();
  }
  bool contiguous() const {
    return row_stride_ == row_size();
  }
  void* data() const {
    return data_;
  }

  // The element pointer of row `row`, typed. Checked in debug builds only.
  template <class T>
  T* Row(int64_t row) const {
    DI_DCHECK(static_cast<int64_t>(sizeof(T)) == DTypeBytes(dtype_));
    return static_cast<T*>(data_) + row * row_stride_;
  }

  // Rows [begin, end).
  TensorView Rows(int64_t begin, int64_t end) const;
  // A rank-2 view of columns [begin, end) of a rank-2 view.
  TensorView Columns(int64_t begin, int64_t end) const;
  // Same memory with another shape of as many elements; needs contiguous().
  TensorView Reshape(std::initializer_list<int64_t> shape) const;

  // "BF16 [3, 5120]", for messages.
  std::string ToString() const;

 private:
  void* data_ = nullptr;
  std::array<int64_t, kMaxRank> shape_ = {};
  int64_t row_stride_ = 0;
  int rank_ = 0;
  DType dtype_ = DType::kU8;
  Device device_;
};

}  // namespace deepinfer
