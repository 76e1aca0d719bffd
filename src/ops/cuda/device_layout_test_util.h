// A step's layout on the device, for tests.
#pragma once

#include <vector>

#include "ops/cuda/cuda_test_util.h"

namespace deepinfer::testing {

class DeviceLayout {
 public:
  DeviceLayout(const BatchLayout& host, Stream& stream) {
    for (const TensorView* view :
         {&host.positions, &host.row_sequence, &host.sequence_start, &host.sequence_slot,
          &host.block_table, &host.window_table, &host.window_first_page, &host.window_begin})
      tensors_.emplace_back(*view, stream);
  }
  BatchLayout view() const {
    return {tensors_[0].view(), tensors_[1].view(), tensors_[2].view(), tensors_[3].view(),
            tensors_[4].view(), tensors_[5].view(), tensors_[6].view(), tensors_[7].view()};
  }

 private:
  std::vector<DeviceTensor> tensors_;
};

// The completed entries of a step of ratio `ratio` and, after every third, one of padding.
class TestEntries {
 public:
  TestEntries(const TestLayout& layout, int64_t ratio) : ratio_(ratio) {
    for (int64_t r = 0; r < layout.rows(); ++r) {
      const int64_t position = layout.position(r);
      if (position % ratio != ratio - 1) continue;
      Add(static_cast<int32_t>(r), layout.view().row_sequence.Row<int32_t>(0)[r],
          static_cast<int32_t>(position / ratio));
      if (count() % 4 == 3) Add(0, 0, -1);
    }
  }
  int64_t count() const {
    return std::ssize(index_);
  }
  CompressedEntries view() const {
    return {ratio_,
            {last_row_.data(), DType::kI32, {count()}},
            {sequence_.data(), DType::kI32, {count()}},
            {index_.data(), DType::kI32, {count()}}};
  }

 private:
  void Add(int32_t last_row, int32_t sequence, int32_t index) {
    last_row_.push_back(last_row);
    sequence_.push_back(sequence);
    index_.push_back(index);
  }
  int64_t ratio_;
  std::vector<int32_t> last_row_, sequence_, index_;
};

class DeviceEntries {
 public:
  DeviceEntries(const CompressedEntries& host, Stream& stream)
      : ratio_(host.ratio),
        last_row_(host.last_row, stream),
        sequence_(host.sequence, stream),
        index_(host.index, stream) {}
  CompressedEntries view() const {
    return {ratio_, last_row_.view(), sequence_.view(), index_.view()};
  }

 private:
  int64_t ratio_;
  DeviceTensor last_row_, sequence_, index_;
};

// cos and sin of random angles.
inline OwnedTensor RandomTable(int64_t rows, int64_t pairs, uint64_t seed) {
  OwnedTensor table(DType::kF32, {rows, pairs, 2});
  Random random(seed);
  for (int64_t i = 0; i < rows * pairs; ++i) {
    const float angle = random.Uniform() * 6.28f;
    table.Row<float>(0)[2 * i] = std::cos(angle);
    table.Row<float>(0)[2 * i + 1] = std::sin(angle);
  }
  return table;
}

// The largest difference of two bf16 tensors in units of 2^-7 of the larger magnitude of the two,
// or of `floor` where both are smaller; infinity if there is a NaN. Neighbouring bf16 numbers are
// at most that far apart, so 1 is a difference in the last bit.
inline double LargestSteps(const TensorView& a, const TensorView& b, double floor = 1e-30) {
  EXPECT_EQ(a.num_elements(), b.num_elements());
  double largest = 0.0;
  for (int64_t i = 0; i < b.num_elements(); ++i) {
    const double x = Value(a, i);
    const double y = Value(b, i);
    const double size = std::max({std::fabs(x), std::fabs(y), floor});
    const double steps = std::fabs(x - y) / (size * 0x1p-7);
    if (!(steps <= largest)) largest = std::isnan(steps) ? INFINITY : steps;
  }
  return largest;
}

}  // namespace deepinfer::testing
