#include <gtest/gtest.h>

#include "ops/cuda/cuda_test_util.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/hyper_connection/hyper_connection_impl.h"

namespace deepinfer {
namespace {

using testing::CudaTest;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Value;

// Inputs and results of a boundary on the host. Post and comb are read by the expand and
// overwritten by the mix, as in the model.
struct Boundary {
  int64_t rows, hidden;
  OwnedTensor x, streams, fn, base, scale, old_pre, pre, post, comb, weight, y, grid;
  Boundary(int64_t num_rows, int64_t width)
      : rows(num_rows),
        hidden(width),
        x(NormalTensor(DType::kBf16, {rows, hidden}, 1, 3.0f)),
        streams(NormalTensor(DType::kBf16, {rows, 4, hidden}, 2, 2.0f)),
        fn(NormalTensor(DType::kF32, {24, 4 * hidden}, 3,
                        0.6f / std::sqrt(4.0f * static_cast<float>(hidden)))),
        base(NormalTensor(DType::kF32, {24}, 4, 1.2f)),
        scale(NormalTensor(DType::kF32, {3}, 5)),
        old_pre(NormalTensor(DType::kF32, {rows, 4}, 6)),
        pre(DType::kF32, {rows, 4}),
        post(NormalTensor(DType::kF32, {rows, 4}, 7)),
        comb(NormalTensor(DType::kF32, {rows, 16}, 8, 0.5f)),
        weight(NormalTensor(DType::kBf16, {hidden}, 9)),
        y(DType::kBf16, {rows, hidden}),
        grid(DType::kBf16, {rows, hidden}) {}

  template <class View>
  HcBoundaryArgs Args(const View& view, bool with_expand) const {
    HcBoundaryArgs args;
    if (with_expand) args.expand = {view(x), view(post), view(comb), view(streams)};
    args.mix.streams = view(streams);
    args.mix.fn = view(fn);
    args.mix.base = view(base);
    args.mix.scale = view(scale);
    args.mix.pre = view(pre);
    args.mix.post = view(post);
    args.mix.comb = view(comb);
    args.collapse.streams = view(streams);
    args.collapse.pre = view(old_pre);
    args.collapse.weight = view(weight);
    args.collapse.y = view(y);
    args.collapse.y_grid = view(grid);
    return args;
  }

  // Rows of the results, one after the other: streams, pre, post, comb, y, y_grid.
  static std::vector<OwnedTensor> Results(const HcBoundaryArgs& args, const auto& download) {
    std::vector<OwnedTensor> results;
    results.push_back(download(args.mix.streams));
    results.push_back(download(args.mix.pre));
    results.push_back(download(args.mix.post));
    results.push_back(download(args.mix.comb));
    results.push_back(download(args.collapse.y));
    results.push_back(download(args.collapse.y_grid));
    return results;
  }
};

// Device copies of rows [begin, end) of a boundary's tensors.
class OnDevice {
 public:
  OnDevice(const Boundary& host, int64_t begin, int64_t end, Stream& stream)
      : host_(host), begin_(begin), end_(end), stream_(stream) {}
  HcBoundaryArgs Args(bool with_expand) {
    std::vector<std::pair<const void*, TensorView>> known;
    return host_.Args(
        [&](const OwnedTensor& tensor) {
          for (const auto& [data, view] : known)
            if (data == tensor.view().data()) return view;
          const bool per_row = &tensor != &host_.fn && &tensor != &host_.base &&
                               &tensor != &host_.scale && &tensor != &host_.weight;
          copies_.push_back(std::make_unique<DeviceTensor>(
              per_row ? tensor.view().Rows(begin_, end_) : tensor.view(), stream_));
          known.emplace_back(tensor.view().data(), copies_.back()->view());
          return copies_.back()->view();
        },
        with_expand);
  }
  std::vector<OwnedTensor> Results(const HcBoundaryArgs& args) {
    return Boundary::Results(args, [&](const TensorView& view) {
      for (const auto& copy : copies_)
        if (copy->view().data() == view.data()) return copy->Download(stream_);
      return OwnedTensor();
    });
  }

 private:
  const Boundary& host_;
  int64_t begin_, end_;
  Stream& stream_;
  std::vector<std::unique_ptr<DeviceTensor>> copies_;
};

std::vector<uint8_t> RowBytes(const std::vector<OwnedTensor>& results, int64_t row) {
  std::vector<uint8_t> bytes;
  for (const OwnedTensor& result : results) {
    const std::vector<uint8_t> part = testing::Bytes(result.view().Rows(row, row + 1));
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

class HyperConnectionCuda : public CudaTest {
 protected:
  std::vector<OwnedTensor> RunBoundary(const Boundary& host, int64_t begin, int64_t end,
                                       bool with_expand) {
    OnDevice device(host, begin, end, stream());
    const HcBoundaryArgs args = device.Args(with_expand);
    const Status status = HcBoundary(args, stream());
    EXPECT_TRUE(status.has_value()) << status.error().message;
    return device.Results(args);
  }

  // The streams have the CPU's bits: the same fused operations. Coefficients: the 24 sums are fp32
  // sums of partial sums (32 steps of the matrix unit's own additions, 10 units, 16 blocks) against
  // fp64, an error below 1e-6 of sums of order one; exponentials differ by 2 ulp; Sinkhorn
  // contracts. y: the norm's statistic differs in its last bits, so that a few elements round to
  // the neighbouring bf16; the grid copies are Q8 of each y.
  void ExpectCloseToCpu(const Boundary& host, bool with_expand) {
    SCOPED_TRACE(::testing::Message() << host.rows << " rows of " << host.hidden);
    const std::vector<OwnedTensor> device = RunBoundary(host, 0, host.rows, with_expand);
    const HcBoundaryArgs args =
        host.Args([](const OwnedTensor& tensor) { return tensor.view(); }, with_expand);
    ASSERT_TRUE(HcBoundary(args, cpu_stream()).has_value());
    EXPECT_EQ(testing::CountDifferentBits(device[0].view(), host.streams.view()), 0);
    const double tolerance[3] = {2e-6, 4e-6, 1e-5};
    const OwnedTensor* expected[3] = {&host.pre, &host.post, &host.comb};
    for (size_t k = 0; k < 3; ++k) {
      for (int64_t i = 0; i < expected[k]->view().num_elements(); ++i)
        ASSERT_NEAR(Value(device[1 + k].view(), i), Value(expected[k]->view(), i), tolerance[k])
            << k << " " << i;
    }
    const int64_t elements = host.rows * host.hidden;
    EXPECT_LE(testing::CountDifferentBits(device[4].view(), host.y.view()), 1 + elements / 500);
    EXPECT_LE(testing::CountDifferentBits(device[5].view(), host.grid.view()), 1 + elements / 500);
    for (int64_t i = 0; i < elements; ++i) {
      const float y = Value(host.y.view(), i);
      ASSERT_NEAR(Value(device[4].view(), i), y, std::fabs(y) / 128) << i;
    }
  }

  void ExpectRowsIndependent(int64_t hidden, std::initializer_list<int64_t> counts) {
    const int64_t most = std::max(counts);
    const Boundary host(most, hidden);
    const std::vector<OwnedTensor> all = RunBoundary(host, 0, most, true);
    for (int64_t count : counts) {
      for (int64_t begin : {int64_t{0}, most - count}) {
        const std::vector<OwnedTensor> some = RunBoundary(host, begin, begin + count, true);
        for (int64_t r = 0; r < count; ++r)
          ASSERT_EQ(RowBytes(some, r), RowBytes(all, begin + r))
              << "row " << begin + r << " among " << count << " of " << hidden << " channels";
      }
    }
  }

  void ExpectFusedIsSeparate(int64_t rows, int64_t hidden) {
    const Boundary host(rows, hidden);
    for (bool with_expand : {true, false}) {
      const std::vector<OwnedTensor> fused = RunBoundary(host, 0, rows, with_expand);
      OnDevice device(host, 0, rows, stream());
      const HcBoundaryArgs args = device.Args(with_expand);
      if (with_expand) {
        ASSERT_TRUE(HcExpand(args.expand, stream()).has_value());
      }
      ASSERT_TRUE(HcMix(args.mix, stream()).has_value());
      ASSERT_TRUE(HcCollapseNorm(args.collapse, stream()).has_value());
      const std::vector<OwnedTensor> separate = device.Results(args);
      for (size_t k = 0; k < fused.size(); ++k)
        EXPECT_EQ(testing::CountDifferentBits(fused[k].view(), separate[k].view()), 0)
            << "result " << k << ", " << rows << " rows of " << hidden;
    }
  }
};

TEST_F(HyperConnectionCuda, BoundaryAgreesWithTheCpuAtSmallWidths) {
  // 1, 2, 3, 8 and 40 units: rows on one block, on several, and unevenly spread.
  for (int64_t hidden : {32, 64, 96, 256, 1280}) {
    for (int64_t rows : {1, 5, 17}) ExpectCloseToCpu(Boundary(rows, hidden), true);
    ExpectCloseToCpu(Boundary(3, hidden), false);
  }
  // Two launches.
  for (int64_t hidden : {32, 96, 288}) {
    ExpectCloseToCpu(Boundary(81, hidden), true);
    ExpectCloseToCpu(Boundary(65, hidden), false);
  }
}

TEST_F(HyperConnectionCuda, BoundaryAgreesWithTheCpuAtTheModelsWidth) {
  ExpectCloseToCpu(Boundary(1, 5120), true);
  ExpectCloseToCpu(Boundary(9, 5120), true);
}

TEST_F(HyperConnectionCuda, BoundaryOfManyRowsAgreesWithTheCpu) {
  DI_DEVICE_ONLY();
  ExpectCloseToCpu(Boundary(300, 5120), true);
  ExpectCloseToCpu(Boundary(33, 5120), false);
}

TEST_F(HyperConnectionCuda, ARowHasTheSameBitsInEveryBatch) {
  ExpectRowsIndependent(64, {1, 2, 7, 8, 9, 64, 65, 130});
  ExpectRowsIndependent(96, {1, 16, 33, 81});
  ExpectRowsIndependent(544, {1, 9, 17, 70});
  ExpectRowsIndependent(1280, {1, 9, 17});
}

TEST_F(HyperConnectionCuda, ARowOfTheModelsWidthHasTheSameBitsInEveryBatch) {
  DI_DEVICE_ONLY();
  ExpectRowsIndependent(5120, {1, 2, 7, 8, 9, 16, 17, 64, 65, 300, 1030});
}

TEST_F(HyperConnectionCuda, ManyRowsHaveTheBitsOfFewRows) {
  // On a GPU enough rows for several tiles per block.
  if (testing::OnRealDevice()) {
    ExpectFusedIsSeparate(1500, 5120);
    ExpectRowsIndependent(5120, {8, 64, 70, 1030});
  }
  ExpectFusedIsSeparate(210, 96);
  ExpectFusedIsSeparate(90, 544);
  ExpectRowsIndependent(64, {1, 8, 65, 130});
}

TEST_F(HyperConnectionCuda, OneLaunchHasTheBitsOfThreeOperations) {
  ExpectFusedIsSeparate(1, 64);
  ExpectFusedIsSeparate(37, 96);
  ExpectFusedIsSeparate(19, 256);
  ExpectFusedIsSeparate(70, 96);
}

TEST_F(HyperConnectionCuda, OneLaunchHasTheBitsOfThreeOperationsAtTheModelsWidth) {
  DI_DEVICE_ONLY();
  for (int64_t rows : {1, 8, 65, 300}) ExpectFusedIsSeparate(rows, 5120);
}

TEST_F(HyperConnectionCuda, ProductsKeepAllBitsOfTheWeights) {
  // Streams 0 and 1 are 1 and -1, so the sum is that of the differences of two weights which agree
  // in their upper 22 bits. Dropping any of a weight's three parts, or rounding one, shows.
  constexpr int64_t kHidden = 64;
  Boundary host(1, kHidden);
  for (int64_t d = 0; d < kHidden; ++d) {
    for (int64_t s = 0; s < 4; ++s)
      host.streams.Row<Bf16>(0)[s * kHidden + d] = F32ToBf16(s == 0 ? 1.0f : s == 1 ? -1.0f : 0.0f);
    for (int64_t k = 0; k < 24; ++k) {
      const float weight =
          1.0f + 0x1p-7f * static_cast<float>(d) + 0x1p-14f * static_cast<float>(k);
      host.fn.Row<float>(k)[d] = weight + static_cast<float>(k % 4) * 0x1p-23f;
      host.fn.Row<float>(k)[kHidden + d] = weight;
    }
  }
  for (int64_t k = 0; k < 24; ++k) host.base.Row<float>(0)[k] = 0.0f;
  for (int64_t i = 0; i < 3; ++i) host.scale.Row<float>(0)[i] = 0x1p16f;
  const std::vector<OwnedTensor> device = RunBoundary(host, 0, 1, false);
  // Weights lie between 1 and 2, so differences are whole ulps of 2^-23.
  for (int64_t i = 0; i < 4; ++i) {
    const double m = static_cast<double>(i) * 0x1p-23 * kHidden * std::sqrt(2.0) * 0x1p16;
    EXPECT_NEAR(Value(device[1].view(), i), 1.0 / (1.0 + std::exp(-m)) + 1e-6, 1e-6) << i;
    EXPECT_NEAR(Value(device[2].view(), i), 2.0 / (1.0 + std::exp(-m)), 2e-6) << i;
  }
}

TEST_F(HyperConnectionCuda, CollapseTakesTheRowsOfItsIndex) {
  for (int64_t hidden : {96, 256}) {
    const OwnedTensor streams = NormalTensor(DType::kBf16, {6, 4, hidden}, 4);
    const OwnedTensor pre = NormalTensor(DType::kF32, {6, 4}, 5);
    const OwnedTensor weight = NormalTensor(DType::kBf16, {hidden}, 6);
    OwnedTensor index(DType::kI32, {3});
    const int32_t rows_wanted[3] = {5, 0, 2};
    std::copy_n(rows_wanted, 3, index.Row<int32_t>(0));
    const DeviceTensor d_streams(streams.view(), stream());
    const DeviceTensor d_pre(pre.view(), stream());
    const DeviceTensor d_weight(weight.view(), stream());
    const DeviceTensor d_index(index.view(), stream());
    const DeviceTensor y_all(DType::kBf16, {6, hidden}, stream());
    const DeviceTensor y_some(DType::kBf16, {3, hidden}, stream());
    HcCollapseNormArgs args;
    args.streams = d_streams.view();
    args.pre = d_pre.view();
    args.weight = d_weight.view();
    args.y = y_all.view();
    ASSERT_TRUE(HcCollapseNorm(args, stream()).has_value());
    args.row_index = d_index.view();
    args.y = y_some.view();
    ASSERT_TRUE(HcCollapseNorm(args, stream()).has_value());
    const OwnedTensor all = y_all.Download(stream());
    const OwnedTensor some = y_some.Download(stream());
    for (int64_t r = 0; r < 3; ++r)
      EXPECT_EQ(testing::Bytes(some.view().Rows(r, r + 1)),
                testing::Bytes(all.view().Rows(rows_wanted[r], rows_wanted[r] + 1)));
  }
}

TEST_F(HyperConnectionCuda, ExpandHasTheCpusBits) {
  for (auto [rows, hidden] : {std::pair<int64_t, int64_t>{5, 256}, {3, 1280}, {2, 32}}) {
    const Boundary host(rows, hidden);
    OnDevice device(host, 0, rows, stream());
    const HcBoundaryArgs args = device.Args(true);
    ASSERT_TRUE(HcExpand(args.expand, stream()).has_value());
    const std::vector<OwnedTensor> results = device.Results(args);
    ASSERT_TRUE(HcExpand({host.x.view(), host.post.view(), host.comb.view(), host.streams.view()},
                         cpu_stream())
                    .has_value());
    EXPECT_EQ(testing::CountDifferentBits(results[0].view(), host.streams.view()), 0);
  }
}

TEST_F(HyperConnectionCuda, NoRowsAndWidthsThatAreNotWholeUnits) {
  const Boundary none(0, 64);
  OnDevice device(none, 0, 0, stream());
  EXPECT_TRUE(HcBoundary(device.Args(true), stream()).has_value());
  const Boundary odd(1, 48);
  OnDevice odd_device(odd, 0, 1, stream());
  HcBoundaryArgs args = odd_device.Args(true);
  args.collapse.y_grid = {};
  const Status status = HcBoundary(args, stream());
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kUnsupported);
  EXPECT_EQ(status.error().field, "streams");
}

}  // namespace
}  // namespace deepinfer
