#include "tensor/tensor_view.h"

#include <fmt/format.h>

namespace deepinfer {

TensorView::TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device)
    : data_(data), dtype_(dtype), device_(device) {
  DI_CHECK_LE(shape.size(), static_cast<size_t>(kMaxRank));
  for (int64_t extent : shape) {
    DI_CHECK_GE(extent, 0);
    shape_[static_cast<size_t>(rank_++)] = extent;
  }
  row_stride_ = row_size();
}

int64_t TensorView::row_size() const {
  int64_t size = 1;
  for (int axis = 1; axis < rank_; ++axis) size *= shape_[static_cast<size_t>(axis)];
  return size;
}

TensorView TensorView::Rows(int64_t begin, int64_t end) const {
  DI_CHECK(rank_ >= 1 && begin >= 0 && begin <= end && end <= shape_[0]);
  TensorView view = *this;
  view.data_ = static_cast<char*>(data_) + begin * row_stride_ * DTypeBytes(dtype_);
  view.shape_[0] = end - begin;
  return view;
}

TensorView TensorView::Columns(int64_t begin, int64_t end) const {
  DI_CHECK(rank_ == 2 && begin >= 0 && begin <= end && end <= shape_[1]);
  TensorView view = *this;
  view.data_ = static_cast<char*>(data_) + begin * DTypeBytes(dtype_);
  view.shape_[1] = end - begin;
  return view;
}

TensorView TensorView::Reshape(std::initializer_list<int64_t> shape) const {
  DI_CHECK(contiguous());
  TensorView view(data_, dtype_, shape, device_);
  DI_CHECK_EQ(view.num_elements(), num_elements());
  return view;
}

std::string TensorView::ToString() const {
  std::string text = fmt::format("{} [", DTypeName(dtype_));
  for (int axis = 0; axis < rank_; ++axis) {
    text += fmt::format("{}{}", axis == 0 ? "" : ", ", shape_[static_cast<size_t>(axis)]);
  }
  return text + "]";
}

}  // namespace deepinfer
