#include "ops/cuda/cuda_test_util.h"
#include "ops/sample_rows/sample_rows.h"
#include "ops/sample_rows/sample_rows_test_util.h"

namespace deepinfer {
namespace {

using testing::DeviceTensor;
using testing::DifferenceOf;
using testing::MakeSampleBatch;
using testing::OwnedTensor;
using testing::SampleBatch;
using testing::SampleTensors;

class SampleRowsCuda : public testing::CudaTest {
 protected:
  void Compare(const SampleBatch& batch) {
    SampleTensors host(batch);
    const DeviceTensor logits(host.logits.view(), stream());
    const DeviceTensor draws(host.draws.view(), stream());
    const DeviceTensor edits(host.edits.view(), stream());
    const DeviceTensor tokens(host.tokens.view(), stream());
    const DeviceTensor masks(host.masks.view(), stream());
    const DeviceTensor sampled(host.sampled.view(), stream());
    const DeviceTensor out(DType::kU8, {std::ssize(batch.draws), sizeof(SampledRow)}, stream());
    const Status run = SampleRows({logits.view(), draws.view(), edits.view(), tokens.view(),
                                   masks.view(), sampled.view(), out.view()},
                                  stream());
    ASSERT_TRUE(run.has_value()) << run.error().message;
    ASSERT_TRUE(
        SampleRows({host.logits.view(), host.draws.view(), host.edits.view(), host.tokens.view(),
                    host.masks.view(), host.sampled.view(), host.out.view()},
                   cpu_stream())
            .has_value());
    const OwnedTensor found = out.Download(stream());
    const auto* rows = reinterpret_cast<const SampledRow*>(found.view().data());
    const auto* expected = reinterpret_cast<const SampledRow*>(host.out.view().data());
    for (size_t i = 0; i < batch.draws.size(); ++i)
      ASSERT_EQ(DifferenceOf(rows[i], expected[i]), "") << batch.names[i];
    if (batch.slots > 0) {
      const OwnedTensor tokens_found = sampled.Download(stream());
      for (int64_t slot = 0; slot < batch.slots; ++slot)
        ASSERT_EQ(tokens_found.Row<int32_t>(0)[slot], host.sampled.Row<int32_t>(0)[slot]) << slot;
    }
  }
};

// Every `step`-th draw: the emulation takes a tenth of a second for one.
SampleBatch Thinned(SampleBatch batch, size_t step) {
  size_t kept = 0;
  for (size_t i = 0; i < batch.draws.size(); i += step, ++kept) {
    batch.draws[kept] = batch.draws[i];
    batch.names[kept] = batch.names[i];
    batch.draws[kept].slot = -1;
  }
  batch.draws.resize(kept);
  for (int32_t i = 0; i < 3; ++i) batch.draws[static_cast<size_t>(i)].slot = 2 - i;
  batch.slots = 3;
  return batch;
}

TEST_F(SampleRowsCuda, ADrawOfEveryKindGivesTheBitsOfTheHost) {
  Compare(Thinned(MakeSampleBatch(1, 1, 1), 13));
  Compare(Thinned(MakeSampleBatch(33, 5, 1), 37));
  Compare(Thinned(MakeSampleBatch(5000, 5, 1), 17));
}

TEST_F(SampleRowsCuda, ManyRandomNumbers) {
  DI_DEVICE_ONLY();
  for (const int64_t vocab : {2, 31, 1000, 4096, 4097, 20000})
    Compare(MakeSampleBatch(vocab, 17, 2));
}

TEST_F(SampleRowsCuda, TheModelsVocabulary) {
  DI_DEVICE_ONLY();
  Compare(MakeSampleBatch(129280, 9, 3));
}

TEST_F(SampleRowsCuda, SampledTokensAreInputsOfTheNextStep) {
  for (const int64_t rows : {1, 300}) {
    OwnedTensor slots(DType::kI32, {rows}), sampled(DType::kI32, {400}), map(DType::kI32, {50}),
        ids(DType::kI32, {rows}), lookback(DType::kI32, {rows, 3});
    testing::Random random(5);
    for (int64_t i = 0; i < 50; ++i) map.Row<int32_t>(0)[i] = static_cast<int32_t>(100 + i);
    for (int64_t i = 0; i < 400; ++i)
      sampled.Row<int32_t>(0)[i] = static_cast<int32_t>(random.Below(50));
    for (int64_t i = 0; i < rows; ++i) {
      slots.Row<int32_t>(0)[i] = static_cast<int32_t>(random.Below(401)) - 1;
      ids.Row<int32_t>(0)[i] = 7;
      std::fill_n(lookback.Row<int32_t>(i), 3, 8);
    }
    const DeviceTensor slots_device(slots.view(), stream());
    const DeviceTensor sampled_device(sampled.view(), stream());
    const DeviceTensor map_device(map.view(), stream());
    const DeviceTensor ids_device(ids.view(), stream());
    const DeviceTensor lookback_device(lookback.view(), stream());
    ASSERT_TRUE(PlaceSampledTokens({slots_device.view(), sampled_device.view(), map_device.view(),
                                    ids_device.view(), lookback_device.view()},
                                   stream())
                    .has_value());
    ASSERT_TRUE(
        PlaceSampledTokens({slots.view(), sampled.view(), map.view(), ids.view(), lookback.view()},
                           cpu_stream())
            .has_value());
    EXPECT_EQ(testing::CountDifferentBits(ids_device.Download(stream()).view(), ids.view()), 0);
    EXPECT_EQ(
        testing::CountDifferentBits(lookback_device.Download(stream()).view(), lookback.view()), 0);
  }
}

}  // namespace
}  // namespace deepinfer
