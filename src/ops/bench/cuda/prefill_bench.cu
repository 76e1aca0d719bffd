// Times the linears of the model on a GPU for many rows (ops/linear/linear_prefill.h): routed
// experts and the dense projections of a layer, beside cuBLASLt in bf16 on the same product. A case
// is a graph of calls on different weights (together more than four times the L2 where that fits),
// replayed; the figure is the median over replays, divided by the calls in the graph. Printed
// beside it: FLOPs over time, as a share of the 8192^3 product in bf16 of the same run, and the
// relative difference from cuBLASLt's result on the dequantised weight.
//
//   prefill_cuda_bench [part of a case's name; those of experts begin with "experts"] [variants]
//
// "variants" times every tile and, where K has several segments, both ways to add them, instead of
// the choice by shape.
//
// A busy H200 is limited by power, so rates depend on what ran before.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/ceil_div.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_prefill.h"
#include "ops/linear/linear_test_util.h"
#include "ops/moe/moe.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/float_formats.h"

namespace deepinfer::cuda {
namespace {

using deepinfer::testing::RandomWeight;
using deepinfer::testing::StoredWeight;

constexpr int64_t kRotatedBytes = int64_t{240} << 20;
constexpr int64_t kCublasWorkspace = int64_t{64} << 20;
constexpr int64_t kCheckedRows = 48;
constexpr double kBytesPerMicrosecond = 4.3e6;

template <class T>
T Must(Result<T> result) {
  if (!result.has_value()) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(1);
  }
  return std::move(*result);
}
void Must(const Status& status) {
  if (status.has_value()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}
void Must(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuBLASLt failed: %d\n", static_cast<int>(status));
  std::exit(1);
}

// A device tensor with its memory.
struct DeviceTensor {
  Buffer buffer;
  TensorView view;
};

// y[rows, n] = x[rows, k] * w[n, k]^T, `batch` of them side by side in x's and y's columns.
class CublasProduct {
 public:
  CublasProduct(cublasLtHandle_t handle, void* workspace, int64_t rows, int64_t n, int64_t k,
                int64_t batch = 1)
      : handle_(handle), workspace_(workspace) {
    Must(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    Must(cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                        sizeof(transposed)));
    const auto layout = [&](cublasLtMatrixLayout_t* result, int64_t inner, int64_t outer,
                            int64_t stride, int64_t batch_offset) {
      Must(cublasLtMatrixLayoutCreate(result, CUDA_R_16BF, static_cast<uint64_t>(inner),
                                      static_cast<uint64_t>(outer), stride));
      const auto count = static_cast<int32_t>(batch);
      Must(cublasLtMatrixLayoutSetAttribute(*result, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                            sizeof(count)));
      Must(cublasLtMatrixLayoutSetAttribute(*result, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                            &batch_offset, sizeof(batch_offset)));
    };
    layout(&w_, k, n, k, n * k);
    layout(&x_, k, rows, k * batch, k);
    layout(&y_, n, rows, n * batch, n);
    cublasLtMatmulPreference_t preference = nullptr;
    Must(cublasLtMatmulPreferenceCreate(&preference));
    const auto workspace_bytes = static_cast<size_t>(kCublasWorkspace);
    Must(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &workspace_bytes, sizeof(workspace_bytes)));
    int found = 0;
    Must(cublasLtMatmulAlgoGetHeuristic(handle_, operation_, w_, x_, y_, y_, preference, 1,
                                        &algorithm_, &found));
    Must(cublasLtMatmulPreferenceDestroy(preference));
    if (found == 0) Must(CUBLAS_STATUS_NOT_SUPPORTED);
  }
  ~CublasProduct() {
    cublasLtMatrixLayoutDestroy(w_);
    cublasLtMatrixLayoutDestroy(x_);
    cublasLtMatrixLayoutDestroy(y_);
    cublasLtMatmulDescDestroy(operation_);
  }
  CublasProduct(const CublasProduct&) = delete;
  CublasProduct& operator=(const CublasProduct&) = delete;

  void Run(const void* x, const void* w, void* y, Stream& stream) const {
    const float one = 1.0f;
    const float zero = 0.0f;
    Must(cublasLtMatmul(handle_, operation_, &one, w, w_, x, x_, &zero, y, y_, y, y_,
                        &algorithm_.algo, workspace_, static_cast<size_t>(kCublasWorkspace),
                        static_cast<cudaStream_t>(stream.cuda_stream())));
  }

 private:
  cublasLtHandle_t handle_;
  void* workspace_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t y_ = nullptr;
  cublasLtMatmulHeuristicResult_t algorithm_ = {};
};

// The weight as bf16, exactly.
std::vector<Bf16> Dequantise(const StoredWeight& stored) {
  const LinearSource& source = stored.source;
  std::vector<Bf16> values(static_cast<size_t>(source.n * source.k));
  for (int64_t i = 0; i < source.n; ++i) {
    for (int64_t j = 0; j < source.k; ++j) {
      Bf16& value = values[static_cast<size_t>(i * source.k + j)];
      if (source.format == WeightFormat::kBf16) {
        value = source.weight.Row<Bf16>(i)[j];
        continue;
      }
      const bool fp8 = source.format == WeightFormat::kFp8Block;
      const uint8_t* const codes = stored.weight.data() + i * (fp8 ? source.k : source.k / 2);
      const float code =
          fp8 ? E4M3ToF32(codes[j]) : E2M1ToF32((codes[j / 2] >> (4 * (j % 2))) & 15u);
      const int64_t scale_row = fp8 ? i / 32 : i;
      value = F32ToBf16(
          code *
          E8M0ToF32(stored.scale[static_cast<size_t>(scale_row * (source.k / 32) + j / 32)]));
    }
  }
  return values;
}

class Bench {
 public:
  Bench(Stream& stream, std::string filter, bool variants)
      : stream_(stream), filter_(std::move(filter)), variants_(variants) {
    Must(cublasLtCreate(&handle_));
    begin_ = Must(CreateEvent(0));
    end_ = Must(CreateEvent(0));
    workspace_ = Must(Buffer::Allocate(stream.device(), kCublasWorkspace));
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (int i = 0; i < (1 << 20); ++i) noise_.push_back(F32ToBf16(normal(random)));
    const int64_t size = 8192;
    const DeviceTensor x = Rows(size, size);
    const DeviceTensor w = Rows(size, size);
    const DeviceTensor y = Empty(DType::kBf16, size, size);
    const CublasProduct product(handle_, workspace_.data(), size, size, size);
    const double us = Median(
        1, [&](int64_t) { product.Run(x.view.data(), w.view.data(), y.view.data(), stream); });
    peak_ = 2.0 * static_cast<double>(size * size * size) / us;
    std::printf("cuBLASLt bf16 8192^3: %.1f TFLOP/s\n\n", peak_ * 1e-6);
    std::printf("%-34s %10s %8s %7s | %10s %8s %7s | %9s %s\n", "case", "us", "TFLOP/s", "%",
                "cuBLAS us", "TFLOP/s", "%", "bound us", "difference");
  }
  ~Bench() {
    cublasLtDestroy(handle_);
    DestroyEvent(begin_);
    DestroyEvent(end_);
  }

  bool Wants(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }
  bool WantsExperts() const {
    return filter_.starts_with("experts") || filter_.empty();
  }
  DeviceTensor Empty(DType dtype, int64_t rows, int64_t columns) {
    DeviceTensor tensor;
    tensor.buffer = Must(Buffer::Allocate(stream_.device(), rows * columns * DTypeBytes(dtype)));
    tensor.view = tensor.buffer.View(dtype, {rows, columns});
    Must(FillBytes(tensor.view.data(), 0xff, tensor.buffer.bytes(), stream_.cuda_stream()));
    return tensor;
  }
  DeviceTensor Copy(const TensorView& host) {
    DeviceTensor tensor;
    tensor.buffer =
        Must(Buffer::Allocate(stream_.device(), host.num_elements() * DTypeBytes(host.dtype())));
    tensor.view = host.rank() == 1 ? tensor.buffer.View(host.dtype(), {host.dim(0)})
                                   : tensor.buffer.View(host.dtype(), {host.dim(0), host.dim(1)});
    Must(CopyToDevice(host.data(), tensor.view, stream_));
    Must(stream_.Synchronize());
    return tensor;
  }
  // Normally distributed numbers.
  DeviceTensor Rows(int64_t rows, int64_t columns) {
    DeviceTensor tensor = Empty(DType::kBf16, rows, columns);
    const int64_t bytes = tensor.buffer.bytes();
    const auto block = static_cast<int64_t>(2 * noise_.size());
    for (int64_t at = 0; at < bytes; at += block)
      Must(CopyToDevice(noise_.data(), static_cast<char*>(tensor.view.data()) + at,
                        std::min(block, bytes - at), stream_.cuda_stream()));
    Must(stream_.Synchronize());
    return tensor;
  }
  std::vector<LinearWeight> Pack(const StoredWeight& stored, int64_t copies) {
    const std::vector<LinearSource> sources(static_cast<size_t>(copies), stored.source);
    return Must(PackLinearStack(sources, stream_));
  }
  CublasProduct Cublas(int64_t rows, int64_t n, int64_t k, int64_t batch = 1) {
    return CublasProduct(handle_, workspace_.data(), rows, n, k, batch);
  }

  // Microseconds per call of a graph of `calls` calls.
  double Median(int64_t calls, const std::function<void(int64_t)>& call) {
    void* const cuda_stream = stream_.cuda_stream();
    call(0);
    Must(stream_.Synchronize());
    Must(BeginCapture(cuda_stream));
    for (int64_t i = 0; i < calls; ++i) call(i);
    void* const graph = Must(EndCapture(cuda_stream));
    std::vector<double> times;
    double total = 0.0;
    for (int i = 0; i < 5 + 30; ++i) {
      Must(RecordEvent(begin_, cuda_stream));
      Must(LaunchGraph(graph, cuda_stream));
      Must(RecordEvent(end_, cuda_stream));
      Must(stream_.Synchronize());
      const double us = 1e3 * Must(ElapsedMilliseconds(begin_, end_));
      if (i >= 5) times.push_back(us / static_cast<double>(calls));
      total += us;
      if (total > 400e3 && times.size() >= 9) break;
    }
    DestroyGraph(graph);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  // `bytes` of weights: what few rows are bound by.
  void Print(const std::string& name, double flops, double bytes, double us, double cublas_us,
             double difference) {
    std::printf("%-34s %10.2f %8.1f %6.1f%% | %10.2f %8.1f %6.1f%% | %9.1f %.1e\n", name.c_str(),
                us, flops / us * 1e-6, 100.0 * flops / us / peak_, cublas_us,
                flops / cublas_us * 1e-6, 100.0 * flops / cublas_us / peak_,
                std::max(flops / peak_, bytes / kBytesPerMicrosecond), difference);
    std::fflush(stdout);
  }
  void PrintVariant(const std::string& name, const PrefillChoice& choice, double flops, double us) {
    std::printf("  %-32s %10.2f %8.1f %6.1f%%   %d tokens%s\n", name.c_str(), us, flops / us * 1e-6,
                100.0 * flops / us / peak_, choice.tile_tokens,
                choice.segments == PrefillChoice::Segments::kSplit     ? ", split"
                : choice.segments == PrefillChoice::Segments::kChained ? ", chained"
                                                                       : "");
    std::fflush(stdout);
  }
  bool variants() const {
    return variants_;
  }
  // ||a - b|| / ||b|| over the first rows of bf16 tensors.
  double Difference(const TensorView& a, const TensorView& b) {
    const int64_t rows = std::min(kCheckedRows, a.rows());
    const int64_t columns = a.dim(1);
    std::vector<Bf16> host_a(static_cast<size_t>(rows * columns));
    std::vector<Bf16> host_b(host_a.size());
    Must(CopyToHost(a.Rows(0, rows), host_a.data(), stream_));
    Must(CopyToHost(b.Rows(0, rows), host_b.data(), stream_));
    Must(stream_.Synchronize());
    double difference = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < host_a.size(); ++i) {
      const double x = Bf16ToF32(host_a[i]);
      const double y = Bf16ToF32(host_b[i]);
      difference += (x - y) * (x - y);
      norm += y * y;
    }
    return std::sqrt(difference / norm);
  }
  Stream& stream() {
    return stream_;
  }

 private:
  Stream& stream_;
  std::string filter_;
  bool variants_;
  cublasLtHandle_t handle_ = nullptr;
  Buffer workspace_;
  void* begin_ = nullptr;
  void* end_ = nullptr;
  std::vector<Bf16> noise_;
  double peak_ = 1.0;  // FLOPs per microsecond
};

// The choices that a case may have: tiles no larger than its rows, and what K allows.
std::vector<PrefillChoice> Choices(bool segmented, int64_t rows) {
  using Segments = PrefillChoice::Segments;
  std::vector<PrefillChoice> choices;
  for (const Segments segments : {Segments::kChained, Segments::kSplit}) {
    if (segments == Segments::kSplit && (!segmented || rows > 1024)) continue;
    const bool totals = segmented && segments == Segments::kChained;
    for (int tokens = totals ? 192 : 256; tokens >= 64; tokens -= 64) {
      if (tokens >= rows + 64 || (rows > 1024 && tokens < 128)) continue;
      choices.push_back({.tile_tokens = tokens, .segments = segments});
    }
  }
  return choices;
}

int64_t CopiesOf(int64_t bytes, int64_t most) {
  return std::clamp<int64_t>(CeilDiv(kRotatedBytes, bytes), 1, most);
}

struct DenseCase {
  const char* name;
  WeightFormat format;
  int64_t n;
  int64_t k;
  int64_t batch = 1;   // side by side
  bool gated = false;  // n is gate and up together
};
constexpr DenseCase kDense[] = {
    {"wq_a + wkv", WeightFormat::kFp8Block, 1792, 5120},
    {"wq_b", WeightFormat::kFp8Block, 32768, 1280},
    {"wo_a", WeightFormat::kFp8Block, 1024, 4096, 8},
    {"wo_b", WeightFormat::kFp8Block, 5120, 8192},
    {"shared gate/up", WeightFormat::kFp8Block, 4608, 5120, 1, true},
    {"shared down", WeightFormat::kFp8Block, 5120, 2304},
    {"indexer q", WeightFormat::kFp8Block, 4096, 1280},
    {"engram", WeightFormat::kFp8Block, 25600, 6144},
    {"compressor", WeightFormat::kBf16, 1024, 5120},
    {"router", WeightFormat::kBf16, 384, 5120},
};

void RunDense(const DenseCase& c, Bench& bench) {
  if (!bench.Wants(c.name)) return;
  Stream& stream = bench.stream();
  const int64_t weight_n = c.gated ? c.n / 2 : c.n;
  const StoredWeight stored = RandomWeight(c.format, weight_n, c.k, 7, 112, 118);
  const std::vector<Bf16> values = Dequantise(stored);
  const int64_t parts = c.gated ? 2 : c.batch;
  const int64_t copies = CopiesOf(c.n * c.k * c.batch, 16);
  const std::vector<LinearWeight> weights = bench.Pack(stored, copies * parts);
  const int64_t bf16_copies = CopiesOf(2 * c.n * c.k * c.batch, 16);
  std::vector<DeviceTensor> bf16_weights;
  for (int64_t i = 0; i < bf16_copies; ++i) {
    bf16_weights.push_back(bench.Empty(DType::kBf16, weight_n * parts, c.k));
    for (int64_t part = 0; part < parts; ++part) {
      Must(CopyToDevice(values.data(), bf16_weights.back().view.Row<Bf16>(part * weight_n),
                        2 * weight_n * c.k, stream.cuda_stream()));
    }
  }
  Must(stream.Synchronize());
  for (const int64_t rows : {64, 128, 256, 512, 1024, 4096, 8192}) {
    const DeviceTensor x = bench.Rows(rows, c.k * c.batch);
    const DeviceTensor y = bench.Empty(DType::kBf16, rows, weight_n * c.batch);
    const DeviceTensor cublas_y = bench.Empty(DType::kBf16, rows, c.n * c.batch);
    const double flops = 2.0 * static_cast<double>(rows * c.n * c.k * c.batch);
    const auto calls_of = [&](int64_t count) {
      return std::max<int64_t>(count, static_cast<int64_t>(1e12 / flops));
    };
    PrefillChoice choice;
    const auto launch = [&](int64_t call) -> Status {
      const LinearWeight* first = &weights[static_cast<size_t>(call % copies * parts)];
      if (c.gated) {
        const LinearWeight* up = first + 1;
        return PrefillGatedLinear({.x = x.view,
                                   .row_index = {},
                                   .group_offsets = {},
                                   .gate_weights = {&first, 1},
                                   .up_weights = {&up, 1},
                                   .row_weight = {},
                                   .out = y.view},
                                  stream, choice);
      }
      std::vector<LinearArgs> batch;
      for (int64_t i = 0; i < c.batch; ++i) {
        batch.push_back({.x = x.view.Columns(i * c.k, (i + 1) * c.k),
                         .weight = first + i,
                         .y = y.view.Columns(i * c.n, (i + 1) * c.n)});
      }
      return PrefillLinear(batch, stream, choice);
    };
    const auto run = [&](int64_t call) { Must(launch(call)); };
    const std::string name = fmt::format("{} {}x{} M {}", c.name, c.n * c.batch, c.k, rows);
    if (bench.variants()) {
      const bool segmented = weights[0].packed()->cuda->segments.count > 1;
      for (const PrefillChoice& one : Choices(segmented, rows)) {
        choice = one;
        if (!launch(0).has_value()) continue;  // does not fit
        bench.PrintVariant(name, choice, flops, bench.Median(calls_of(copies), run));
      }
      continue;
    }
    const double us = bench.Median(calls_of(copies), run);
    const CublasProduct product = bench.Cublas(rows, c.n, c.k, c.batch);
    const double cublas_us = bench.Median(calls_of(bf16_copies), [&](int64_t call) {
      product.Run(x.view.data(), bf16_weights[static_cast<size_t>(call % bf16_copies)].view.data(),
                  cublas_y.view.data(), stream);
    });
    double difference = 0.0;
    if (c.gated) {
      const int64_t checked = std::min(kCheckedRows, rows);
      const DeviceTensor gate = bench.Empty(DType::kBf16, checked, weight_n);
      const DeviceTensor up = bench.Empty(DType::kBf16, checked, weight_n);
      const CublasProduct half = bench.Cublas(checked, weight_n, c.k);
      const TensorView& w = bf16_weights[0].view;
      half.Run(x.view.data(), w.data(), gate.view.data(), stream);
      half.Run(x.view.data(), w.Row<Bf16>(weight_n), up.view.data(), stream);
      Must(Swiglu({.gate = gate.view, .up = up.view, .row_weight = {}, .out = gate.view}, stream));
      difference = bench.Difference(y.view, gate.view);
    } else {
      difference = bench.Difference(y.view, cublas_y.view);
    }
    const double bytes =
        static_cast<double>(c.n * c.k * c.batch) * (c.format == WeightFormat::kBf16 ? 2.0 : 1.0);
    bench.Print(name, flops, bytes, us, cublas_us, difference);
  }
}

constexpr int64_t kHidden = 5120;
constexpr int64_t kIntermediate = 2304;
constexpr int64_t kExperts = 384;

// Gate and up of all experts, then down: one weight's values in all of them, memory for each.
struct Experts {
  explicit Experts(Bench& bench)
      : up_stored(RandomWeight(WeightFormat::kFp4Group, kIntermediate, kHidden, 11, 118, 122)),
        down_stored(RandomWeight(WeightFormat::kFp4Group, kHidden, kIntermediate, 12, 118, 122)),
        gate_up(bench.Pack(up_stored, 2 * kExperts)),
        down(bench.Pack(down_stored, kExperts)) {
    const std::vector<Bf16> up = Dequantise(up_stored);
    up_bf16 = bench.Empty(DType::kBf16, 2 * kIntermediate, kHidden);
    for (int64_t half = 0; half < 2; ++half)
      Must(CopyToDevice(up.data(), up_bf16.view.Row<Bf16>(half * kIntermediate),
                        2 * kIntermediate * kHidden, bench.stream().cuda_stream()));
    down_bf16 = bench.Copy(
        TensorView(Dequantise(down_stored).data(), DType::kBf16, {kHidden, kIntermediate}));
    Must(bench.stream().Synchronize());
  }
  StoredWeight up_stored;
  StoredWeight down_stored;
  std::vector<LinearWeight> gate_up;
  std::vector<LinearWeight> down;
  DeviceTensor up_bf16;
  DeviceTensor down_bf16;
};

void RunExperts(const Experts& experts, const std::vector<int32_t>& counts, const std::string& name,
                Bench& bench) {
  if (!bench.Wants(name)) return;
  Stream& stream = bench.stream();
  const auto groups = static_cast<int64_t>(counts.size());
  std::vector<int32_t> offsets = {0};
  for (const int32_t count : counts) offsets.push_back(offsets.back() + count);
  const int64_t rows = offsets.back();
  std::mt19937 random(3);
  // A token has six experts, so x has a sixth of the rows.
  const int64_t tokens = std::max<int64_t>(1, rows / 6);
  std::vector<int32_t> index;
  std::vector<float> row_weight;
  for (int64_t i = 0; i < rows; ++i) {
    index.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(tokens)));
    row_weight.push_back(0.1f + static_cast<float>(random() % 1000) * 1e-3f);
  }
  const DeviceTensor offsets_device =
      bench.Copy(TensorView(offsets.data(), DType::kI32, {groups + 1}));
  const DeviceTensor index_device = bench.Copy(TensorView(index.data(), DType::kI32, {rows}));
  const DeviceTensor weight_device = bench.Copy(TensorView(row_weight.data(), DType::kF32, {rows}));
  const DeviceTensor x = bench.Rows(tokens, kHidden);
  const DeviceTensor middle = bench.Empty(DType::kBf16, rows, kIntermediate);
  const DeviceTensor y = bench.Empty(DType::kBf16, rows, kHidden);
  const int64_t sets = std::min(kExperts / groups, CopiesOf(groups * 18800000, 16));
  std::vector<const LinearWeight*> gate;
  std::vector<const LinearWeight*> up;
  std::vector<const LinearWeight*> down;
  for (int64_t i = 0; i < kExperts; ++i) {
    gate.push_back(&experts.gate_up[static_cast<size_t>(i)]);
    up.push_back(&experts.gate_up[static_cast<size_t>(kExperts + i)]);
    down.push_back(&experts.down[static_cast<size_t>(i)]);
  }
  const auto of_set = [&](const std::vector<const LinearWeight*>& all, int64_t call) {
    return std::span(all).subspan(static_cast<size_t>(call % sets * groups),
                                  static_cast<size_t>(groups));
  };
  PrefillChoice choice;
  const auto run_gated = [&](int64_t call) {
    Must(PrefillGatedLinear({.x = x.view,
                             .row_index = index_device.view,
                             .group_offsets = offsets_device.view,
                             .gate_weights = of_set(gate, call),
                             .up_weights = of_set(up, call),
                             .row_weight = weight_device.view,
                             .out = middle.view},
                            stream, choice));
  };
  const auto run_down = [&](int64_t call) {
    Must(PrefillGroupedLinear({.x = middle.view,
                               .row_index = {},
                               .group_offsets = offsets_device.view,
                               .weights = of_set(down, call),
                               .y = y.view},
                              stream, choice));
  };
  const double flops = 2.0 * static_cast<double>(rows * 3 * kIntermediate * kHidden);
  const int64_t calls = std::max<int64_t>(sets, static_cast<int64_t>(1e12 / flops));
  if (bench.variants()) {
    for (const PrefillChoice& one : Choices(false, rows / groups)) {
      choice = one;
      bench.PrintVariant(name + " gate/up", choice, flops * 2 / 3, bench.Median(calls, run_gated));
      bench.PrintVariant(name + " down", choice, flops / 3, bench.Median(calls, run_down));
    }
    return;
  }
  const double gated_us = bench.Median(calls, run_gated);
  const double down_us = bench.Median(calls, run_down);
  const double both_us = bench.Median(calls, [&](int64_t call) {
    run_gated(call);
    run_down(call);
  });
  // One product of all rows with one weight: what the library reaches without groups.
  const DeviceTensor gathered = bench.Rows(rows, kHidden);
  const DeviceTensor gate_up_y = bench.Empty(DType::kBf16, rows, 2 * kIntermediate);
  const CublasProduct up_product = bench.Cublas(rows, 2 * kIntermediate, kHidden);
  const double cublas_up_us = bench.Median(1, [&](int64_t) {
    up_product.Run(gathered.view.data(), experts.up_bf16.view.data(), gate_up_y.view.data(),
                   stream);
  });
  const DeviceTensor down_y = bench.Empty(DType::kBf16, rows, kHidden);
  const CublasProduct down_product = bench.Cublas(rows, kHidden, kIntermediate);
  const double cublas_down_us = bench.Median(1, [&](int64_t) {
    down_product.Run(middle.view.data(), experts.down_bf16.view.data(), down_y.view.data(), stream);
  });
  const double down_difference = bench.Difference(y.view, down_y.view);
  // Gate and up of the first rows, whose x rows are gathered by copies.
  const int64_t checked = std::min(kCheckedRows, rows);
  for (int64_t i = 0; i < checked; ++i) {
    Must(CopyOnDevice(x.view.Row<Bf16>(index[static_cast<size_t>(i)]), gathered.view.Row<Bf16>(i),
                      2 * kHidden, stream.cuda_stream()));
  }
  const DeviceTensor gate_y = bench.Empty(DType::kBf16, checked, kIntermediate);
  const DeviceTensor up_y = bench.Empty(DType::kBf16, checked, kIntermediate);
  const CublasProduct half = bench.Cublas(checked, kIntermediate, kHidden);
  half.Run(gathered.view.data(), experts.up_bf16.view.data(), gate_y.view.data(), stream);
  half.Run(gathered.view.data(), experts.up_bf16.view.Row<Bf16>(kIntermediate), up_y.view.data(),
           stream);
  TensorView first_weights = weight_device.view.Rows(0, checked);
  Must(Swiglu(
      {.gate = gate_y.view, .up = up_y.view, .row_weight = first_weights, .out = gate_y.view},
      stream));
  const double gated_difference = bench.Difference(middle.view, gate_y.view);
  const double bytes =
      static_cast<double>(groups) * static_cast<double>(3 * kIntermediate * kHidden) * 0.53125;
  bench.Print(name + " gate/up", flops * 2 / 3, bytes * 2 / 3, gated_us, cublas_up_us,
              gated_difference);
  bench.Print(name + " down", flops / 3, bytes / 3, down_us, cublas_down_us, down_difference);
  bench.Print(name + " both", flops, bytes, both_us, cublas_up_us + cublas_down_us,
              std::max(gated_difference, down_difference));
}

int Main(int argc, char** argv) {
  const std::unique_ptr<Stream> stream = Must(Stream::CreateCuda(0, 8));
  Bench bench(*stream, argc > 1 ? argv[1] : "", argc > 2 && std::string(argv[2]) == "variants");
  if (bench.WantsExperts()) {
    const Experts experts(bench);
    for (const int rows : {128, 256, 512, 1536})
      RunExperts(experts, std::vector<int32_t>(6, rows), fmt::format("experts 6 x {}", rows),
                 bench);
    RunExperts(experts, std::vector<int32_t>(48, 192), "experts 48 x 192", bench);
    std::mt19937 random(5);
    std::vector<int32_t> counts(kExperts, 0);
    for (int i = 0; i < 4096 * 6; ++i) ++counts[random() % kExperts];
    RunExperts(experts, counts, "experts 384 x ~64", bench);
  }
  for (const DenseCase& c : kDense) RunDense(c, bench);
  return 0;
}

}  // namespace
}  // namespace deepinfer::cuda

int main(int argc, char** argv) {
  return deepinfer::cuda::Main(argc, argv);
}
