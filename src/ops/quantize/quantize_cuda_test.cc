#include <bit>
#include <limits>

#include "ops/cuda/device_layout_test_util.h"
#include "ops/quantize/group_quantize.h"
#include "ops/quantize/group_quantize_probe.h"
#include "ops/quantize/quantize.h"

namespace deepinfer {
namespace {

using testing::CountDifferentBits;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::Random;

class QuantizeCuda : public testing::CudaTest {};

// Groups of 32 of many kinds, one kind per group: any bits, ordinary values, any bf16, quarters
// (ties of all grids) at magnitudes from subnormal to near overflow, zeros of both signs, single
// values, NaN and infinities among ordinary values. NaN is quiet: signalling ones cannot arise.
OwnedTensor Groups(int64_t groups) {
  OwnedTensor x(DType::kF32, {groups, 32});
  Random random(1);
  const auto quiet = [](float value) {
    return std::isnan(value) ? std::bit_cast<float>(std::bit_cast<uint32_t>(value) | 0x00400000u)
                             : value;
  };
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < 32; ++i) {
      float value = random.Normal();
      const auto quarters = static_cast<float>(random.Below(65) - 32) * 0.25f;
      switch (g % 10) {
        case 0:
          value = quiet(std::bit_cast<float>(static_cast<uint32_t>(random.Next())));
          break;
        case 1:
          break;
        case 2:
          value = quiet(Bf16ToF32(Bf16{static_cast<uint16_t>(random.Next())}));
          break;
        case 3:
          value = quarters;
          break;
        case 4:
          value = random.Below(2) == 0 ? 0.0f : -0.0f;
          break;
        case 5:
          value = std::ldexp(quarters, static_cast<int>(random.Below(12)) - 130);
          break;
        case 6:
          value = std::ldexp(quarters, static_cast<int>(random.Below(25)) + 100);
          break;
        case 7:
          value = i == random.Below(32) ? std::ldexp(value, static_cast<int>(g % 60) - 40) : 0.0f;
          break;
        case 8:
          if (random.Below(16) == 0)
            value = std::bit_cast<float>(0x7fc00000u | (random.Below(2) == 0 ? 0x80000000u : 0u));
          break;
        default:
          if (random.Below(16) == 0) {
            value = random.Below(2) == 0 ? std::numeric_limits<float>::infinity()
                                         : -std::numeric_limits<float>::infinity();
          }
      }
      x.Row<float>(g)[i] = value;
    }
  }
  return x;
}

TEST_F(QuantizeCuda, TheDeviceQuantisersHaveTheBitsOfTheCpu) {
  const int64_t groups = testing::OnRealDevice() ? 200000 : 4000;
  const OwnedTensor x = Groups(groups);
  const DeviceTensor x_device(x.view(), stream());
  for (const Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    const DeviceTensor q8_codes(DType::kU8, {groups, 32}, stream());
    const DeviceTensor q8_scale(DType::kU8, {groups}, stream());
    const DeviceTensor q8_grid(DType::kBf16, {groups, 32}, stream());
    const DeviceTensor q4p_codes(DType::kU8, {groups, 16}, stream());
    const DeviceTensor q4p_scale(DType::kU8, {groups}, stream());
    const DeviceTensor q4p_grid(DType::kBf16, {groups, 32}, stream());
    const DeviceTensor q4e_codes(DType::kU8, {groups, 16}, stream());
    const DeviceTensor q4e_scale(DType::kU8, {groups, 2}, stream());
    const DeviceTensor q4e_grid(DType::kBf16, {groups, 32}, stream());
    ASSERT_TRUE(testing::QuantizeGroups(
                    {x_device.view().Row<float>(0), q8_codes.view().Row<uint8_t>(0),
                     q8_scale.view().Row<uint8_t>(0), q8_grid.view().Row<uint16_t>(0),
                     q4p_codes.view().Row<uint8_t>(0), q4p_scale.view().Row<uint8_t>(0),
                     q4p_grid.view().Row<uint16_t>(0), q4e_codes.view().Row<uint8_t>(0),
                     q4e_scale.view().Row<uint8_t>(0), q4e_grid.view().Row<uint16_t>(0)},
                    groups, numerics, stream())
                    .has_value());
    const OwnedTensor results[] = {
        q8_codes.Download(stream()),  q8_scale.Download(stream()),  q8_grid.Download(stream()),
        q4p_codes.Download(stream()), q4p_scale.Download(stream()), q4p_grid.Download(stream()),
        q4e_codes.Download(stream()), q4e_scale.Download(stream()), q4e_grid.Download(stream())};
    int64_t failures = 0;
    for (int64_t g = 0; g < groups && failures < 5; ++g) {
      const float* values = x.Row<float>(g);
      uint8_t q8[Q8RecordBytes(32)], q4p[Q4PRecordBytes(32)], q4e[Q4ERecordBytes(32)];
      float grid[3][32];
      EncodeQ8Record(values, 32, q8);
      DecodeQ8Record(q8, 32, grid[0]);
      EncodeQ4PRecord(values, 32, q4p);
      DecodeQ4PRecord(q4p, 32, grid[1]);
      EncodeQ4ERecord(values, 32, numerics, q4e);
      DecodeQ4ERecord(q4e, 32, grid[2]);
      bool equal = std::memcmp(results[0].Row<uint8_t>(g), q8, 32) == 0 &&
                   results[1].Row<uint8_t>(0)[g] == q8[32] &&
                   std::memcmp(results[3].Row<uint8_t>(g), q4p, 16) == 0 &&
                   results[4].Row<uint8_t>(0)[g] == q4p[16] &&
                   std::memcmp(results[6].Row<uint8_t>(g), q4e, 16) == 0 &&
                   std::memcmp(results[7].Row<uint8_t>(g), q4e + 16, 2) == 0;
      for (int k = 0; k < 3; ++k) {
        for (int64_t i = 0; i < 32; ++i)
          equal = equal && results[2 + 3 * k].Row<Bf16>(g)[i] == F32ToBf16(grid[k][i]);
      }
      EXPECT_TRUE(equal) << "group " << g << " of kind " << g % 10;
      failures += equal ? 0 : 1;
    }
  }
}

TEST_F(QuantizeCuda, EveryCodeAndScaleDecodesToItsValue) {
  const DeviceTensor e4m3(DType::kBf16, {256, 256}, stream());
  const DeviceTensor scales(DType::kF32, {256}, stream());
  const DeviceTensor e2m1(DType::kBf16, {128, 16}, stream());
  ASSERT_TRUE(
      testing::DecodeEveryE4M3(e4m3.view().Row<uint16_t>(0), scales.view().Row<float>(0), stream())
          .has_value());
  ASSERT_TRUE(testing::DecodeEveryE2M1(e2m1.view().Row<uint16_t>(0), stream()).has_value());
  const OwnedTensor e4m3_host = e4m3.Download(stream());
  const OwnedTensor scales_host = scales.Download(stream());
  const OwnedTensor e2m1_host = e2m1.Download(stream());
  for (int scale = 0; scale < 256; ++scale) {
    const float s = E8M0ToF32(static_cast<uint8_t>(scale));
    EXPECT_EQ(std::bit_cast<uint32_t>(scales_host.Row<float>(0)[scale]),
              std::bit_cast<uint32_t>(s));
    for (int code = 0; code < 256; ++code) {
      ASSERT_EQ(e4m3_host.Row<Bf16>(scale)[code].bits,
                F32ToBf16(E4M3ToF32(static_cast<uint8_t>(code)) * s).bits)
          << "code " << code << " scale " << scale;
    }
  }
  for (int scale = 0; scale < 127; ++scale) {
    for (int code = 0; code < 16; ++code) {
      EXPECT_EQ(
          e2m1_host.Row<Bf16>(scale)[code].bits,
          F32ToBf16(E2M1ToF32(static_cast<uint8_t>(code)) * E4M3ToF32(static_cast<uint8_t>(scale)))
              .bits)
          << "code " << code << " scale " << scale;
    }
  }
}

TEST_F(QuantizeCuda, RowsHaveTheBitsOfTheCpuDenseStridedAndInPlace) {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (auto [rows, channels] :
         {std::pair<int64_t, int64_t>{1, 32}, {3, 64}, {2, 5120}, {5, 1024}, {70, 96}}) {
      const OwnedTensor x = NormalTensor(dtype, {rows, channels}, 7, 5.0f);
      OwnedTensor expected(DType::kBf16, {rows, channels});
      ASSERT_TRUE(QuantizeFp8({x.view(), expected.view()}, cpu_stream()).has_value());
      const DeviceTensor x_device(x.view(), stream());
      const DeviceTensor y(DType::kBf16, {rows, channels}, stream());
      ASSERT_TRUE(QuantizeFp8({x_device.view(), y.view()}, stream()).has_value());
      EXPECT_EQ(CountDifferentBits(y.Download(stream()).view(), expected.view()), 0);
      // Into columns of a wider tensor: at a multiple of 16 bytes, and not.
      for (const int64_t offset : {8, 1}) {
        const DeviceTensor wide(DType::kBf16, {rows, channels + 8 * offset}, stream());
        const TensorView columns = wide.view().Columns(offset, offset + channels);
        ASSERT_TRUE(QuantizeFp8({x_device.view(), columns}, stream()).has_value());
        const OwnedTensor wide_host = wide.Download(stream());
        for (int64_t r = 0; r < rows; ++r) {
          EXPECT_EQ(std::memcmp(wide_host.Row<Bf16>(r) + offset, expected.Row<Bf16>(r),
                                static_cast<size_t>(channels) * 2),
                    0);
          EXPECT_EQ(wide_host.Row<Bf16>(r)[offset - 1].bits, 0xffffu);
          EXPECT_EQ(wide_host.Row<Bf16>(r)[offset + channels].bits, 0xffffu);
        }
      }
      if (dtype == DType::kF32) continue;
      ASSERT_TRUE(QuantizeFp8({x_device.view(), x_device.view()}, stream()).has_value());
      EXPECT_EQ(CountDifferentBits(x_device.Download(stream()).view(), expected.view()), 0);
    }
  }
}

}  // namespace
}  // namespace deepinfer
