#include "apps/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/sha256.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;

class JournalTest : public ::testing::Test {
 protected:
  JournalTest()
      : dir_(std::filesystem::temp_directory_path() /
             fmt::format("deepinfer_journal_{}", ::getpid())),
        path_(dir_ / "out.partial") {
    std::filesystem::create_directories(dir_);
  }
  ~JournalTest() override {
    std::filesystem::remove_all(dir_);
  }

  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void SetContent(std::string_view bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  static std::string Results(Journal& journal) {
    std::string text;
    const Status copied = journal.CopyInOrder([&](std::string_view piece) {
      text += piece;
      return Status();
    });
    EXPECT_TRUE(copied.has_value()) << copied.error().message;
    return text;
  }
  // Three results, in another order than their lines.
  void WriteThree() const {
    Result<Journal> journal = Journal::Create(path_);
    ASSERT_TRUE(journal.has_value()) << journal.error().message;
    ASSERT_TRUE(journal->Begin({{"seed", "7"}, {"sampling_params", R"({"top_k":5})"}}).has_value());
    ASSERT_TRUE(journal->Append(5, 0xabc, false, R"({"id":"five"})").has_value());
    ASSERT_TRUE(journal->Append(2, 1, true, R"({"id":"two"})").has_value());
    ASSERT_TRUE(journal->Append(9, ~uint64_t{0}, false, "").has_value());
  }

  std::filesystem::path dir_;
  std::string path_;
};

TEST_F(JournalTest, HasTheDocumentedFormat) {
  WriteThree();
  const std::string header = "sampling_params={\"top_k\":5}\tseed=7";
  const auto checksum = [](const std::string& text) { return Word(Sha256::Of(text)); };
  EXPECT_EQ(Content(), fmt::format("deepinfer-journal-1 34 {:016x} {}\n"
                                   "5 0000000000000abc ok 13 {:016x} {{\"id\":\"five\"}}\n"
                                   "2 0000000000000001 failed 12 {:016x} {{\"id\":\"two\"}}\n"
                                   "9 ffffffffffffffff ok 0 {:016x} \n",
                                   checksum("deepinfer-journal-1 34\n" + header), header,
                                   checksum("5 0000000000000abc ok 13\n{\"id\":\"five\"}"),
                                   checksum("2 0000000000000001 failed 12\n{\"id\":\"two\"}"),
                                   checksum("9 ffffffffffffffff ok 0\n")));
}

TEST_F(JournalTest, IsContinuedWhereItEnded) {
  WriteThree();
  {
    Result<Journal> journal = Journal::Open(path_);
    ASSERT_TRUE(journal.has_value()) << journal.error().message;
    EXPECT_EQ(journal->fields(), (JobFields{{"seed", "7"}, {"sampling_params", R"({"top_k":5})"}}));
    EXPECT_EQ(journal->num_records(), 3);
    EXPECT_EQ(journal->num_failed(), 1);
    EXPECT_EQ(journal->cut_bytes(), 0);
    EXPECT_EQ(journal->Find(5)->input, 0xabcu);
    EXPECT_EQ(journal->Find(3), nullptr);
    EXPECT_EQ(journal->Find(10), nullptr);
    ASSERT_TRUE(journal->Append(3, 4, false, "three").has_value());
    ASSERT_TRUE(journal->Sync().has_value());
  }
  Result<Journal> journal = Journal::Open(path_);
  ASSERT_TRUE(journal.has_value());
  EXPECT_EQ(Results(*journal), "{\"id\":\"two\"}\nthree\n{\"id\":\"five\"}\n\n");
  EXPECT_TRUE(journal->Remove().has_value());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(JournalTest, ATornLastRecordIsCutWhereverItEnds) {
  WriteThree();
  const std::string whole = Content();
  const size_t header = whole.find('\n') + 1;
  for (size_t size = header; size < whole.size(); ++size) {
    SetContent(whole.substr(0, size));
    const auto lines = std::count(whole.begin() + static_cast<std::ptrdiff_t>(header),
                                  whole.begin() + static_cast<std::ptrdiff_t>(size), '\n');
    const size_t good = whole.rfind('\n', size - 1) + 1;
    {
      Result<Journal> journal = Journal::Open(path_);
      ASSERT_TRUE(journal.has_value()) << size;
      ASSERT_EQ(journal->num_records(), lines) << size;
      ASSERT_EQ(journal->cut_bytes(), static_cast<int64_t>(size - good));
    }
    ASSERT_EQ(Content(), whole.substr(0, good));
  }
}

TEST_F(JournalTest, NoChangedByteGoesUnnoticed) {
  WriteThree();
  const std::string whole = Content();
  const size_t header = whole.find('\n') + 1;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const int change : {1, 0x10, 0x80}) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ change);
      SetContent(bytes);
      Result<Journal> journal = Journal::Open(path_);
      if (at < header) {
        ASSERT_FALSE(journal.has_value()) << at;
        ASSERT_EQ(Content(), bytes);  // what may not be a journal is not touched
      } else {
        const auto before = std::count(whole.begin() + static_cast<std::ptrdiff_t>(header),
                                       whole.begin() + static_cast<std::ptrdiff_t>(at), '\n');
        ASSERT_TRUE(journal.has_value()) << at;
        ASSERT_EQ(journal->num_records(), before) << at;
      }
    }
  }
}

TEST_F(JournalTest, LengthsThatAreNotThereTakeNoMemory) {
  WriteThree();
  SetContent(Content() + "10 0000000000000001 ok 9223372036854775807 0000000000000001 x\n");
  {
    Result<Journal> journal = Journal::Open(path_);
    ASSERT_TRUE(journal.has_value());
    EXPECT_EQ(journal->num_records(), 3);
  }
  SetContent("deepinfer-journal-1 9223372036854775807 0000000000000001 x\n");
  EXPECT_EQ(Journal::Open(path_).error().code, Code::kDataLoss);
}

TEST_F(JournalTest, WhatIsNoJournalOrOfAnotherVersionIsRefused) {
  SetContent("important notes\n");
  EXPECT_THAT(Journal::Open(path_).error().message, HasSubstr("is not the journal of a job"));
  SetContent("deepinfer-journal-2 5 0123456789abcdef hello\n");
  const Result<Journal> newer = Journal::Open(path_);
  ASSERT_FALSE(newer.has_value());
  EXPECT_EQ(newer.error().code, Code::kUnsupported);
  EXPECT_THAT(newer.error().message, HasSubstr("has format '2'"));
}

TEST_F(JournalTest, TwoResultsOfALineAreRefused) {
  WriteThree();
  const std::string whole = Content();
  const size_t header = whole.find('\n') + 1;
  SetContent(whole + whole.substr(header, whole.find('\n', header) + 1 - header));
  const Result<Journal> journal = Journal::Open(path_);
  ASSERT_FALSE(journal.has_value());
  EXPECT_THAT(journal.error().message, HasSubstr("has two results of line 5"));
}

TEST_F(JournalTest, AnExistingJournalIsOnlyOverwrittenOnRequestAndNotBeforeTheJobBegins) {
  WriteThree();
  const std::string whole = Content();
  const Result<Journal> refused = Journal::Create(path_);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message,
              HasSubstr("--resume, or delete the file (--overwrite does)"));
  EXPECT_EQ(Content(), whole);
  {
    const Result<Journal> journal = Journal::Create(path_, true);
    ASSERT_TRUE(journal.has_value());
  }
  EXPECT_EQ(Content(), whole);  // the model could not be loaded, say
  Result<Journal> journal = Journal::Create(path_, true);
  ASSERT_TRUE(journal->Begin({{"seed", "8"}}).has_value());
  EXPECT_EQ(Content().find("five"), std::string::npos);
  EXPECT_EQ(Results(*journal), "");
}

TEST_F(JournalTest, OneThatWasNotBegunLeavesNothing) {
  EXPECT_EQ(Journal::Open(path_).error().code, Code::kNotFound);
  {
    const Result<Journal> journal = Journal::Create(path_);
    ASSERT_TRUE(journal.has_value());
    EXPECT_TRUE(std::filesystem::exists(path_));
  }
  EXPECT_FALSE(std::filesystem::exists(path_));
  SetContent("");  // a process that was killed while it loaded the model
  const Result<Journal> journal = Journal::Open(path_);
  ASSERT_TRUE(journal.has_value());
  EXPECT_TRUE(journal->fields().empty());
}

TEST_F(JournalTest, IsLockedWhileItIsOpen) {
  WriteThree();
  const Result<Journal> first = Journal::Open(path_);
  ASSERT_TRUE(first.has_value());
  for (const bool create : {false, true}) {
    const Result<Journal> second = create ? Journal::Create(path_, true) : Journal::Open(path_);
    ASSERT_FALSE(second.has_value());
    EXPECT_EQ(second.error().code, Code::kUnavailable);
  }
}

TEST_F(JournalTest, LinksAndFoldersAreRefused) {
  std::ofstream(dir_ / "else") << "precious";
  std::filesystem::create_symlink("else", path_);
  EXPECT_FALSE(Journal::Create(path_, true).has_value());
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  EXPECT_FALSE(Journal::Create(path_).has_value());
  EXPECT_FALSE(Journal::Open(path_).has_value());
}

TEST_F(JournalTest, AChangeDuringTheJobIsNoticedWhenResultsAreCopied) {
  WriteThree();
  Result<Journal> journal = Journal::Open(path_);
  std::string bytes = Content();
  bytes[bytes.find("five")] = 'F';
  SetContent(bytes);
  const Status copied = journal->CopyInOrder([](std::string_view) { return Status(); });
  ASSERT_FALSE(copied.has_value());
  EXPECT_THAT(copied.error().message, HasSubstr("the result of line 5"));
}

// Any results, cut anywhere and continued: what remains is what was written before the cut.
RC_GTEST_FIXTURE_PROP(JournalTest, AnyCutLeavesTheRecordsBeforeIt, ()) {
  const auto results = *rc::gen::container<std::map<uint16_t, std::string>>(
      rc::gen::arbitrary<uint16_t>(), rc::gen::arbitrary<std::string>());
  std::filesystem::remove(path_);
  std::vector<size_t> ends;
  {
    Result<Journal> journal = Journal::Create(path_);
    RC_ASSERT(journal->Begin({}).has_value());
    ends.push_back(Content().size());
    for (const auto& [line, text] : results) {
      RC_ASSERT(journal->Append(line + 1, line, false, text).has_value());
      ends.push_back(Content().size());
    }
  }
  const size_t size = *rc::gen::inRange(ends.front(), ends.back() + 1);
  std::filesystem::resize_file(path_, size);
  Result<Journal> journal = Journal::Open(path_);
  RC_ASSERT(journal.has_value());
  const auto kept =
      static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), size) - ends.begin()) - 1;
  RC_ASSERT(journal->num_records() == static_cast<int64_t>(kept));
  std::string expected;
  for (const auto& [line, text] : results) {
    if (journal->Find(line + 1) == nullptr)
      RC_ASSERT(journal->Append(line + 1, line, false, text).has_value());
    expected += text + "\n";
  }
  RC_ASSERT(Results(*journal) == expected);
}

}  // namespace
}  // namespace deepinfer
