// Times of the indexer's kernels on a GPU: scores of decode, verify and prefill steps, selections,
// and the whole operation. Each case is a captured graph of several launches over key (or score)
// sets that together exceed four times the second-level cache; the figure is the median over
// replays of a graph's time by its launches.
//
//   indexer_cuda_bench [part of a case's name]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "ops/indexer/indexer_cuda.cuh"
#include "ops/indexer/indexer_impl.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

// Ceilings that percentages refer to: device memory and fp8 matrix products of an H200.
constexpr double kBandwidth = 4.3e12;
constexpr double kMatrixRate = 1.422e15;
constexpr int64_t kColdBytes = int64_t{256} << 20;  // more than four times 50 MB
constexpr int kReplays = 31;
constexpr int64_t kHeads = 32;
constexpr int64_t kChannels = 128;
constexpr int64_t kRecordBytes = 68;
constexpr int64_t kBlockEntries = 128;
constexpr int64_t kTopK = 512;
constexpr int64_t kCandidateBlocks = 2048;

__device__ uint32_t Hash(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(x >> 32);
}

__global__ void FillRecordsKernel(uint8_t* records, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t* words = reinterpret_cast<uint32_t*>(records + i * kRecordBytes);
    for (int w = 0; w < 16; ++w) words[w] = Hash(static_cast<uint64_t>(i * 17 + w));
    // Scales 2^-7 ... 2^-4.
    words[16] = 0x78787878u + (Hash(static_cast<uint64_t>(i * 17 + 16)) & 0x03030303u);
  }
}

// Queries and weights: small halves, as bf16.
__global__ void FillQueriesKernel(uint16_t* values, int64_t count, uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  constexpr float kGrid[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t h = Hash(seed + static_cast<uint64_t>(i));
    const float value = (h & 8u) != 0 ? -kGrid[h & 7u] : kGrid[h & 7u];
    values[i] = cuda::FloatToBf16(value);
  }
}

__global__ void FillScoresKernel(float* scores, int64_t count, uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    float sum = 0.0f;  // roughly normal
    for (int j = 0; j < 6; ++j)
      sum += static_cast<float>(Hash(seed + static_cast<uint64_t>(i * 6 + j)) >> 8) * 0x1p-24f;
    scores[i] = (sum - 3.0f) * 20.0f;
  }
}

#define BENCH_CHECK(expression)                                                       \
  do {                                                                                \
    const auto& checked = (expression);                                               \
    if (!checked.has_value()) {                                                       \
      std::fprintf(stderr, "%s: %s\n", #expression, checked.error().message.c_str()); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    auto stream = Stream::CreateCuda(0, 1);
    BENCH_CHECK(stream);
    stream_ = std::move(*stream);
  }
  bool Wants(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }
  Stream& stream() {
    return *stream_;
  }
  Buffer Allocate(int64_t bytes) {
    auto buffer = Buffer::Allocate(stream_->device(), bytes);
    BENCH_CHECK(buffer);
    return std::move(*buffer);
  }
  Buffer Upload(const std::vector<int32_t>& values) {
    const auto count = static_cast<int64_t>(values.size());
    Buffer buffer = Allocate(count * 4);
    BENCH_CHECK(CopyToDevice(values.data(), buffer.View(DType::kI32, {count}), *stream_));
    BENCH_CHECK(stream_->Synchronize());
    return buffer;
  }
  template <class... Parameters, class... Arguments>
  void Fill(void (*kernel)(Parameters...), Arguments... arguments) {
    cuda::LaunchConfig config;
    config.grid.x = 1024;
    config.block = 256;
    BENCH_CHECK(cuda::Launch("fill", kernel, config, *stream_, arguments...));
    BENCH_CHECK(stream_->Synchronize());
  }

  // Microseconds per call of `launch`, which is given the number of the set to use.
  double Measure(int64_t sets, int64_t calls, const std::function<Status(int64_t)>& launch) {
    void* cuda_stream = stream_->cuda_stream();
    for (int64_t i = 0; i < sets; ++i) BENCH_CHECK(launch(i));  // scratch memory, modules
    BENCH_CHECK(stream_->Synchronize());
    BENCH_CHECK(cuda::BeginCapture(cuda_stream));
    for (int64_t i = 0; i < calls; ++i) BENCH_CHECK(launch(i % sets));
    auto graph = cuda::EndCapture(cuda_stream);
    BENCH_CHECK(graph);
    auto begin = cuda::CreateEvent(0);
    auto end = cuda::CreateEvent(0);
    BENCH_CHECK(begin);
    BENCH_CHECK(end);
    std::vector<double> times;
    for (int i = 0; i < kReplays + 3; ++i) {
      BENCH_CHECK(cuda::RecordEvent(*begin, cuda_stream));
      BENCH_CHECK(cuda::LaunchGraph(*graph, cuda_stream));
      BENCH_CHECK(cuda::RecordEvent(*end, cuda_stream));
      BENCH_CHECK(stream_->Synchronize());
      auto milliseconds = cuda::ElapsedMilliseconds(*begin, *end);
      BENCH_CHECK(milliseconds);
      if (i >= 3) times.push_back(1e3 * static_cast<double>(*milliseconds));
    }
    cuda::DestroyGraph(*graph);
    cuda::DestroyEvent(*begin);
    cuda::DestroyEvent(*end);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2] / static_cast<double>(calls);
  }

  void Report(const std::string& name, double us, double bytes, double flops) const {
    std::printf("%-44s %9.2f us", name.c_str(), us);
    if (bytes > 0) {
      std::printf("  %7.0f GB/s %5.1f %% BW", bytes / us * 1e-3,
                  100.0 * bytes / (us * 1e-6) / kBandwidth);
    }
    if (flops > 0) {
      std::printf("  %6.0f TFLOP/s %5.1f %% P8", flops / us * 1e-6,
                  100.0 * flops / (us * 1e-6) / kMatrixRate);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::string filter_;
  std::unique_ptr<Stream> stream_;
};

// `sequences` of `keys` visible entries each, `rows` query rows at their ends, in several sets.
class Step {
 public:
  Step(Bench& bench, int64_t sequences, int64_t rows, int64_t keys, int64_t max_sets = 1 << 20) {
    const int64_t blocks_per_sequence = (keys + kBlockEntries - 1) / kBlockEntries;
    const int64_t set_blocks = sequences * blocks_per_sequence;
    const int64_t set_bytes = set_blocks * kBlockEntries * kRecordBytes;
    sets_ = std::min(max_sets, std::max<int64_t>(1, (kColdBytes + set_bytes - 1) / set_bytes));
    if (sets_ == 1 && max_sets > 1) sets_ = 2;
    const int64_t total_rows = sequences * rows;
    const int64_t total_blocks = sets_ * set_blocks;
    records_ = bench.Allocate(total_blocks * kBlockEntries * kRecordBytes);
    bench.Fill(FillRecordsKernel, static_cast<uint8_t*>(records_.data()),
               total_blocks * kBlockEntries);
    q_ = bench.Allocate(total_rows * kHeads * kChannels * 2);
    bench.Fill(FillQueriesKernel, static_cast<uint16_t*>(q_.data()),
               total_rows * kHeads * kChannels, uint64_t{1} << 40);
    weights_ = bench.Allocate(total_rows * kHeads * 2);
    bench.Fill(FillQueriesKernel, static_cast<uint16_t*>(weights_.data()), total_rows * kHeads,
               uint64_t{1} << 41);
    std::vector<int32_t> positions;
    std::vector<int32_t> row_sequence;
    std::vector<int32_t> start = {0};
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t r = 0; r < rows; ++r) {
        positions.push_back(static_cast<int32_t>(keys - rows + r));
        row_sequence.push_back(static_cast<int32_t>(s));
      }
      start.push_back(static_cast<int32_t>(positions.size()));
    }
    // Blocks in shuffled order.
    std::vector<int32_t> order(static_cast<size_t>(total_blocks));
    std::iota(order.begin(), order.end(), 0);
    uint64_t state = 1;
    for (size_t i = order.size(); i > 1; --i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i - 1], order[(state >> 33) % i]);
    }
    positions_ = bench.Upload(positions);
    row_sequence_ = bench.Upload(row_sequence);
    start_ = bench.Upload(start);
    slots_ = bench.Upload(std::vector<int32_t>(static_cast<size_t>(sequences)));
    tables_ = bench.Upload(order);
    std::vector<int32_t> candidates;
    for (int64_t r = 0; r < total_rows; ++r) {
      const int64_t available = keys / 8;
      for (int64_t b = 0; b < kCandidateBlocks; ++b) {
        candidates.push_back(b < available
                                 ? static_cast<int32_t>(available <= kCandidateBlocks
                                                            ? b
                                                            : b * available / kCandidateBlocks)
                                 : -1);
      }
    }
    candidates_ = bench.Upload(candidates);
    candidates_out_ = bench.Allocate(total_rows * kCandidateBlocks * 4);
    selected_ = bench.Allocate(total_rows * kTopK * 4);
    for (int64_t i = 0; i < sets_; ++i) {
      IndexerArgs args;
      args.q = q_.View(DType::kBf16, {total_rows, kHeads, kChannels});
      args.weights = weights_.View(DType::kBf16, {total_rows, kHeads});
      args.blocks = records_.View(DType::kU8, {total_blocks, kBlockEntries, kRecordBytes});
      args.layout.positions = positions_.View(DType::kI32, {total_rows});
      args.layout.row_sequence = row_sequence_.View(DType::kI32, {total_rows});
      args.layout.sequence_start = start_.View(DType::kI32, {sequences + 1});
      args.layout.sequence_slot = slots_.View(DType::kI32, {sequences});
      args.layout.block_table =
          TensorView(static_cast<int32_t*>(tables_.data()) + i * set_blocks, DType::kI32,
                     {sequences, blocks_per_sequence}, args.q.device());
      args.selected = selected_.View(DType::kI32, {total_rows, kTopK});
      args_.push_back(args);
    }
  }
  int64_t sets() const {
    return sets_;
  }
  IndexerArgs args(int64_t set) const {
    return args_[static_cast<size_t>(set)];
  }
  TensorView candidates() const {
    return candidates_.View(DType::kI32, {args_[0].q.rows(), kCandidateBlocks});
  }
  TensorView candidates_out() const {
    return candidates_out_.View(DType::kI32, {args_[0].q.rows(), kCandidateBlocks});
  }

 private:
  int64_t sets_ = 1;
  Buffer records_, q_, weights_, positions_, row_sequence_, start_, slots_, tables_, candidates_,
      candidates_out_, selected_;
  std::vector<IndexerArgs> args_;
};

int64_t CallsFor(int64_t sets, double estimated_us) {
  return std::max<int64_t>(sets,
                           static_cast<int64_t>(std::clamp(4000.0 / estimated_us, 1.0, 60.0)));
}

void BenchScores(Bench& bench, int64_t sequences, int64_t rows, int64_t keys, bool listed) {
  std::string name = "scores " + std::to_string(sequences);
  if (rows > 1) name += " x " + std::to_string(rows) + " rows";
  name += " x " + std::to_string(keys) + (listed ? " keys, candidates" : " keys");
  if (!bench.Wants(name)) return;
  const Step step(bench, sequences, rows, keys, sequences * rows >= 1024 ? 2 : 1 << 20);
  const int64_t scored = listed ? std::min<int64_t>(keys, kCandidateBlocks * 8) : keys;
  const double pairs = static_cast<double>(sequences * rows * scored);
  const double bytes = static_cast<double>(sequences * (listed ? rows : 1) * scored * kRecordBytes);
  ScratchScope scratch(bench.stream());
  std::vector<cuda::IndexerProblem> problems;
  int64_t wave = 0;
  for (int64_t i = 0; i < step.sets(); ++i) {
    IndexerArgs args = step.args(i);
    if (listed) args.candidates_in = step.candidates();
    problems.push_back(cuda::DescribeProblem(args));
    if (i == 0) {
      wave = cuda::PlaceScores(sequences * rows, &problems[0], &scratch);
    } else {
      problems.back().score_stride = problems[0].score_stride;
      problems.back().scores = problems[0].scores;
      problems.back().maxima = problems[0].maxima;
    }
  }
  const double us = bench.Measure(
      step.sets(), CallsFor(step.sets(), bytes / kBandwidth * 1e6), [&](int64_t set) -> Status {
        cuda::IndexerProblem problem = problems[static_cast<size_t>(set)];
        for (int64_t begin = 0; begin < sequences * rows; begin += wave) {
          problem.row_begin = static_cast<int>(begin);
          problem.row_end = static_cast<int>(std::min(sequences * rows, begin + wave));
          DI_RETURN_IF_ERROR(cuda::LaunchTensorScores(problem, sequences, bench.stream()));
        }
        return {};
      });
  bench.Report(name, us, bytes, 2.0 * kHeads * kChannels * pairs);
}

void BenchSelection(Bench& bench, int64_t rows, int64_t keys, bool publishes) {
  std::string name = "selection " + std::to_string(rows) + " rows x " + std::to_string(keys) +
                     (publishes ? ", candidate blocks too" : "");
  if (!bench.Wants(name)) return;
  const Step step(bench, 1, rows, keys + rows, 1);
  IndexerArgs args = step.args(0);
  if (publishes) args.candidates_out = step.candidates_out();
  const int64_t set_bytes = rows * keys * 4;
  const int64_t sets = std::max<int64_t>(2, (kColdBytes + set_bytes - 1) / set_bytes);
  std::vector<Buffer> buffers;
  std::vector<cuda::IndexerProblem> problems;
  for (int64_t i = 0; i < sets; ++i) {
    cuda::IndexerProblem problem = cuda::DescribeProblem(args);
    const int64_t stride = (problem.max_blocks * kBlockEntries + 63) / 64 * 64;
    problem.row_end = static_cast<int>(rows);
    problem.score_stride = static_cast<int>(stride);
    buffers.push_back(bench.Allocate(rows * stride * 4));
    problem.scores = static_cast<float*>(buffers.back().data());
    buffers.push_back(bench.Allocate(rows * stride / 2));
    problem.maxima = static_cast<float*>(buffers.back().data());
    problem.candidate_maxima = problem.maxima;
    problem.candidate_maxima_stride = static_cast<int>(stride / cuda::kScoreBlock);
    bench.Fill(FillScoresKernel, problem.scores, rows * stride, static_cast<uint64_t>(i) << 36);
    BENCH_CHECK(cuda::LaunchBlockMaxima(problem, false, cuda::kScoreBlock, problem.maxima,
                                        problem.candidate_maxima_stride, bench.stream()));
    problems.push_back(problem);
  }
  const double us = bench.Measure(sets, std::max<int64_t>(sets, 20), [&](int64_t set) {
    return cuda::LaunchSelection(problems[static_cast<size_t>(set)], bench.stream());
  });
  // Counted as one read of bf16 scores, whatever is really read.
  bench.Report(name, us, static_cast<double>(rows * keys * 2), 0.0);
}

// How far scores of the tensor kernel are from fp32 sums, and how many of the best 512 differ.
void CompareScores(Bench& bench, int64_t rows, int64_t keys) {
  const std::string name =
      "accuracy " + std::to_string(rows) + " rows x " + std::to_string(keys) + " keys";
  if (!bench.Wants(name)) return;
  const Step step(bench, 1, rows, keys, 1);
  cuda::IndexerProblem problem = cuda::DescribeProblem(step.args(0));
  ScratchScope scratch(bench.stream());
  cuda::PlaceScores(rows, &problem, &scratch);
  problem.row_end = static_cast<int>(rows);
  const int64_t stride = problem.score_stride;
  std::vector<float> tensor(static_cast<size_t>(rows * stride));
  std::vector<float> plain(tensor.size());
  const TensorView scores(problem.scores, DType::kF32, {rows * stride}, bench.stream().device());
  BENCH_CHECK(cuda::LaunchTensorScores(problem, 1, bench.stream()));
  BENCH_CHECK(CopyToHost(scores, tensor.data(), bench.stream()));
  BENCH_CHECK(cuda::LaunchPlainScores(problem, bench.stream()));
  BENCH_CHECK(CopyToHost(scores, plain.data(), bench.stream()));
  BENCH_CHECK(bench.stream().Synchronize());
  double square = 0.0;
  double difference = 0.0;
  double largest = 0.0;
  int64_t different_bits = 0;
  int64_t different_choices = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const auto n = static_cast<size_t>(keys - rows + r + 1);
    const std::span<const float> a(tensor.data() + r * stride, n);
    const std::span<const float> b(plain.data() + r * stride, n);
    for (size_t i = 0; i < n; ++i) {
      const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      difference += d * d;
      square += static_cast<double>(b[i]) * static_cast<double>(b[i]);
      largest = std::max(largest, std::abs(d));
      different_bits += a[i] != b[i] ? 1 : 0;
    }
    std::vector<int32_t> chosen_a(kTopK);
    std::vector<int32_t> chosen_b(kTopK);
    SelectTopK(a, chosen_a);
    SelectTopK(b, chosen_b);
    std::vector<int32_t> common;
    std::set_intersection(chosen_a.begin(), chosen_a.end(), chosen_b.begin(), chosen_b.end(),
                          std::back_inserter(common));
    different_choices += kTopK - std::ssize(common);
  }
  std::printf(
      "%-44s relative L2 error %.2e, largest %.2e, other bits %.2f %%, other choices %lld of "
      "%lld\n",
      name.c_str(), std::sqrt(difference / square), largest,
      100.0 * static_cast<double>(different_bits) / static_cast<double>(rows * keys),
      static_cast<long long>(different_choices), static_cast<long long>(rows * kTopK));
}

enum class Role { kPlain, kSource, kConsumer };

void BenchWhole(Bench& bench, int64_t sequences, int64_t rows, int64_t keys, Role role) {
  std::string name = "whole " + std::to_string(sequences) + " x " + std::to_string(rows) +
                     " rows x " + std::to_string(keys) + " keys";
  if (role == Role::kSource) name += ", candidate source";
  if (role == Role::kConsumer) name += ", candidate consumer";
  if (!bench.Wants(name)) return;
  const Step step(bench, sequences, rows, keys, sequences * rows >= 1024 ? 2 : 1 << 20);
  const double us =
      bench.Measure(step.sets(), std::max<int64_t>(step.sets(), 20), [&](int64_t set) {
        IndexerArgs args = step.args(set);
        if (role == Role::kSource) args.candidates_out = step.candidates_out();
        if (role == Role::kConsumer) args.candidates_in = step.candidates();
        return cuda::Indexer(args, bench.stream());
      });
  bench.Report(name, us, 0.0, 0.0);
}

void Run(const std::string& filter) {
  Bench bench(filter);
  constexpr int64_t kKibi = 1024;
  CompareScores(bench, 1, 64 * kKibi);
  CompareScores(bench, 8, 64 * kKibi);
  BenchScores(bench, 1, 1, 8 * kKibi, false);
  BenchScores(bench, 1, 1, 64 * kKibi, false);
  BenchScores(bench, 1, 1, 512 * kKibi, false);
  BenchScores(bench, 1, 1, 1024 * kKibi, false);
  BenchScores(bench, 8, 1, 64 * kKibi, false);
  BenchScores(bench, 32, 1, 4 * kKibi, false);
  BenchScores(bench, 32, 1, 32 * kKibi, false);
  BenchScores(bench, 32, 1, 64 * kKibi, false);
  BenchScores(bench, 128, 1, 64 * kKibi, false);
  BenchScores(bench, 32, 1, 512 * kKibi, false);
  BenchScores(bench, 32, 2, 64 * kKibi, false);
  BenchScores(bench, 32, 6, 64 * kKibi, false);
  BenchScores(bench, 1, 6, 64 * kKibi, false);
  BenchScores(bench, 32, 1, 64 * kKibi, true);
  BenchScores(bench, 1, 140, 64 * kKibi, true);
  BenchScores(bench, 1, 4096, 64 * kKibi, false);
  BenchScores(bench, 1, 4096, 256 * kKibi, false);
  for (bool publishes : {false, true}) {
    BenchSelection(bench, 1, 64 * kKibi, publishes);
    BenchSelection(bench, 8, 64 * kKibi, publishes);
    BenchSelection(bench, 64, 32 * kKibi, publishes);
    BenchSelection(bench, 64, 128 * kKibi, publishes);
    BenchSelection(bench, 256, 128 * kKibi, publishes);
  }
  BenchWhole(bench, 1, 1, 4 * kKibi, Role::kPlain);
  BenchWhole(bench, 1, 1, 64 * kKibi, Role::kPlain);
  BenchWhole(bench, 1, 1, 64 * kKibi, Role::kSource);
  BenchWhole(bench, 1, 1, 64 * kKibi, Role::kConsumer);
  BenchWhole(bench, 32, 1, 64 * kKibi, Role::kPlain);
  BenchWhole(bench, 64, 1, 128 * kKibi, Role::kSource);
  BenchWhole(bench, 64, 1, 128 * kKibi, Role::kConsumer);
  BenchWhole(bench, 1, 4096, 64 * kKibi, Role::kPlain);
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  deepinfer::Run(argc > 1 ? argv[1] : "");
  return 0;
}
