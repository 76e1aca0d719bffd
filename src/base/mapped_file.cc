#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/file_kind.h"

namespace deepinfer {

Result<MappedFile> MappedFile::Open(const std::string& path) {
  const auto cannot_open = [&](int error) {
    const Code code = error == ENOENT || error == ENOTDIR ? Code::kNotFound : Code::kUnavailable;
    return Fail(code, fmt::format("Cannot open '{}': {}.", path, std::strerror(error)));
  };
  const auto not_regular = [&](mode_t mode) {
    return Fail(Code::kInvalidArgument,
                fmt::format("'{}' is not a regular file, it is a {}.", path, FileKind(mode)));
  };
  // Looked at before it is opened, because opening a device can have effects. O_NONBLOCK is for a
  // FIFO that takes the place of the file in between: open() would wait for a writer.
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return cannot_open(errno);
  if (!S_ISREG(info.st_mode)) return not_regular(info.st_mode);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return cannot_open(errno);
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return cannot_open(error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return not_regular(info.st_mode);
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) {
    ::close(fd);
    return MappedFile(nullptr, 0, path);
  }
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  const int map_errno = errno;
  ::close(fd);
  if (data == MAP_FAILED) {
    return Fail(Code::kUnavailable, fmt::format("Cannot map '{}' ({} bytes): {}.", path, size,
                                                std::strerror(map_errno)));
  }
  return MappedFile(static_cast<const std::byte*>(data), size, path);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

void MappedFile::DropResidentPages() const {
  // Advice only: when the kernel refuses it, the pages merely stay.
  if (data_ != nullptr) ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace deepinfer
