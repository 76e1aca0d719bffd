// Times of drawing tokens on one GPU, at the published vocabulary: microseconds per launch inside a
// replayed graph, rows read once over time as a share of the read bandwidth, and beside it what the
// host needs for the same rows (the copy of the logits, and one row's draw on one thread). Every
// case is first compared with the host bit for bit. Few rows stay in the second-level cache, as
// they do behind the LM head. Option: a word that names must contain.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "ops/sample_rows/sample_row.h"
#include "ops/sample_rows/sample_rows.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

constexpr double kReadBandwidth = 4.54e12;  // bytes per second, of an H200
constexpr int64_t kVocab = 129280;
constexpr int64_t kMostRows = 256;
constexpr int kLaunches = 20;

void Check(const Status& status) {
  if (status.has_value()) return;
  fmt::print(stderr, "{}\n", status.error().message);
  std::exit(1);
}
template <class T>
T Check(Result<T> result) {
  if (result.has_value()) return *std::move(result);
  fmt::print(stderr, "{}\n", result.error().message);
  std::exit(1);
}

// Like a language model's: a bell 2.5 wide, and a few tokens ahead of it.
std::vector<float> MakeLogits() {
  std::vector<float> logits(static_cast<size_t>(kMostRows * kVocab));
  uint64_t state = 1;
  const auto next = [&] {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  for (float& x : logits) {
    const uint64_t z = next();
    float sum = -2.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>((z >> (16 * i)) & 0xffffu) * 0x1p-16f;
    x = 4.3f * sum;
  }
  for (int64_t row = 0; row < kMostRows; ++row) {
    for (int i = 0; i < 40; ++i) {
      logits[static_cast<size_t>(row * kVocab) + next() % kVocab] =
          20.0f - 0.35f * static_cast<float>(i);
    }
  }
  return logits;
}

struct Kind {
  const char* name;
  RowDraw draw;
};

std::vector<Kind> Kinds() {
  RowDraw greedy;
  greedy.greedy = 1;
  RowDraw greedy_logprob = greedy;
  greedy_logprob.report = RowReport::kRaw;
  RowDraw plain;
  plain.report = RowReport::kRaw;
  RowDraw warm = plain;
  warm.inverse_temperature = 1.0 / 0.6;
  RowDraw nucleus = warm;
  nucleus.top_p = 0.95;
  RowDraw top_k = warm;
  top_k.top_k = 40;
  RowDraw both = nucleus;
  both.top_k = 40;
  both.min_mass = static_cast<uint64_t>(0.05 * kUnitMass);
  return {{"greedy", greedy},
          {"greedy, logprob", greedy_logprob},
          {"temperature 1, logprob", plain},
          {"temperature 0.6, logprob", warm},
          {"top-p 0.95, logprob", nucleus},
          {"top-k 40, logprob", top_k},
          {"top-k, top-p, min-p, logprob", both}};
}

int Main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const auto stream = Check(Stream::CreateCuda(0, 8));
  const std::vector<float> logits = MakeLogits();
  const Device device = stream->device();
  const auto upload = [&](const void* data, int64_t bytes) {
    Buffer buffer = Check(Buffer::Allocate(device, std::max<int64_t>(bytes, 16)));
    Check(cuda::CopyToDevice(data, buffer.data(), bytes, stream->cuda_stream()));
    Check(stream->Synchronize());
    return buffer;
  };
  const Buffer logits_device = upload(logits.data(), std::ssize(logits) * 4);
  const std::vector<int32_t> ends = {1, 0, 128804, 128803};
  const Buffer tokens = upload(ends.data(), std::ssize(ends) * 4);
  const Buffer sampled = Check(Buffer::Allocate(device, kMostRows * 4));
  const Buffer out =
      Check(Buffer::Allocate(device, kMostRows * static_cast<int64_t>(sizeof(SampledRow))));
  constexpr double kPcie = 55e9;
  fmt::print("{:<30} {:>5} {:>10} {:>9} {:>22}\n", "draw", "rows", "us", "% of read",
             "copy + one host draw");
  for (const Kind& kind : Kinds()) {
    if (std::string(kind.name).find(filter) == std::string::npos) continue;
    for (const int64_t rows : {1, 8, 64, 256}) {
      std::vector<RowDraw> draws;
      for (int64_t r = 0; r < rows; ++r) {
        RowDraw draw = kind.draw;
        draw.logit_row = static_cast<int32_t>(r);
        draw.slot = static_cast<int32_t>(r);
        draw.random = static_cast<uint64_t>(r + 1) * 0x9e3779b97f4a7c15ull;
        draw.ends_end = static_cast<int32_t>(ends.size());
        draws.push_back(draw);
      }
      const Buffer draws_device =
          upload(draws.data(), rows * static_cast<int64_t>(sizeof(RowDraw)));
      const SampleRowsArgs args{.logits = logits_device.View(DType::kF32, {kMostRows, kVocab}),
                                .draws = draws_device.View(DType::kU8, {rows, sizeof(RowDraw)}),
                                .edits = TensorView(static_cast<void*>(nullptr), DType::kU8,
                                                    {0, sizeof(RowEdit)}, device),
                                .tokens = tokens.View(DType::kI32, {std::ssize(ends)}),
                                .masks = TensorView(static_cast<void*>(nullptr), DType::kI32,
                                                    {0, (kVocab + 31) / 32}, device),
                                .sampled = sampled.View(DType::kI32, {kMostRows}),
                                .out = out.View(DType::kU8, {rows, sizeof(SampledRow)})};
      Check(SampleRows(args, *stream));
      std::vector<SampledRow> found(static_cast<size_t>(rows));
      Check(CopyToHost(args.out, found.data(), *stream));
      RowScratch scratch;
      double host_seconds = 0;
      const int64_t checked = std::min<int64_t>(rows, 16);
      for (int64_t r = 0; r < checked; ++r) {
        const auto start = std::chrono::steady_clock::now();
        const SampledRow expected =
            SampleRow(std::span(logits).subspan(static_cast<size_t>(r * kVocab), kVocab),
                      draws[static_cast<size_t>(r)],
                      {.mask = {}, .edits = {}, .excluded = {}, .ends = ends}, scratch);
        host_seconds +=
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (std::memcmp(&expected, &found[static_cast<size_t>(r)], sizeof(SampledRow)) != 0) {
          fmt::print("{} row {}: token {} rank {} sum {} instead of {} {} {}\n", kind.name, r,
                     found[static_cast<size_t>(r)].token, found[static_cast<size_t>(r)].rank,
                     found[static_cast<size_t>(r)].sum, expected.token, expected.rank,
                     expected.sum);
          return 1;
        }
      }
      Check(cuda::BeginCapture(stream->cuda_stream()));
      for (int i = 0; i < kLaunches; ++i) Check(SampleRows(args, *stream));
      void* graph = Check(cuda::EndCapture(stream->cuda_stream()));
      void* begin = Check(cuda::CreateEvent(0));
      void* end = Check(cuda::CreateEvent(0));
      std::vector<double> us;
      for (int i = 0; i < 35; ++i) {
        Check(cuda::RecordEvent(begin, stream->cuda_stream()));
        Check(cuda::LaunchGraph(graph, stream->cuda_stream()));
        Check(cuda::RecordEvent(end, stream->cuda_stream()));
        Check(stream->Synchronize());
        if (i >= 5) us.push_back(1e3 * Check(cuda::ElapsedMilliseconds(begin, end)) / kLaunches);
      }
      std::sort(us.begin(), us.end());
      const double median = us[us.size() / 2];
      const auto bytes = static_cast<double>(rows * kVocab * 4);
      fmt::print("{:<30} {:>5} {:>10.2f} {:>9.1f} {:>10.0f} + {:>6.0f} us\n", kind.name, rows,
                 median, 100.0 * bytes / (median * 1e-6) / kReadBandwidth, bytes / kPcie * 1e6,
                 host_seconds / static_cast<double>(checked) * 1e6);
      std::fflush(stdout);
      cuda::DestroyEvent(begin);
      cuda::DestroyEvent(end);
      cuda::DestroyGraph(graph);
    }
  }
  return 0;
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  return deepinfer::Main(argc, argv);
}
