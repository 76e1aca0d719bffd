// Helpers of the operations' tests: owned tensors, reproducible random contents, batches made of
// named sequences, bitwise comparison.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "ops/batch_layout.h"
#include "tensor/buffer.h"
#include "tensor/float_formats.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer::testing {

// SplitMix64: the same numbers on every machine, and cheap to seed from (what, sequence, position).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  Random(uint64_t a, uint64_t b, uint64_t c = 0) : Random((a * 1000003 + b) * 1000003 + c) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t n) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(n));
  }
  float Uniform() {
    return static_cast<float>(Next() >> 40) * 0x1p-24f;
  }
  // Roughly normal with unit variance: heavy enough tails for quantisers to see different group
  // maxima.
  float Normal() {
    float sum = 0.0f;
    for (int i = 0; i < 6; ++i) sum += Uniform();
    return (sum - 3.0f) * 1.41421356f;
  }

 private:
  uint64_t state_;
};

// A zeroed tensor and its memory.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    buffer_ =
        Buffer::AllocateZeroed({}, std::max<int64_t>(1, extent.num_elements() * DTypeBytes(dtype)))
            .value();
    view_ = buffer_.View(dtype, shape);
  }
  const TensorView& view() const {
    return view_;
  }
  template <class T>
  T* Row(int64_t row) const {
    return view_.Row<T>(row);
  }
  int64_t bytes() const {
    return view_.num_elements() * DTypeBytes(view_.dtype());
  }
  void FillNormal(Random random, float scale) {
    for (int64_t i = 0; i < view_.num_elements(); ++i) {
      const float x = random.Normal() * scale;
      if (view_.dtype() == DType::kBf16) {
        static_cast<Bf16*>(view_.data())[i] = F32ToBf16(x);
      } else {
        static_cast<float*>(view_.data())[i] = x;
      }
    }
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

inline OwnedTensor NormalTensor(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed,
                                float scale = 1.0f) {
  OwnedTensor tensor(dtype, shape);
  tensor.FillNormal(Random(seed), scale);
  return tensor;
}

inline OwnedTensor CopyOf(const OwnedTensor& source, std::initializer_list<int64_t> shape) {
  OwnedTensor copy(source.view().dtype(), shape);
  std::memcpy(copy.view().data(), source.view().data(), static_cast<size_t>(source.bytes()));
  return copy;
}

// Number of bf16 or f32 elements whose bits differ.
inline int64_t CountDifferentBits(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(a.num_elements(), b.num_elements());
  const int64_t size = DTypeBytes(a.dtype());
  int64_t different = 0;
  for (int64_t i = 0; i < a.num_elements(); ++i) {
    different +=
        std::memcmp(static_cast<char*>(a.data()) + i * size,
                    static_cast<char*>(b.data()) + i * size, static_cast<size_t>(size)) != 0;
  }
  return different;
}

inline float Value(const TensorView& view, int64_t element) {
  return view.dtype() == DType::kBf16 ? Bf16ToF32(static_cast<Bf16*>(view.data())[element])
                                      : static_cast<float*>(view.data())[element];
}

// Checks that an operation on rows gives a row the same bits at 1, 2 and 3 threads and alone.
// `run(stream, begin, end)` runs it on these rows and returns their result; results of several rows
// are the results of the rows one after the other.
template <class Run>
void ExpectRowsIndependent(int64_t rows, const Run& run) {
  Stream one(1);
  const std::vector<uint8_t> expected = run(one, 0, rows);
  ASSERT_EQ(expected.size() % static_cast<size_t>(rows), 0u);
  const size_t row_bytes = expected.size() / static_cast<size_t>(rows);
  for (int threads : {1, 2, 3}) {
    Stream stream(threads);
    EXPECT_EQ(run(stream, 0, rows), expected) << threads << " threads";
    for (int64_t r = 0; r < rows; ++r) {
      const auto begin = expected.begin() + static_cast<ptrdiff_t>(row_bytes) * r;
      const std::vector<uint8_t> row(begin, begin + static_cast<ptrdiff_t>(row_bytes));
      EXPECT_EQ(run(stream, r, r + 1), row) << "row " << r << " alone, " << threads << " threads";
    }
  }
}

// Bytes of the rows of a contiguous view.
inline std::vector<uint8_t> Bytes(const TensorView& view) {
  const auto* begin = static_cast<const uint8_t*>(view.data());
  return {begin, begin + view.num_elements() * DTypeBytes(view.dtype())};
}

inline std::vector<uint8_t> Joined(std::initializer_list<TensorView> views) {
  std::vector<uint8_t> bytes;
  const int64_t rows = views.begin()->rows();
  for (int64_t r = 0; r < rows; ++r) {
    for (const TensorView& view : views) {
      const std::vector<uint8_t> row = Bytes(view.Rows(r, r + 1));
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
  }
  return bytes;
}

// One sequence's share of a step: tokens [first, first + count) of the sequence named `id`.
struct Chunk {
  int id = 0;
  int64_t first = 0;
  int64_t count = 1;
  int64_t slot = 0;
};

// A step's layout with owned arrays. Sequence i uses blocks i * blocks_per_sequence, shifted and
// reversed so that table order is not memory order; window pages likewise, of which the table holds
// those from `history` positions before the step on.
class TestLayout {
 public:
  static constexpr int64_t kPageRows = 128;

  TestLayout(std::vector<Chunk> chunks, int64_t blocks_per_sequence, int64_t history = 140)
      : chunks_(std::move(chunks)) {
    const auto sequences = static_cast<int64_t>(chunks_.size());
    int64_t rows = 0;
    for (const Chunk& chunk : chunks_) rows += chunk.count;
    positions_ = OwnedTensor(DType::kI32, {rows});
    row_sequence_ = OwnedTensor(DType::kI32, {rows});
    start_ = OwnedTensor(DType::kI32, {sequences + 1});
    slot_ = OwnedTensor(DType::kI32, {sequences});
    table_ = OwnedTensor(DType::kI32, {sequences, blocks_per_sequence});
    first_page_ = OwnedTensor(DType::kI32, {sequences});
    window_begin_ = OwnedTensor(DType::kI32, {sequences});
    const auto first_page_of = [&](const Chunk& chunk) {
      return std::max<int64_t>(0, chunk.first - history) / kPageRows;
    };
    for (const Chunk& chunk : chunks_) {
      pages_per_sequence_ =
          std::max(pages_per_sequence_,
                   (chunk.first + chunk.count - 1) / kPageRows + 1 - first_page_of(chunk));
    }
    pages_ = OwnedTensor(DType::kI32, {sequences, pages_per_sequence_});
    int64_t row = 0;
    for (int64_t s = 0; s < sequences; ++s) {
      const Chunk& chunk = chunks_[static_cast<size_t>(s)];
      start_.Row<int32_t>(s)[0] = static_cast<int32_t>(row);
      slot_.Row<int32_t>(s)[0] = static_cast<int32_t>(chunk.slot);
      for (int64_t i = 0; i < chunk.count; ++i, ++row) {
        positions_.Row<int32_t>(row)[0] = static_cast<int32_t>(chunk.first + i);
        row_sequence_.Row<int32_t>(row)[0] = static_cast<int32_t>(s);
      }
      first_page_.Row<int32_t>(0)[s] = static_cast<int32_t>(first_page_of(chunk));
      for (int64_t b = 0; b < pages_per_sequence_; ++b) {
        pages_.Row<int32_t>(s)[b] =
            static_cast<int32_t>(s * pages_per_sequence_ + pages_per_sequence_ - 1 - b);
      }
      for (int64_t b = 0; b < blocks_per_sequence; ++b) {
        table_.Row<int32_t>(s)[b] =
            static_cast<int32_t>(s * blocks_per_sequence + blocks_per_sequence - 1 - b);
      }
    }
    start_.Row<int32_t>(sequences)[0] = static_cast<int32_t>(row);
  }
  BatchLayout view() const {
    return {positions_.view(), row_sequence_.view(), start_.view(),      slot_.view(),
            table_.view(),     pages_.view(),        first_page_.view(), window_begin_.view()};
  }
  int64_t num_pages() const {
    return std::ssize(chunks_) * pages_per_sequence_;
  }
  void set_window_begin(int64_t sequence, int64_t position) {
    window_begin_.Row<int32_t>(0)[sequence] = static_cast<int32_t>(position);
  }
  // Where the window key of a position lives, or null if its page is not in the table.
  uint8_t* WindowPlace(const TensorView& pages, int64_t sequence, int64_t position) const {
    const int64_t page = position / kPageRows - first_page_.Row<int32_t>(0)[sequence];
    if (page < 0 || page >= pages_per_sequence_) return nullptr;
    return pages.Row<uint8_t>(pages_.Row<int32_t>(sequence)[page]) +
           position % kPageRows * pages.dim(2);
  }
  const std::vector<Chunk>& chunks() const {
    return chunks_;
  }
  int64_t rows() const {
    return positions_.view().rows();
  }
  const Chunk& chunk_of(int64_t row) const {
    return chunks_[static_cast<size_t>(row_sequence_.Row<int32_t>(row)[0])];
  }
  int64_t position(int64_t row) const {
    return positions_.Row<int32_t>(row)[0];
  }

 private:
  std::vector<Chunk> chunks_;
  int64_t pages_per_sequence_ = 1;
  OwnedTensor positions_, row_sequence_, start_, slot_, table_, pages_, first_page_, window_begin_;
};

}  // namespace deepinfer::testing
