// Times sparse attention on a GPU: decode batches of several sizes and prefill, with 128 window
// keys and 512 selected keys or the window alone. Records are read from pools of 2 GB in random
// order. A graph runs the operation over as many sets of inputs as hold four times the L2, so that
// every call finds its records and queries in memory; the time of a call is that of a replay over
// the calls in it, of which the median, the least and the 90th percentile are printed.
//
// Few rows are timed with every kernel that can take them (SparseAttentionChoices).
//
// Usage: attention_cuda_bench [substring of a case's name]
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ops/op_test_util.h"
#include "ops/quantize/group_quantize.h"
#include "ops/sparse_attention/sparse_attention_impl.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

constexpr int64_t kHeads = 64;
constexpr int64_t kDim = 512;
constexpr int64_t kPairs = 32;
constexpr int64_t kWindow = 128;
constexpr int64_t kTopk = 512;
constexpr int64_t kPageRows = 128;
constexpr int64_t kEntriesPerBlock = 128;
constexpr int64_t kPoolBytes = int64_t{2} << 30;
constexpr double kMatrixPeak = 790e12;  // bf16 FLOP/s, what the library reaches on an H200
constexpr int64_t kColdBytes = int64_t{256} << 20;

template <class T>
T Must(Result<T> result) {
  if (!result.has_value()) {
    fmt::print(stderr, "{}\n", result.error().message);
    std::exit(1);
  }
  return std::move(*result);
}
void Must(const Status& status) {
  if (status.has_value()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::exit(1);
}

class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(Stream& stream, DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    buffer_ = Must(Buffer::Allocate(stream.device(), extent.num_elements() * DTypeBytes(dtype)));
    view_ = buffer_.View(dtype, shape);
  }
  // Repeats `bytes` until the array is full.
  void Fill(Stream& stream, const std::vector<uint8_t>& bytes) {
    const int64_t total = view_.num_elements() * DTypeBytes(view_.dtype());
    for (int64_t at = 0; at < total; at += std::ssize(bytes)) {
      Must(cuda::CopyToDevice(bytes.data(), static_cast<uint8_t*>(view_.data()) + at,
                              std::min<int64_t>(std::ssize(bytes), total - at),
                              stream.cuda_stream()));
    }
  }
  template <class T>
  void Set(Stream& stream, const std::vector<T>& values) {
    Must(cuda::CopyToDevice(values.data(), view_.data(),
                            std::ssize(values) * static_cast<int64_t>(sizeof(T)),
                            stream.cuda_stream()));
  }
  const TensorView& view() const {
    return view_;
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

struct Case {
  std::string name;
  int64_t sequences;
  int64_t rows_per_sequence;
  int64_t entries;          // of a sequence; 0: window only
  std::string wanted = {};  // floor and target
};

// The pools that all cases read from.
struct Pools {
  DeviceArray pages;
  DeviceArray blocks;
};

std::vector<uint8_t> RandomRecords(int64_t count, bool window) {
  const int64_t bytes = window ? Q8RecordBytes(kDim) : Q4ERecordBytes(kDim);
  std::vector<uint8_t> records(static_cast<size_t>(count * bytes));
  std::vector<float> x(kDim);
  testing::Random random(window ? 1 : 2);
  for (int64_t i = 0; i < count; ++i) {
    for (float& value : x) value = random.Normal();
    uint8_t* record = records.data() + i * bytes;
    if (window) {
      EncodeQ8Record(x.data(), kDim, record);
    } else {
      EncodeQ4ERecord(x.data(), kDim, Numerics::kProduction, record);
    }
  }
  return records;
}

// One call's inputs.
class Inputs {
 public:
  Inputs(Stream& stream, const Case& c, const Pools& pools, uint64_t seed) {
    const int64_t rows = c.sequences * c.rows_per_sequence;
    testing::Random random(seed);
    std::vector<int32_t> positions, row_sequence, start, slot, first_page, begin, window_table;
    const int64_t pages = c.rows_per_sequence / kPageRows + 2;
    // Steps begin in the middle of a page, a window behind the first position.
    const int64_t first_position = 4 * kPageRows + 64;
    for (int64_t s = 0; s < c.sequences; ++s) {
      start.push_back(static_cast<int32_t>(s * c.rows_per_sequence));
      slot.push_back(static_cast<int32_t>(s));
      first_page.push_back(3);
      begin.push_back(0);
      for (int64_t i = 0; i < c.rows_per_sequence; ++i) {
        positions.push_back(static_cast<int32_t>(first_position + i));
        row_sequence.push_back(static_cast<int32_t>(s));
      }
      for (int64_t i = 0; i < pages; ++i)
        window_table.push_back(static_cast<int32_t>(random.Below(pools.pages.view().dim(0))));
    }
    start.push_back(static_cast<int32_t>(rows));
    const int64_t blocks = std::max<int64_t>(1, c.entries / kEntriesPerBlock);
    std::vector<int32_t> block_table(static_cast<size_t>(c.sequences * blocks));
    for (int32_t& block : block_table)
      block = static_cast<int32_t>(random.Below(pools.blocks.view().dim(0)));
    Make(stream, positions_, positions, {rows});
    Make(stream, row_sequence_, row_sequence, {rows});
    Make(stream, start_, start, {c.sequences + 1});
    Make(stream, slot_, slot, {c.sequences});
    Make(stream, first_page_, first_page, {c.sequences});
    Make(stream, begin_, begin, {c.sequences});
    Make(stream, window_table_, window_table, {c.sequences, pages});
    Make(stream, block_table_, block_table, {c.sequences, blocks});
    if (c.entries > 0) {
      std::vector<int32_t> selected;
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<int32_t> list(kTopk);
        for (int32_t& entry : list) entry = static_cast<int32_t>(random.Below(c.entries));
        std::sort(list.begin(), list.end());
        selected.insert(selected.end(), list.begin(), list.end());
      }
      Make(stream, selected_, selected, {rows, kTopk});
    }
    static const std::vector<uint8_t> q = [] {
      testing::Random values(7);
      std::vector<uint8_t> bytes(1 << 20);
      for (size_t i = 0; i < bytes.size(); i += 2) {
        const Bf16 value = F32ToBf16(values.Normal());
        std::memcpy(bytes.data() + i, &value, 2);
      }
      return bytes;
    }();
    q_ = DeviceArray(stream, DType::kBf16, {rows, kHeads, kDim});
    q_.Fill(stream, q);
    window_ = DeviceArray(stream, DType::kU8, {rows, Q8RecordBytes(kDim)});
    window_.Fill(stream, RandomRecords(16, true));
    std::vector<float> table;
    for (int64_t i = 0; i < kPairs; ++i) {
      table.push_back(std::cos(static_cast<float>(i)));
      table.push_back(std::sin(static_cast<float>(i)));
    }
    std::vector<uint8_t> table_bytes(table.size() * 4);
    std::memcpy(table_bytes.data(), table.data(), table_bytes.size());
    table_ = DeviceArray(stream, DType::kF32, {rows, kPairs, 2});
    table_.Fill(stream, table_bytes);
    sink_ = DeviceArray(stream, DType::kF32, {kHeads});
    sink_.Set(stream, std::vector<float>(kHeads, 0.5f));
    out_ = DeviceArray(stream, DType::kBf16, {rows, kHeads * kDim});
    args_.q = q_.view();
    args_.rotate_q = true;
    args_.window_records = window_.view();
    args_.window_pages = pools.pages.view();
    args_.window = kWindow;
    if (c.entries > 0) {
      args_.kv_blocks = pools.blocks.view();
      args_.selected = selected_.view();
    }
    args_.layout = {positions_.view(),   row_sequence_.view(), start_.view(),      slot_.view(),
                    block_table_.view(), window_table_.view(), first_page_.view(), begin_.view()};
    args_.sink = sink_.view();
    args_.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    args_.table = table_.view();
    args_.out = out_.view();
    Must(stream.Synchronize());
  }
  const SparseAttentionArgs& args() const {
    return args_;
  }

 private:
  static void Make(Stream& stream, DeviceArray& array, const std::vector<int32_t>& values,
                   std::initializer_list<int64_t> shape) {
    array = DeviceArray(stream, DType::kI32, shape);
    array.Set(stream, values);
  }

  DeviceArray positions_, row_sequence_, start_, slot_, first_page_, begin_, window_table_,
      block_table_, selected_, q_, window_, table_, sink_, out_;
  SparseAttentionArgs args_;
};

void TimeCase(Stream& stream, const Case& c, const std::vector<std::unique_ptr<Inputs>>& inputs) {
  const int64_t rows = c.sequences * c.rows_per_sequence;
  const int64_t keys = kWindow + (c.entries > 0 ? kTopk : 0);
  const auto sets = std::ssize(inputs);
  for (int i = 0; i < 2; ++i) Must(SparseAttention(inputs[0]->args(), stream));
  Must(stream.Synchronize());
  Must(cuda::BeginCapture(stream.cuda_stream()));
  for (const auto& input : inputs) Must(SparseAttention(input->args(), stream));
  void* graph = Must(cuda::EndCapture(stream.cuda_stream()));
  void* begin = Must(cuda::CreateEvent(stream.device().index));
  void* end = Must(cuda::CreateEvent(stream.device().index));
  std::vector<double> us;
  for (int i = 0; i < 34; ++i) {
    Must(cuda::RecordEvent(begin, stream.cuda_stream()));
    Must(cuda::LaunchGraph(graph, stream.cuda_stream()));
    Must(cuda::RecordEvent(end, stream.cuda_stream()));
    Must(cuda::SynchronizeEvent(end));
    const double total = Must(cuda::ElapsedMilliseconds(begin, end)) * 1e3;
    if (i >= 3) us.push_back(total / static_cast<double>(sets));
  }
  std::sort(us.begin(), us.end());
  const double median = us[us.size() / 2];
  const double flops = 4.0 * kHeads * kDim * static_cast<double>(keys * rows);
  fmt::print(
      "{:<28} {:>5} rows {:>4} keys {:>9.2f} us (min {:.2f}, p90 {:.2f}, {} sets) {:>7.1f} "
      "TFLOP/s {:>5.1f} %  {}\n",
      c.name, rows, keys, median, us[0], us[us.size() * 9 / 10], sets, flops / median * 1e-6,
      100.0 * flops / (median * 1e-6) / kMatrixPeak, c.wanted);
  std::fflush(stdout);
  cuda::DestroyGraph(graph);
  cuda::DestroyEvent(begin);
  cuda::DestroyEvent(end);
}

void RunCase(Stream& stream, const Case& c, const Pools& pools) {
  const int64_t rows = c.sequences * c.rows_per_sequence;
  const int64_t keys = kWindow + (c.entries > 0 ? kTopk : 0);
  const int64_t row_bytes =
      kHeads * kDim * 2 + kWindow * Q8RecordBytes(kDim) + (keys - kWindow) * Q4ERecordBytes(kDim);
  const int64_t sets = std::clamp<int64_t>(kColdBytes / (rows * row_bytes), 2, 128);
  std::vector<std::unique_ptr<Inputs>> inputs;
  for (int64_t i = 0; i < sets; ++i)
    inputs.push_back(std::make_unique<Inputs>(stream, c, pools, static_cast<uint64_t>(100 + i)));
  TimeCase(stream, c, inputs);
  if (rows > 32) return;
  const std::pair<const char*, cuda::SparseAttentionChoices> kernels[] = {
      {"clusters, by L2", {.few_rows = 32, .push_probabilities = false}},
      {"clusters, pushed", {.few_rows = 32, .push_probabilities = true}},
      {"a block per row", {.few_rows = 0}}};
  const cuda::SparseAttentionChoices choices = cuda::sparse_attention_choices;
  for (const auto& [name, kernel] : kernels) {
    Case with = c;
    with.name = fmt::format("  {}", name);
    cuda::sparse_attention_choices = kernel;
    TimeCase(stream, with, inputs);
  }
  cuda::sparse_attention_choices = choices;
}

int Main(const std::string& filter) {
  auto stream = Must(Stream::CreateCuda(0, 1));
  Pools pools;
  pools.pages =
      DeviceArray(*stream, DType::kU8,
                  {kPoolBytes / (kPageRows * Q8RecordBytes(kDim)), kPageRows, Q8RecordBytes(kDim)});
  pools.pages.Fill(*stream, RandomRecords(8192, true));
  pools.blocks = DeviceArray(*stream, DType::kU8,
                             {kPoolBytes / (kEntriesPerBlock * Q4ERecordBytes(kDim)),
                              kEntriesPerBlock, Q4ERecordBytes(kDim)});
  pools.blocks.Fill(*stream, RandomRecords(8192, false));
  constexpr int64_t kContext = 65536;
  std::vector<Case> cases;
  const std::string few = "(floor 12, target 9 us)";
  const std::string many = "(floor 33, target 45 %)";
  for (int64_t rows : {1, 2, 8, 9, 15, 16, 24, 32, 64, 128, 132, 256}) {
    cases.push_back({"decode", rows, 1, kContext,
                     rows <= 8     ? few
                     : rows == 64  ? "(target 30 us)"
                     : rows >= 132 ? many
                                   : ""});
  }
  cases.push_back({"verify 1 x 6", 1, 6, kContext, few});
  cases.push_back({"verify 32 x 6", 32, 6, kContext, many});
  for (int64_t rows : {1, 128, 256}) cases.push_back({"window only", rows, 1, 0});
  cases.push_back({"prefill, window only", 1, 4096, 0, "(target 45 %)"});
  cases.push_back({"replay", 1, 140, kContext, "(target 35 us)"});
  cases.push_back({"prefill, 32 K entries", 1, 4096, 32768, "(target 72 %)"});
  cases.push_back({"prefill, 6 M entries", 1, 4096, int64_t{6} << 20, "(floor 60, target 66 %)"});
  for (const Case& c : cases) {
    if (c.name.find(filter) != std::string::npos) RunCase(*stream, c, pools);
  }
  return 0;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  return deepinfer::Main(argc > 1 ? argv[1] : "");
}
