#include "ops/sparse_attention/sparse_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::OwnedTensor;
using testing::Random;
using testing::TestLayout;

struct Shape {
  int64_t heads;
  int64_t dim;
  int64_t pairs;
  int64_t window;
  int64_t topk;
};
constexpr Shape kTiny = {8, 64, 8, 8, 16};
constexpr Shape kReal = {64, 512, 32, 128, 512};
constexpr Shape kOdd = {5, 96, 16, 7,
                        70};  // head and key remainders of every tile, a last block of few keys

constexpr int64_t kEntriesPerBlock = 128;
using RowKey = std::pair<int, int64_t>;  // sequence, position
using Outputs = std::map<RowKey, std::vector<uint16_t>>;

// Everything a row reads is a function of (sequence, position) or (sequence, entry), whatever batch
// it is in.
class AttentionCase {
 public:
  AttentionCase(Shape shape, std::vector<Chunk> chunks, bool compressed,
                Numerics numerics = Numerics::kProduction)
      : shape_(shape), layout_(Slots(std::move(chunks)), 4) {
    const int64_t rows = layout_.rows();
    const auto sequences = static_cast<int64_t>(layout_.chunks().size());
    q_ = OwnedTensor(DType::kBf16, {rows, shape.heads, shape.dim});
    window_ = OwnedTensor(DType::kU8, {rows, Q8RecordBytes(shape.dim)});
    pages_ = OwnedTensor(DType::kU8,
                         {layout_.num_pages(), TestLayout::kPageRows, Q8RecordBytes(shape.dim)});
    blocks_ = OwnedTensor(DType::kU8, {4 * sequences, kEntriesPerBlock, Q4ERecordBytes(shape.dim)});
    selected_ = OwnedTensor(DType::kI32, {rows, shape.topk});
    table_ = OwnedTensor(DType::kF32, {rows, shape.pairs, 2});
    sink_ = testing::NormalTensor(DType::kF32, {shape.heads}, 77);
    out_ = OwnedTensor(DType::kBf16, {rows, shape.heads * shape.dim});
    for (int64_t r = 0; r < rows; ++r) FillRow(r);
    for (int64_t s = 0; s < sequences; ++s) {
      const Chunk& chunk = layout_.chunks()[static_cast<size_t>(s)];
      for (int64_t p = std::max<int64_t>(0, chunk.first - shape.window); p < chunk.first; ++p)
        WindowRecord(chunk.id, p, layout_.WindowPlace(pages_.view(), s, p));
      for (int64_t j = 0; j < std::min<int64_t>(chunk.first + chunk.count, 4 * kEntriesPerBlock);
           ++j) {
        const int32_t block = layout_.view().block_table.Row<int32_t>(s)[j / kEntriesPerBlock];
        const std::vector<float> x = Vector(2, chunk.id, j, shape.dim);
        EncodeQ4ERecord(
            x.data(), shape.dim, numerics,
            blocks_.Row<uint8_t>(block) + (j % kEntriesPerBlock) * Q4ERecordBytes(shape.dim));
      }
    }
    args_.q = q_.view();
    args_.window_records = window_.view();
    args_.window_pages = pages_.view();
    args_.window = shape.window;
    if (compressed) {
      args_.kv_blocks = blocks_.view();
      args_.selected = selected_.view();
    }
    args_.layout = layout_.view();
    args_.sink = sink_.view();
    args_.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    args_.table = table_.view();
    args_.out = out_.view();
    args_.numerics = numerics;
  }

  Outputs Run(Stream& stream) {
    EXPECT_TRUE(SparseAttention(args_, stream).has_value());
    Outputs outputs;
    for (int64_t r = 0; r < layout_.rows(); ++r) {
      const auto* begin = &out_.Row<Bf16>(r)->bits;
      outputs[{layout_.chunk_of(r).id, layout_.position(r)}] = {begin,
                                                                begin + shape_.heads * shape_.dim};
    }
    return outputs;
  }

  SparseAttentionArgs& args() {
    return args_;
  }
  TestLayout& layout() {
    return layout_;
  }

 private:
  static std::vector<Chunk> Slots(std::vector<Chunk> chunks) {
    // Slots differ from the order in the batch.
    for (size_t i = 0; i < chunks.size(); ++i)
      chunks[i].slot = static_cast<int64_t>(chunks.size() - 1 - i);
    return chunks;
  }
  static std::vector<float> Vector(uint64_t what, int id, int64_t position, int64_t count) {
    Random random(what, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    std::vector<float> x(static_cast<size_t>(count));
    for (float& value : x) value = RoundToBf16(random.Normal());
    return x;
  }
  void WindowRecord(int id, int64_t position, uint8_t* record) const {
    EncodeQ8Record(Vector(1, id, position, shape_.dim).data(), shape_.dim, record);
  }
  void FillRow(int64_t r) {
    const int id = layout_.chunk_of(r).id;
    const int64_t position = layout_.position(r);
    const std::vector<float> q = Vector(3, id, position, shape_.heads * shape_.dim);
    for (size_t i = 0; i < q.size(); ++i) q_.Row<Bf16>(r)[i] = F32ToBf16(3.0f * q[i]);
    WindowRecord(id, position, window_.Row<uint8_t>(r));
    for (int64_t i = 0; i < shape_.pairs; ++i) {
      const float angle = static_cast<float>(position) * std::pow(0.5f, static_cast<float>(i));
      table_.Row<float>(r)[2 * i] = std::cos(angle);
      table_.Row<float>(r)[2 * i + 1] = std::sin(angle);
    }
    // A random ascending subset of the visible entries.
    Random random(4, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    const int64_t visible = std::min<int64_t>(position + 1, 4 * kEntriesPerBlock);
    const int64_t wanted = std::min(visible, shape_.topk);
    int32_t* selected = selected_.Row<int32_t>(r);
    int64_t count = 0;
    for (int64_t j = 0; j < visible; ++j) {
      if (random.Below(visible - j) < wanted - count) selected[count++] = static_cast<int32_t>(j);
    }
    std::fill(selected + count, selected + shape_.topk, -1);
  }

  Shape shape_;
  TestLayout layout_;
  OwnedTensor q_, window_, pages_, blocks_, selected_, table_, sink_, out_;
  SparseAttentionArgs args_;
};

// Both implementations compute the same fp32 formula; they differ in the order of the score's sum
// (relative 1e-6), in the exponential (2e-7), and where one of these crosses a rounding of p to
// bf16 (2^-9 of one term). The relative error before Q8 is below 1e-4, so an element may land on
// the neighbouring E4M3 point (2^-3 of it, or 2^-15 of the group's maximum near zero), and rarely.
void ExpectCloseToReference(Shape shape, const std::vector<Chunk>& chunks, bool compressed,
                            Numerics numerics, CpuLevel level) {
  AttentionCase test(shape, chunks, compressed, numerics);
  Stream stream(1);
  stream.set_use_reference(true);
  const Outputs expected = test.Run(stream);
  stream.set_use_reference(false);
  stream.set_cpu_level(level);
  const Outputs tuned = test.Run(stream);
  int64_t different = 0;
  int64_t total = 0;
  for (const auto& [key, row] : expected) {
    const std::vector<uint16_t>& other = tuned.at(key);
    float largest = 0.0f;
    for (uint16_t bits : row) largest = std::max(largest, std::fabs(Bf16ToF32(Bf16{bits})));
    ASSERT_GT(largest, 0.0f);
    for (size_t i = 0; i < row.size(); ++i) {
      const float a = Bf16ToF32(Bf16{row[i]});
      const float b = Bf16ToF32(Bf16{other[i]});
      const float step = numerics == Numerics::kProduction
                             ? std::fabs(a) / 8 + largest * 0x1p-13f
                             : std::fabs(a) / 128 + largest * 0x1p-12f;
      ASSERT_NEAR(a, b, step) << "position " << key.second << " element " << i;
      different += row[i] != other[i];
      ++total;
    }
  }
  EXPECT_LT(static_cast<double>(different), 0.02 * static_cast<double>(total) + 1);
}

TEST(SparseAttention, TunedMatchesReferenceOnTheCaseTable) {
  // Every level that the host has; a stream lowers a wish beyond that to the host's best.
  for (CpuLevel level : {CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
      for (bool compressed : {false, true}) {
        ExpectCloseToReference(kTiny, {{1, 0, 1}, {2, 5, 9}, {3, 40, 3}}, compressed, numerics,
                               level);
        ExpectCloseToReference(kOdd, {{1, 0, 2}, {2, 90, 5}}, compressed, numerics, level);
      }
    }
    ExpectCloseToReference(kReal, {{1, 0, 1}, {2, 400, 2}, {3, 700, 1}}, true,
                           Numerics::kProduction, level);
    ExpectCloseToReference(kReal, {{1, 63, 1}, {2, 200, 1}}, false, Numerics::kProduction, level);
  }
}

TEST(SparseAttention, ARowHasTheSameBitsAloneInAnyBatchAndAtAnyThreadCount) {
  for (Shape shape : {kTiny, kOdd, Shape{12, 512, 32, 128, 300}}) {
    const std::vector<Chunk> batch = {{1, 0, 4}, {2, 130, 1}, {3, 77, 6}};
    Stream one(1);
    const Outputs expected = AttentionCase(shape, batch, true).Run(one);
    for (int threads : {2, 3, 7}) {
      Stream stream(threads);
      EXPECT_EQ(AttentionCase(shape, batch, true).Run(stream), expected) << threads << " threads";
      for (const auto& [key, row] : expected) {
        const Outputs alone = AttentionCase(shape, {{key.first, key.second, 1}}, true).Run(stream);
        EXPECT_EQ(alone.at(key), row)
            << "alone, position " << key.second << ", " << threads << " threads";
      }
    }
    const Outputs reversed = AttentionCase(shape, {batch[2], batch[1], batch[0]}, true).Run(one);
    EXPECT_EQ(reversed, expected);
  }
}

TEST(SparseAttention, TheLowestLevelRunsTheReference) {
  AttentionCase test(kOdd, {{1, 60, 3}}, true);
  Stream stream(1);
  stream.set_use_reference(true);
  const Outputs expected = test.Run(stream);
  stream.set_use_reference(false);
  stream.set_cpu_level(CpuLevel::kScalar);
  EXPECT_EQ(test.Run(stream), expected);
}

TEST(SparseAttention, ChunkBoundariesDoNotChangeBits) {
  // The window of a row comes from the step's own records or from pages, depending on where the
  // chunk starts.
  for (bool compressed : {false, true}) {
    Stream stream(2);
    const Outputs whole = AttentionCase(kTiny, {{9, 0, 33}}, compressed).Run(stream);
    for (int64_t cut = 1; cut < 33; cut += 3) {
      Outputs parts = AttentionCase(kTiny, {{9, 0, cut}}, compressed).Run(stream);
      parts.merge(AttentionCase(kTiny, {{9, cut, 33 - cut}}, compressed).Run(stream));
      EXPECT_EQ(parts, whole) << "cut at " << cut;
    }
  }
}

TEST(SparseAttention, TheWindowEndsWhereItIsSaidToBegin) {
  // Rows at 20 ... 29 with keys from 23 on only: those before see none, the others what they would
  // see in a sequence of other keys, whose keys before 23 are poisoned.
  for (bool compressed : {false, true}) {
    for (bool reference : {false, true}) {
      for (int threads : {1, 8}) {
        Stream stream(threads);
        stream.set_use_reference(reference);
        AttentionCase clean(kTiny, {{9, 20, 10}}, compressed);
        clean.layout().set_window_begin(0, 23);
        const Outputs expected = clean.Run(stream);
        AttentionCase poisoned(kTiny, {{9, 20, 10}}, compressed);
        poisoned.layout().set_window_begin(0, 23);
        std::memset(poisoned.args().window_pages.data(), 0xff,
                    static_cast<size_t>(poisoned.args().window_pages.num_elements()));
        std::memset(poisoned.args().window_records.Row<uint8_t>(0), 0xff,
                    static_cast<size_t>(3 * Q8RecordBytes(kTiny.dim)));
        EXPECT_EQ(poisoned.Run(stream), expected);
        // The last row's window lies wholly behind 21, that of the row at 22 would reach 15.
        const Outputs whole = AttentionCase(kTiny, {{9, 20, 10}}, compressed).Run(stream);
        EXPECT_NE(expected.at({9, 25}), whole.at({9, 25}));
        AttentionCase later(kTiny, {{9, 30, 1}}, compressed);
        later.layout().set_window_begin(0, 23);
        EXPECT_EQ(later.Run(stream), AttentionCase(kTiny, {{9, 30, 1}}, compressed).Run(stream));
        if (compressed) continue;
        for (uint16_t bits : expected.at({9, 22})) EXPECT_EQ(bits & 0x7fff, 0);
      }
    }
  }
}

TEST(SparseAttention, RowsOfABlockSeeAllOfItAndTheWindowInFrontOfIt) {
  // What the last row of a block sees is what it sees without blocks in a window that is longer by
  // the block. So every row's query, put in its place, must give that row's result.
  for (Shape shape : {kTiny, kOdd}) {
    for (bool reference : {false, true}) {
      for (int threads : {1, 8}) {
        for (int64_t first : {int64_t{0}, int64_t{1}, shape.window - 1, shape.window,
                              shape.window + 1, 3 * shape.window, int64_t{126}}) {
          constexpr int64_t kRows = 5;
          Stream stream(threads);
          stream.set_use_reference(reference);
          AttentionCase block(shape, {{3, 40, kRows}, {9, first, kRows}}, false);
          block.args().block_rows = kRows;
          const Outputs outputs = block.Run(stream);
          for (int64_t r = 0; r < kRows; ++r) {
            AttentionCase causal(shape, {{9, first, kRows}}, false);
            SparseAttentionArgs& args = causal.args();
            args.window = shape.window + kRows;
            std::copy_n(args.q.Row<Bf16>(r), args.q.row_size(), args.q.Row<Bf16>(kRows - 1));
            std::copy_n(args.table.Row<float>(r), args.table.row_size(),
                        args.table.Row<float>(kRows - 1));
            const Outputs longer = causal.Run(stream);
            EXPECT_EQ(outputs.at({9, first + r}), longer.at({9, first + kRows - 1}))
                << "slot " << r << " of a block at " << first;
          }
        }
      }
    }
  }
}

TEST(SparseAttention, ABlockHasTheSameBitsAloneAndSeesNothingBeforeItsWindowBegins) {
  Stream stream(2);
  AttentionCase both(kTiny, {{3, 40, 3}, {9, 20, 3}}, false);
  both.args().block_rows = 3;
  both.layout().set_window_begin(1, 17);
  const Outputs expected = both.Run(stream);
  AttentionCase alone(kTiny, {{9, 20, 3}}, false);
  alone.args().block_rows = 3;
  alone.layout().set_window_begin(0, 17);
  for (int64_t p = 0; p < 17; ++p)
    std::memset(alone.layout().WindowPlace(alone.args().window_pages, 0, p), 0xff,
                static_cast<size_t>(Q8RecordBytes(kTiny.dim)));
  for (const auto& [key, row] : alone.Run(stream)) EXPECT_EQ(expected.at(key), row);
}

TEST(SparseAttention, OneKeyWithoutSinkReturnsItsValue) {
  // A softmax over one key is 1; with the sink far below, the output is the key itself, rotated
  // back.
  for (bool reference : {false, true}) {
    AttentionCase test(kTiny, {{1, 0, 1}}, false);
    SparseAttentionArgs& args = test.args();
    for (int64_t h = 0; h < kTiny.heads; ++h) args.sink.Row<float>(h)[0] = -1000.0f;
    for (int64_t i = 0; i < kTiny.pairs; ++i) {
      args.table.Row<float>(0)[2 * i] = 1.0f;
      args.table.Row<float>(0)[2 * i + 1] = 0.0f;
    }
    Stream stream(1);
    stream.set_use_reference(reference);
    test.Run(stream);
    std::vector<float> key(static_cast<size_t>(kTiny.dim));
    DecodeQ8Record(args.window_records.Row<uint8_t>(0), kTiny.dim, key.data());
    for (int64_t i = 0; i < kTiny.heads * kTiny.dim; ++i) {
      EXPECT_EQ(testing::Value(args.out, i), key[static_cast<size_t>(i % kTiny.dim)]) << i;
    }
  }
}

TEST(SparseAttention, TheSinkAddsToTheDenominatorOnly) {
  // One key with score 0 and a sink of ln 3: probability 1 / (1 + 3).
  for (bool reference : {false, true}) {
    AttentionCase test(kTiny, {{1, 0, 1}}, false, Numerics::kReference);
    SparseAttentionArgs& args = test.args();
    std::fill_n(args.q.Row<Bf16>(0), kTiny.heads * kTiny.dim, Bf16{0});
    for (int64_t h = 0; h < kTiny.heads; ++h) args.sink.Row<float>(h)[0] = 1.09861229f;
    Stream stream(1);
    stream.set_use_reference(reference);
    std::vector<float> key(static_cast<size_t>(kTiny.dim));
    DecodeQ8Record(args.window_records.Row<uint8_t>(0), kTiny.dim, key.data());
    test.Run(stream);
    for (int64_t i = 0; i < kTiny.dim - 2 * kTiny.pairs; ++i) {
      EXPECT_NEAR(testing::Value(args.out, i), key[static_cast<size_t>(i)] / 4,
                  std::fabs(key[static_cast<size_t>(i)]) / 500)
          << i;
    }
  }
}

TEST(SparseAttention, HugeScoresAndSinksStayFinite) {
  for (float sink : {-1e30f, 200.0f, 1e30f}) {
    AttentionCase test(kTiny, {{1, 30, 2}}, true);
    for (int64_t i = 0; i < 2 * kTiny.heads * kTiny.dim; ++i) {
      test.args().q.Row<Bf16>(0)[i] = F32ToBf16(i % 2 == 0 ? 3e4f : -2e4f);
    }
    for (int64_t h = 0; h < kTiny.heads; ++h) test.args().sink.Row<float>(h)[0] = sink;
    Stream stream(1);
    test.Run(stream);
    for (int64_t i = 0; i < 2 * kTiny.heads * kTiny.dim; ++i)
      ASSERT_TRUE(std::isfinite(testing::Value(test.args().out, i))) << i;
  }
}

TEST(SparseAttention, ANanInOneQueryHeadStaysInThatHead) {
  AttentionCase test(kTiny, {{1, 30, 1}}, true);
  Stream stream(1);
  const Outputs clean = test.Run(stream);
  test.args().q.Row<Bf16>(0)[2 * kTiny.dim + 5] = Bf16{0x7fc0};
  const Outputs dirty = test.Run(stream);
  const std::vector<uint16_t>& a = clean.begin()->second;
  const std::vector<uint16_t>& b = dirty.begin()->second;
  for (size_t i = 0; i < a.size(); ++i) {
    if (static_cast<int64_t>(i) / kTiny.dim == 2) {
      EXPECT_TRUE(std::isnan(Bf16ToF32(Bf16{b[i]})));
    } else {
      EXPECT_EQ(a[i], b[i]);
    }
  }
}

TEST(SparseAttention, WrongShapesAreRefused) {
  Stream stream(1);
  AttentionCase wrong_pages(kTiny, {{1, 0, 1}}, false);
  wrong_pages.args().window_pages = wrong_pages.args().window_records;
  const Status pages = SparseAttention(wrong_pages.args(), stream);
  ASSERT_FALSE(pages.has_value());
  EXPECT_EQ(pages.error().field, "window_pages");
  AttentionCase wrong_out(kTiny, {{1, 0, 1}}, false);
  wrong_out.args().out = wrong_out.args().q;
  const Status out = SparseAttention(wrong_out.args(), stream);
  ASSERT_FALSE(out.has_value());
  EXPECT_EQ(out.error().field, "out");
}

}  // namespace
}  // namespace deepinfer
