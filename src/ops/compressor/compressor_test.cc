#include "ops/compressor/compressor.h"

#include <gtest/gtest.h>

#include <map>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::OwnedTensor;
using testing::Random;
using testing::TestLayout;

constexpr int64_t kDim = 64;
constexpr int64_t kRemainders = 4;  // rows: a sequence may be set back by three tokens
using Outputs = std::map<std::pair<int, int64_t>, std::vector<uint16_t>>;  // sequence, entry

std::vector<float> Projection(uint64_t what, int id, int64_t position) {
  Random random(what, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
  std::vector<float> x(kDim);
  for (float& value : x) value = random.Normal() * 2.0f;
  return x;
}

// Runs one step and adds its entries to `outputs`; remainders live on between steps.
void Step(const std::vector<Chunk>& chunks, const OwnedTensor& remainders, Stream& stream,
          Outputs* outputs) {
  TestLayout layout(chunks, 1);
  const int64_t rows = layout.rows();
  OwnedTensor key(DType::kF32, {rows, kDim});
  OwnedTensor gate(DType::kF32, {rows, kDim});
  std::vector<int32_t> last_row, sequence, index;
  for (int64_t r = 0; r < rows; ++r) {
    const int id = layout.chunk_of(r).id;
    const int64_t position = layout.position(r);
    std::copy_n(Projection(1, id, position).begin(), kDim, key.Row<float>(r));
    std::copy_n(Projection(2, id, position).begin(), kDim, gate.Row<float>(r));
    if (position % 2 == 0) continue;
    last_row.push_back(static_cast<int32_t>(r));
    sequence.push_back(layout.view().row_sequence.Row<int32_t>(0)[r]);
    index.push_back(static_cast<int32_t>(position / 2));
  }
  const auto count = static_cast<int64_t>(index.size());
  OwnedTensor pooled(DType::kBf16, {count, kDim});
  CompressPairsArgs args;
  args.key = key.view();
  args.gate = gate.view();
  args.layout = layout.view();
  args.entries.ratio = 2;
  args.entries.last_row = TensorView(last_row.data(), DType::kI32, {count});
  args.entries.sequence = TensorView(sequence.data(), DType::kI32, {count});
  args.entries.index = TensorView(index.data(), DType::kI32, {count});
  args.remainders = remainders.view();
  args.pooled = pooled.view();
  ASSERT_TRUE(CompressPairs(args, stream).has_value());
  for (int64_t e = 0; e < count; ++e) {
    const auto* begin = &pooled.Row<Bf16>(e)->bits;
    const int id = chunks[static_cast<size_t>(sequence[static_cast<size_t>(e)])].id;
    (*outputs)[{id, index[static_cast<size_t>(e)]}] = {begin, begin + kDim};
  }
}

TEST(CompressPairs, PoolsWithAPerChannelSoftmaxOfTheGates) {
  OwnedTensor remainders(DType::kF32, {1, kRemainders, 2 * kDim});
  Outputs outputs;
  Stream stream(1);
  Step({{3, 0, 4, 0}}, remainders, stream, &outputs);
  ASSERT_EQ(outputs.size(), 2u);
  for (int64_t j = 0; j < 2; ++j) {
    const std::vector<float> k0 = Projection(1, 3, 2 * j), k1 = Projection(1, 3, 2 * j + 1);
    const std::vector<float> g0 = Projection(2, 3, 2 * j), g1 = Projection(2, 3, 2 * j + 1);
    for (size_t d = 0; d < kDim; ++d) {
      const double w = 1.0 / (1.0 + std::exp(static_cast<double>(g1[d]) - g0[d]));
      const double expected = w * k0[d] + (1.0 - w) * k1[d];
      // Half a bf16 step of the larger term, because the two may cancel.
      const double tolerance = 0x1p-8 * std::fabs(expected) + 1e-6;
      EXPECT_NEAR(Bf16ToF32(Bf16{outputs[{3, j}][d]}), expected, tolerance);
    }
  }
}

TEST(CompressPairs, EntriesDoNotDependOnWhereStepsCutTheSequence) {
  constexpr int64_t kTokens = 13;
  Stream stream(2);
  OwnedTensor remainders(DType::kF32, {3, kRemainders, 2 * kDim});
  Outputs whole;
  Step({{5, 0, kTokens, 1}}, remainders, stream, &whole);
  ASSERT_EQ(whole.size(), 6u);
  for (int64_t first = 1; first < kTokens; ++first) {
    for (int64_t second = first; second < kTokens; second += 2) {
      OwnedTensor state(DType::kF32, {3, kRemainders, 2 * kDim});
      Outputs parts;
      Step({{5, 0, first, 2}}, state, stream, &parts);
      if (second > first) Step({{5, first, second - first, 2}}, state, stream, &parts);
      Step({{5, second, kTokens - second, 2}}, state, stream, &parts);
      EXPECT_EQ(parts, whole) << "cut at " << first << " and " << second;
    }
  }
}

TEST(CompressPairs, ASequenceCanBeSetBackByOneLessThanTheRows) {
  Stream stream(2);
  Outputs whole;
  {
    OwnedTensor state(DType::kF32, {1, kRemainders, 2 * kDim});
    Step({{5, 0, 24, 0}}, state, stream, &whole);
  }
  for (int64_t reached = 9; reached <= 12; ++reached) {
    for (int64_t back = 1; back < kRemainders; ++back) {
      // Tokens of another sequence from `reached - back` on, then set back to that.
      OwnedTensor state(DType::kF32, {1, kRemainders, 2 * kDim});
      Outputs parts;
      Outputs forgotten;
      Step({{5, 0, reached - back, 0}}, state, stream, &parts);
      for (int64_t p = reached - back; p < reached; ++p)
        Step({{6, p, 1, 0}}, state, stream, &forgotten);
      Step({{5, reached - back, 24 - (reached - back), 0}}, state, stream, &parts);
      EXPECT_EQ(parts, whole) << "set back from " << reached << " by " << back;
    }
  }
}

TEST(CompressPairs, SequencesKeepTheirOwnRemainders) {
  Outputs alone;
  Stream one(1);
  for (int id : {1, 2, 3}) {
    OwnedTensor state(DType::kF32, {1, kRemainders, 2 * kDim});
    Step({{id, 0, 6 + id, 0}}, state, one, &alone);
  }
  for (int threads : {1, 2, 3}) {
    Stream stream(threads);
    OwnedTensor state(DType::kF32, {4, kRemainders, 2 * kDim});
    Outputs together;
    // One token at a time for sequence 3, odd cuts for the others, other slots than batch places.
    Step({{1, 0, 3, 3}, {2, 0, 1, 0}, {3, 0, 1, 1}}, state, stream, &together);
    Step({{3, 1, 1, 1}, {2, 1, 4, 0}}, state, stream, &together);
    Step({{2, 5, 3, 0}, {1, 3, 4, 3}, {3, 2, 7, 1}}, state, stream, &together);
    EXPECT_EQ(together, alone) << threads << " threads";
  }
}

TEST(CompressPairs, LargeGatesDoNotOverflow) {
  TestLayout layout({{1, 0, 2, 0}}, 1);
  OwnedTensor key(DType::kF32, {2, 16});
  OwnedTensor gate(DType::kF32, {2, 16});
  for (int64_t d = 0; d < 16; ++d) {
    key.Row<float>(0)[d] = 3.0f;
    key.Row<float>(1)[d] = 5.0f;
    gate.Row<float>(0)[d] = 1e4f;
    gate.Row<float>(1)[d] = -1e4f;
  }
  OwnedTensor remainders(DType::kF32, {1, 1, 32});
  OwnedTensor pooled(DType::kBf16, {1, 16});
  int32_t one = 1;
  int32_t zero = 0;
  CompressPairsArgs args{key.view(), gate.view(),       layout.view(),
                         {},         remainders.view(), pooled.view()};
  args.entries = {2, TensorView(&one, DType::kI32, {1}), TensorView(&zero, DType::kI32, {1}),
                  TensorView(&zero, DType::kI32, {1})};
  Stream stream(1);
  ASSERT_TRUE(CompressPairs(args, stream).has_value());
  for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(testing::Value(pooled.view(), d), 3.0f);
}

}  // namespace
}  // namespace deepinfer
