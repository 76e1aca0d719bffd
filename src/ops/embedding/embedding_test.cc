#include "ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include "ops/op_test_util.h"

namespace deepinfer {
namespace {

using testing::OwnedTensor;

TEST(Embedding, CopiesTheTokensRowToEveryStream) {
  const OwnedTensor table = testing::NormalTensor(DType::kBf16, {50, 256}, 1);
  OwnedTensor ids(DType::kI32, {37});
  for (int64_t r = 0; r < 37; ++r) ids.Row<int32_t>(0)[r] = static_cast<int32_t>((r * 11) % 50);
  for (int threads : {1, 2, 3}) {
    OwnedTensor streams(DType::kBf16, {37, 4, 256});
    Stream stream(threads);
    ASSERT_TRUE(Embedding({ids.view(), table.view(), streams.view(), {}}, stream).has_value());
    for (int64_t r = 0; r < 37; ++r) {
      for (int64_t s = 0; s < 4; ++s) {
        EXPECT_EQ(std::memcmp(streams.Row<Bf16>(r) + s * 256,
                              table.Row<Bf16>(ids.Row<int32_t>(0)[r]), 512),
                  0);
      }
    }
  }
}

TEST(Embedding, WrongShapesAreRefused) {
  Stream stream(1);
  OwnedTensor ids(DType::kI32, {2});
  OwnedTensor table(DType::kBf16, {50, 32});
  OwnedTensor streams(DType::kBf16, {3, 4, 32});
  EXPECT_EQ(Embedding({ids.view(), table.view(), streams.view(), {}}, stream).error().field,
            "streams");
}

}  // namespace
}  // namespace deepinfer
