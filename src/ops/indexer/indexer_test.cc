#include "ops/indexer/indexer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "ops/indexer/indexer_impl.h"
#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::OwnedTensor;
using testing::Random;
using testing::TestLayout;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- Selection
// ---------------------------------------------------------------------------------------------------------------

std::vector<int32_t> TopKBySorting(const std::vector<float>& scores, size_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](int32_t i) {
    return std::isnan(scores[static_cast<size_t>(i)]) ? -kInfinity : scores[static_cast<size_t>(i)];
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return rank(a) > rank(b); });
  order.resize(std::min(k, order.size()));
  std::sort(order.begin(), order.end());
  order.resize(k, -1);
  return order;
}

// Few distinct values, so that ties at the boundary are the normal case; all the awkward numbers
// among them.
rc::Gen<std::vector<float>> TiedScores() {
  return rc::gen::container<std::vector<float>>(
      rc::gen::element(0.0f, -0.0f, 1.0f, -1.0f, 1.0000001f, 0.5f, 3e-41f, -3e-41f, 3.4e38f,
                       kInfinity, -kInfinity, kNan, -kNan));
}

RC_GTEST_PROP(SelectTopK, EqualsAStableSortWithTiesAndNan, ()) {
  const auto scores = *TiedScores();
  const auto k = *rc::gen::inRange<size_t>(0, 40);
  std::vector<int32_t> out(k, 12345);
  SelectTopK(scores, out);
  RC_ASSERT(out == TopKBySorting(scores, k));
}

RC_GTEST_PROP(SelectTopK, EqualsAStableSortOfArbitraryFloatBits, ()) {
  const auto bits = *rc::gen::container<std::vector<uint32_t>>(rc::gen::arbitrary<uint32_t>());
  std::vector<float> scores;
  for (uint32_t b : bits) scores.push_back(std::bit_cast<float>(b));
  const auto k = *rc::gen::inRange<size_t>(0, scores.size() + 2);
  std::vector<int32_t> out(k, 12345);
  SelectTopK(scores, out);
  RC_ASSERT(out == TopKBySorting(scores, k));
}

TEST(SelectTopK, LongRowsWithManyTiesEqualAStableSort) {
  Random random(1);
  for (int levels : {1, 3, 50, 100000}) {
    std::vector<float> scores(20000);
    for (float& score : scores) score = static_cast<float>(random.Below(levels)) * 0.01f - 0.1f;
    std::vector<int32_t> out(512);
    SelectTopK(scores, out);
    EXPECT_EQ(out, TopKBySorting(scores, 512)) << levels << " distinct values";
  }
}

std::vector<int32_t> BlocksBySorting(const std::vector<float>& scores, int64_t block_size,
                                     size_t k) {
  std::vector<float> best;
  for (size_t j = 0; j < scores.size(); ++j) {
    if (j % static_cast<size_t>(block_size) == 0) best.push_back(-kInfinity);
    if (!std::isnan(scores[j]))
      best.back() = std::max(best.back(), std::min(scores[j], std::numeric_limits<float>::max()));
  }
  if (!best.empty()) best.back() = kInfinity;
  return TopKBySorting(best, k);
}

RC_GTEST_PROP(SelectCandidateBlocks, EqualsSortedBlockMaximaAndKeepsTheNewest, ()) {
  const auto scores = *TiedScores();
  const auto block_size = *rc::gen::inRange<int64_t>(1, 10);
  const auto k = *rc::gen::inRange<size_t>(1, 20);
  std::vector<int32_t> out(k, 12345);
  SelectCandidateBlocks(scores, block_size, out);
  RC_ASSERT(out == BlocksBySorting(scores, block_size, k));
  if (!scores.empty()) {
    const auto newest =
        static_cast<int32_t>((static_cast<int64_t>(scores.size()) - 1) / block_size);
    RC_ASSERT(std::count(out.begin(), out.end(), newest) == 1);
  }
}

TEST(SelectCandidateBlocks, TheDescriptionsExample) {
  const std::vector<float> scores = {.1f, .9f, .2f, .3f, .8f, 0.0f, 0.0f, .1f, .05f, .02f};
  std::vector<int32_t> out(2);
  SelectCandidateBlocks(scores, 4, out);
  EXPECT_EQ(out, (std::vector<int32_t>{0, 2}));
}

TEST(SelectCandidateBlocks, InfiniteScoresDoNotPushTheNewestBlockOut) {
  const std::vector<float> scores = {kInfinity, 0, kInfinity, 0, kInfinity, 0, -1, -1};
  std::vector<int32_t> out(2);
  SelectCandidateBlocks(scores, 2, out);
  EXPECT_EQ(out, (std::vector<int32_t>{0, 3}));
}

TEST(SelectCandidateBlocks, NoEntriesGiveNoBlocks) {
  std::vector<int32_t> out(3, 7);
  SelectCandidateBlocks({}, 8, out);
  EXPECT_EQ(out, (std::vector<int32_t>{-1, -1, -1}));
}

// ---- The operation
// -----------------------------------------------------------------------------------------------------------

struct Shape {
  int64_t heads;
  int64_t channels;
  int64_t ratio;
  int64_t topk;
  int64_t candidate_blocks;
  int64_t candidate_block_size;
  int64_t entries_per_block;
};
constexpr Shape kTiny = {4, 64, 1, 16, 6, 4, 128};
constexpr Shape kReal = {32, 128, 1, 512, 100, 8, 128};
constexpr Shape kHalf = {32, 128, 2, 512, 64, 8, 64};
constexpr Shape kOdd = {
    5, 96, 3, 10,
    4, 5,  42};  // remainders of head tiles; candidate blocks and cache blocks across key tiles

struct Choice {
  std::vector<int32_t> selected;
  std::vector<int32_t> candidates;
  friend bool operator==(const Choice&, const Choice&) = default;
};
using Outputs = std::map<std::pair<int, int64_t>, Choice>;

enum class Candidates { kNone, kPublish, kApply };

class IndexerCase {
 public:
  IndexerCase(Shape shape, std::vector<Chunk> chunks, Candidates candidates)
      : shape_(shape), candidates_(candidates), layout_(std::move(chunks), 32) {
    const int64_t rows = layout_.rows();
    const auto sequences = static_cast<int64_t>(layout_.chunks().size());
    const int64_t record_bytes = Q4PRecordBytes(shape.channels);
    q_ = OwnedTensor(DType::kBf16, {rows, shape.heads, shape.channels});
    weights_ = OwnedTensor(DType::kBf16, {rows, shape.heads});
    blocks_ = OwnedTensor(DType::kU8, {32 * sequences, shape.entries_per_block, record_bytes});
    in_ = OwnedTensor(DType::kI32, {rows, shape.candidate_blocks});
    out_ = OwnedTensor(DType::kI32, {rows, shape.candidate_blocks});
    selected_ = OwnedTensor(DType::kI32, {rows, shape.topk});
    for (int64_t s = 0; s < sequences; ++s) {
      const Chunk& chunk = layout_.chunks()[static_cast<size_t>(s)];
      for (int64_t j = 0; j < (chunk.first + chunk.count) / shape.ratio; ++j) {
        const int32_t block =
            layout_.view().block_table.Row<int32_t>(s)[j / shape.entries_per_block];
        const std::vector<float> key = Vector(1, chunk.id, j, shape.channels);
        EncodeQ4PRecord(key.data(), shape.channels,
                        blocks_.Row<uint8_t>(block) + (j % shape.entries_per_block) * record_bytes);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int id = layout_.chunk_of(r).id;
      const int64_t position = layout_.position(r);
      std::vector<float> q = Vector(2, id, position, shape.heads * shape.channels);
      std::vector<uint8_t> record(static_cast<size_t>(record_bytes));
      for (int64_t h = 0; h < shape.heads; ++h) {
        EncodeQ4PRecord(q.data() + h * shape.channels, shape.channels, record.data());
        DecodeQ4PRecord(record.data(), shape.channels, q.data() + h * shape.channels);
      }
      for (size_t i = 0; i < q.size(); ++i) q_.Row<Bf16>(r)[i] = F32ToBf16(q[i]);
      const std::vector<float> w = Vector(3, id, position, shape.heads);
      for (int64_t h = 0; h < shape.heads; ++h)
        weights_.Row<Bf16>(r)[h] = F32ToBf16(w[static_cast<size_t>(h)]);
      FillCandidates(r, id, position);
    }
    args_.q = q_.view();
    args_.weights = weights_.view();
    args_.blocks = blocks_.view();
    args_.layout = layout_.view();
    args_.ratio = shape.ratio;
    if (candidates == Candidates::kApply) args_.candidates_in = in_.view();
    if (candidates == Candidates::kPublish) args_.candidates_out = out_.view();
    args_.candidate_block_size = shape.candidate_block_size;
    args_.selected = selected_.view();
  }

  Outputs Run(Stream& stream) {
    EXPECT_TRUE(Indexer(args_, stream).has_value());
    Outputs outputs;
    for (int64_t r = 0; r < layout_.rows(); ++r) {
      Choice& choice = outputs[{layout_.chunk_of(r).id, layout_.position(r)}];
      choice.selected.assign(selected_.Row<int32_t>(r), selected_.Row<int32_t>(r) + shape_.topk);
      if (candidates_ == Candidates::kPublish) {
        choice.candidates.assign(out_.Row<int32_t>(r),
                                 out_.Row<int32_t>(r) + shape_.candidate_blocks);
      }
    }
    return outputs;
  }
  IndexerArgs& args() {
    return args_;
  }

 private:
  // Group scales differ by up to 2^4, so that a wrong scale index shows; small enough for every sum
  // of dot products to be exact.
  static std::vector<float> Vector(uint64_t what, int id, int64_t position, int64_t count) {
    Random random(what, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    std::vector<float> x(static_cast<size_t>(count));
    float gain = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
      if (i % 32 == 0) gain = std::exp2(static_cast<float>(random.Below(4)));
      x[static_cast<size_t>(i)] = RoundToBf16(random.Normal() * gain);
    }
    return x;
  }
  void FillCandidates(int64_t r, int id, int64_t position) {
    Random random(4, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    const int64_t n_vis = (position + 1) / shape_.ratio;
    const int64_t blocks = (n_vis + shape_.candidate_block_size - 1) / shape_.candidate_block_size;
    const int64_t wanted = std::min(blocks, shape_.candidate_blocks);
    int64_t count = 0;
    int32_t* row = in_.Row<int32_t>(r);
    for (int64_t b = 0; b < blocks; ++b) {
      if (random.Below(blocks - b) < wanted - count) row[count++] = static_cast<int32_t>(b);
    }
    std::fill(row + count, row + shape_.candidate_blocks, -1);
  }

  Shape shape_;
  Candidates candidates_;
  TestLayout layout_;
  OwnedTensor q_, weights_, blocks_, in_, out_, selected_;
  IndexerArgs args_;
};

TEST(Indexer, TunedSelectsExactlyWhatTheReferenceSelects) {
  // No tolerance: with group scales a few binades apart every dot product is exact in fp32 in any
  // order, and the sum over heads has the same order in both.
  Stream tuned(1);
  Stream reference(1);
  reference.set_use_reference(true);
  for (Candidates candidates : {Candidates::kNone, Candidates::kPublish, Candidates::kApply}) {
    for (const auto& [shape, chunks] : std::vector<std::pair<Shape, std::vector<Chunk>>>{
             {kTiny, {{1, 0, 3}, {2, 14, 30}, {3, 200, 2}}},
             {kOdd, {{1, 0, 5}, {2, 100, 12}, {3, 500, 2}}},
             {kReal, {{1, 0, 1}, {2, 1500, 3}}},
             {kHalf, {{1, 1, 1}, {2, 2000, 2}}}}) {
      IndexerCase test(shape, chunks, candidates);
      const Outputs expected = test.Run(reference);
      EXPECT_EQ(test.Run(tuned), expected)
          << shape.heads << " heads, candidates " << static_cast<int>(candidates);
    }
  }
}

TEST(Indexer, TunedScoresHaveTheReferencesBits) {
  for (Shape shape : {kTiny, kOdd, kReal}) {
    if (HostCpuFeatures().best_level() < CpuLevel::kAvx2) GTEST_SKIP() << "no AVX2";
    constexpr int64_t kPosition = 403;
    IndexerCase test(shape, {{5, kPosition, 1}}, Candidates::kNone);
    const int64_t n_vis = (kPosition + 1) / shape.ratio;
    std::vector<float> expected(static_cast<size_t>(n_vis));
    reference::IndexerScores(test.args(), 0, n_vis, expected.data());
    const int64_t tiles = (n_vis + cpu::kIndexTile - 1) / cpu::kIndexTile;
    const int64_t groups = shape.channels / 32;
    std::vector<int8_t> codes(static_cast<size_t>(shape.heads * shape.channels));
    std::vector<float> scales(static_cast<size_t>(shape.heads * groups));
    std::vector<int32_t> offsets(scales.size());
    std::vector<float> weights(static_cast<size_t>(shape.heads));
    std::vector<float> scores(static_cast<size_t>(tiles * cpu::kIndexTile));
    const cpu::IndexQuery query = {codes.data(),   scales.data(), offsets.data(),
                                   weights.data(), scores.data(), tiles};
    cpu::PrepareIndexQuery(test.args(), 0, query);
    cpu::ScoreIndexTiles(test.args(), 0, {&query, 1}, nullptr, 0, tiles);
    for (int64_t j = 0; j < n_vis; ++j)
      ASSERT_EQ(scores[static_cast<size_t>(j)], expected[static_cast<size_t>(j)]) << j;
  }
}

TEST(Indexer, ARowHasTheSameResultAloneInAnyBatchAndAtAnyThreadCount) {
  for (Candidates candidates : {Candidates::kPublish, Candidates::kApply}) {
    for (Shape shape : {kTiny, kOdd, kHalf}) {
      const std::vector<Chunk> batch = {{1, 0, 11}, {2, 1290, 2}, {3, 77, 9}};
      Stream one(1);
      const Outputs expected = IndexerCase(shape, batch, candidates).Run(one);
      EXPECT_EQ(IndexerCase(shape, {batch[2], batch[0], batch[1]}, candidates).Run(one), expected);
      for (int threads : {2, 3}) {
        Stream stream(threads);
        EXPECT_EQ(IndexerCase(shape, batch, candidates).Run(stream), expected)
            << threads << " threads";
        for (const auto& [key, choice] : expected) {
          const Outputs alone =
              IndexerCase(shape, {{key.first, key.second, 1}}, candidates).Run(stream);
          EXPECT_EQ(alone.at(key), choice) << "alone, position " << key.second;
        }
      }
    }
  }
}

TEST(Indexer, EntriesOutsideTheCandidatesAreNeverChosen) {
  IndexerCase test(kTiny, {{2, 100, 20}}, Candidates::kApply);
  Stream stream(1);
  for (const auto& [key, choice] : test.Run(stream)) {
    const int64_t row = key.second - 100;
    const int32_t* blocks = test.args().candidates_in.Row<int32_t>(row);
    for (int32_t j : choice.selected) {
      ASSERT_GE(j, 0);
      EXPECT_EQ(std::count(blocks, blocks + kTiny.candidate_blocks, j / 4), 1) << "entry " << j;
    }
  }
}

TEST(Indexer, FewVisibleEntriesAreAllSelectedInOrder) {
  for (bool reference : {false, true}) {
    IndexerCase test(kTiny, {{2, 0, 16}}, Candidates::kPublish);
    Stream stream(1);
    stream.set_use_reference(reference);
    for (const auto& [key, choice] : test.Run(stream)) {
      for (int64_t i = 0; i < kTiny.topk; ++i)
        EXPECT_EQ(choice.selected[static_cast<size_t>(i)], i <= key.second ? i : -1);
    }
  }
}

TEST(Indexer, ReferenceNumericsRoundScoresToBf16) {
  // Two keys whose scores differ by less than a bf16 step tie in the reference profile (lower index
  // wins) and not in production.
  IndexerCase test(Shape{1, 32, 1, 1, 1, 8, 128}, {{1, 1, 1}}, Candidates::kNone);
  for (int64_t i = 0; i < 32; ++i) test.args().q.Row<Bf16>(0)[i] = F32ToBf16(6.0f);
  test.args().weights.Row<Bf16>(0)[0] = F32ToBf16(1.0f);
  for (int j = 0; j < 2; ++j) {
    std::vector<float> key(32, 6.0f);
    key[0] = j == 0 ? 0.5f : 1.0f;  // sums 1119 and 1122; the bf16 step is 8 and both round to 1120
    const int32_t block = test.args().layout.block_table.Row<int32_t>(0)[0];
    EncodeQ4PRecord(key.data(), 32,
                    test.args().blocks.Row<uint8_t>(block) + j * Q4PRecordBytes(32));
  }
  Stream stream(1);
  EXPECT_EQ(test.Run(stream).begin()->second.selected.front(), 1);
  test.args().numerics = Numerics::kReference;
  EXPECT_EQ(test.Run(stream).begin()->second.selected.front(), 0);
}

TEST(Indexer, WrongShapesAreRefused) {
  Stream stream(1);
  IndexerCase test(kTiny, {{1, 3, 1}}, Candidates::kNone);
  test.args().weights = test.args().q;
  const Status status = Indexer(test.args(), stream);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().field, "weights");
}

}  // namespace
}  // namespace deepinfer
