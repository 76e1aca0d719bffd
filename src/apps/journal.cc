#include "apps/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "apps/output.h"
#include "base/check.h"
#include "base/file_kind.h"
#include "base/quoted.h"
#include "base/sha256.h"

namespace deepinfer {
namespace {

constexpr std::string_view kMagic = "deepinfer-journal-";
constexpr std::string_view kVersion = "1";
// No head of a record or of the header is longer; a header's content is bounded too.
constexpr size_t kMaxHeadBytes = 128;
constexpr int64_t kMaxHeaderBytes = int64_t{16} << 20;
constexpr int64_t kPieceBytes = int64_t{64} << 10;

uint64_t ChecksumOf(std::string_view hashed_head, std::string_view content) {
  return Word(Sha256().Update(hashed_head).Update("\n").Update(content).Finish());
}

std::string HashedHead(int64_t line, uint64_t input, bool failed, int64_t length) {
  return fmt::format("{} {:016x} {} {}", line, input, failed ? "failed" : "ok", length);
}

std::string HashedHeaderHead(int64_t length) {
  return fmt::format("{}{} {}", kMagic, kVersion, length);
}

// The text before the next space, which is dropped too; empty if there is no space.
std::string_view TakeWord(std::string_view* text) {
  const size_t space = text->find(' ');
  if (space == std::string_view::npos) return {};
  const std::string_view word = text->substr(0, space);
  text->remove_prefix(space + 1);
  return word;
}

template <class T>
bool ParseNumber(std::string_view word, int base, T* number) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *number, base);
  return !word.empty() && error == std::errc() && end == word.data() + word.size();
}

std::string JoinFields(const JobFields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    DI_CHECK(value.find_first_of("\t\n") == std::string::npos);
    text += (text.empty() ? "" : "\t") + name + "=" + value;
  }
  return text;
}

JobFields SplitFields(std::string_view text) {
  JobFields fields;
  while (!text.empty()) {
    const std::string_view field = text.substr(0, text.find('\t'));
    const size_t equals = std::min(field.find('='), field.size());
    fields.emplace(field.substr(0, equals), field.substr(std::min(equals + 1, field.size())));
    text.remove_prefix(std::min(field.size() + 1, text.size()));
  }
  return fields;
}

}  // namespace

// What stands before a record's result.
struct Journal::Head {
  int64_t line = 0;
  uint64_t input = 0;
  bool failed = false;
  int64_t length = 0;
  uint64_t checksum = 0;
  int64_t bytes = 0;  // of the head itself
};

Result<Journal> Journal::Lock(const std::string& path, int flags) {
  for (;;) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0666);
    if (fd < 0) {
      return Fail(
          errno == ENOENT && (flags & O_CREAT) == 0 ? Code::kNotFound : Code::kInvalidArgument,
          fmt::format("the job's journal {} cannot be opened: {}.", Quoted(path),
                      std::strerror(errno)));
    }
    Journal journal(fd, path);
    struct ::stat opened = {};
    struct ::stat named = {};
    if (::fstat(fd, &opened) != 0 || !S_ISREG(opened.st_mode)) {
      ::close(std::exchange(journal.fd_, -1));
      return Fail(Code::kInvalidArgument,
                  fmt::format("the job's journal {} is a {}, not a regular file.", Quoted(path),
                              FileKind(opened.st_mode)));
    }
    journal.size_ = opened.st_size;
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      ::close(std::exchange(journal.fd_, -1));
      return Fail(Code::kUnavailable,
                  fmt::format("another process is working on the job of {}; wait until it ends.",
                              Quoted(path)));
    }
    // The process that had the lock may have completed the job and removed the file.
    if (::stat(path.c_str(), &named) == 0 && named.st_dev == opened.st_dev &&
        named.st_ino == opened.st_ino) {
      // What was written until the lock was free counts.
      if (::fstat(fd, &opened) == 0) journal.size_ = opened.st_size;
      return journal;
    }
    ::close(std::exchange(journal.fd_, -1));
  }
}

Result<Journal> Journal::Create(const std::string& path, bool overwrite) {
  DI_ASSIGN_OR_RETURN(Journal journal, Lock(path, O_CREAT));
  if (journal.size_ == 0) return journal;
  if (!overwrite) {
    ::close(std::exchange(journal.fd_, -1));
    return Fail(Code::kInvalidArgument,
                fmt::format("there is a journal of an unfinished job, {}. Continue that job with "
                            "--resume, or delete the file (--overwrite does) to begin anew.",
                            Quoted(path)));
  }
  journal.has_old_content_ = true;
  journal.size_ = 0;
  return journal;
}

Result<Journal> Journal::Open(const std::string& path) {
  DI_ASSIGN_OR_RETURN(Journal journal, Lock(path, 0));
  if (journal.size_ == 0) return journal;
  Status read = journal.ReadHeader();
  if (read.has_value()) read = journal.ReadRecords();
  if (read.has_value()) return journal;
  ::close(std::exchange(journal.fd_, -1));
  return tl::unexpected<Error>(read.error());
}

Journal::Journal(Journal&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      fields_(std::move(other.fields_)),
      size_(other.size_),
      records_(std::move(other.records_)),
      num_opened_(other.num_opened_),
      num_failed_(other.num_failed_),
      cut_bytes_(other.cut_bytes_),
      dirty_(other.dirty_),
      has_old_content_(other.has_old_content_) {}

Journal::~Journal() {
  if (fd_ < 0) return;
  if (size_ == 0 && !has_old_content_) ::unlink(path_.c_str());
  ::close(fd_);
}

Status Journal::ReadAt(int64_t offset, char* to, size_t count) const {
  while (count > 0) {
    const ssize_t got = ::pread(fd_, to, count, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return Fail(Code::kDataLoss,
                  fmt::format("reading the journal {} failed at byte {}: {}.", Quoted(path_),
                              offset, got == 0 ? "it has become shorter" : std::strerror(errno)));
    }
    to += got;
    offset += got;
    count -= static_cast<size_t>(got);
  }
  return {};
}

bool Journal::ParseHead(std::string_view bytes, Head* head) {
  std::string_view rest = bytes;
  const std::string_view line = TakeWord(&rest);
  const std::string_view input = TakeWord(&rest);
  const std::string_view result = TakeWord(&rest);
  const std::string_view length = TakeWord(&rest);
  const std::string_view checksum = TakeWord(&rest);
  if (!ParseNumber(line, 10, &head->line) || !ParseNumber(input, 16, &head->input) ||
      !ParseNumber(length, 10, &head->length) || !ParseNumber(checksum, 16, &head->checksum) ||
      head->line < 1 || head->length < 0)
    return false;
  head->failed = result == "failed";
  head->bytes = static_cast<int64_t>(bytes.size() - rest.size());
  // Every record has one spelling.
  return bytes.substr(0, bytes.size() - rest.size()) ==
         fmt::format("{} {:016x} ", HashedHead(head->line, head->input, head->failed, head->length),
                     head->checksum);
}

Result<bool> Journal::CheckContent(std::string_view hashed_head, uint64_t checksum, int64_t offset,
                                   int64_t length,
                                   const std::function<Status(std::string_view)>& piece) const {
  // In pieces: a wrong length must not make us allocate what it says.
  Sha256 hash;
  hash.Update(hashed_head).Update("\n");
  std::string buffer;
  for (int64_t done = 0; done < length; done += static_cast<int64_t>(buffer.size())) {
    buffer.resize(static_cast<size_t>(std::min(length - done, kPieceBytes)));
    DI_RETURN_IF_ERROR(ReadAt(offset + done, buffer.data(), buffer.size()));
    hash.Update(buffer);
    if (piece) DI_RETURN_IF_ERROR(piece(buffer));
  }
  char line_end = 0;
  DI_RETURN_IF_ERROR(ReadAt(offset + length, &line_end, 1));
  return line_end == '\n' && Word(hash.Finish()) == checksum;
}

Status Journal::ReadHeader() {
  const auto refuse = [&](std::string_view what) {
    return Fail(Code::kDataLoss,
                fmt::format("{} {}. Delete it (--overwrite does) to begin the job anew.",
                            Quoted(path_), what));
  };
  std::string head(static_cast<size_t>(std::min<int64_t>(size_, kMaxHeadBytes)), '\0');
  DI_RETURN_IF_ERROR(ReadAt(0, head.data(), head.size()));
  if (!head.starts_with(kMagic)) return refuse("is not the journal of a job");
  std::string_view rest = std::string_view(head).substr(kMagic.size());
  const std::string_view version = TakeWord(&rest);
  if (!version.empty() && version != kVersion) {
    return Fail(
        Code::kUnsupported,
        fmt::format("the journal {} has format {}; this version continues jobs of format {} only.",
                    Quoted(path_), Quoted(version), kVersion));
  }
  int64_t length = 0;
  uint64_t checksum = 0;
  const std::string_view length_word = TakeWord(&rest);
  const std::string_view checksum_word = TakeWord(&rest);
  const int64_t offset = static_cast<int64_t>(head.size() - rest.size());
  const bool parsed =
      ParseNumber(length_word, 10, &length) && ParseNumber(checksum_word, 16, &checksum);
  if (!parsed || length < 0 || length > kMaxHeaderBytes || length >= size_ - offset)
    return refuse("has a damaged header");
  std::string content;
  DI_ASSIGN_OR_RETURN(const bool good, CheckContent(HashedHeaderHead(length), checksum, offset,
                                                    length, [&](std::string_view piece) {
                                                      content += piece;
                                                      return Status();
                                                    }));
  if (!good) return refuse("has a damaged header");
  fields_ = SplitFields(content);
  cut_bytes_ = size_;
  size_ = offset + length + 1;
  cut_bytes_ -= size_;
  return {};
}

Status Journal::ReadRecords() {
  const int64_t end = size_ + cut_bytes_;
  std::string bytes;
  while (size_ < end) {
    bytes.resize(static_cast<size_t>(std::min<int64_t>(end - size_, kMaxHeadBytes)));
    DI_RETURN_IF_ERROR(ReadAt(size_, bytes.data(), bytes.size()));
    Head head;
    if (!ParseHead(bytes, &head) || head.length >= end - size_ - head.bytes) break;
    DI_ASSIGN_OR_RETURN(const bool good,
                        CheckContent(HashedHead(head.line, head.input, head.failed, head.length),
                                     head.checksum, size_ + head.bytes, head.length, nullptr));
    if (!good) break;
    records_.push_back({head.line, size_, head.input});
    num_failed_ += head.failed ? 1 : 0;
    size_ += head.bytes + head.length + 1;
  }
  cut_bytes_ = end - size_;
  const auto by_line = [](const Record& a, const Record& b) { return a.line < b.line; };
  std::sort(records_.begin(), records_.end(), by_line);
  num_opened_ = records_.size();
  const auto twice =
      std::adjacent_find(records_.begin(), records_.end(),
                         [](const Record& a, const Record& b) { return a.line == b.line; });
  if (twice != records_.end()) {
    return Fail(Code::kDataLoss,
                fmt::format("the journal {} has two results of line {}; no job writes that. Delete "
                            "it (--overwrite does) to begin the job anew.",
                            Quoted(path_), twice->line));
  }
  if (cut_bytes_ > 0 && ::ftruncate(fd_, size_) != 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("the torn end of the journal {} cannot be cut: {}.", Quoted(path_),
                            std::strerror(errno)));
  }
  return {};
}

// One write(), so that a killed process leaves all of it or, rarely, a part at the end.
Status Journal::Write(std::string_view text) {
  std::string_view left = text;
  while (!left.empty()) {
    const ssize_t count = ::pwrite(fd_, left.data(), left.size(),
                                   size_ + static_cast<int64_t>(text.size() - left.size()));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int error = count == 0 ? ENOSPC : errno;
      // Should this fail too, the part is cut when the journal is opened.
      if (::ftruncate(fd_, size_) != 0) dirty_ = true;
      return Fail(Code::kResourceExhausted, fmt::format("writing the journal {} failed: {}.",
                                                        Quoted(path_), std::strerror(error)));
    }
    left.remove_prefix(static_cast<size_t>(count));
  }
  size_ += static_cast<int64_t>(text.size());
  dirty_ = true;
  return {};
}

Status Journal::Begin(const JobFields& fields) {
  DI_CHECK_EQ(size_, 0);
  if (has_old_content_ && ::ftruncate(fd_, 0) != 0) {
    return Fail(Code::kInvalidArgument, fmt::format("the journal {} cannot be overwritten: {}.",
                                                    Quoted(path_), std::strerror(errno)));
  }
  has_old_content_ = false;
  const std::string content = JoinFields(fields);
  const std::string head = HashedHeaderHead(static_cast<int64_t>(content.size()));
  DI_RETURN_IF_ERROR(
      Write(fmt::format("{} {:016x} {}\n", head, ChecksumOf(head, content), content)));
  fields_ = fields;
  DI_RETURN_IF_ERROR(Sync());
  SyncFolderOf(path_);
  return {};
}

const Journal::Record* Journal::Find(int64_t line) const {
  const auto end = records_.begin() + static_cast<std::ptrdiff_t>(num_opened_);
  const auto found =
      std::lower_bound(records_.begin(), end, line,
                       [](const Record& record, int64_t wanted) { return record.line < wanted; });
  return found != end && found->line == line ? &*found : nullptr;
}

Status Journal::Append(int64_t line, uint64_t input, bool failed, std::string_view result) {
  DI_CHECK(size_ > 0);
  const std::string head = HashedHead(line, input, failed, static_cast<int64_t>(result.size()));
  const int64_t offset = size_;
  DI_RETURN_IF_ERROR(Write(fmt::format("{} {:016x} {}\n", head, ChecksumOf(head, result), result)));
  records_.push_back({line, offset, input});
  num_failed_ += failed ? 1 : 0;
  return {};
}

Status Journal::Sync() {
  if (!dirty_) return {};
  if (::fdatasync(fd_) != 0) {
    return Fail(Code::kResourceExhausted,
                fmt::format("writing the journal {} to the device failed: {}.", Quoted(path_),
                            std::strerror(errno)));
  }
  dirty_ = false;
  return {};
}

Status Journal::CopyInOrder(const std::function<Status(std::string_view)>& write) {
  std::sort(records_.begin(), records_.end(),
            [](const Record& a, const Record& b) { return a.line < b.line; });
  num_opened_ = records_.size();
  std::string bytes;
  for (const Record& record : records_) {
    bytes.resize(static_cast<size_t>(std::min<int64_t>(size_ - record.offset, kMaxHeadBytes)));
    DI_RETURN_IF_ERROR(ReadAt(record.offset, bytes.data(), bytes.size()));
    Head head;
    bool good = ParseHead(bytes, &head) && head.line == record.line &&
                head.length < size_ - record.offset - head.bytes;
    if (good) {
      DI_ASSIGN_OR_RETURN(
          good, CheckContent(HashedHead(head.line, head.input, head.failed, head.length),
                             head.checksum, record.offset + head.bytes, head.length, write));
    }
    if (!good) {
      return Fail(Code::kDataLoss, fmt::format("the journal {} was changed by something else at "
                                               "byte {}, the result of line {}.",
                                               Quoted(path_), record.offset, record.line));
    }
    DI_RETURN_IF_ERROR(write("\n"));
  }
  return {};
}

Status Journal::Remove() {
  if (::unlink(path_.c_str()) != 0) {
    return Fail(Code::kUnavailable, fmt::format("the journal {} cannot be removed: {}.",
                                                Quoted(path_), std::strerror(errno)));
  }
  ::close(std::exchange(fd_, -1));
  SyncFolderOf(path_);
  return {};
}

}  // namespace deepinfer
