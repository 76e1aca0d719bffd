// Where the commands write: standard output, standard error and files. Nothing here throws, is
// stopped by a signal, or dies of a closed pipe: what went wrong is a value.
#pragma once

#include <fmt/core.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace deepinfer {

// Opens /dev/null in place of standard streams that are closed, the wrong way round, so that no
// file of ours takes their number and using them is an error; and makes writing to a closed pipe an
// ordinary error. First thing in main().
void PrepareStandardStreams();

// Writes everything. Errors: kCancelled when nobody reads any more, kResourceExhausted otherwise.
Status WriteStdout(std::string_view text);
// Messages for people. Failures are ignored: there is no other place to report them, and the exit
// status still tells.
void WriteStderr(std::string_view text);

template <class... Args>
Status Print(fmt::format_string<Args...> format, Args&&... args) {
  return WriteStdout(fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void PrintStderr(fmt::format_string<Args...> format, Args&&... args) {
  WriteStderr(fmt::format(format, std::forward<Args>(args)...));
}

// A file that is written front to back, unbuffered.
class OutputFile {
 public:
  // "-" is the standard output. An existing file is replaced. Errors: kInvalidArgument when it
  // cannot be created; the message has the system's reason.
  static Result<OutputFile> Create(const std::string& path);
  // The same for a file that is written after long work: what it holds is replaced by the first
  // Write. Without one an existing file stays as it is, and a new one is removed again.
  static Result<OutputFile> CreateForLater(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Errors: as WriteStdout.
  Status Write(std::string_view text);

 private:
  OutputFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}

  int fd_;
  std::string path_;
  bool replaces_ = false;  // the next Write replaces what the file holds
  bool is_new_ = false;    // removed unless something is written
};

// OutputFile::CreateForLater, absent for an empty path: a report that nobody asked for. To be
// created before the work that it reports on, so that a path that cannot be written costs no work.
Result<std::optional<OutputFile>> CreateIfNamed(const std::string& path);

// A file that is put in the place of another when it is complete: readers see the old one or the
// new one, never a part. Writes go to a temporary file in the same folder, which is removed unless
// Commit succeeds.
class ReplacementFile {
 public:
  // `temporary` is in the same folder as `path`; a file of that name is replaced. Errors:
  // kInvalidArgument with the system's reason.
  static Result<ReplacementFile> Create(const std::string& path, const std::string& temporary);
  ReplacementFile(ReplacementFile&& other) noexcept;
  ReplacementFile& operator=(ReplacementFile&&) = delete;
  ~ReplacementFile();

  // Errors: kResourceExhausted. Small pieces are collected.
  Status Write(std::string_view text);
  // Everything is on the device, then the file gets its name. An existing file's permissions are
  // kept.
  Status Commit();

 private:
  ReplacementFile(int fd, std::string path, std::string temporary)
      : fd_(fd), path_(std::move(path)), temporary_(std::move(temporary)) {}
  Status Flush();

  int fd_;
  std::string path_;
  std::string temporary_;
  std::string pending_;
};

// Makes a rename, creation or removal in the folder of `path` last through a power failure. Not all
// file systems can; that is no error.
void SyncFolderOf(const std::string& path);

// Where a file named `path` really is: the target of a symbolic link, else the name itself.
std::string ResolvedPath(const std::string& path);

// Refuses an output that is the input ("-": the standard streams), also under another name and
// while neither exists: the input would be lost before it is read. Terminals and pipes may be both.
Status CheckNotTheSameFile(const std::string& input, const std::string& output);

}  // namespace deepinfer
