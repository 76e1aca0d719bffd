// What it costs that a row's bits do not depend on the batch (scoreboard, row 18). The one choice
// that a layer's shape makes, and the number of rows may not, is how K is cut into segments that
// are summed apart: kernels, tiles and cuts along tokens or keys do not show in the results,
// experts have one segment, attention and the indexer's selection have the same sums for every
// batch. So the dense linears of a layer are timed as they are, and with 1, 2, 4 and 8 segments for
// all shapes; the fastest for each shape and number of rows is what a model without the promise
// would run. Both are then timed again, so that the fastest is not the luckiest. Figures are
// medians of replayed graphs of calls on different weights.
//
//   invariance_cuda_bench [ROWS...]      (default: 1 8 64 256 1024 4096)
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/ceil_div.h"
#include "ops/gated_linear/gated_linear.h"
#include "ops/linear/cuda_pack.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_pack.h"
#include "ops/linear/linear_test_util.h"
#include "ops/linear/tune_segments.h"
#include "tensor/buffer.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/float_formats.h"
#include "tensor/stream.h"

namespace deepinfer::cuda {
namespace {

constexpr int64_t kRotatedBytes = int64_t{240} << 20;
constexpr int64_t kMostRows = 16384;
constexpr double kFloorPercent = 15;
constexpr double kTargetPercent = 5;

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

// Weights that one call takes together.
struct Shape {
  const char* name;
  std::vector<int64_t> n;
  int64_t k;
  bool apart = false;     // each weight has columns of x and y of its own
  bool gated = false;     // gate and up
  bool quantize = false;  // y
};

// One way to cut K, and the weights packed for it.
struct Cut {
  int64_t tuned = 0;  // TuneSegments
  std::vector<LinearWeight> weights;
};

class Bench {
 public:
  explicit Bench(Stream& stream)
      : stream_(stream), begin_(Must(CreateEvent(0))), end_(Must(CreateEvent(0))) {
    // On the FP8 grid, as activations are: codes without scales.
    std::vector<Bf16> values(1 << 20);
    uint32_t state = 1;
    for (Bf16& value : values) {
      state = state * 1664525u + 1013904223u;
      value = F32ToBf16(static_cast<float>(static_cast<int32_t>(state >> 28) - 8) * 0.125f);
    }
    constexpr int64_t kWidest = 32768;
    x_ = Must(Buffer::Allocate(stream.device(), kMostRows * kWidest * 2));
    y_ = Must(Buffer::Allocate(stream.device(), kMostRows * kWidest * 2));
    const auto piece = static_cast<int64_t>(values.size() * sizeof(Bf16));
    for (int64_t at = 0; at < x_.bytes(); at += piece) {
      Must(CopyToDevice(values.data(), static_cast<char*>(x_.data()) + at,
                        std::min(piece, x_.bytes() - at), stream.cuda_stream()));
    }
    Must(stream.Synchronize());
  }
  ~Bench() {
    DestroyEvent(begin_);
    DestroyEvent(end_);
  }

  std::vector<Cut> MakeCuts(const Shape& shape) {
    std::vector<testing::StoredWeight> stored;
    int64_t bytes = 0;
    for (const int64_t n : shape.n) {
      stored.push_back(testing::RandomWeight(WeightFormat::kFp8Block, n, shape.k, 7, 112, 118));
      bytes += n * shape.k;
    }
    copies_ = std::clamp<int64_t>(CeilDiv(kRotatedBytes, bytes), 1, 32);
    std::vector<Cut> cuts;
    std::vector<int64_t> seen;
    for (const int64_t tuned : {0, 1, 2, 4, 8}) {
      TuneSegments() = tuned;
      int64_t columns = 0;  // of all weights, to tell cuts apart
      for (const int64_t n : shape.n)
        columns = columns * 65536 + SegmentsOf(WeightFormat::kFp8Block, n, shape.k).columns;
      if (std::find(seen.begin(), seen.end(), columns) != seen.end()) continue;
      seen.push_back(columns);
      Cut cut{.tuned = tuned, .weights = {}};
      for (int64_t copy = 0; copy < copies_; ++copy) {
        for (const testing::StoredWeight& one : stored)
          cut.weights.push_back(Must(PackLinearWeight(one.source, stream_)));
      }
      cuts.push_back(std::move(cut));
    }
    TuneSegments() = 0;
    return cuts;
  }

  // Microseconds of one call.
  double Time(const Shape& shape, const Cut& cut, int64_t rows) {
    TuneSegments() = cut.tuned;
    const auto parts = static_cast<int64_t>(shape.n.size());
    const int64_t x_columns = shape.apart ? shape.k * parts : shape.k;
    int64_t y_columns = 0;
    for (const int64_t n : shape.n) y_columns += n;
    const TensorView x = x_.View(DType::kBf16, {rows, x_columns});
    const TensorView y = y_.View(DType::kBf16, {rows, shape.gated ? shape.n[0] : y_columns});
    const auto call = [&](int64_t i) {
      const LinearWeight* weights = &cut.weights[static_cast<size_t>(i % copies_ * parts)];
      if (shape.gated) {
        const LinearWeight* const up = weights + 1;
        Must(GatedLinear({.x = x,
                          .row_index = {},
                          .group_offsets = {},
                          .gate_weights = {&weights, 1},
                          .up_weights = {&up, 1},
                          .row_weight = {},
                          .limit = 10.0f,
                          .out = y,
                          .numerics = Numerics::kProduction},
                         stream_));
        return;
      }
      std::vector<LinearArgs> batch;
      int64_t column = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t n = shape.n[static_cast<size_t>(part)];
        batch.push_back({.x = shape.apart ? x.Columns(part * shape.k, (part + 1) * shape.k) : x,
                         .weight = weights + part,
                         .y = y.Columns(column, column + n),
                         .quantize_y = shape.quantize});
        column += n;
      }
      Must(LinearBatch(batch, stream_));
    };
    const double us = Median(copies_, call);
    TuneSegments() = 0;
    return us;
  }

 private:
  double Median(int64_t calls, const std::function<void(int64_t)>& call) {
    void* const cuda_stream = stream_.cuda_stream();
    call(0);
    Must(stream_.Synchronize());
    Must(BeginCapture(cuda_stream));
    for (int64_t i = 0; i < calls; ++i) call(i);
    void* const graph = Must(EndCapture(cuda_stream));
    std::vector<double> times;
    double total = 0.0;
    for (int i = 0; i < 3 + 21; ++i) {
      Must(RecordEvent(begin_, cuda_stream));
      Must(LaunchGraph(graph, cuda_stream));
      Must(RecordEvent(end_, cuda_stream));
      Must(stream_.Synchronize());
      const double us = 1e3 * Must(ElapsedMilliseconds(begin_, end_));
      if (i >= 3) times.push_back(us / static_cast<double>(calls));
      total += us;
      if (total > 100e3 && times.size() >= 7) break;
    }
    DestroyGraph(graph);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Stream& stream_;
  void* begin_;
  void* end_;
  Buffer x_;
  Buffer y_;
  int64_t copies_ = 1;
};

int Main(int argc, char** argv) {
  std::vector<int64_t> row_counts;
  for (int i = 1; i < argc; ++i) {
    row_counts.push_back(std::atoll(argv[i]));
    if (row_counts.back() < 1 || row_counts.back() > kMostRows) {
      std::fprintf(stderr, "Rows are '%s'; allowed are 1 to %lld.\n", argv[i],
                   static_cast<long long>(kMostRows));
      return 2;
    }
  }
  if (row_counts.empty()) row_counts = {1, 8, 64, 256, 1024, 4096};
  const std::unique_ptr<Stream> stream = Must(Stream::CreateCuda(0, 16));
  std::printf("device: %s\n", Must(GetDeviceProperties(0)).name.c_str());
  const Shape shapes[] = {
      {.name = "wq_a and wkv", .n = {1280, 512}, .k = 5120},
      {.name = "wq_b", .n = {32768}, .k = 1280},
      {.name = "wo_a",
       .n = std::vector<int64_t>(8, 1024),
       .k = 4096,
       .apart = true,
       .quantize = true},
      {.name = "wo_b", .n = {5120}, .k = 8192},
      {.name = "shared gate and up", .n = {2304, 2304}, .k = 5120, .gated = true},
      {.name = "shared down", .n = {5120}, .k = 2304},
  };
  std::printf("microseconds a call; segments of K by shape, then with so many at most\n");
  std::printf("%-20s %6s %10s | %s\n", "", "rows", "by shape", "others");
  Bench bench(*stream);
  std::vector<double> invariant(row_counts.size(), 0.0);
  std::vector<double> fastest(row_counts.size(), 0.0);
  for (const Shape& shape : shapes) {
    const std::vector<Cut> cuts = bench.MakeCuts(shape);
    for (size_t r = 0; r < row_counts.size(); ++r) {
      const int64_t rows = row_counts[r];
      std::string others;
      size_t best = 0;
      double best_us = 0;
      double own_us = 0;
      for (size_t i = 0; i < cuts.size(); ++i) {
        const double us = bench.Time(shape, cuts[i], rows);
        if (i == 0) {
          own_us = us;
        } else {
          others += fmt::format(" {}: {:.2f}", cuts[i].tuned, us);
        }
        if (i == 0 || us < best_us) {
          best = i;
          best_us = us;
        }
      }
      if (best != 0) {
        own_us = bench.Time(shape, cuts[0], rows);
        best_us = std::min(own_us, bench.Time(shape, cuts[best], rows));
      }
      invariant[r] += own_us;
      fastest[r] += best_us;
      std::printf("%-20s %6lld %10.2f |%s   tax %.1f %%\n", shape.name,
                  static_cast<long long>(rows), own_us, others.c_str(),
                  100 * (own_us / best_us - 1));
      std::fflush(stdout);
    }
  }
  for (size_t r = 0; r < row_counts.size(); ++r) {
    std::printf(
        "row 18: batch-invariant tax of a layer's dense linears, %lld rows: %.1f %% (%.1f us, "
        "fastest cuts %.1f us); floor %.0f %%, target %.0f %%\n",
        static_cast<long long>(row_counts[r]), 100 * (invariant[r] / fastest[r] - 1), invariant[r],
        fastest[r], kFloorPercent, kTargetPercent);
  }
  return 0;
}

}  // namespace
}  // namespace deepinfer::cuda

int main(int argc, char** argv) {
  return deepinfer::cuda::Main(argc, argv);
}
