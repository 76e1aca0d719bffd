// Element types of tensors and their sizes.
#pragma once

#include <cstdint>
#include <string_view>

namespace deepinfer {

enum class DType : uint8_t {
  kF32,
  kBf16,
  kFp8E4M3,  // "fn" variant: no infinities, NaN = 0x7f / 0xff, maximum 448
  kE8M0,     // power-of-two scale: byte b means 2^(b - 127), 255 is NaN
  kFp4x2,    // two E2M1 codes per byte, even element in the low nibble; shapes count bytes
  kI32,
  kI64,
  kU8,
};

// Bytes per element (per byte pair of codes for kFp4x2: 1).
int64_t DTypeBytes(DType dtype);
std::string_view DTypeName(DType dtype);

}  // namespace deepinfer
