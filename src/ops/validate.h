// Argument checks shared by the dispatching halves of operations. They look at shapes and dtypes,
// never at data.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <string_view>

#include "base/error.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// kInvalidArgument unless `view` has the dtype and shape; -1 in `shape` matches any extent.
inline Status ExpectTensor(const TensorView& view, DType dtype,
                           std::initializer_list<int64_t> shape, std::string_view op,
                           std::string_view name) {
  bool ok = !view.empty() || view.num_elements() == 0;
  ok = ok && view.dtype() == dtype && view.rank() == static_cast<int>(shape.size());
  int axis = 0;
  for (int64_t extent : shape) {
    if (ok && extent >= 0) ok = view.dim(axis) == extent;
    ++axis;
  }
  if (ok) return {};
  std::string expected;
  for (int64_t extent : shape) {
    expected += (expected.empty() ? "" : ", ") +
                (extent < 0 ? std::string("any") : fmt::format("{}", extent));
  }
  return Fail(Code::kInvalidArgument,
              fmt::format("{}: '{}' is {}, expected {} [{}].", op, name, view.ToString(),
                          DTypeName(dtype), expected),
              std::string(name));
}

// kInvalidArgument unless the records, along the view's last axis, have one of two sizes.
inline Status ExpectRecords(const TensorView& view, int64_t packed, int64_t bf16,
                            std::string_view op, std::string_view name) {
  const int64_t bytes = view.dim(view.rank() - 1);
  if (bytes == packed || bytes == bf16) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("{}: '{}' has records of {} bytes, expected {} (packed) or {} (bf16).",
                          op, name, bytes, packed, bf16),
              std::string(name));
}

}  // namespace deepinfer
