#include "ops/bench/ops_bench.h"

#include <emmintrin.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/cpu_features.h"
#include "base/quoted.h"
#include "base/thread_pool.h"
#include "ops/bench/model_ops_bench.h"
#include "ops/bench/ops_bench_cases.h"
#include "ops/bench/peaks.h"
#include "tensor/buffer.h"

namespace deepinfer {
namespace {

struct OpEntry {
  const char* op;
  Status (*bench)(OpsBench&);
};
constexpr OpEntry kOps[] = {
    {"linear", &BenchLinear},   {"sparse_attention", &BenchSparseAttention},
    {"indexer", &BenchIndexer}, {"hyper_connection", &BenchHyperConnection},
    {"rows", &BenchRowOps},
};

constexpr CpuLevel kLevels[] = {CpuLevel::kAvx2, CpuLevel::kAvx512, CpuLevel::kAvx512Bf16,
                                CpuLevel::kAmx};
// Calls are grouped until one timing lasts this long.
constexpr double kSecondsPerRun = 0.02;

// Seconds of the wall clock, or of the calling thread's processor time.
class Timer {
 public:
  explicit Timer(bool thread_cpu_time)
      : clock_(thread_cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC), start_(Now()) {}
  double Seconds() const {
    return Now() - start_;
  }

 private:
  double Now() const {
    timespec now = {};
    ::clock_gettime(clock_, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }
  clockid_t clock_;
  double start_;
};

int64_t LastLevelCacheBytes() {
  int64_t bytes =
      std::max<int64_t>(::sysconf(_SC_LEVEL3_CACHE_SIZE), ::sysconf(_SC_LEVEL2_CACHE_SIZE));
  return std::clamp<int64_t>(bytes, int64_t{8} << 20, int64_t{512} << 20);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Reads [begin, end) once, front to back; both 128-byte aligned.
__m128i ReadRange(const char* begin, const char* end) {
  __m128i sum[8] = {};
  for (const char* at = begin; at < end; at += 128) {
    _mm_prefetch(at + 2048, _MM_HINT_T0);
    _mm_prefetch(at + 2048 + 64, _MM_HINT_T0);
    for (int i = 0; i < 8; ++i) {
      sum[i] = _mm_xor_si128(sum[i], _mm_load_si128(reinterpret_cast<const __m128i*>(at + 16 * i)));
    }
  }
  for (int i = 1; i < 8; ++i) sum[0] = _mm_xor_si128(sum[0], sum[i]);
  return sum[0];
}

// One call of a bandwidth-bound operation is about this long.
constexpr int64_t kPieceBytes = int64_t{8} << 20;

ReadBandwidth MeasureRead(const Buffer& buffer, ThreadPool& pool, const OpsBenchOptions& options) {
  const int64_t pieces = buffer.bytes() / kPieceBytes;
  const char* data = static_cast<const char*>(buffer.data());
  ReadBandwidth rate;
  std::vector<double> gbps;
  for (int run = 0; run < options.runs; ++run) {
    double seconds = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const char* from = data + piece * kPieceBytes;
      const Timer timer(options.thread_cpu_time);
      pool.ParallelFor(kPieceBytes / 128, [&](int64_t begin, int64_t end, int) {
        __m128i sum = ReadRange(from + 128 * begin, from + 128 * end);
        asm volatile("" : "+x"(sum));
      });
      const double piece_seconds = timer.Seconds();
      seconds += piece_seconds;
      rate.best_gbps =
          std::max(rate.best_gbps, static_cast<double>(kPieceBytes) / piece_seconds * 1e-9);
    }
    gbps.push_back(static_cast<double>(pieces * kPieceBytes) / seconds * 1e-9);
  }
  rate.median_gbps = Median(gbps);
  return rate;
}

// The best of many short pieces: a peak is what the machine can do, not what it did on average.
double PeakGflops(double (*spin)(int64_t), ThreadPool& pool, const OpsBenchOptions& options) {
  constexpr double kPieceSeconds = 0.0003;
  constexpr int kPieces = 400;
  int64_t rounds = 100;
  double best = 0;
  for (int piece = 0; piece < kPieces;) {
    std::vector<double> flops(static_cast<size_t>(pool.num_threads()));
    const Timer timer(options.thread_cpu_time);
    pool.Run([&](int worker) { flops[static_cast<size_t>(worker)] = spin(rounds); });
    const double seconds = timer.Seconds();
    if (seconds < kPieceSeconds) {
      rounds *= 2;  // too short to count
      continue;
    }
    double sum = 0;
    for (double f : flops) sum += f;
    best = std::max(best, sum / seconds * 1e-9);
    ++piece;
  }
  return best;
}

// Larger than any cache, and touched, so that reads go to memory.
Result<Buffer> ColdBuffer(ThreadPool& pool) {
  const int64_t bytes = std::max<int64_t>(5 * LastLevelCacheBytes(), int64_t{256} << 20);
  DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate({}, bytes));
  char* data = static_cast<char*>(buffer.data());
  pool.ParallelFor(bytes >> 12, [&](int64_t begin, int64_t end, int) {
    std::memset(data + (begin << 12), 1, static_cast<size_t>((end - begin) << 12));
  });
  return buffer;
}

Result<MachineCeilings> MeasureCeilings(const OpsBenchOptions& options, ThreadPool& pool) {
  MachineCeilings ceilings;
  DI_ASSIGN_OR_RETURN(const Buffer buffer, ColdBuffer(pool));
  ThreadPool one(1);
  ceilings.read_gbps_one_thread = MeasureRead(buffer, one, options).best_gbps;
  const ReadBandwidth read = MeasureRead(buffer, pool, options);
  ceilings.read_gbps = read.best_gbps;
  ceilings.read_median_gbps = read.median_gbps;
  const CpuFeatures& features = HostCpuFeatures();
  if (features.avx2) ceilings.fp32_gflops_avx2 = PeakGflops(&SpinFp32Avx2, pool, options);
  if (features.avx512) ceilings.fp32_gflops_avx512 = PeakGflops(&SpinFp32Avx512, pool, options);
  if (features.avx512_bf16) ceilings.bf16_dot_gflops = PeakGflops(&SpinBf16Dot, pool, options);
  if (features.amx_bf16) ceilings.bf16_amx_gflops = PeakGflops(&SpinAmxBf16, pool, options);
  return ceilings;
}

struct Timing {
  double median_us = 0;  // of runs
  double min_us = 0;     // of runs
  double max_us = 0;     // of runs
  double best_us = 0;    // of single calls
};

Result<Timing> Time(const std::function<Status()>& run, const OpsBenchOptions& options) {
  DI_RETURN_IF_ERROR(run());  // first touch
  const Timer second(options.thread_cpu_time);
  DI_RETURN_IF_ERROR(run());
  const int64_t calls =
      std::max<int64_t>(1, static_cast<int64_t>(kSecondsPerRun / second.Seconds()));
  Timing timing;
  timing.best_us = 1e12;
  std::vector<double> us;
  for (int i = 0; i < options.runs; ++i) {
    double seconds = 0;
    for (int64_t call = 0; call < calls; ++call) {
      const Timer timer(options.thread_cpu_time);
      DI_RETURN_IF_ERROR(run());
      const double call_seconds = timer.Seconds();
      seconds += call_seconds;
      timing.best_us = std::min(timing.best_us, call_seconds * 1e6);
    }
    us.push_back(seconds * 1e6 / static_cast<double>(calls));
  }
  timing.median_us = Median(us);
  timing.min_us = *std::min_element(us.begin(), us.end());
  timing.max_us = *std::max_element(us.begin(), us.end());
  return timing;
}

nlohmann::ordered_json CeilingsJson(const MachineCeilings& ceilings) {
  return {{"read_gbps_one_thread", ceilings.read_gbps_one_thread},
          {"read_gbps", ceilings.read_gbps},
          {"read_median_gbps", ceilings.read_median_gbps},
          {"fp32_gflops_avx2", ceilings.fp32_gflops_avx2},
          {"fp32_gflops_avx512", ceilings.fp32_gflops_avx512},
          {"bf16_dot_gflops", ceilings.bf16_dot_gflops},
          {"bf16_amx_gflops", ceilings.bf16_amx_gflops}};
}

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  ::gmtime_r(&now, &parts);
  char text[32] = {};
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

OpsBench::OpsBench(const OpsBenchOptions& options, const MachineCeilings& ceilings, Stream& stream,
                   Survey* survey)
    : options_(options), ceilings_(ceilings), stream_(stream), survey_(survey) {}

bool OpsBench::Wants(std::string_view op, std::string_view name) const {
  const bool wanted = fmt::format("{} {}", op, name).find(options_.filter) != std::string::npos;
  if (survey_ == nullptr) return wanted;
  survey_->any_wanted |= wanted;
  if (std::find(survey_->ops.begin(), survey_->ops.end(), op) == survey_->ops.end())
    survey_->ops.emplace_back(op);
  return false;
}

int64_t OpsBench::CopiesForColdData(int64_t bytes) {
  return std::max<int64_t>(2, 4 * LastLevelCacheBytes() / std::max<int64_t>(1, bytes) + 1);
}

double OpsBench::fp32_gflops() const {
  return stream_.cpu_level() >= CpuLevel::kAvx512 ? ceilings_.fp32_gflops_avx512
                                                  : ceilings_.fp32_gflops_avx2;
}

OpsBench::Share OpsBench::ShareOf(const Result& result) const {
  const double peak =
      result.bench_case.peak_gflops > 0 ? result.bench_case.peak_gflops : fp32_gflops();
  const double memory_us = result.bench_case.bytes / ceilings_.read_gbps * 1e-3;
  const double median_memory_us = result.bench_case.bytes / ceilings_.read_median_gbps * 1e-3;
  const double compute_us = peak > 0 ? result.bench_case.flops / peak * 1e-3 : 0;
  if (memory_us >= compute_us) {
    return {median_memory_us / result.median_us, memory_us / result.best_us, "read bandwidth"};
  }
  return {compute_us / result.median_us, compute_us / result.best_us, "peak"};
}

Status OpsBench::Measure(const OpsBenchCase& bench_case) {
  if (!Wants(bench_case.op, bench_case.name)) return {};
  DI_ASSIGN_OR_RETURN(const Timing timing, Time(bench_case.run, options_));
  Result result;
  result.bench_case = bench_case;
  result.bench_case.run = nullptr;
  result.bench_case.other = nullptr;
  result.level = stream_.cpu_level();
  result.median_us = timing.median_us;
  result.min_us = timing.min_us;
  result.max_us = timing.max_us;
  result.best_us = timing.best_us;
  if (bench_case.other) {
    DI_ASSIGN_OR_RETURN(const Timing other, Time(bench_case.other, options_));
    result.other_median_us = other.median_us;
    result.other_best_us = other.best_us;
  }
  if (options_.progress) {
    const Share share = ShareOf(result);
    std::string line = fmt::format(
        "{:<12} {:<8} {:<24} {:>9.1f} us (best {:>9.1f}) {:>6.2f} GB/s {:>7.1f} GFLOP/s {:>4.0f} % "
        "(best {:>3.0f} %) of {}",
        CpuLevelName(result.level), bench_case.op, bench_case.name, result.median_us,
        result.best_us, bench_case.bytes / result.median_us * 1e-3,
        bench_case.flops / result.median_us * 1e-3, 100 * share.median, 100 * share.best,
        share.ceiling);
    if (result.other_median_us > 0) {
      line +=
          fmt::format("; {:.2f} x (best {:.2f} x) {}", result.other_median_us / result.median_us,
                      result.other_best_us / result.best_us, bench_case.other_name);
    }
    options_.progress(line);
  }
  results_.push_back(std::move(result));
  return {};
}

Result<ReadBandwidth> MeasureReadBandwidth(int threads) {
  ThreadPool pool(threads);
  DI_ASSIGN_OR_RETURN(const Buffer buffer, ColdBuffer(pool));
  return MeasureRead(buffer, pool, {});
}

Status RunOpsBench(const OpsBenchOptions& options, std::string* json) {
  if (options.threads < 0 || options.threads > 1024) {
    return Fail(Code::kInvalidArgument,
                fmt::format("threads is {}; it must be from 0 (all) to 1024.", options.threads),
                "threads");
  }
  if (options.runs < 3 || options.runs > 1000) {
    return Fail(Code::kInvalidArgument,
                fmt::format("runs is {}; it must be from 3 to 1000.", options.runs), "runs");
  }
  if (options.thread_cpu_time && options.threads != 1) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("thread_cpu_time needs threads = 1, but threads is {}.", options.threads),
        "thread_cpu_time");
  }
  const int threads = options.threads > 0 ? options.threads : UsableCores();
  Stream stream(threads);
  const CpuLevel best = stream.cpu_level();
  // Before anything is measured: a filter that selects nothing.
  OpsBench::Survey survey;
  const MachineCeilings no_ceilings;
  OpsBench surveying(options, no_ceilings, stream, &survey);
  for (const OpEntry& entry : kOps) {
    auto status = entry.bench(surveying);
    if (!status.has_value()) return WithContext(std::move(status.error()), entry.op);
  }
  if (!survey.any_wanted) {
    return Fail(Code::kNotFound,
                fmt::format("no case has {} in its name, which begins with the operation; "
                            "operations are {}.",
                            Quoted(options.filter), fmt::join(survey.ops, ", ")),
                "filter");
  }
  DI_ASSIGN_OR_RETURN(const MachineCeilings ceilings, MeasureCeilings(options, stream.pool()));
  if (options.progress) {
    options.progress(fmt::format(
        "{} {}; read {:.1f} GB/s (median {:.1f}, one thread {:.1f}); GFLOP/s: fp32 avx2 "
        "{:.0f}, avx512 {:.0f}, bf16 dot {:.0f}, amx {:.0f}",
        threads, threads == 1 ? "thread" : "threads", ceilings.read_gbps, ceilings.read_median_gbps,
        ceilings.read_gbps_one_thread, ceilings.fp32_gflops_avx2, ceilings.fp32_gflops_avx512,
        ceilings.bf16_dot_gflops, ceilings.bf16_amx_gflops));
  }

  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (CpuLevel level : kLevels) {
    if (level > best || (!options.all_levels && level != best)) continue;
    stream.set_cpu_level(level);
    OpsBench bench(options, ceilings, stream);
    for (const OpEntry& entry : kOps) {
      auto status = entry.bench(bench);
      if (!status.has_value()) return WithContext(std::move(status.error()), entry.op);
    }
    for (const OpsBench::Result& result : bench.results()) {
      const OpsBench::Share share = bench.ShareOf(result);
      nlohmann::ordered_json entry = {{"level", CpuLevelName(result.level)},
                                      {"op", result.bench_case.op},
                                      {"name", result.bench_case.name},
                                      {"median_us", result.median_us},
                                      {"min_us", result.min_us},
                                      {"max_us", result.max_us},
                                      {"best_call_us", result.best_us},
                                      {"bytes", result.bench_case.bytes},
                                      {"flops", result.bench_case.flops},
                                      {"gbps", result.bench_case.bytes / result.median_us * 1e-3},
                                      {"gflops", result.bench_case.flops / result.median_us * 1e-3},
                                      {"fraction", share.median},
                                      {"best_fraction", share.best},
                                      {"of", share.ceiling}};
      if (result.other_median_us > 0) {
        entry["other"] = result.bench_case.other_name;
        entry["other_median_us"] = result.other_median_us;
        entry["other_best_call_us"] = result.other_best_us;
        entry["speed_over_other"] = result.other_median_us / result.median_us;
        entry["best_speed_over_other"] = result.other_best_us / result.best_us;
      }
      cases.push_back(std::move(entry));
    }
  }
  // Ceilings again at the end: a machine shared with others drifts, and a reader should see by how
  // much.
  DI_ASSIGN_OR_RETURN(const MachineCeilings ceilings_after,
                      MeasureCeilings(options, stream.pool()));
  const nlohmann::ordered_json document = {
      {"cpu", HostCpuFeatures().brand},
      {"level", CpuLevelName(best)},
      {"threads", threads},
      {"runs", options.runs},
      {"filter", options.filter},
      {"clock", options.thread_cpu_time ? "thread cpu time" : "wall"},
      {"date", UtcNow()},
      {"last_level_cache_bytes", LastLevelCacheBytes()},
      {"ceilings", CeilingsJson(ceilings)},
      {"ceilings_after", CeilingsJson(ceilings_after)},
      {"cases", std::move(cases)},
  };
  *json = document.dump(1) + "\n";
  return {};
}

}  // namespace deepinfer
