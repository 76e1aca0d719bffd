// A read-only memory mapping of a whole file, closed with the object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

namespace deepinfer {

class MappedFile {
 public:
  // Errors: kNotFound (missing), kInvalidArgument (not a regular file; never waits for the writer
  // of a FIFO), kUnavailable (cannot be opened or mapped). An empty file maps to an empty span.
  static Result<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // Valid until the object is destroyed.
  std::span<const std::byte> bytes() const {
    return {data_, size_};
  }
  const std::string& path() const {
    return path_;
  }
  // Gives back the memory that reading the mapping has taken in this process. The bytes stay valid:
  // the next access reads them from the page cache or the file again.
  void DropResidentPages() const;

 private:
  MappedFile(const std::byte* data, size_t size, std::string path)
      : data_(data), size_(size), path_(std::move(path)) {}
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

}  // namespace deepinfer
