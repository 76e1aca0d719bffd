// The work journal of a batch job: what is finished, kept so that a job that dies at any instant
// can be continued without losing or repeating a line. Used by `generate` (apps/generate_job.cc).
//
// A journal is a text file. Its first line describes the job, every other one is the result of one
// input line, in the order in which they were finished:
//
//   deepinfer-journal-1 LENGTH CHECKSUM name=value<tab>name=value...
//   LINE INPUT ok|failed LENGTH CHECKSUM RESULT
//
//   LINE      number of the input line, counted from 1, blank lines included
//   INPUT     fingerprint of the input line's text, 16 hexadecimal digits
//   LENGTH    bytes of what follows the checksum, without the line end
//   CHECKSUM  16 hexadecimal digits: first half of SHA-256 of everything before it and after it
//   RESULT    the output line
//
// Invariants:
//   - A record is one write() at the end of the file, so a killed process leaves whole records and
//     at most one torn one, the last. Records reach the device at most a second later (Sync).
//   - A record counts only if its length, its checksum and its line end are right. Opening a
//   journal
//     cuts it before the first record that is not: what was there is computed again.
//   - No input line has two records.
//   - One process at a time: an open journal is locked, and the lock ends with the process.
//   - A journal without a header is empty; it is removed when it is closed like that.
//
// In memory a record takes 24 bytes, whatever its size.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace deepinfer {

// Describes a job: names of letters and underscores; values without tabs and line ends.
using JobFields = std::map<std::string, std::string>;

class Journal {
 public:
  struct Record {
    int64_t line = 0;
    int64_t offset = 0;  // in the file
    uint64_t input = 0;
  };

  // Locks the journal for a new job; Begin writes its header. An existing file with content is
  // refused unless `overwrite`; its content then stays until Begin. Errors: kInvalidArgument when
  // it exists or cannot be created, kUnavailable when another process works on it.
  static Result<Journal> Create(const std::string& path, bool overwrite = false);
  // Locks an existing journal and reads what is there; damage at the end is cut. Errors: kNotFound,
  // kUnavailable as above, kDataLoss when it has no header or repeats a line, kUnsupported when
  // another version wrote it.
  static Result<Journal> Open(const std::string& path);

  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&&) = delete;
  ~Journal();

  // Precondition: the journal is new.
  Status Begin(const JobFields& fields);
  // Empty before Begin.
  const JobFields& fields() const {
    return fields_;
  }

  // The record of a line if there was one when the journal was opened, else null.
  const Record* Find(int64_t line) const;
  // Preconditions: Begin, and the line has no record. `result` has no line end. Errors:
  // kResourceExhausted; the file then ends with the record before.
  Status Append(int64_t line, uint64_t input, bool failed, std::string_view result);
  // Waits until all records are on the device.
  Status Sync();

  int64_t num_records() const {
    return static_cast<int64_t>(records_.size());
  }
  int64_t num_failed() const {
    return num_failed_;
  }
  // Bytes that were cut when the journal was opened.
  int64_t cut_bytes() const {
    return cut_bytes_;
  }

  // Calls write(piece) so that the pieces are all results in the order of their lines, each with a
  // line end. Checks every record again. Errors: kDataLoss, and what `write` returns.
  Status CopyInOrder(const std::function<Status(std::string_view)>& write);

  // The job is complete: removes the file.
  Status Remove();

 private:
  struct Head;

  Journal(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  static Result<Journal> Lock(const std::string& path, int flags);
  Status ReadAt(int64_t offset, char* to, size_t count) const;
  Status ReadHeader();
  Status ReadRecords();
  // Whether the content after a head has its checksum and line end; `piece` sees it in pieces.
  Result<bool> CheckContent(std::string_view hashed_head, uint64_t checksum, int64_t offset,
                            int64_t length,
                            const std::function<Status(std::string_view)>& piece) const;
  static bool ParseHead(std::string_view bytes, Head* head);
  Status Write(std::string_view text);

  int fd_ = -1;
  std::string path_;
  JobFields fields_;
  int64_t size_ = 0;  // of the file, up to the last good record
  std::vector<Record> records_;
  size_t num_opened_ = 0;  // records_[0 ... num_opened_) are sorted by line
  int64_t num_failed_ = 0;
  int64_t cut_bytes_ = 0;
  bool dirty_ = false;
  bool has_old_content_ = false;  // of a journal that Begin is to overwrite
};

}  // namespace deepinfer
