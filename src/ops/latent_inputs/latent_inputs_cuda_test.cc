#include "ops/latent_inputs/latent_inputs.h"

#include "ops/cache_records/cache_records.h"
#include "ops/cuda/device_layout_test_util.h"
#include "ops/quantize/group_quantize.h"
#include "ops/rms_norm/rms_norm.h"

namespace deepinfer {
namespace {

using testing::Bytes;
using testing::DeviceLayout;
using testing::DeviceTensor;
using testing::NormalTensor;
using testing::OwnedTensor;
using testing::RandomTable;
using testing::TestLayout;

class LatentInputsCuda : public testing::CudaTest {};

struct Width {
  int64_t q_channels, kv_channels, pairs;
};
constexpr Width kWidths[] = {{64, 64, 8}, {1280, 512, 32}, {1536, 512, 32}, {96, 32, 3}};

std::vector<testing::Chunk> Chunks(int64_t rows) {
  if (rows == 1) return {{1, 700, 1}};
  return {{1, 5, rows / 3}, {2, 1000, 1}, {3, 0, 1}, {4, 300, rows - rows / 3 - 2}};
}

struct Outputs {
  std::vector<uint8_t> grid, records, pages;
};

// Tensors of one case on the device. Rows of q and kv are columns of one wider tensor, as a fused
// projection leaves them.
class Inputs {
 public:
  Inputs(const Width& w, int64_t rows, int64_t record_bytes, Stream& stream)
      : width_(w), record_bytes_(record_bytes), layout_(Chunks(rows), 1, 20) {
    layout_.set_window_begin(0, 7);
    const OwnedTensor projected =
        NormalTensor(DType::kBf16, {rows, w.q_channels + w.kv_channels}, 1, 2.0f);
    projected_ = DeviceTensor(projected.view(), stream);
    q_weight_ = DeviceTensor(NormalTensor(DType::kBf16, {w.q_channels}, 2).view(), stream);
    kv_weight_ = DeviceTensor(NormalTensor(DType::kBf16, {w.kv_channels}, 3).view(), stream);
    table_ = DeviceTensor(RandomTable(rows, w.pairs, 4).view(), stream);
    device_layout_ = std::make_unique<DeviceLayout>(layout_.view(), stream);
    grid_ = DeviceTensor(DType::kBf16, {rows, w.q_channels}, stream);
    records_ = DeviceTensor(DType::kU8, {rows, record_bytes}, stream);
    pages_ = DeviceTensor(DType::kU8, {layout_.num_pages(), TestLayout::kPageRows, record_bytes},
                          stream);
  }
  LatentInputsArgs Args() const {
    const int64_t width = width_.q_channels + width_.kv_channels;
    return {.q = projected_.view().Columns(0, width_.q_channels),
            .q_weight = q_weight_.view(),
            .q_grid = grid_.view(),
            .kv = projected_.view().Columns(width_.q_channels, width),
            .kv_weight = kv_weight_.view(),
            .table = table_.view(),
            .records = records_.view(),
            .layout = device_layout_->view(),
            .pages = pages_.view()};
  }
  Outputs Download(Stream& stream) const {
    return {Bytes(grid_.Download(stream).view()), Bytes(records_.Download(stream).view()),
            Bytes(pages_.Download(stream).view())};
  }
  const Width& width() const {
    return width_;
  }
  int64_t record_bytes() const {
    return record_bytes_;
  }

 private:
  Width width_;
  int64_t record_bytes_;
  TestLayout layout_;
  DeviceTensor projected_, q_weight_, kv_weight_, table_, grid_, records_, pages_;
  std::unique_ptr<DeviceLayout> device_layout_;
};

// The operations that it stands for, on the device too: those are compared with the CPU's by their
// own tests, and have the same sums.
void RunParts(const LatentInputsArgs& args, Stream& stream) {
  ASSERT_TRUE(
      RmsNorm({.x = args.q, .weight = args.q_weight, .y = {}, .y_grid = args.q_grid}, stream)
          .has_value());
  ASSERT_TRUE(RmsNorm({.x = args.kv, .weight = args.kv_weight, .y = args.kv, .y_grid = {}}, stream)
                  .has_value());
  ASSERT_TRUE(WindowRecords({args.kv, args.table, args.records}, stream).has_value());
  ASSERT_TRUE(WriteWindowPages({args.records, args.layout, args.pages}, stream).has_value());
}

TEST_F(LatentInputsCuda, HasTheBitsOfItsPartsForEveryRowCount) {
  for (const Width& w : kWidths) {
    // More than four rows per multiprocessor take another division into warps.
    for (const int64_t rows : {int64_t{1}, int64_t{9}, int64_t{4 * stream().sm_count() + 7}}) {
      for (const int64_t bytes : {Q8RecordBytes(w.kv_channels), Bf16RecordBytes(w.kv_channels)}) {
        const Inputs fused(w, rows, bytes, stream());
        const Inputs parts(w, rows, bytes, stream());
        ASSERT_TRUE(LatentInputs(fused.Args(), stream()).has_value());
        RunParts(parts.Args(), stream());
        const Outputs result = fused.Download(stream());
        const Outputs expected = parts.Download(stream());
        EXPECT_EQ(result.grid, expected.grid) << rows << " rows of " << w.q_channels;
        EXPECT_EQ(result.records, expected.records) << rows << " rows of " << w.kv_channels;
        EXPECT_EQ(result.pages, expected.pages) << rows << " rows of " << w.kv_channels;
      }
    }
  }
}

TEST_F(LatentInputsCuda, ARowHasTheSameBitsAlone) {
  for (const Width& w : kWidths) {
    const int64_t rows = 4 * stream().sm_count() + 7;
    const Inputs inputs(w, rows, Q8RecordBytes(w.kv_channels), stream());
    ASSERT_TRUE(LatentInputs(inputs.Args(), stream()).has_value());
    const Outputs together = inputs.Download(stream());
    // Again, over the same inputs, a row at a time.
    for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
      LatentInputsArgs args = inputs.Args();
      for (TensorView* view : {&args.q, &args.q_grid, &args.kv, &args.table, &args.records,
                               &args.layout.positions, &args.layout.row_sequence})
        *view = view->Rows(row, row + 1);
      const DeviceTensor grid(DType::kBf16, {1, w.q_channels}, stream());
      const DeviceTensor records(DType::kU8, {1, inputs.record_bytes()}, stream());
      args.q_grid = grid.view();
      args.records = records.view();
      ASSERT_TRUE(LatentInputs(args, stream()).has_value());
      const auto row_of = [&](const std::vector<uint8_t>& bytes, int64_t size) {
        return std::vector<uint8_t>(bytes.begin() + row * size, bytes.begin() + (row + 1) * size);
      };
      EXPECT_EQ(Bytes(grid.Download(stream()).view()), row_of(together.grid, 2 * w.q_channels));
      EXPECT_EQ(Bytes(records.Download(stream()).view()),
                row_of(together.records, inputs.record_bytes()));
    }
    EXPECT_EQ(inputs.Download(stream()).pages, together.pages);
  }
}

TEST_F(LatentInputsCuda, TheKeyAloneHasTheSameBitsAndPagesMayBeLeftOut) {
  for (const Width& w : kWidths) {
    for (const int64_t rows : {int64_t{5}, int64_t{4 * stream().sm_count() + 7}}) {
      const Inputs whole(w, rows, Q8RecordBytes(w.kv_channels), stream());
      const Inputs key(w, rows, Q8RecordBytes(w.kv_channels), stream());
      const Inputs kept(w, rows, Q8RecordBytes(w.kv_channels), stream());
      ASSERT_TRUE(LatentInputs(whole.Args(), stream()).has_value());
      LatentInputsArgs args = key.Args();
      args.q = args.q_weight = args.q_grid = {};
      ASSERT_TRUE(LatentInputs(args, stream()).has_value());
      args = kept.Args();
      args.pages = {};
      ASSERT_TRUE(LatentInputs(args, stream()).has_value());
      const Outputs expected = whole.Download(stream());
      EXPECT_EQ(key.Download(stream()).records, expected.records);
      EXPECT_EQ(key.Download(stream()).pages, expected.pages);
      EXPECT_EQ(kept.Download(stream()).grid, expected.grid);
      EXPECT_EQ(kept.Download(stream()).records, expected.records);
      for (const uint8_t byte : kept.Download(stream()).pages) ASSERT_EQ(byte, 0xff);
    }
  }
}

}  // namespace
}  // namespace deepinfer
