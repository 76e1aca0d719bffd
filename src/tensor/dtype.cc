#include "tensor/dtype.h"

namespace deepinfer {

int64_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBf16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kFp8E4M3:
    case DType::kE8M0:
    case DType::kFp4x2:
    case DType::kU8:
      return 1;
  }
  return 0;
}

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBf16:
      return "BF16";
    case DType::kFp8E4M3:
      return "F8_E4M3";
    case DType::kE8M0:
      return "F8_E8M0";
    case DType::kFp4x2:
      return "FP4x2";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
  }
  return "unknown";
}

}  // namespace deepinfer
