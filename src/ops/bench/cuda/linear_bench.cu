// Times the linears of the model on a GPU for few rows: experts, the dense projections of a layer,
// the small projections beside them, and the LM head. A case is a graph of calls on different
// weights (together more than four times the L2), replayed; the figure is the median over replays,
// divided by the calls in the graph, so launches overlap as they do in the model. Printed beside
// it: bytes of the weights that the call needs over time, and that as a share of 4.3 TB/s and of
// what a plain reading kernel reached in this run, and the project's floor and target where there
// are any.
//
// Arguments: words that a case's name must contain ("experts," "dense set"), none for all.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/ceil_div.h"
#include "device.cuh"
#include "ops/gated_linear/gated_linear.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_test_util.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"

namespace deepinfer::cuda {
namespace {

constexpr int kWarmUps = 5;
constexpr int kReplays = 40;
// Bytes per microsecond that kernels that only read sustain on an H200.
constexpr double kSustainedRate = 4.3e6;
constexpr int64_t kRotatedBytes = int64_t{320} << 20;

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

__global__ void ReadKernel(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = LoadStreaming(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

// Floor and target of a case in microseconds, zero for none.
struct Goal {
  double floor = 0;
  double target = 0;
};
// Those of a share of the sustained rate.
Goal ShareGoal(double bytes, double floor, double target) {
  return {bytes / kSustainedRate / floor, bytes / kSustainedRate / target};
}

class Bench {
 public:
  Bench(Stream& stream, std::vector<std::string> filters)
      : stream_(stream),
        filters_(std::move(filters)),
        events_{Must(CreateEvent(0)), Must(CreateEvent(0))} {
    const int64_t bytes = int64_t{2} << 30;
    const Buffer a = Must(Buffer::AllocateZeroed(stream.device(), bytes));
    const Buffer b = Must(Buffer::AllocateZeroed(stream.device(), 16));
    LaunchConfig config;
    config.grid.x = static_cast<uint32_t>(stream.sm_count() * 8);
    config.block = 256;
    const double read = Median([&] {
      Must(Launch("ReadKernel", &ReadKernel, config, stream_, static_cast<const uint4*>(a.data()),
                  bytes / 16, static_cast<uint32_t*>(b.data())));
    });
    read_rate_ = static_cast<double>(bytes) / read;
    std::printf("a reading kernel: %.0f GB/s\n", read_rate_ / 1e3);
  }

  bool Wants(const std::string& name) const {
    return filters_.empty() || std::any_of(filters_.begin(), filters_.end(), [&](const auto& f) {
             return name.find(f) != std::string::npos;
           });
  }

  // Runs `record` into a graph of `calls` calls that each need `bytes` of weights.
  void Time(const std::string& name, int64_t calls, double bytes, Goal goal,
            const std::function<void(int64_t call)>& record) {
    if (!Wants(name)) return;
    const double us = Median([&] {
                        for (int64_t i = 0; i < calls; ++i) record(i);
                      }) /
                      static_cast<double>(calls);
    const double rate = bytes / us;
    std::printf(
        "%-44s %9.2f us %7.0f GB/s %6.1f %% of 4.3 TB/s %6.1f %% of read   (p10 %.2f, p90 %.2f)",
        name.c_str(), us, rate / 1e3, 100 * rate / kSustainedRate, 100 * rate / read_rate_,
        p10_ / static_cast<double>(calls), p90_ / static_cast<double>(calls));
    if (goal.floor > 0) std::printf("   floor %.1f, target %.1f us", goal.floor, goal.target);
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  // Microseconds.
  double Median(const std::function<void()>& record) {
    // Scratch memory of the stream cannot grow while a graph is recorded.
    record();
    Must(stream_.Synchronize());
    void* const cuda_stream = stream_.cuda_stream();
    Must(BeginCapture(cuda_stream));
    record();
    void* const graph = Must(EndCapture(cuda_stream));
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + kReplays; ++i) {
      Must(RecordEvent(events_[0], cuda_stream));
      Must(LaunchGraph(graph, cuda_stream));
      Must(RecordEvent(events_[1], cuda_stream));
      Must(stream_.Synchronize());
      if (i >= kWarmUps) times.push_back(1e3 * Must(ElapsedMilliseconds(events_[0], events_[1])));
    }
    DestroyGraph(graph);
    std::sort(times.begin(), times.end());
    p10_ = times[times.size() / 10];
    p90_ = times[times.size() * 9 / 10];
    return times[times.size() / 2];
  }

  Stream& stream_;
  std::vector<std::string> filters_;
  void* events_[2];
  double read_rate_ = 0;
  double p10_ = 0;
  double p90_ = 0;
};

// Tensors on the device.
struct Tensors {
  explicit Tensors(Stream& stream) : stream(stream) {}
  TensorView Random(int64_t rows, int64_t columns) {
    std::vector<Bf16> values(static_cast<size_t>(rows * columns));
    std::normal_distribution<float> normal;
    for (Bf16& value : values) value = F32ToBf16(normal(random));
    return Upload(values.data(), DType::kBf16, {rows, columns});
  }
  TensorView New(DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    buffers.push_back(Must(Buffer::AllocateZeroed(
        stream.device(), std::max<int64_t>(16, extent.num_elements() * DTypeBytes(dtype)))));
    return buffers.back().View(dtype, shape);
  }
  TensorView Upload(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView view = New(dtype, shape);
    Must(deepinfer::CopyToDevice(data, view, stream));
    Must(stream.Synchronize());
    return view;
  }
  Stream& stream;
  std::vector<Buffer> buffers;
  std::mt19937 random{7};
};

// `count` weights in one stack; a few random ones, repeated.
std::vector<LinearWeight> Weights(WeightFormat format, int64_t n, int64_t k, int64_t count,
                                  Stream& stream) {
  std::vector<testing::StoredWeight> stored;
  for (uint32_t i = 0; i < std::min<int64_t>(count, 2); ++i) {
    // Rows of a large matrix repeat.
    const int64_t rows = std::min<int64_t>(n, 4096);
    testing::StoredWeight part = testing::RandomWeight(format, rows, k, i, 115, 125);
    if (rows < n) {
      const auto repeat = [&](std::vector<uint8_t>& bytes, size_t wanted) {
        const size_t have = bytes.size();
        bytes.resize(wanted);
        for (size_t at = have; at < wanted; at += have)
          std::memcpy(bytes.data() + at, bytes.data(), std::min(have, wanted - at));
      };
      const int64_t code_row = static_cast<int64_t>(part.weight.size()) / rows;
      const int64_t scale_rows = format == WeightFormat::kFp8Block ? CeilDiv(n, 32) : n;
      repeat(part.weight, static_cast<size_t>(n * code_row));
      if (!part.scale.empty()) repeat(part.scale, static_cast<size_t>(scale_rows * (k / 32)));
      part.source.n = n;
      part.source.weight = TensorView(part.weight.data(), part.source.weight.dtype(),
                                      {n, part.source.weight.dim(1)});
      if (!part.scale.empty())
        part.source.scale = TensorView(part.scale.data(), DType::kE8M0, {scale_rows, k / 32});
    }
    stored.push_back(std::move(part));
  }
  std::vector<LinearSource> sources;
  for (int64_t i = 0; i < count; ++i)
    sources.push_back(stored[static_cast<size_t>(i) % stored.size()].source);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<LinearWeight> weights = Must(PackLinearStack(sources, stream));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const double bytes = static_cast<double>(weights[0].bytes()) * static_cast<double>(count);
  if (bytes > 1e9)
    std::printf("packed %.2f GB in %.2f s: %.1f GB/s\n", bytes / 1e9, seconds.count(),
                bytes / 1e9 / seconds.count());
  return weights;
}

std::vector<const LinearWeight*> Pointers(const std::vector<LinearWeight>& weights) {
  std::vector<const LinearWeight*> pointers;
  for (const LinearWeight& weight : weights) pointers.push_back(&weight);
  return pointers;
}

// Rows of the experts.
struct ExpertCase {
  const char* name;
  int64_t touched;  // experts that get rows
  int64_t rows;     // each
  int64_t tokens;   // instead: six random experts for each
};
constexpr ExpertCase kExpertCases[] = {
    {"B=1: 6 experts, 1 row", 6, 1, 0},
    {"6 experts, 8 rows", 6, 8, 0},
    {"B=8: 6 experts for each of 8 tokens", 0, 0, 8},
    {"48 experts, 1 row", 48, 1, 0},
    {"48 experts, 8 rows", 48, 8, 0},
    {"48 experts, 16 rows", 48, 16, 0},
    {"48 experts, 32 rows", 48, 32, 0},
    {"48 experts, 64 rows", 48, 64, 0},
    {"B=64", 0, 0, 64},
    {"B=256", 0, 0, 256},
    {"384 experts, 16 rows", 384, 16, 0},
};

void BenchExperts(Bench& bench, Stream& stream) {
  constexpr const char* kParts[] = {", both", ", gate and up", ", down"};
  const auto wants = [&](const ExpertCase& c) {
    return std::any_of(std::begin(kParts), std::end(kParts),
                       [&](const char* part) { return bench.Wants(std::string(c.name) + part); });
  };
  if (std::none_of(std::begin(kExpertCases), std::end(kExpertCases), wants)) return;
  constexpr int64_t kExperts = 384;
  constexpr int64_t kHidden = 5120;
  constexpr int64_t kIntermediate = 2304;
  const std::vector<LinearWeight> gate =
      Weights(WeightFormat::kFp4Group, kIntermediate, kHidden, kExperts, stream);
  const std::vector<LinearWeight> up =
      Weights(WeightFormat::kFp4Group, kIntermediate, kHidden, kExperts, stream);
  const std::vector<LinearWeight> down =
      Weights(WeightFormat::kFp4Group, kHidden, kIntermediate, kExperts, stream);
  const auto gate_pointers = Pointers(gate);
  const auto up_pointers = Pointers(up);
  const auto down_pointers = Pointers(down);
  const double expert_bytes =
      static_cast<double>(gate[0].bytes() + up[0].bytes() + down[0].bytes());

  for (const ExpertCase& c : kExpertCases) {
    const std::string name = c.name;
    if (!wants(c)) continue;
    Tensors tensors(stream);
    struct Call {
      TensorView offsets, index;
    };
    std::vector<Call> calls;
    int64_t rows = 0;
    int64_t touched_sum = 0;
    const int64_t tokens = c.tokens > 0 ? c.tokens : c.rows;
    const int64_t count = std::max<int64_t>(
        1, 16 * 6 / std::max<int64_t>(6, c.tokens > 0 ? 6 * c.tokens : c.touched));
    for (int64_t i = 0; i < count; ++i) {
      std::vector<int32_t> per_expert(kExperts, 0);
      std::vector<int32_t> order(kExperts);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), tensors.random);
      if (c.tokens > 0) {
        for (int64_t t = 0; t < c.tokens; ++t) {
          std::shuffle(order.begin(), order.end(), tensors.random);
          for (int j = 0; j < 6; ++j)
            ++per_expert[static_cast<size_t>(order[static_cast<size_t>(j)])];
        }
      } else {
        for (int64_t j = 0; j < c.touched; ++j) {
          // Consecutive calls take different experts.
          const int64_t expert = (i * c.touched + j) * 5 % kExperts;
          per_expert[static_cast<size_t>(expert)] += static_cast<int32_t>(c.rows);
        }
      }
      std::vector<int32_t> offsets(kExperts + 1, 0);
      std::vector<int32_t> index;
      for (int64_t e = 0; e < kExperts; ++e) {
        const int32_t own = per_expert[static_cast<size_t>(e)];
        touched_sum += own > 0;
        offsets[static_cast<size_t>(e) + 1] = offsets[static_cast<size_t>(e)] + own;
        for (int32_t r = 0; r < own; ++r) index.push_back(static_cast<int32_t>((e + r) % tokens));
      }
      rows = offsets.back();
      calls.push_back({tensors.Upload(offsets.data(), DType::kI32, {kExperts + 1}),
                       tensors.Upload(index.data(), DType::kI32, {rows})});
    }
    const TensorView x = tensors.Random(tokens, kHidden);
    const TensorView hidden = tensors.New(DType::kBf16, {rows, kIntermediate});
    const TensorView y = tensors.New(DType::kBf16, {rows, kHidden});
    const std::vector<float> ones(static_cast<size_t>(rows), 0.5f);
    const TensorView row_weight = tensors.Upload(ones.data(), DType::kF32, {rows});
    const double bytes =
        expert_bytes * static_cast<double>(touched_sum) / static_cast<double>(count);
    const auto gated = [&](int64_t i) {
      const Call& call = calls[static_cast<size_t>(i) % calls.size()];
      Must(GatedLinear({.x = x,
                        .row_index = call.index,
                        .group_offsets = call.offsets,
                        .gate_weights = gate_pointers,
                        .up_weights = up_pointers,
                        .row_weight = row_weight,
                        .limit = 10.0f,
                        .out = hidden,
                        .numerics = Numerics::kProduction},
                       stream));
    };
    const auto grouped = [&](int64_t i) {
      const Call& call = calls[static_cast<size_t>(i) % calls.size()];
      Must(GroupedLinear({.x = hidden,
                          .row_index = {},
                          .group_offsets = call.offsets,
                          .weights = down_pointers,
                          .y = y},
                         stream));
    };
    Goal goal;
    if (c.touched == 6 && c.rows == 1) goal = {50.0, 35.0};
    if (bytes >= 400e6 && c.rows <= 16) goal = ShareGoal(bytes, 0.72, 0.88);
    bench.Time(name + kParts[0], count, bytes, goal, [&](int64_t i) {
      gated(i);
      grouped(i);
    });
    bench.Time(name + kParts[1], count, bytes * 2 / 3, {}, gated);
    bench.Time(name + kParts[2], count, bytes / 3, {}, grouped);
  }
}

// One matrix shape of which some are called together.
struct Dense {
  const char* name;
  WeightFormat format;
  int64_t n, k;
  int64_t together = 1;
  bool quantize = false;
  bool f32 = false;
};

void BenchDense(Bench& bench, Stream& stream, std::span<const int64_t> row_counts) {
  const Dense shapes[] = {
      {"wq_b 32768 x 1280", WeightFormat::kFp8Block, 32768, 1280},
      {"wo_a 8 x 1024 x 4096, quantized", WeightFormat::kFp8Block, 1024, 4096, 8, true},
      {"wo_b 5120 x 8192", WeightFormat::kFp8Block, 5120, 8192},
      {"shared down 5120 x 2304", WeightFormat::kFp8Block, 5120, 2304},
      {"indexer q 4096 x 1280", WeightFormat::kFp8Block, 4096, 1280},
      {"Engram 25600 x 6144", WeightFormat::kFp8Block, 25600, 6144},
      {"router 384 x 5120 bf16", WeightFormat::kBf16, 384, 5120, 1, false, true},
      {"compressor 2 x 512 x 5120 bf16", WeightFormat::kBf16, 512, 5120, 2, false, true},
      {"LM head 129280 x 5120 bf16", WeightFormat::kBf16, 129280, 5120, 1, false, true},
  };
  for (const Dense& shape : shapes) {
    const auto name_of = [&](int64_t rows) {
      return fmt::format("{}, dense, {} rows", shape.name, rows);
    };
    if (std::none_of(row_counts.begin(), row_counts.end(),
                     [&](int64_t rows) { return bench.Wants(name_of(rows)); }))
      continue;
    const double element = shape.format == WeightFormat::kBf16 ? 2.0 : 1.0 + 1.0 / 1024;
    const double bytes = element * static_cast<double>(shape.n * shape.k * shape.together);
    const int64_t calls =
        std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(kRotatedBytes) / bytes));
    const std::vector<LinearWeight> weights =
        Weights(shape.format, shape.n, shape.k, calls * shape.together, stream);
    for (const int64_t rows : row_counts) {
      Tensors tensors(stream);
      const TensorView x = tensors.Random(rows, shape.k * shape.together);
      const TensorView y =
          tensors.New(shape.f32 ? DType::kF32 : DType::kBf16, {rows, shape.n * shape.together});
      Goal goal;
      if (shape.format == WeightFormat::kFp8Block && rows <= 16)
        goal = ShareGoal(bytes, 0.7, bytes >= 30e6 ? 0.8 : 0.6);
      bench.Time(
          fmt::format("{}, dense, {} rows", shape.name, rows), calls, bytes, goal, [&](int64_t i) {
            std::vector<LinearArgs> batch;
            for (int64_t j = 0; j < shape.together; ++j) {
              batch.push_back({.x = x.Columns(j * shape.k, (j + 1) * shape.k),
                               .weight = &weights[static_cast<size_t>(i * shape.together + j)],
                               .y = y.Columns(j * shape.n, (j + 1) * shape.n),
                               .quantize_y = shape.quantize});
            }
            Must(LinearBatch(batch, stream));
          });
    }
  }
}

// The dense linears of one layer, one after the other, as often as there are layers' weights.
void BenchDenseSet(Bench& bench, Stream& stream, std::span<const int64_t> row_counts) {
  const auto wants = [&](int64_t rows) {
    return bench.Wants(fmt::format("wq_a + wkv, {} rows", rows)) ||
           bench.Wants(fmt::format("shared gate and up, {} rows", rows)) ||
           bench.Wants(fmt::format("dense set of a layer, {} rows", rows));
  };
  if (std::none_of(row_counts.begin(), row_counts.end(), wants)) return;
  constexpr int64_t kLayers = 8;
  const auto fp8 = [&](int64_t n, int64_t k, int64_t each) {
    return Weights(WeightFormat::kFp8Block, n, k, kLayers * each, stream);
  };
  const auto wq_a = fp8(1280, 5120, 4);
  const auto wkv = fp8(512, 5120, 4);
  const auto wq_b = fp8(32768, 1280, 1);
  const auto wo_a = fp8(1024, 4096, 8);
  const auto wo_b = fp8(5120, 8192, 1);
  const auto gate = fp8(2304, 5120, 2);
  const auto up = fp8(2304, 5120, 2);
  const auto down = fp8(5120, 2304, 1);
  for (const int64_t rows : row_counts) {
    Tensors tensors(stream);
    const TensorView x = tensors.Random(rows, 5120);
    const TensorView qr = tensors.New(DType::kBf16, {rows, 1280});
    const TensorView kv = tensors.New(DType::kBf16, {rows, 512});
    const TensorView q = tensors.New(DType::kBf16, {rows, 32768});
    const TensorView attention = tensors.Random(rows, 32768);
    const TensorView u = tensors.New(DType::kBf16, {rows, 8192});
    const TensorView y = tensors.New(DType::kBf16, {rows, 5120});
    const TensorView hidden = tensors.New(DType::kBf16, {rows, 2304});
    const auto inputs = [&](int64_t i) {
      const LinearArgs batch[] = {{.x = x, .weight = &wq_a[static_cast<size_t>(i)], .y = qr},
                                  {.x = x, .weight = &wkv[static_cast<size_t>(i)], .y = kv}};
      Must(LinearBatch(batch, stream));
    };
    const auto shared = [&](int64_t i) {
      const LinearWeight* gate_pointer = &gate[static_cast<size_t>(i)];
      const LinearWeight* up_pointer = &up[static_cast<size_t>(i)];
      Must(GatedLinear({.x = x,
                        .row_index = {},
                        .group_offsets = {},
                        .gate_weights = {&gate_pointer, 1},
                        .up_weights = {&up_pointer, 1},
                        .row_weight = {},
                        .limit = 10.0f,
                        .out = hidden,
                        .numerics = Numerics::kProduction},
                       stream));
    };
    bench.Time(fmt::format("wq_a + wkv, {} rows", rows), 4 * kLayers, 1792.0 * 5120,
               ShareGoal(1792.0 * 5120, 0.5, 0.6), inputs);
    bench.Time(fmt::format("shared gate and up, {} rows", rows), 2 * kLayers, 4608.0 * 5120,
               ShareGoal(4608.0 * 5120, 0.5, 0.6), shared);
    const double bytes = 1792.0 * 5120 + 32768.0 * 1280 + 8 * 1024.0 * 4096 + 5120.0 * 8192 +
                         4608.0 * 5120 + 5120.0 * 2304;
    const Goal goal = rows == 1 ? Goal{63.0, 52.0} : Goal{};
    bench.Time(fmt::format("dense set of a layer, {} rows", rows), kLayers, bytes, goal,
               [&](int64_t i) {
                 const auto at = static_cast<size_t>(i);
                 inputs(i);
                 Must(Linear({.x = qr, .weight = &wq_b[at], .y = q}, stream));
                 std::vector<LinearArgs> groups;
                 for (int64_t g = 0; g < 8; ++g) {
                   groups.push_back({.x = attention.Columns(4096 * g, 4096 * (g + 1)),
                                     .weight = &wo_a[8 * at + static_cast<size_t>(g)],
                                     .y = u.Columns(1024 * g, 1024 * (g + 1)),
                                     .quantize_y = true});
                 }
                 Must(LinearBatch(groups, stream));
                 Must(Linear({.x = u, .weight = &wo_b[at], .y = y}, stream));
                 shared(i);
                 Must(Linear({.x = hidden, .weight = &down[at], .y = y}, stream));
               });
  }
}

int Main(int argc, char** argv) {
  std::vector<std::string> filters(argv + 1, argv + argc);
  const std::unique_ptr<Stream> stream = Must(Stream::CreateCuda(0, 16));
  std::printf("device: %s\n", Must(GetDeviceProperties(0)).name.c_str());
  Bench bench(*stream, std::move(filters));
  constexpr int64_t kRowCounts[] = {1, 8, 16, 64};
  BenchExperts(bench, *stream);
  BenchDenseSet(bench, *stream, kRowCounts);
  BenchDense(bench, *stream, kRowCounts);
  return 0;
}

}  // namespace
}  // namespace deepinfer::cuda

int main(int argc, char** argv) {
  return deepinfer::cuda::Main(argc, argv);
}
