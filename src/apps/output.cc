#include "apps/output.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/quoted.h"

namespace deepinfer {
namespace {

// The error number, 0 if everything was written. A signal does not end it: what is complete is
// written before the program answers an interrupt.
int WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

Status WriteOrExplain(int fd, std::string_view text, const std::string& name) {
  const int error = WriteAll(fd, text);
  if (error == 0) return {};
  return Fail(error == EPIPE ? Code::kCancelled : Code::kResourceExhausted,
              fmt::format("writing {} failed: {}.", name, std::strerror(error)));
}

std::string NameOf(const std::string& path) {
  return path == "-" ? "the standard output" : Quoted(path);
}

bool FileStatus(const std::string& path, int standard_stream, struct ::stat* status) {
  return (path == "-" ? ::fstat(standard_stream, status) : ::stat(path.c_str(), status)) == 0;
}

// The path without links and detours, whether or not there is such a file; empty if the system does
// not tell.
std::string FullPath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return {};
  const std::filesystem::path full = std::filesystem::weakly_canonical(absolute, error);
  return error ? std::string() : full.string();
}

}  // namespace

void PrepareStandardStreams() {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // a file at its size limit, likewise
  // open() returns the lowest free number, so an earlier gap has been filled before a later one.
  constexpr int kModes[] = {O_WRONLY, O_RDONLY, O_RDWR};
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && ::open("/dev/null", kModes[fd]) != fd) return;
  }
}

Status WriteStdout(std::string_view text) {
  return WriteOrExplain(STDOUT_FILENO, text, NameOf("-"));
}

void WriteStderr(std::string_view text) {
  WriteAll(STDERR_FILENO, text);
}

Result<OutputFile> OutputFile::Create(const std::string& path) {
  if (path == "-") return OutputFile(STDOUT_FILENO, path);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd >= 0) return OutputFile(fd, path);
  return Fail(Code::kInvalidArgument, fmt::format("the output {} cannot be written: {}.",
                                                  Quoted(path), std::strerror(errno)));
}

Result<OutputFile> OutputFile::CreateForLater(const std::string& path) {
  if (path == "-") return OutputFile(STDOUT_FILENO, path);
  // O_EXCL tells who made the file; of a dangling link it does not, and then nothing is removed.
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  const bool is_new = fd >= 0;
  if (!is_new && errno == EEXIST) fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) {
    return Fail(Code::kInvalidArgument, fmt::format("the output {} cannot be written: {}.",
                                                    Quoted(path), std::strerror(errno)));
  }
  OutputFile file(fd, path);
  file.replaces_ = true;
  file.is_new_ = is_new;
  return file;
}

Result<std::optional<OutputFile>> CreateIfNamed(const std::string& path) {
  if (path.empty()) return std::nullopt;
  DI_ASSIGN_OR_RETURN(OutputFile file, OutputFile::CreateForLater(path));
  return std::optional<OutputFile>(std::move(file));
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      replaces_(other.replaces_),
      is_new_(other.is_new_) {}

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(replaces_, other.replaces_);
  std::swap(is_new_, other.is_new_);
  return *this;
}

OutputFile::~OutputFile() {
  if (fd_ <= STDERR_FILENO) return;
  ::close(fd_);
  if (is_new_) ::unlink(path_.c_str());
}

Status OutputFile::Write(std::string_view text) {
  struct ::stat status = {};
  if (replaces_ && ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode) &&
      ::ftruncate(fd_, 0) != 0) {
    return Fail(Code::kResourceExhausted,
                fmt::format("writing {} failed: {}.", NameOf(path_), std::strerror(errno)));
  }
  replaces_ = is_new_ = false;
  return WriteOrExplain(fd_, text, NameOf(path_));
}

Result<ReplacementFile> ReplacementFile::Create(const std::string& path,
                                                const std::string& temporary) {
  // Removed first: what has that name may be a link or a pipe.
  ::unlink(temporary.c_str());
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0) {
    struct ::stat old = {};
    if (::stat(path.c_str(), &old) == 0) ::fchmod(fd, old.st_mode & 07777);
    return ReplacementFile(fd, path, temporary);
  }
  return Fail(Code::kInvalidArgument, fmt::format("the file {} cannot be written: {}.",
                                                  Quoted(temporary), std::strerror(errno)));
}

ReplacementFile::ReplacementFile(ReplacementFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      pending_(std::move(other.pending_)) {}

ReplacementFile::~ReplacementFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

Status ReplacementFile::Flush() {
  const Status written = WriteOrExplain(fd_, pending_, Quoted(temporary_));
  pending_.clear();
  return written;
}

Status ReplacementFile::Write(std::string_view text) {
  constexpr size_t kCollected = size_t{256} << 10;
  pending_ += text;
  if (pending_.size() < kCollected) return {};
  return Flush();
}

Status ReplacementFile::Commit() {
  DI_RETURN_IF_ERROR(Flush());
  // A full disk may be noticed only here.
  if (::fsync(fd_) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return Fail(Code::kResourceExhausted,
                fmt::format("completing {} failed: {}.", Quoted(path_), std::strerror(errno)));
  }
  ::close(std::exchange(fd_, -1));
  SyncFolderOf(path_);
  return {};
}

void SyncFolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

std::string ResolvedPath(const std::string& path) {
  std::error_code failed;
  if (!std::filesystem::is_symlink(path, failed)) return path;
  const std::filesystem::path resolved = std::filesystem::canonical(path, failed);
  return failed ? path : resolved.string();
}

Status CheckNotTheSameFile(const std::string& input, const std::string& output) {
  struct ::stat in = {};
  struct ::stat out = {};
  const bool has_in = FileStatus(input, STDIN_FILENO, &in);
  const bool has_out = FileStatus(output, STDOUT_FILENO, &out);
  bool same = false;
  if (has_in && has_out) {
    same = S_ISREG(in.st_mode) && in.st_dev == out.st_dev && in.st_ino == out.st_ino;
  } else if (!has_in && !has_out) {
    // Files to come: their names are compared.
    const std::string first = FullPath(input);
    same = !first.empty() && first == FullPath(output);
  }
  if (!same) return {};
  return Fail(Code::kInvalidArgument,
              "input and output are the same file; the input would be lost.", "output");
}

}  // namespace deepinfer
