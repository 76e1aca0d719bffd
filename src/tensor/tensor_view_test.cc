#include "tensor/tensor_view.h"

#include <gtest/gtest.h>

#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

TEST(TensorView, RowsColumnsAndReshapeAddressTheSameMemory) {
  float values[24];
  for (int i = 0; i < 24; ++i) values[i] = static_cast<float>(i);
  const TensorView view(values, DType::kF32, {4, 6});
  EXPECT_EQ(*view.Rows(1, 3).Row<float>(1), 12.0f);
  const TensorView columns = view.Columns(2, 5);
  EXPECT_EQ(columns.row_stride(), 6);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(columns.Row<float>(3)[2], 22.0f);
  EXPECT_EQ(view.Reshape({2, 3, 4}).Row<float>(1)[0], 12.0f);
  EXPECT_EQ(view.ToString(), "F32 [4, 6]");
}

TEST(Buffer, IsAlignedAndZeroed) {
  auto buffer = Buffer::AllocateZeroed({}, 1000);
  ASSERT_TRUE(buffer.has_value());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(static_cast<char*>(buffer->data())[i], 0);
}

TEST(Buffer, AnImpossibleSizeIsAnErrorNotACrash) {
  auto buffer = Buffer::Allocate({}, int64_t{1} << 62);
  ASSERT_FALSE(buffer.has_value());
  EXPECT_EQ(buffer.error().code, Code::kResourceExhausted);
}

TEST(ScratchScope, ReturnsMemoryWhenItEnds) {
  Stream stream(1);
  float* first = nullptr;
  {
    ScratchScope scope(stream);
    first = scope.Allocate<float>(100);
    float* second = scope.Allocate<float>(100);
    EXPECT_GE(second, first + 100);
  }
  ScratchScope scope(stream);
  EXPECT_EQ(scope.Allocate<float>(50), first);
  // Growth while a scope is open keeps earlier pointers valid.
  float* big = scope.Allocate<float>(64 << 20);
  big[(64 << 20) - 1] = 1.0f;
  *first = 2.0f;
}

}  // namespace
}  // namespace deepinfer
