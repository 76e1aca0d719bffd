// The safetensors container: a strict reader of its header and a streaming writer. Called by the
// checkpoint directory (weights/checkpoint.h) and by everything that writes tensors. Not for
// interpreting tensor names.
//
// File layout: 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes. The
// JSON maps each name to {"dtype", "shape", "data_offsets": [begin, end)} with offsets counted from
// the end of the header; the optional
// "__metadata__" maps strings to strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tensor/dtype.h"

namespace deepinfer {

// Element types that the format defines. Wider than DType: a file may hold types that no operation
// reads.
enum class StoredDType : uint8_t {
  kBool,
  kU8,
  kI8,  // in this model's checkpoints: two FP4 codes per byte
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kU16,
  kI16,
  kF16,
  kBf16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

int64_t StoredDTypeBytes(StoredDType dtype);
// The spelling of the format: "BF16", "F8_E4M3", ...
std::string_view StoredDTypeName(StoredDType dtype);
std::optional<StoredDType> ParseStoredDType(std::string_view name);
// The type operations see; nullopt for types that no operation reads. I8 is the container of FP4
// pairs.
std::optional<DType> ToDType(StoredDType dtype);

// What a tensor is, without its bytes.
struct StoredTensor {
  std::string name;
  StoredDType dtype = StoredDType::kU8;
  std::vector<int64_t> shape;
};

// Product of the shape and the element size. Precondition: checked against overflow, as every
// parsed tensor is.
int64_t StoredBytes(const StoredTensor& tensor);
// "BF16 [3, 5120]".
std::string ToString(StoredDType dtype, std::span<const int64_t> shape);

struct SafetensorsHeader {
  struct Entry : StoredTensor {
    int64_t begin = 0;  // bytes from data_begin
    int64_t end = 0;
  };
  std::vector<Entry> entries;  // ascending by `begin`
  std::vector<std::pair<std::string, std::string>> metadata;
  int64_t data_begin = 0;  // file offset of the first data byte
};

// Reads the header of a file of `file_size` bytes from its first bytes, of which `prefix` must hold
// at least the whole header. Refuses everything that the format does not define: unknown types,
// negative or overflowing shapes, ranges that disagree with shape and type, overlaps, holes, bytes
// after the last tensor, duplicate names. Also refuses a tensor that is not aligned to its element
// size, because its values are read in place. A data section that ends early is kDataLoss and gives
// both sizes; everything else is kInvalidArgument.
Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> prefix,
                                                 int64_t file_size);

// The first bytes of a file with these tensors in this order, without holes: length and JSON,
// padded with spaces to a multiple of 8. Errors: duplicate or reserved names, negative dimensions,
// overflow.
Result<std::string> BuildSafetensorsHeader(
    std::span<const StoredTensor> tensors,
    std::span<const std::pair<std::string, std::string>> metadata = {});

// Writes one file front to back. The bytes go to PATH.partial, which Finish renames to PATH; a
// writer that is destroyed before Finish removes it, so that PATH is either complete or untouched.
// When PATH is a symbolic link, both names are those of the file behind it. A PATH that exists and
// is not a regular file (a device, a FIFO, a directory) is refused with kInvalidArgument.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> Create(
      const std::string& path, std::span<const StoredTensor> tensors,
      std::span<const std::pair<std::string, std::string>> metadata = {});
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();

  // The next bytes of the data section, in pieces of any size. kResourceExhausted when the disk is
  // full.
  Status Write(std::span<const std::byte> bytes);
  // Gives the complete file its name. All announced bytes must have been written. Not flushed to
  // the device: the promise holds when the process dies, not when the power fails.
  Status Finish();

  int64_t data_bytes() const {
    return data_bytes_;
  }

 private:
  SafetensorsWriter(int fd, std::string path, int64_t data_bytes)
      : fd_(fd), path_(std::move(path)), data_bytes_(data_bytes) {}
  Status WriteRaw(std::span<const std::byte> bytes);
  void Discard();

  int fd_ = -1;
  std::string path_;
  int64_t data_bytes_ = 0;
  int64_t written_ = 0;
};

}  // namespace deepinfer
