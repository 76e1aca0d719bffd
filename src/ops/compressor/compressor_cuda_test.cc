#include "ops/compressor/compressor.h"

#include "ops/cuda/device_layout_test_util.h"

namespace deepinfer {
namespace {

using testing::Bytes;
using testing::Chunk;
using testing::CountDifferentBits;
using testing::DeviceEntries;
using testing::DeviceLayout;
using testing::DeviceTensor;
using testing::LargestSteps;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::TestEntries;
using testing::TestLayout;

class CompressorCuda : public testing::CudaTest {};

struct Case {
  std::vector<Chunk> chunks;  // slots are given by the test
  int64_t dim;
};

std::vector<Case> Cases() {
  return {{{{1, 0, 6}}, 64},
          {{{1, 5, 1}}, 512},
          {{{1, 5, 1}, {2, 8, 1}, {3, 9, 2}, {4, 0, 1}}, 512},
          {{{1, 7, 9}, {2, 100, 13}, {3, 33, 4}}, 64},
          {{{1, 3, 5}, {2, 4, 4}}, 30}};  // not whole vectors
}

// One step over random remainders; key and gate are columns of one tensor on the device.
TEST_F(CompressorCuda, PoolsAndRemembersWhatTheCpuDoes) {
  for (Case c : Cases()) {
    for (size_t s = 0; s < c.chunks.size(); ++s)
      c.chunks[s].slot = static_cast<int64_t>((s * 2 + 1) % 5);
    const TestLayout layout(c.chunks, 1);
    const int64_t rows = layout.rows();
    const TestEntries entries(layout, 2);
    const OwnedTensor key = NormalTensor(DType::kF32, {rows, c.dim}, 1, 2.0f);
    const OwnedTensor gate = NormalTensor(DType::kF32, {rows, c.dim}, 2, 2.0f);
    const OwnedTensor remainders = NormalTensor(DType::kF32, {5, 4, 2 * c.dim}, 3, 2.0f);
    OwnedTensor pooled(DType::kBf16, {entries.count(), c.dim});
    const DeviceTensor remainders_device(remainders.view(), stream());
    CompressPairsArgs args{.key = key.view(),
                           .gate = gate.view(),
                           .layout = layout.view(),
                           .entries = entries.view(),
                           .remainders = remainders.view(),
                           .pooled = pooled.view()};
    ASSERT_TRUE(CompressPairs(args, cpu_stream()).has_value());
    const DeviceLayout layout_device(layout.view(), stream());
    const DeviceEntries entries_device(entries.view(), stream());
    OwnedTensor joined(DType::kF32, {rows, 2 * c.dim});
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(key.Row<float>(r), c.dim, joined.Row<float>(r));
      std::copy_n(gate.Row<float>(r), c.dim, joined.Row<float>(r) + c.dim);
    }
    const DeviceTensor joined_device(joined.view(), stream());
    const DeviceTensor pooled_device(DType::kBf16, {entries.count(), c.dim}, stream());
    args = {.key = joined_device.view().Columns(0, c.dim),
            .gate = joined_device.view().Columns(c.dim, 2 * c.dim),
            .layout = layout_device.view(),
            .entries = entries_device.view(),
            .remainders = remainders_device.view(),
            .pooled = pooled_device.view()};
    ASSERT_TRUE(CompressPairs(args, stream()).has_value());
    EXPECT_EQ(Bytes(remainders_device.Download(stream()).view()), Bytes(remainders.view()));
    // The exponential differs from the CPU's by 2^-23 or so of its value, hence the pooled value by
    // that much of its larger term, and that may cancel: one step of bf16, or 2^-20 if it is tiny.
    const OwnedTensor result = pooled_device.Download(stream());
    const auto* index = entries.view().index.Row<int32_t>(0);
    for (int64_t e = 0; e < entries.count(); ++e) {
      if (index[e] < 0) {
        EXPECT_EQ(result.Row<uint16_t>(e)[0], 0xffffu) << "padding was written";
        continue;
      }
      EXPECT_LE(LargestSteps(result.view().Rows(e, e + 1), pooled.view().Rows(e, e + 1), 0x1p-12),
                1.0);
    }
  }
}

TEST_F(CompressorCuda, EntriesDoNotDependOnWhereStepsCutTheSequence) {
  constexpr int64_t kDim = 64;
  constexpr int64_t kTokens = 13;
  const OwnedTensor key = NormalTensor(DType::kF32, {kTokens, kDim}, 4);
  const OwnedTensor gate = NormalTensor(DType::kF32, {kTokens, kDim}, 5);
  const DeviceTensor key_device(key.view(), stream());
  const DeviceTensor gate_device(gate.view(), stream());
  const auto run = [&](const std::vector<int64_t>& cuts) {
    const DeviceTensor remainders(DType::kF32, {3, 4, 2 * kDim}, stream());
    std::vector<uint8_t> outputs;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const TestLayout layout({{1, cuts[i], cuts[i + 1] - cuts[i], 2}}, 1);
      const TestEntries entries(layout, 2);
      const DeviceLayout layout_device(layout.view(), stream());
      const DeviceEntries entries_device(entries.view(), stream());
      const DeviceTensor pooled(DType::kBf16, {entries.count(), kDim}, stream());
      EXPECT_TRUE(CompressPairs({.key = key_device.view().Rows(cuts[i], cuts[i + 1]),
                                 .gate = gate_device.view().Rows(cuts[i], cuts[i + 1]),
                                 .layout = layout_device.view(),
                                 .entries = entries_device.view(),
                                 .remainders = remainders.view(),
                                 .pooled = pooled.view()},
                                stream())
                      .has_value());
      const OwnedTensor result = pooled.Download(stream());
      for (int64_t e = 0; e < entries.count(); ++e) {
        if (entries.view().index.Row<int32_t>(0)[e] < 0) continue;
        const std::vector<uint8_t> row = Bytes(result.view().Rows(e, e + 1));
        outputs.insert(outputs.end(), row.begin(), row.end());
      }
    }
    return outputs;
  };
  const std::vector<uint8_t> whole = run({0, kTokens});
  ASSERT_EQ(whole.size(), 6u * kDim * 2);
  for (const std::vector<int64_t>& cuts :
       std::vector<std::vector<int64_t>>{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13},
                                         {0, 3, 8, 13},
                                         {0, 5, 6, 13},
                                         {0, 1, 13},
                                         {0, 7, 12, 13}}) {
    EXPECT_EQ(run(cuts), whole) << "first cut at " << cuts[1];
  }
}

}  // namespace
}  // namespace deepinfer
