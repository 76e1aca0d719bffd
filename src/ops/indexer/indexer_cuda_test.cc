// The indexer on a GPU against the CPU. Inputs are made so that scores are exact in fp32 whatever
// the order of additions (integer weights, group scales a few binades apart): selections must be
// identical then, ties included. Where weights are arbitrary, selections are compared by score.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>

#include "ops/cuda/cuda_test_util.h"
#include "ops/indexer/indexer.h"
#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::CudaTest;
using testing::DeviceTensor;
using testing::OwnedTensor;
using testing::Random;
using testing::TestLayout;

struct Shape {
  int64_t heads;
  int64_t channels;
  int64_t ratio;
  int64_t topk;
  int64_t candidate_blocks;
  int64_t candidate_block_size;
  int64_t entries_per_block;
  int64_t blocks_per_sequence = 32;
};
constexpr Shape kTiny = {4, 64, 1, 16, 6, 4, 128};
constexpr Shape kTinyHalf = {4, 64, 2, 16, 6, 4, 64};
constexpr Shape kReal = {32, 128, 1, 512, 100, 8, 128};
constexpr Shape kHalf = {32, 128, 2, 512, 64, 8, 64};
// Fewer chosen entries, so that short sequences are selected from at both levels.
constexpr Shape kSmallTopK = {32, 128, 1, 24, 40, 8, 128};
// Remainders everywhere: candidate blocks and cache blocks that do not divide each other.
constexpr Shape kOdd = {5, 96, 3, 10, 4, 5, 42};

enum class Candidates { kNone, kPublish, kApply, kBoth };

struct Contents {
  bool packed = true;
  bool integer_weights = true;
  int64_t distinct_keys = 0;  // 0: all keys differ
  float weight_sign = 0.0f;   // 0: both signs
  int scale_step = 1;         // binades between the gains of channel groups
  // The first group of all keys and queries is one number, powers of two whose product is the same
  // for all but every so many keys; the other groups decide. Weights are 0 and 1.
  int64_t wide_key_every = 0;
  bool wide_queries = false;
};

struct Choice {
  std::vector<int32_t> selected;
  std::vector<int32_t> candidates;
  friend bool operator==(const Choice&, const Choice&) = default;
};
using Outputs = std::map<std::pair<int, int64_t>, Choice>;  // by sequence name and position

class IndexerCase {
 public:
  IndexerCase(Shape shape, std::vector<Chunk> chunks, Candidates candidates, Contents contents = {})
      : shape_(shape),
        candidates_(candidates),
        contents_(contents),
        layout_(std::move(chunks), shape.blocks_per_sequence) {
    const int64_t rows = layout_.rows();
    const auto sequences = std::ssize(layout_.chunks());
    const int64_t record_bytes =
        contents.packed ? Q4PRecordBytes(shape.channels) : Bf16RecordBytes(shape.channels);
    q_ = OwnedTensor(DType::kBf16, {rows, shape.heads, shape.channels});
    weights_ = OwnedTensor(DType::kBf16, {rows, shape.heads});
    blocks_ = OwnedTensor(
        DType::kU8, {shape.blocks_per_sequence * sequences, shape.entries_per_block, record_bytes});
    // What was never written is not zero: an entry that is read too far shows.
    std::memset(blocks_.view().data(), 0x7f, static_cast<size_t>(blocks_.bytes()));
    in_ = OwnedTensor(DType::kI32, {rows, shape.candidate_blocks});
    out_ = OwnedTensor(DType::kI32, {rows, shape.candidate_blocks});
    selected_ = OwnedTensor(DType::kI32, {rows, shape.topk});
    for (int64_t s = 0; s < sequences; ++s) FillKeys(s);
    for (int64_t r = 0; r < rows; ++r) FillRow(r);
    args_.q = q_.view();
    args_.weights = weights_.view();
    args_.blocks = blocks_.view();
    args_.layout = layout_.view();
    args_.ratio = shape.ratio;
    if (applies()) args_.candidates_in = in_.view();
    if (publishes()) args_.candidates_out = out_.view();
    args_.candidate_block_size = shape.candidate_block_size;
    args_.selected = selected_.view();
  }

  Outputs RunOnCpu(Stream& stream) {
    EXPECT_TRUE(Indexer(args_, stream).has_value());
    return Collect(selected_, out_);
  }
  Outputs RunOnDevice(Stream& stream) {
    const BatchLayout& host = args_.layout;
    const DeviceTensor positions(host.positions, stream);
    const DeviceTensor row_sequence(host.row_sequence, stream);
    const DeviceTensor sequence_start(host.sequence_start, stream);
    const DeviceTensor sequence_slot(host.sequence_slot, stream);
    const DeviceTensor block_table(host.block_table, stream);
    const DeviceTensor q(args_.q, stream);
    const DeviceTensor weights(args_.weights, stream);
    const DeviceTensor blocks(args_.blocks, stream);
    const DeviceTensor in(in_.view(), stream);
    const DeviceTensor out(DType::kI32, {layout_.rows(), shape_.candidate_blocks}, stream);
    const DeviceTensor selected(DType::kI32, {layout_.rows(), shape_.topk}, stream);
    IndexerArgs args = args_;
    args.q = q.view();
    args.weights = weights.view();
    args.blocks = blocks.view();
    args.layout.positions = positions.view();
    args.layout.row_sequence = row_sequence.view();
    args.layout.sequence_start = sequence_start.view();
    args.layout.sequence_slot = sequence_slot.view();
    args.layout.block_table = block_table.view();
    if (applies()) args.candidates_in = in.view();
    if (publishes()) args.candidates_out = out.view();
    args.selected = selected.view();
    const Status status = Indexer(args, stream);
    EXPECT_TRUE(status.has_value()) << status.error().message;
    return Collect(selected.Download(stream), out.Download(stream));
  }
  IndexerArgs& args() {
    return args_;
  }
  const TestLayout& layout() const {
    return layout_;
  }

 private:
  bool applies() const {
    return candidates_ == Candidates::kApply || candidates_ == Candidates::kBoth;
  }
  bool publishes() const {
    return candidates_ == Candidates::kPublish || candidates_ == Candidates::kBoth;
  }
  Outputs Collect(const OwnedTensor& selected, const OwnedTensor& candidates) const {
    Outputs outputs;
    for (int64_t r = 0; r < layout_.rows(); ++r) {
      Choice& choice = outputs[{layout_.chunk_of(r).id, layout_.position(r)}];
      choice.selected.assign(selected.Row<int32_t>(r), selected.Row<int32_t>(r) + shape_.topk);
      if (publishes()) {
        choice.candidates.assign(candidates.Row<int32_t>(r),
                                 candidates.Row<int32_t>(r) + shape_.candidate_blocks);
      }
    }
    return outputs;
  }
  // Normal numbers on the Q4P grid; groups have different scales, so that a wrong scale shows.
  std::vector<float> Vector(uint64_t what, int id, int64_t number, int64_t count) const {
    Random random(what, static_cast<uint64_t>(id), static_cast<uint64_t>(number));
    std::vector<float> x(static_cast<size_t>(count));
    float gain = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
      if (i % kQ4PGroup == 0)
        gain = std::ldexp(1.0f, static_cast<int>(random.Below(2)) * contents_.scale_step);
      x[static_cast<size_t>(i)] = random.Normal() * gain;
    }
    std::vector<uint8_t> record(static_cast<size_t>(Q4PRecordBytes(shape_.channels)));
    for (int64_t i = 0; i < count; i += shape_.channels) {
      EncodeQ4PRecord(x.data() + i, shape_.channels, record.data());
      DecodeQ4PRecord(record.data(), shape_.channels, x.data() + i);
    }
    return x;
  }
  static void SetFirstGroup(int exponent, float* x) {
    std::fill(x, x + kQ4PGroup, 0.0f);
    x[5] = std::ldexp(1.0f, exponent);
  }
  void FillKeys(int64_t s) {
    const Chunk& chunk = layout_.chunks()[static_cast<size_t>(s)];
    for (int64_t j = 0; j < (chunk.first + chunk.count) / shape_.ratio; ++j) {
      const int32_t block =
          layout_.view().block_table.Row<int32_t>(s)[j / shape_.entries_per_block];
      uint8_t* record =
          blocks_.Row<uint8_t>(block) + j % shape_.entries_per_block * blocks_.view().dim(2);
      int64_t number = j;
      if (contents_.distinct_keys > 0)
        number = Random(5, static_cast<uint64_t>(j)).Below(contents_.distinct_keys);
      std::vector<float> key = Vector(1, chunk.id, number, shape_.channels);
      if (contents_.wide_key_every > 0)
        SetFirstGroup(j % contents_.wide_key_every == 0 ? 16 : 8, key.data());
      if (contents_.wide_queries) SetFirstGroup(0, key.data());
      if (contents_.packed) {
        EncodeQ4PRecord(key.data(), shape_.channels, record);
      } else {
        EncodeBf16Record(key.data(), shape_.channels, record);
      }
    }
  }
  void FillRow(int64_t r) {
    const int id = layout_.chunk_of(r).id;
    const int64_t position = layout_.position(r);
    std::vector<float> q = Vector(2, id, position, shape_.heads * shape_.channels);
    const bool one_number = contents_.wide_key_every > 0 || contents_.wide_queries;
    for (int64_t h = 0; h < shape_.heads && one_number; ++h) {
      const bool wide = contents_.wide_queries && position % 2 == 1 && h % 3 == 0;
      SetFirstGroup(wide ? 16 : 0, q.data() + h * shape_.channels);
    }
    for (size_t i = 0; i < q.size(); ++i) q_.Row<Bf16>(r)[i] = F32ToBf16(q[i]);
    Random random(3, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    for (int64_t h = 0; h < shape_.heads; ++h) {
      float w = random.Normal() * 2.0f;
      if (contents_.integer_weights) w = std::round(w);
      if (contents_.weight_sign != 0.0f) w = std::copysign(w, contents_.weight_sign);
      if (one_number) w = h % 8 == 0 ? 1.0f : 0.0f;
      weights_.Row<Bf16>(r)[h] = F32ToBf16(w);
    }
    // A random choice of the visible blocks; the newest, which may be partial, often among them.
    const int64_t n_vis = (position + 1) / shape_.ratio;
    const int64_t blocks = (n_vis + shape_.candidate_block_size - 1) / shape_.candidate_block_size;
    const int64_t wanted = std::min(blocks, shape_.candidate_blocks);
    int64_t count = 0;
    int32_t* row = in_.Row<int32_t>(r);
    for (int64_t b = 0; b < blocks; ++b) {
      if (random.Below(blocks - b) < wanted - count) row[count++] = static_cast<int32_t>(b);
    }
    if (count > 0 && position % 3 != 0) row[count - 1] = static_cast<int32_t>(blocks - 1);
    std::fill(row + count, row + shape_.candidate_blocks, -1);
  }

  Shape shape_;
  Candidates candidates_;
  Contents contents_;
  TestLayout layout_;
  OwnedTensor q_, weights_, blocks_, in_, out_, selected_;
  IndexerArgs args_;
};

std::string Describe(const std::pair<int, int64_t>& key) {
  return "sequence " + std::to_string(key.first) + ", position " + std::to_string(key.second);
}

void ExpectSame(const Outputs& actual, const Outputs& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [key, choice] : expected) {
    EXPECT_EQ(actual.at(key).selected, choice.selected) << what << ": " << Describe(key);
    EXPECT_EQ(actual.at(key).candidates, choice.candidates) << what << ": " << Describe(key);
  }
}

constexpr Candidates kAllCandidates[] = {Candidates::kNone, Candidates::kPublish,
                                         Candidates::kApply, Candidates::kBoth};

class IndexerCudaTest : public CudaTest {
 protected:
  void ExpectCpuChoice(Shape shape, const std::vector<Chunk>& chunks, Candidates candidates,
                       Contents contents = {}, Numerics numerics = Numerics::kProduction) {
    IndexerCase test(shape, chunks, candidates, contents);
    test.args().numerics = numerics;
    ExpectSame(test.RunOnDevice(stream()), test.RunOnCpu(cpu_stream()),
               std::to_string(shape.heads) + " heads, ratio " + std::to_string(shape.ratio) +
                   ", candidates " + std::to_string(static_cast<int>(candidates)));
  }
};

TEST_F(IndexerCudaTest, ModelShapeSelectsExactlyWhatTheCpuSelects) {
  for (Candidates candidates : kAllCandidates) {
    for (const Shape& shape : {kReal, kHalf}) {
      // One to eight rows that share a pass over the keys, on both sides of what is all selected.
      ExpectCpuChoice(shape, {{1, 513 * shape.ratio, 1}, {2, 700 * shape.ratio, 1}}, candidates);
      ExpectCpuChoice(shape, {{1, 511 * shape.ratio - 1, 4}}, candidates);
      ExpectCpuChoice(shape, {{1, 0, 1}, {2, 600 * shape.ratio, 10}, {3, 3, 2}}, candidates);
    }
  }
}

TEST_F(IndexerCudaTest, SmallSelectionsFromSeveralSequencesEqualTheCpus) {
  for (Candidates candidates : kAllCandidates) {
    for (bool packed : {true, false}) {
      const Contents contents = {.packed = packed};
      ExpectCpuChoice(kSmallTopK, {{1, 22, 4}, {2, 317, 1}, {3, 640, 1}, {4, 0, 1}, {5, 100, 1}},
                      candidates, contents);
      ExpectCpuChoice(kSmallTopK, {{1, 250, 2}, {2, 383, 2}}, candidates, contents);
      ExpectCpuChoice(kSmallTopK, {{1, 250, 4}, {2, 383, 2}, {3, 500, 3}}, candidates, contents);
      ExpectCpuChoice(kSmallTopK, {{1, 250, 6}, {2, 381, 6}}, candidates, contents);
      ExpectCpuChoice(kSmallTopK, {{1, 190, 19}, {2, 401, 1}}, candidates, contents);
    }
  }
}

TEST_F(IndexerCudaTest, OtherShapesSelectExactlyWhatTheCpuSelects) {
  for (Candidates candidates : kAllCandidates) {
    for (bool packed : {true, false}) {
      for (const Shape& shape : {kTiny, kTinyHalf, kOdd}) {
        ExpectCpuChoice(shape, {{1, 0, 3}, {2, 14, 30}, {3, 200, 2}}, candidates,
                        {.packed = packed, .integer_weights = false});
      }
    }
  }
}

TEST_F(IndexerCudaTest, ReferenceNumericsRoundAsTheCpuDoes) {
  for (Candidates candidates : kAllCandidates) {
    ExpectCpuChoice(kTiny, {{1, 0, 3}, {2, 90, 9}}, candidates, {.integer_weights = false},
                    Numerics::kReference);
  }
  // Rounding to bf16 makes ties at the boundary the normal case.
  ExpectCpuChoice(kSmallTopK, {{1, 300, 2}}, Candidates::kPublish, {.integer_weights = false},
                  Numerics::kReference);
}

TEST_F(IndexerCudaTest, TiesGoToTheLowerEntry) {
  for (Candidates candidates : kAllCandidates) {
    for (int64_t distinct : {1, 2, 5}) {
      ExpectCpuChoice(kSmallTopK, {{1, 600, 1}, {2, 333, 1}}, candidates,
                      {.distinct_keys = distinct});
      // No weight above zero: the best score is that of keys that no head likes, zero.
      ExpectCpuChoice(kSmallTopK, {{1, 601, 2}}, candidates,
                      {.distinct_keys = distinct, .weight_sign = -1.0f});
    }
  }
}

TEST_F(IndexerCudaTest, GroupScalesTooFarApartForFewBitsAreExact) {
  for (Candidates candidates : {Candidates::kPublish, Candidates::kApply}) {
    for (const std::vector<Chunk>& chunks : {std::vector<Chunk>{{1, 500, 1}, {2, 253, 1}},
                                             std::vector<Chunk>{{1, 250, 3}, {2, 383, 12}}}) {
      // Some keys of a tile, or all of them.
      ExpectCpuChoice(kSmallTopK, chunks, candidates, {.wide_key_every = 37});
      ExpectCpuChoice(kSmallTopK, chunks, candidates, {.wide_key_every = 1});
      // Some heads of every second query.
      ExpectCpuChoice(kSmallTopK, chunks, candidates, {.wide_queries = true});
    }
  }
}

TEST_F(IndexerCudaTest, ARowHasTheSameResultAloneAndInAnyBatch) {
  for (Candidates candidates : {Candidates::kPublish, Candidates::kApply}) {
    for (const Shape& shape : {kSmallTopK, kTiny}) {
      const Contents contents = {.integer_weights = false};
      const std::vector<Chunk> batch = {{1, 60, 11}, {2, 290, 2}, {3, 177, 9}};
      const Outputs expected =
          IndexerCase(shape, batch, candidates, contents).RunOnDevice(stream());
      ExpectSame(IndexerCase(shape, {batch[2], batch[0], batch[1]}, candidates, contents)
                     .RunOnDevice(stream()),
                 expected, "another order");
      for (const auto& [key, choice] : expected) {
        const Outputs alone = IndexerCase(shape, {{key.first, key.second, 1}}, candidates, contents)
                                  .RunOnDevice(stream());
        EXPECT_EQ(alone.at(key), choice) << "alone: " << Describe(key);
      }
    }
  }
}

TEST_F(IndexerCudaTest, ArbitraryWeightsChooseTheBestScoresWithinRounding) {
  IndexerCase test(kSmallTopK, {{1, 700, 3}, {2, 411, 1}}, Candidates::kNone,
                   {.integer_weights = false});
  const Outputs outputs = test.RunOnDevice(stream());
  for (int64_t r = 0; r < test.layout().rows(); ++r) {
    const int64_t n_vis = test.layout().position(r) + 1;
    std::vector<float> scores(static_cast<size_t>(n_vis));
    reference::IndexerScores(test.args(), r, n_vis, scores.data());
    float largest = 0.0f;
    for (float score : scores) largest = std::max(largest, std::fabs(score));
    std::vector<bool> chosen(scores.size());
    const auto& selected =
        outputs.at({test.layout().chunk_of(r).id, test.layout().position(r)}).selected;
    ASSERT_TRUE(std::is_sorted(selected.begin(), selected.end()));
    float worst_chosen = std::numeric_limits<float>::infinity();
    for (int32_t j : selected) {
      ASSERT_GE(j, 0);
      ASSERT_LT(j, n_vis);
      EXPECT_FALSE(chosen[static_cast<size_t>(j)]);
      chosen[static_cast<size_t>(j)] = true;
      worst_chosen = std::min(worst_chosen, scores[static_cast<size_t>(j)]);
    }
    // The tensor core of Hopper cuts a step's sum of E4M3 products at 13 bits behind the leading
    // one; four steps per head, and partial sums a few times the score.
    for (size_t j = 0; j < scores.size(); ++j) {
      if (chosen[j]) continue;
      EXPECT_LE(scores[j], worst_chosen + 5e-4f * largest) << "entry " << j;
    }
  }
}

TEST_F(IndexerCudaTest, LongContextsEqualTheCpus) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  Shape shape = kReal;
  shape.candidate_blocks = 2048;
  shape.blocks_per_sequence = 1200;
  for (Candidates candidates : {Candidates::kPublish, Candidates::kApply}) {
    ExpectCpuChoice(shape, {{1, 33000, 1}, {2, 17001, 1}}, candidates, {.distinct_keys = 5000});
    // More blocks of scores than shared memory holds.
    ExpectCpuChoice(shape, {{1, 149000, 2}}, candidates, {.distinct_keys = 20000});
  }
}

TEST_F(IndexerCudaTest, ManyRowsOfLongSequencesEqualTheCpus) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  Shape shape = kHalf;
  shape.candidate_blocks = 300;
  shape.blocks_per_sequence = 80;
  for (Candidates candidates : kAllCandidates) {
    ExpectCpuChoice(shape, {{1, 5000, 203}, {2, 0, 77}, {3, 9000, 1}, {4, 2047, 8}}, candidates,
                    {.distinct_keys = 3000});
  }
}

}  // namespace
}  // namespace deepinfer
