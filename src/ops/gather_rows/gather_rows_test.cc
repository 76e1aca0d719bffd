#include "ops/gather_rows/gather_rows.h"

#include <gtest/gtest.h>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::OwnedTensor;

TEST(GatherRows, MovesTheNamedRowsOfPaddedAndWideTensors) {
  const OwnedTensor source = testing::NormalTensor(DType::kF32, {40, 12}, 1);
  const OwnedTensor wide = testing::NormalTensor(DType::kBf16, {40, 4, 96}, 2);
  OwnedTensor rows(DType::kI32, {33});
  for (int64_t i = 0; i < 33; ++i) rows.Row<int32_t>(0)[i] = static_cast<int32_t>((i * 7) % 40);
  for (int threads : {1, 3}) {
    Stream stream(threads);
    OwnedTensor out(DType::kF32, {33, 5});
    OwnedTensor wide_out(DType::kBf16, {33, 4, 96});
    ASSERT_TRUE(
        GatherRows({source.view().Columns(3, 8), rows.view(), out.view()}, stream).has_value());
    ASSERT_TRUE(GatherRows({wide.view(), rows.view(), wide_out.view()}, stream).has_value());
    for (int64_t i = 0; i < 33; ++i) {
      const int64_t r = (i * 7) % 40;
      EXPECT_EQ(std::memcmp(out.Row<float>(i), source.Row<float>(r) + 3, 20), 0);
      EXPECT_EQ(std::memcmp(wide_out.Row<Bf16>(i), wide.Row<Bf16>(r), 768), 0);
    }
  }
}

TEST(GatherRows, WrongShapesAreRefused) {
  Stream stream(1);
  OwnedTensor source(DType::kF32, {4, 12});
  OwnedTensor rows(DType::kI32, {2});
  OwnedTensor out(DType::kF32, {2, 11});
  OwnedTensor type(DType::kBf16, {2, 12});
  EXPECT_EQ(GatherRows({source.view(), rows.view(), out.view()}, stream).error().field, "out");
  EXPECT_EQ(GatherRows({source.view(), rows.view(), type.view()}, stream).error().field, "out");
}

}  // namespace
}  // namespace deepinfer
