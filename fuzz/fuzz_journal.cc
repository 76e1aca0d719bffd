// Journals of jobs: whatever the bytes are, opening one ends with an error or with records that can
// be copied and continued; what is cut once stays cut.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "apps/journal.h"
#include "base/sha256.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

std::string Copy(deepinfer::Journal& journal) {
  std::string text;
  Require(journal
              .CopyInOrder([&](std::string_view piece) {
                text += piece;
                return deepinfer::Status();
              })
              .has_value());
  return text;
}

void Open(const std::string& bytes) {
  static const std::string path =
      (std::filesystem::temp_directory_path() / ("fuzz_journal_" + std::to_string(::getpid())))
          .string();
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  std::string results;
  int64_t records = 0;
  bool opened = false;
  {
    auto journal = deepinfer::Journal::Open(path);
    opened = journal.has_value() && !bytes.empty();
    if (opened) {
      int64_t line = 1;
      while (journal->Find(line) != nullptr) ++line;
      Require(journal->Append(line, 1, true, "more").has_value());
      records = journal->num_records();
      results = Copy(*journal);
    }
  }
  if (opened) {
    auto again = deepinfer::Journal::Open(path);
    Require(again.has_value() && again->num_records() == records && again->cut_bytes() == 0);
    Require(Copy(*again) == results);
  }
  std::filesystem::remove(path);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  Open(text);
  // With a good header, and records whose checksums are right: "LINE INPUT ok|failed LENGTH" and
  // the result of each, one per line of the text.
  const auto checksum = [](const std::string& head, const std::string& content) {
    return fmt::format("{} {:016x} {}\n", head,
                       deepinfer::Word(deepinfer::Sha256::Of(head + "\n" + content)), content);
  };
  const std::string header = checksum("deepinfer-journal-1 6", "seed=7");
  Open(header + text);
  std::string records = header;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const size_t middle = std::min(text.find('|', begin), end);
    records += checksum(text.substr(begin, middle - begin),
                        middle == end ? "" : text.substr(middle + 1, end - middle - 1));
    begin = end + 1;
  }
  Open(records);
  return 0;
}
