// The CUDA kernels of sparse attention against the CPU implementation, and their invariance.
#include <algorithm>
#include <map>

#include "ops/cuda/cuda_test_util.h"
#include "ops/quantize/group_quantize.h"
#include "ops/sparse_attention/sparse_attention_impl.h"

namespace deepinfer {
namespace {

using testing::Chunk;
using testing::DeviceTensor;
using testing::OwnedTensor;
using testing::Random;
using testing::TestLayout;

class SparseAttentionCudaTest : public testing::CudaTest {};

struct Shape {
  int64_t heads;
  int64_t dim;
  int64_t pairs;
  int64_t window;
  int64_t topk;
};
constexpr Shape kTiny = {8, 64, 8, 8, 16};
constexpr Shape kOdd = {5, 96, 16, 7, 70};
constexpr Shape kReal = {64, 512, 32, 128, 512};

struct Options {
  bool compressed = true;
  Numerics numerics = Numerics::kProduction;
  bool window_bf16 = false;
  bool kv_bf16 = false;
  bool rotate_q = false;
  int64_t block_rows = 0;
};

constexpr int64_t kEntriesPerBlock = 100;  // no power of two, which divisors must handle
constexpr int64_t kBlocksPerSequence = 6;
using RowKey = std::pair<int, int64_t>;  // sequence, position
using Outputs = std::map<RowKey, std::vector<uint16_t>>;

// Everything a row reads is a function of (sequence, position) or (sequence, entry), whatever batch
// it is in.
class AttentionCase {
 public:
  AttentionCase(Shape shape, std::vector<Chunk> chunks, Options options = {})
      : shape_(shape), options_(options), layout_(Slots(std::move(chunks)), kBlocksPerSequence) {
    const int64_t rows = layout_.rows();
    const auto sequences = static_cast<int64_t>(layout_.chunks().size());
    const int64_t window_bytes =
        options.window_bf16 ? Bf16RecordBytes(shape.dim) : Q8RecordBytes(shape.dim);
    const int64_t kv_bytes =
        options.kv_bf16 ? Bf16RecordBytes(shape.dim) : Q4ERecordBytes(shape.dim);
    q_ = OwnedTensor(DType::kBf16, {rows, shape.heads, shape.dim});
    window_ = OwnedTensor(DType::kU8, {rows, window_bytes});
    pages_ = OwnedTensor(DType::kU8, {layout_.num_pages(), TestLayout::kPageRows, window_bytes});
    blocks_ = OwnedTensor(DType::kU8, {kBlocksPerSequence * sequences, kEntriesPerBlock, kv_bytes});
    selected_ = OwnedTensor(DType::kI32, {rows, shape.topk});
    table_ = OwnedTensor(DType::kF32, {rows, shape.pairs, 2});
    sink_ = testing::NormalTensor(DType::kF32, {shape.heads}, 77);
    for (int64_t r = 0; r < rows; ++r) FillRow(r);
    for (int64_t s = 0; s < sequences; ++s) {
      const Chunk& chunk = layout_.chunks()[static_cast<size_t>(s)];
      for (int64_t p = std::max<int64_t>(0, chunk.first - shape.window); p < chunk.first; ++p)
        WindowRecord(chunk.id, p, layout_.WindowPlace(pages_.view(), s, p));
      const int64_t entries =
          std::min<int64_t>(chunk.first + chunk.count, kBlocksPerSequence * kEntriesPerBlock);
      for (int64_t j = 0; j < entries; ++j) {
        const int32_t block = layout_.view().block_table.Row<int32_t>(s)[j / kEntriesPerBlock];
        KvRecord(chunk.id, j, blocks_.Row<uint8_t>(block) + (j % kEntriesPerBlock) * kv_bytes);
      }
    }
  }

  // Host tensors, to be changed before a run.
  OwnedTensor& q() {
    return q_;
  }
  OwnedTensor& sink() {
    return sink_;
  }
  OwnedTensor& pages() {
    return pages_;
  }
  OwnedTensor& window() {
    return window_;
  }
  TestLayout& layout() {
    return layout_;
  }
  const Shape& shape() const {
    return shape_;
  }
  int64_t rows() const {
    return layout_.rows();
  }

  // On the CPU, with a copy of q, which the operation may overwrite.
  Outputs RunCpu(Stream& stream) {
    const OwnedTensor q = testing::CopyOf(q_, {rows(), shape_.heads, shape_.dim});
    const OwnedTensor out(DType::kBf16, {rows(), shape_.heads * shape_.dim});
    SparseAttentionArgs args =
        Args(q.view(), window_.view(), pages_.view(), blocks_.view(), selected_.view(),
             layout_.view(), sink_.view(), table_.view(), out.view());
    const Status status = SparseAttention(args, stream);
    EXPECT_TRUE(status.has_value());
    return Collect(out);
  }

  Outputs RunCuda(Stream& stream) {
    const BatchLayout host = layout_.view();
    const DeviceTensor q(q_.view(), stream), window(window_.view(), stream);
    const DeviceTensor pages(pages_.view(), stream), blocks(blocks_.view(), stream);
    const DeviceTensor selected(selected_.view(), stream), table(table_.view(), stream);
    const DeviceTensor sink(sink_.view(), stream);
    const DeviceTensor positions(host.positions, stream), sequence(host.row_sequence, stream);
    const DeviceTensor start(host.sequence_start, stream), slot(host.sequence_slot, stream);
    const DeviceTensor block_table(host.block_table, stream);
    const DeviceTensor window_table(host.window_table, stream);
    const DeviceTensor first_page(host.window_first_page, stream);
    const DeviceTensor window_begin(host.window_begin, stream);
    const DeviceTensor out(DType::kBf16, {rows(), shape_.heads * shape_.dim}, stream);
    const BatchLayout layout = {positions.view(),  sequence.view(),    start.view(),
                                slot.view(),       block_table.view(), window_table.view(),
                                first_page.view(), window_begin.view()};
    const Status status =
        SparseAttention(Args(q.view(), window.view(), pages.view(), blocks.view(), selected.view(),
                             layout, sink.view(), table.view(), out.view()),
                        stream);
    EXPECT_TRUE(status.has_value()) << status.error().message;
    const Status done = stream.Synchronize();
    EXPECT_TRUE(done.has_value()) << done.error().message;
    return Collect(out.Download(stream));
  }

 private:
  static std::vector<Chunk> Slots(std::vector<Chunk> chunks) {
    for (size_t i = 0; i < chunks.size(); ++i)
      chunks[i].slot = static_cast<int64_t>(chunks.size() - 1 - i);
    return chunks;
  }
  static std::vector<float> Vector(uint64_t what, int id, int64_t position, int64_t count) {
    Random random(what, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    std::vector<float> x(static_cast<size_t>(count));
    for (float& value : x) value = RoundToBf16(random.Normal());
    // Groups of different size, so that a wrong scale shows.
    for (size_t i = 0; i < x.size(); ++i) x[i] *= i / 16 % 3 == 0 ? 0.25f : 1.0f;
    return x;
  }
  void WindowRecord(int id, int64_t position, uint8_t* record) const {
    const std::vector<float> x = Vector(1, id, position, shape_.dim);
    std::vector<uint8_t> packed(static_cast<size_t>(Q8RecordBytes(shape_.dim)));
    EncodeQ8Record(x.data(), shape_.dim, packed.data());
    if (!options_.window_bf16) {
      std::copy(packed.begin(), packed.end(), record);
      return;
    }
    std::vector<float> grid(x.size());
    DecodeQ8Record(packed.data(), shape_.dim, grid.data());
    EncodeBf16Record(grid.data(), shape_.dim, record);
  }
  void KvRecord(int id, int64_t entry, uint8_t* record) const {
    const std::vector<float> x = Vector(2, id, entry, shape_.dim);
    std::vector<uint8_t> packed(static_cast<size_t>(Q4ERecordBytes(shape_.dim)));
    EncodeQ4ERecord(x.data(), shape_.dim, options_.numerics, packed.data());
    if (!options_.kv_bf16) {
      std::copy(packed.begin(), packed.end(), record);
      return;
    }
    std::vector<float> grid(x.size());
    DecodeQ4ERecord(packed.data(), shape_.dim, grid.data());
    EncodeBf16Record(grid.data(), shape_.dim, record);
  }
  void FillRow(int64_t r) {
    const int id = layout_.chunk_of(r).id;
    const int64_t position = layout_.position(r);
    const std::vector<float> q = Vector(3, id, position, shape_.heads * shape_.dim);
    for (size_t i = 0; i < q.size(); ++i) q_.Row<Bf16>(r)[i] = F32ToBf16(3.0f * q[i]);
    WindowRecord(id, position, window_.Row<uint8_t>(r));
    for (int64_t i = 0; i < shape_.pairs; ++i) {
      const float angle = static_cast<float>(position) * std::pow(0.5f, static_cast<float>(i));
      table_.Row<float>(r)[2 * i] = std::cos(angle);
      table_.Row<float>(r)[2 * i + 1] = std::sin(angle);
    }
    // A random ascending subset of the visible entries, then -1.
    Random random(4, static_cast<uint64_t>(id), static_cast<uint64_t>(position));
    const int64_t visible = std::min<int64_t>(position + 1, kBlocksPerSequence * kEntriesPerBlock);
    const int64_t wanted = std::min(visible, shape_.topk);
    int32_t* selected = selected_.Row<int32_t>(r);
    int64_t count = 0;
    for (int64_t j = 0; j < visible; ++j) {
      if (random.Below(visible - j) < wanted - count) selected[count++] = static_cast<int32_t>(j);
    }
    std::fill(selected + count, selected + shape_.topk, -1);
  }
  SparseAttentionArgs Args(const TensorView& q, const TensorView& window, const TensorView& pages,
                           const TensorView& blocks, const TensorView& selected,
                           const BatchLayout& layout, const TensorView& sink,
                           const TensorView& table, const TensorView& out) const {
    SparseAttentionArgs args;
    args.q = q;
    args.rotate_q = options_.rotate_q;
    args.window_records = window;
    args.window_pages = pages;
    args.window = shape_.window;
    args.block_rows = options_.block_rows;
    if (options_.compressed) {
      args.kv_blocks = blocks;
      args.selected = selected;
    }
    args.layout = layout;
    args.sink = sink;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim));
    args.table = table;
    args.out = out;
    args.numerics = options_.numerics;
    return args;
  }
  Outputs Collect(const OwnedTensor& out) const {
    Outputs outputs;
    for (int64_t r = 0; r < layout_.rows(); ++r) {
      const auto* begin = &out.Row<Bf16>(r)->bits;
      outputs[{layout_.chunk_of(r).id, layout_.position(r)}] = {begin,
                                                                begin + shape_.heads * shape_.dim};
    }
    return outputs;
  }

  Shape shape_;
  Options options_;
  TestLayout layout_;
  OwnedTensor q_, window_, pages_, blocks_, selected_, table_, sink_;
};

// The order of fp32 sums and the exponential (relative 1e-6), and where one of these crosses a
// rounding of p to bf16 (2^-9 of one term of the sum), are all that differs. So an element may land
// on the neighbouring point of the E4M3 or bf16 grid, or near zero be off by a part of the largest
// value; and rarely. The reference profile rounds before it rotates back, so there an element moves
// with the other one of its pair.
void ExpectClose(const Shape& shape, const Outputs& expected, const Outputs& actual,
                 Numerics numerics) {
  int64_t different = 0;
  int64_t total = 0;
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [key, row] : expected) {
    const std::vector<uint16_t>& other = actual.at(key);
    float largest = 0.0f;
    for (uint16_t bits : row) largest = std::max(largest, std::fabs(Bf16ToF32(Bf16{bits})));
    for (size_t i = 0; i < row.size(); ++i) {
      const float a = Bf16ToF32(Bf16{row[i]});
      const float b = Bf16ToF32(Bf16{other[i]});
      const bool rotated = static_cast<int64_t>(i) % shape.dim >= shape.dim - 2 * shape.pairs;
      const float rounded = rotated ? std::hypot(a, Bf16ToF32(Bf16{row[i ^ 1]})) : std::fabs(a);
      const float step = (numerics == Numerics::kProduction ? std::fabs(a) / 8 : rounded / 128) +
                         largest * 0x1p-10f;
      ASSERT_NEAR(a, b, step) << "sequence " << key.first << " position " << key.second
                              << " element " << i;
      different += row[i] != other[i];
      ++total;
    }
  }
  EXPECT_LT(static_cast<double>(different), 0.05 * static_cast<double>(total) + 1);
}

TEST_F(SparseAttentionCudaTest, SmallShapesMatchTheCpuInBothProfilesAndAllRecordFormats) {
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (bool compressed : {false, true}) {
      for (int formats = 0; formats < 4; ++formats) {
        const Options options = {compressed, numerics, (formats & 1) != 0, (formats & 2) != 0,
                                 formats == 1};
        for (const auto& [shape, chunks] : std::vector<std::pair<Shape, std::vector<Chunk>>>{
                 {kTiny, {{1, 0, 1}, {2, 5, 9}, {3, 40, 3}, {4, 127, 4}}},
                 {kOdd, {{1, 0, 2}, {2, 90, 5}}}}) {
          AttentionCase test(shape, chunks, options);
          ExpectClose(test.shape(), test.RunCpu(cpu_stream()), test.RunCuda(stream()), numerics);
        }
      }
    }
  }
}

TEST_F(SparseAttentionCudaTest, RowsOfTheModelMatchTheCpu) {
  // Lists of one key, whole blocks of 64, remainders, window and selection in one block, pages that
  // end inside the window.
  AttentionCase test(kReal, {{1, 0, 1}, {2, 63, 1}, {3, 99, 2}, {4, 700, 1}});
  ExpectClose(test.shape(), test.RunCpu(cpu_stream()), test.RunCuda(stream()),
              Numerics::kProduction);
}

TEST_F(SparseAttentionCudaTest, QueriesOfTheModelAreRotated) {
  AttentionCase test(kReal, {{1, 37, 2}}, {.rotate_q = true});
  ExpectClose(test.shape(), test.RunCpu(cpu_stream()), test.RunCuda(stream()),
              Numerics::kProduction);
}

TEST_F(SparseAttentionCudaTest, WindowsOfTheModelAloneAndBf16RecordsMatchTheCpu) {
  AttentionCase window(kReal, {{1, 130, 1}}, {.compressed = false});
  ExpectClose(window.shape(), window.RunCpu(cpu_stream()), window.RunCuda(stream()),
              Numerics::kProduction);
  const Options reference = {true, Numerics::kReference, true, true, true};
  AttentionCase bf16(kReal, {{1, 70, 1}}, reference);
  ExpectClose(bf16.shape(), bf16.RunCpu(cpu_stream()), bf16.RunCuda(stream()),
              Numerics::kReference);
}

TEST_F(SparseAttentionCudaTest, HeadCountsThatAreNoMultipleOf64MatchTheCpu) {
  for (int64_t heads : {8, 72}) {
    AttentionCase test({heads, 512, 32, 16, 20}, {{1, 30, 2}}, {.rotate_q = true});
    ExpectClose(test.shape(), test.RunCpu(cpu_stream()), test.RunCuda(stream()),
                Numerics::kProduction);
  }
}

TEST_F(SparseAttentionCudaTest, LongListsOfTheModelMatchTheCpu) {
  DI_DEVICE_ONLY();
  if (IsSkipped()) return;
  for (Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (bool bf16 : {false, true}) {
      AttentionCase test(kReal, {{1, 0, 3}, {2, 400, 5}, {3, 700, 20}, {4, 1300, 150}},
                         {true, numerics, bf16, bf16, true});
      ExpectClose(test.shape(), test.RunCpu(cpu_stream()), test.RunCuda(stream()), numerics);
    }
  }
  AttentionCase mixed(kReal, {{1, 100, 2}, {2, 700, 2}},
                      {true, Numerics::kProduction, true, false, true});
  ExpectClose(mixed.shape(), mixed.RunCpu(cpu_stream()), mixed.RunCuda(stream()),
              Numerics::kProduction);
}

TEST_F(SparseAttentionCudaTest, ARowHasTheSameBitsAloneAndInAnyBatch) {
  for (Shape shape : {kTiny, kOdd}) {
    const std::vector<Chunk> batch = {{1, 0, 4}, {2, 130, 1}, {3, 77, 6}};
    const Outputs expected = AttentionCase(shape, batch).RunCuda(stream());
    for (const auto& [key, row] : expected) {
      const Outputs alone = AttentionCase(shape, {{key.first, key.second, 1}}).RunCuda(stream());
      EXPECT_EQ(alone.at(key), row) << "alone, position " << key.second;
    }
    const Outputs reversed = AttentionCase(shape, {batch[2], batch[1], batch[0]}).RunCuda(stream());
    EXPECT_EQ(reversed, expected);
  }
}

TEST_F(SparseAttentionCudaTest, ARowOfTheModelHasTheSameBitsAloneAndInAnyBatch) {
  const Options options = {.rotate_q = true};
  // Batches of up to 15 rows and larger ones are the work of different kernels. The emulation runs
  // mostly short lists.
  const std::vector<Chunk> batch =
      testing::OnRealDevice()
          ? std::vector<Chunk>{{1, 0, 40}, {2, 700, 3}, {3, 1000, 1}, {4, 433, 156}}
          : std::vector<Chunk>{{1, 0, 16}, {2, 90, 1}, {3, 299, 2}};
  const Outputs expected = AttentionCase(kReal, batch, options).RunCuda(stream());
  // Repetition: a race would show.
  EXPECT_EQ(AttentionCase(kReal, batch, options).RunCuda(stream()), expected);
  int index = 0;
  for (const auto& [key, row] : expected) {
    if (index++ % 7 != 0 && key.second < 90) continue;
    for (int64_t count : {1, 2, 9, 20, 33, 140}) {
      if (count > 2 && !testing::OnRealDevice()) break;
      // The row as the last of `count` rows, as far as its sequence reaches back.
      const int64_t first = std::max<int64_t>(0, key.second - count + 1);
      const Outputs other =
          AttentionCase(kReal, {{key.first, first, key.second - first + 1}}, options)
              .RunCuda(stream());
      ASSERT_EQ(other.at(key), row)
          << "sequence " << key.first << " position " << key.second << " with " << count << " rows";
    }
  }
}

TEST_F(SparseAttentionCudaTest, EveryKernelOfTheModelGivesTheSameBits) {
  const cuda::SparseAttentionChoices choices = cuda::sparse_attention_choices;
  // Lists of the largest size, of whole and of broken blocks of 64 keys, short ones; windows alone.
  for (bool compressed : {true, false}) {
    for (bool bf16 : {false, true}) {
      AttentionCase test(kReal, {{1, 0, 1}, {2, 30, 1}, {3, 255, 1}, {4, 431, 1}, {5, 700, 2}},
                         {compressed, Numerics::kProduction, bf16, bf16, true});
      cuda::sparse_attention_choices = {.few_rows = 0, .push_probabilities = false};
      const Outputs expected = test.RunCuda(stream());
      for (bool push : {false, true}) {
        cuda::sparse_attention_choices = {.few_rows = 15, .push_probabilities = push};
        EXPECT_EQ(test.RunCuda(stream()), expected)
            << "compressed " << compressed << " bf16 " << bf16 << " push " << push;
      }
    }
  }
  cuda::sparse_attention_choices = choices;
}

TEST_F(SparseAttentionCudaTest, ChunkBoundariesDoNotChangeBits) {
  for (bool compressed : {false, true}) {
    const Options options = {.compressed = compressed};
    const Outputs whole = AttentionCase(kTiny, {{9, 0, 33}}, options).RunCuda(stream());
    for (int64_t cut = 1; cut < 33; cut += 5) {
      Outputs parts = AttentionCase(kTiny, {{9, 0, cut}}, options).RunCuda(stream());
      parts.merge(AttentionCase(kTiny, {{9, cut, 33 - cut}}, options).RunCuda(stream()));
      EXPECT_EQ(parts, whole) << "cut at " << cut;
    }
  }
}

TEST_F(SparseAttentionCudaTest, TheWindowEndsWhereItIsSaidToBegin) {
  // Rows at 20 ... 25 with keys from 23 on only; those before are poisoned. A row without any key
  // is zero.
  for (Shape shape : {kTiny, Shape{64, 512, 32, 8, 16}}) {
    for (bool compressed : {false, true}) {
      const Options options = {.compressed = compressed};
      AttentionCase clean(shape, {{9, 20, 6}}, options);
      clean.layout().set_window_begin(0, 23);
      const Outputs expected = clean.RunCuda(stream());
      ExpectClose(clean.shape(), clean.RunCpu(cpu_stream()), expected, Numerics::kProduction);
      AttentionCase poisoned(shape, {{9, 20, 6}}, options);
      poisoned.layout().set_window_begin(0, 23);
      std::memset(poisoned.pages().view().data(), 0xff,
                  static_cast<size_t>(poisoned.pages().bytes()));
      std::memset(poisoned.window().Row<uint8_t>(0), 0xff,
                  static_cast<size_t>(3 * Q8RecordBytes(shape.dim)));
      EXPECT_EQ(poisoned.RunCuda(stream()), expected);
      if (compressed) continue;
      for (uint16_t bits : expected.at({9, 22})) ASSERT_EQ(bits & 0x7fff, 0);
    }
  }
}

TEST_F(SparseAttentionCudaTest, BlocksMatchTheCpuAndHaveTheSameBitsAlone) {
  for (const auto& [shape, rows] :
       std::vector<std::pair<Shape, int64_t>>{{kTiny, 3}, {kOdd, 5}, {kReal, 5}}) {
    const Options options = {.compressed = false, .rotate_q = true, .block_rows = rows};
    // More than 16 rows of the model are the work of another kernel than one block.
    const std::vector<Chunk> batch = {
        {1, 1, rows}, {2, shape.window + 1, rows}, {3, 0, rows}, {4, 3 * shape.window, rows}};
    AttentionCase test(shape, batch, options);
    const Outputs expected = test.RunCuda(stream());
    ExpectClose(test.shape(), test.RunCpu(cpu_stream()), expected, Numerics::kProduction);
    for (const Chunk& chunk : batch) {
      for (const auto& [key, row] : AttentionCase(shape, {chunk}, options).RunCuda(stream()))
        EXPECT_EQ(expected.at(key), row) << "alone, position " << key.second;
    }
  }
}

TEST_F(SparseAttentionCudaTest, HugeScoresAndSinksStayFinite) {
  for (Shape shape : {kTiny, Shape{64, 512, 32, 8, 16}}) {
    for (float sink : {-1e30f, 200.0f, 1e30f}) {
      AttentionCase test(shape, {{1, 30, 1}});
      for (int64_t i = 0; i < shape.heads * shape.dim; ++i)
        test.q().Row<Bf16>(0)[i] = F32ToBf16(i % 2 == 0 ? 3e4f : -2e4f);
      for (int64_t h = 0; h < shape.heads; ++h) test.sink().Row<float>(h)[0] = sink;
      const std::vector<uint16_t> row = test.RunCuda(stream()).begin()->second;
      for (size_t i = 0; i < row.size(); ++i)
        ASSERT_TRUE(std::isfinite(Bf16ToF32(Bf16{row[i]})))
            << "element " << i << ", sink " << sink << " bits " << row[i];
    }
  }
}

TEST_F(SparseAttentionCudaTest, ANanInOneQueryHeadStaysInThatHead) {
  for (Shape shape : {kTiny, Shape{64, 512, 32, 8, 16}}) {
    AttentionCase test(shape, {{1, 30, 1}});
    const std::vector<uint16_t> clean = test.RunCuda(stream()).begin()->second;
    test.q().Row<Bf16>(0)[2 * shape.dim + 5] = Bf16{0x7fc0};
    const std::vector<uint16_t> dirty = test.RunCuda(stream()).begin()->second;
    for (size_t i = 0; i < clean.size(); ++i) {
      if (static_cast<int64_t>(i) / shape.dim == 2) {
        ASSERT_TRUE(std::isnan(Bf16ToF32(Bf16{dirty[i]}))) << i;
      } else {
        ASSERT_EQ(clean[i], dirty[i]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace deepinfer
