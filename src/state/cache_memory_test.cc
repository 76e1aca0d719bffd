#include "state/cache_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

namespace deepinfer {
namespace {

constexpr int64_t kRemainderRows = 4;

CacheGeometry Geometry() {
  CacheGeometry geometry;
  geometry.producers = {
      {.ratio = 2, .kv_record_bytes = 9, .index_record_bytes = 5, .remainder_floats = 6},
      {.ratio = 1, .kv_record_bytes = 7, .index_record_bytes = 3, .remainder_floats = 0}};
  geometry.num_layers = 3;
  geometry.window_record_bytes = 11;
  geometry.remainder_rows = kRemainderRows;
  return geometry;
}

CacheMemory Memory(const CacheGeometry& geometry = Geometry()) {
  return std::move(*CacheMemory::Create(geometry, {}, 8, 7, 5));
}

// All views, so that tests can fill and compare the whole memory.
std::vector<TensorView> Views(const CacheMemory& memory) {
  std::vector<TensorView> views;
  for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
    views.push_back(memory.KvBlocks(p));
    views.push_back(memory.IndexBlocks(p));
    if (!memory.Remainders(p).empty()) views.push_back(memory.Remainders(p));
  }
  for (int64_t layer = 0; layer < memory.geometry().num_layers; ++layer)
    views.push_back(memory.WindowPages(layer));
  return views;
}

size_t ViewBytes(const TensorView& view) {
  return static_cast<size_t>(view.num_elements() * DTypeBytes(view.dtype()));
}

void Fill(const CacheMemory& memory, uint32_t seed) {
  for (const TensorView& view : Views(memory)) {
    auto* bytes = static_cast<uint8_t*>(view.data());
    for (size_t i = 0; i < ViewBytes(view); ++i) {
      seed = seed * 1664525u + 1013904223u;
      bytes[i] = static_cast<uint8_t>(seed >> 24);
    }
  }
}

std::vector<std::vector<uint8_t>> Contents(const CacheMemory& memory) {
  std::vector<std::vector<uint8_t>> contents;
  for (const TensorView& view : Views(memory)) {
    const auto* bytes = static_cast<const uint8_t*>(view.data());
    contents.emplace_back(bytes, bytes + ViewBytes(view));
  }
  return contents;
}

// The bytes that a sequence's record at a position has, in every pool.
std::vector<uint8_t> RecordsAt(const CacheMemory& memory, const StateCommand& c, int64_t position) {
  std::vector<uint8_t> bytes;
  const auto add = [&bytes](const TensorView& view, int64_t row, int64_t item) {
    const auto* from = static_cast<const uint8_t*>(view.data()) +
                       (row * view.row_stride() + item * view.dim(2)) * DTypeBytes(view.dtype());
    bytes.insert(bytes.end(), from, from + view.dim(2) * DTypeBytes(view.dtype()));
  };
  const int32_t block = c.blocks[static_cast<size_t>(position / kBlockTokens)];
  for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
    const int64_t ratio = memory.geometry().producers[static_cast<size_t>(p)].ratio;
    if (position / ratio < c.num_tokens / ratio) {
      add(memory.KvBlocks(p), block, position % kBlockTokens / ratio);
      add(memory.IndexBlocks(p), block, position % kBlockTokens / ratio);
    }
    if (ratio == 2 && position >= c.num_tokens - kRemainderRows)
      add(memory.Remainders(p), c.slot, position % kRemainderRows);
  }
  const int64_t page = position / kBlockTokens - c.first_window_page;
  for (int64_t layer = 0; page >= 0 && layer < memory.geometry().num_layers; ++layer)
    add(memory.WindowPages(layer), c.window_pages[static_cast<size_t>(page)],
        position % kBlockTokens);
  return bytes;
}

StateCommand Sequence(StateCommand::Kind kind, std::shared_ptr<StateImage> image, int64_t tokens,
                      bool elsewhere) {
  StateCommand c{.kind = kind, .image = std::move(image), .num_tokens = tokens};
  c.slot = elsewhere ? 4 : 1;
  c.blocks = elsewhere ? std::vector<int32_t>{6, 1, 5} : std::vector<int32_t>{2, 7, 0};
  c.window_pages = elsewhere ? std::vector<int32_t>{3, 6} : std::vector<int32_t>{5, 2};
  c.first_window_page = 1;
  const auto units = static_cast<size_t>((tokens + kBlockTokens - 1) / kBlockTokens);
  c.blocks.resize(units);
  c.window_pages.resize(units > 0 ? units - 1 : 0);
  return c;
}

TEST(CacheMemory, CopiesAllOfABlockOrAPageAndNothingElse) {
  CacheMemory memory = Memory();
  Stream stream(1);
  Fill(memory, 1);
  auto expected = Contents(memory);
  const std::vector<TensorView> views = Views(memory);
  for (size_t v = 0; v < views.size(); ++v) {
    const int64_t rows = views[v].rows();
    const size_t row = ViewBytes(views[v]) / static_cast<size_t>(rows);
    // Blocks 3 to 5, then 5 to 6; pages 0 to 4.
    if (rows == memory.num_blocks()) {
      std::copy_n(expected[v].begin() + static_cast<int64_t>(3 * row), row,
                  expected[v].begin() + static_cast<int64_t>(5 * row));
      std::copy_n(expected[v].begin() + static_cast<int64_t>(5 * row), row,
                  expected[v].begin() + static_cast<int64_t>(6 * row));
    } else if (rows == memory.num_window_pages()) {
      std::copy_n(expected[v].begin(), row, expected[v].begin() + static_cast<int64_t>(4 * row));
    }
  }
  ASSERT_TRUE(
      memory
          .Execute({{.kind = StateCommand::Kind::kCopyBlock, .source = 3, .target = 5},
                    {.kind = StateCommand::Kind::kCopyBlock, .source = 5, .target = 6},
                    {.kind = StateCommand::Kind::kCopyWindowPage, .source = 0, .target = 4}},
                   stream)
          .has_value());
  EXPECT_EQ(Contents(memory), expected);
}

TEST(CacheMemory, AnImageCarriesASequenceToOtherUnitsAndOtherMemory) {
  Stream stream(1);
  for (int64_t tokens : {0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 384}) {
    CacheMemory memory = Memory();
    Fill(memory, static_cast<uint32_t>(tokens));
    auto image = std::make_shared<StateImage>();
    const StateCommand from = Sequence(StateCommand::Kind::kExport, image, tokens, false);
    ASSERT_TRUE(memory.Execute({from}, stream).has_value());
    EXPECT_EQ(image->num_tokens, tokens);
    const StateCommand to = Sequence(StateCommand::Kind::kImport, image, tokens, true);
    CacheMemory other = Memory();
    Fill(other, 77);
    const auto before = Contents(other);
    ASSERT_TRUE(other.Execute({to}, stream).has_value());
    // In one list as well.
    auto again = std::make_shared<StateImage>();
    StateCommand first = from;
    StateCommand second = to;
    first.image = second.image = again;
    std::vector<std::vector<uint8_t>> records;
    for (int64_t p = 0; p < tokens; ++p) records.push_back(RecordsAt(memory, from, p));
    ASSERT_TRUE(memory.Execute({first, second}, stream).has_value());
    EXPECT_EQ(again->bytes, image->bytes);
    for (int64_t p = 0; p < tokens; ++p) {
      ASSERT_EQ(RecordsAt(other, to, p), records[static_cast<size_t>(p)]) << p << " of " << tokens;
      ASSERT_EQ(RecordsAt(memory, to, p), records[static_cast<size_t>(p)]) << p << " of " << tokens;
    }
    // Nothing beyond the sequence has changed: exactly the image's bytes without its header may.
    size_t changed = 0;
    const auto after = Contents(other);
    for (size_t v = 0; v < after.size(); ++v) {
      for (size_t i = 0; i < after[v].size(); ++i) changed += after[v][i] != before[v][i];
    }
    EXPECT_LE(changed, image->bytes.size());
    if (tokens == 0) {
      EXPECT_EQ(changed, 0u);
    }
  }
}

TEST(CacheMemory, ImagesDoNotContainWhatLiesBeyondTheSequence) {
  Stream stream(1);
  for (int64_t tokens : {1, 3, 130}) {
    std::vector<std::byte> images[2];
    for (int fill = 0; fill < 2; ++fill) {
      CacheMemory memory = Memory();
      Fill(memory, 5);
      auto image = std::make_shared<StateImage>();
      const StateCommand from = Sequence(StateCommand::Kind::kExport, image, tokens, false);
      ASSERT_TRUE(memory.Execute({from}, stream).has_value());
      if (fill == 1) {
        // The sequence in a memory of other contents.
        CacheMemory other = Memory();
        Fill(other, 6);
        ASSERT_TRUE(
            other.Execute({Sequence(StateCommand::Kind::kImport, image, tokens, true)}, stream)
                .has_value());
        ASSERT_TRUE(
            other.Execute({Sequence(StateCommand::Kind::kExport, image, tokens, true)}, stream)
                .has_value());
      }
      images[fill] = image->bytes;
    }
    EXPECT_EQ(images[0], images[1]) << tokens;
  }
}

TEST(CacheMemory, AnImageHoldsNoMoreHistoryThanItSays) {
  Stream stream(1);
  CacheMemory memory = Memory();
  CacheMemory other = Memory();
  Fill(memory, 3);
  Fill(other, 4);
  auto image = std::make_shared<StateImage>();
  image->window_begin = 150;
  image->remainder_begin = 198;
  const StateCommand from = Sequence(StateCommand::Kind::kExport, image, 200, false);
  const StateCommand to = Sequence(StateCommand::Kind::kImport, image, 200, true);
  ASSERT_TRUE(memory.Execute({from}, stream).has_value());
  EXPECT_EQ(image->window_begin, 150);
  EXPECT_EQ(image->remainder_begin, 198);
  const auto untouched = RecordsAt(other, to, 149);
  ASSERT_TRUE(other.Execute({to}, stream).has_value());
  const size_t window_bytes = 3 * 11;
  const auto window_of = [&](const std::vector<uint8_t>& records) {
    return std::vector<uint8_t>(records.end() - static_cast<int64_t>(window_bytes), records.end());
  };
  EXPECT_EQ(window_of(RecordsAt(other, to, 149)), window_of(untouched));
  EXPECT_EQ(window_of(RecordsAt(other, to, 150)), window_of(RecordsAt(memory, from, 150)));
  EXPECT_NE(RecordsAt(other, to, 197), RecordsAt(memory, from, 197));
  for (int64_t p : {198, 199}) EXPECT_EQ(RecordsAt(other, to, p), RecordsAt(memory, from, p));
  // A state without any window history, as right after a prefix hit without pages.
  StateCommand bare = from;
  bare.image = std::make_shared<StateImage>();
  bare.window_pages.clear();
  ASSERT_TRUE(memory.Execute({bare}, stream).has_value());
  EXPECT_EQ(bare.image->window_begin, 200);
  StateCommand bare_to = to;
  bare_to.image = bare.image;
  bare_to.window_pages.clear();
  ASSERT_TRUE(other.Execute({bare_to}, stream).has_value());
}

TEST(CacheMemory, ABadImageOrCommandChangesNothing) {
  Stream stream(1);
  CacheMemory memory = Memory();
  Fill(memory, 3);
  auto image = std::make_shared<StateImage>();
  constexpr int64_t kTokens = 200;
  ASSERT_TRUE(memory.Execute({Sequence(StateCommand::Kind::kExport, image, kTokens, false)}, stream)
                  .has_value());
  const auto before = Contents(memory);
  const StateCommand good = Sequence(StateCommand::Kind::kImport, image, kTokens, true);
  const auto code_of = [&](const std::function<void(StateCommand&, StateImage&)>& spoil) {
    StateCommand command = good;
    command.image = std::make_shared<StateImage>(*image);
    spoil(command, *command.image);
    // A good command before it must not be carried out either.
    const Status status = memory.Execute(
        {{.kind = StateCommand::Kind::kCopyBlock, .source = 0, .target = 1}, command}, stream);
    EXPECT_EQ(Contents(memory), before);
    return status.has_value() ? Code::kInternal : status.error().code;
  };
  using C = StateCommand;
  using I = StateImage;
  for (size_t size : {size_t{0}, size_t{7}, size_t{39}, size_t{40}, image->bytes.size() - 1})
    EXPECT_EQ(code_of([size](C&, I& i) { i.bytes.resize(size); }), Code::kDataLoss) << size;
  EXPECT_EQ(code_of([](C&, I& i) { i.bytes.resize(i.bytes.size() + 1); }), Code::kDataLoss);
  // Every bit of the header counts.
  for (size_t bit = 0; bit < 8 * 40; ++bit) {
    EXPECT_EQ(code_of([bit](C&, I& i) { i.bytes[bit / 8] ^= std::byte{1} << bit % 8; }),
              Code::kDataLoss)
        << bit;
  }
  EXPECT_EQ(code_of([](C& c, I&) { c.num_tokens = kTokens - 1; }), Code::kDataLoss);
  EXPECT_EQ(code_of([](C& c, I&) { c.num_tokens = -1; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.image = nullptr; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.blocks[1] = 8; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.blocks.pop_back(); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.window_pages[0] = -1; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.first_window_page = 0; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c.slot = 5; }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](C& c, I&) { c = {.kind = C::Kind::kCopyBlock, .source = 8, .target = 0}; }),
            Code::kInvalidArgument);
  EXPECT_EQ(
      code_of([](C& c, I&) { c = {.kind = C::Kind::kCopyWindowPage, .source = 0, .target = 7}; }),
      Code::kInvalidArgument);
  // Another geometry.
  CacheGeometry geometry = Geometry();
  geometry.window_record_bytes = 22;
  CacheMemory other = Memory(geometry);
  EXPECT_EQ(other.Execute({good}, stream).error().code, Code::kDataLoss);
}

}  // namespace
}  // namespace deepinfer
