#include "apps/model_fingerprint.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <vector>

#include "base/sha256.h"

namespace deepinfer {
namespace {

constexpr int64_t kWholeBytes = int64_t{64} << 20;  // of files that are hashed to the end
constexpr int64_t kHeadBytes = int64_t{64} << 10;
constexpr int64_t kPieces = 16;
constexpr int64_t kPieceBytes = 4096;

void HashRange(int fd, int64_t begin, int64_t end, Sha256* hash) {
  std::string buffer;
  while (begin < end) {
    buffer.resize(static_cast<size_t>(std::min(end - begin, kHeadBytes)));
    const ssize_t count = ::pread(fd, buffer.data(), buffer.size(), begin);
    if (count <= 0) return;
    hash->Update(std::string_view(buffer).substr(0, static_cast<size_t>(count)));
    begin += count;
  }
}

void HashFile(const std::filesystem::path& path, Sha256* hash) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct ::stat status = {};
  const bool regular = fd >= 0 && ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const int64_t size = regular ? static_cast<int64_t>(status.st_size) : 0;
  hash->Update(fmt::format("{}\n{}\n", path.filename().string(), size));
  if (path.extension() != ".safetensors") {
    HashRange(fd, 0, std::min(size, kWholeBytes), hash);
  } else {
    HashRange(fd, 0, std::min(size, kHeadBytes), hash);
    for (int64_t i = 1; i <= kPieces; ++i) {
      const int64_t end = size / kPieces * i + (i == kPieces ? size % kPieces : 0);
      HashRange(fd, std::max<int64_t>(0, end - kPieceBytes), end, hash);
    }
  }
  if (fd >= 0) ::close(fd);
}

}  // namespace

std::string ModelFingerprint(const std::string& model_dir) {
  const std::filesystem::path dir(model_dir);
  std::vector<std::filesystem::path> files = {dir / "config.json", dir / "tokenizer.json"};
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(dir, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
  }
  std::sort(files.begin(), files.end());
  Sha256 hash;
  for (const std::filesystem::path& file : files) HashFile(file, &hash);
  return Hex(hash.Finish());
}

}  // namespace deepinfer
