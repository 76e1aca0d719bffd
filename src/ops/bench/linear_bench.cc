// Linear layers of the model's shapes, cold weights.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "ops/bench/onednn_linear.h"
#include "ops/bench/ops_bench_cases.h"
#include "ops/linear/linear.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

struct Shape {
  int64_t n;
  int64_t k;
};

// Expert up and down projections, query down-projection, query up-projection, output
// down-projection.
constexpr Shape kShapes[] = {{2304, 5120}, {5120, 2304}, {1280, 5120}, {32768, 1280}, {5120, 8192}};
constexpr int64_t kRows[] = {1, 4, 16, 64, 256};

struct Format {
  WeightFormat format;
  const char* name;
};
constexpr Format kFormats[] = {{WeightFormat::kFp4Group, "mxfp4"},
                               {WeightFormat::kFp8Block, "mxfp8"},
                               {WeightFormat::kBf16, "bf16"}};

struct Weights {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  std::vector<LinearWeight> copies;
};

// Random codes: also the subnormal ones, as real checkpoints have them.
Result<Weights> MakeWeights(WeightFormat format, const Shape& shape, Stream& stream) {
  Weights weights;
  std::mt19937_64 random(1);
  LinearSource source{.format = format, .n = shape.n, .k = shape.k, .weight = {}, .scale = {}};
  const int64_t count = shape.n * shape.k;
  switch (format) {
    case WeightFormat::kBf16:
      weights.codes.resize(static_cast<size_t>(2 * count));
      for (int64_t i = 0; i < count; ++i) {
        const Bf16 value = F32ToBf16((static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f) * 0.1f);
        std::memcpy(weights.codes.data() + 2 * i, &value, 2);
      }
      source.weight = TensorView(weights.codes.data(), DType::kBf16, {shape.n, shape.k});
      break;
    case WeightFormat::kFp8Block:
      weights.codes.resize(static_cast<size_t>(count));
      for (uint8_t& code : weights.codes) {
        code = static_cast<uint8_t>(random() >> 56);
        if ((code & 0x7f) == 0x7f) code = 0;
      }
      weights.scales.assign(static_cast<size_t>((shape.n + 31) / 32 * (shape.k / 32)), 118);
      source.weight = TensorView(weights.codes.data(), DType::kFp8E4M3, {shape.n, shape.k});
      source.scale =
          TensorView(weights.scales.data(), DType::kE8M0, {(shape.n + 31) / 32, shape.k / 32});
      break;
    case WeightFormat::kFp4Group:
      weights.codes.resize(static_cast<size_t>(count / 2));
      for (uint8_t& code : weights.codes) code = static_cast<uint8_t>(random() >> 56);
      weights.scales.resize(static_cast<size_t>(shape.n * (shape.k / 32)));
      for (uint8_t& scale : weights.scales) scale = static_cast<uint8_t>(116 + random() % 6);
      source.weight = TensorView(weights.codes.data(), DType::kFp4x2, {shape.n, shape.k / 2});
      source.scale = TensorView(weights.scales.data(), DType::kE8M0, {shape.n, shape.k / 32});
      break;
  }
  int64_t wanted = 1;
  while (static_cast<int64_t>(weights.copies.size()) < wanted) {
    DI_ASSIGN_OR_RETURN(LinearWeight weight, PackLinearWeight(source, stream));
    weights.copies.push_back(std::move(weight));
    wanted = OpsBench::CopiesForColdData(weights.copies[0].bytes());
  }
  return weights;
}

double Peak(const OpsBench& bench, CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx512Bf16:
      return bench.ceilings().bf16_dot_gflops;
    case CpuLevel::kAmx:
      return bench.ceilings().bf16_amx_gflops;
    default:
      return bench.fp32_gflops();
  }
}

}  // namespace

Status BenchLinear(OpsBench& bench) {
  Stream& stream = bench.stream();
  if (stream.cpu_level() == CpuLevel::kScalar) return {};
  for (const Shape& shape : kShapes) {
    for (const Format& format : kFormats) {
      std::optional<Weights> weights;
      for (const int64_t rows : kRows) {
        const std::string name = fmt::format("{} {}x{} m={}", format.name, shape.n, shape.k, rows);
        if (!bench.Wants("linear", name)) continue;
        if (!weights.has_value()) {
          DI_ASSIGN_OR_RETURN(weights, MakeWeights(format.format, shape, stream));
        }
        std::vector<Bf16> x(static_cast<size_t>(rows * shape.k));
        std::mt19937_64 random(2);
        for (Bf16& value : x)
          value = F32ToBf16(static_cast<float>(random() >> 40) * 0x1p-23f - 1.0f);
        std::vector<Bf16> y(static_cast<size_t>(rows * shape.n));
        size_t next = 0;

        OpsBenchCase bench_case;
        bench_case.op = "linear";
        bench_case.name = name;
        bench_case.bytes = static_cast<double>(weights->copies[0].bytes() + 2 * rows * shape.k +
                                               2 * rows * shape.n);
        bench_case.flops = 2.0 * static_cast<double>(rows * shape.n * shape.k);
        bench_case.peak_gflops = Peak(bench, stream.cpu_level());
        bench_case.run = [&]() -> Status {
          const LinearWeight& weight = weights->copies[next];
          next = (next + 1) % weights->copies.size();
          return Linear({.x = TensorView(x.data(), DType::kBf16, {rows, shape.k}),
                         .weight = &weight,
                         .y = TensorView(y.data(), DType::kBf16, {rows, shape.n})},
                        stream);
        };
        std::unique_ptr<OnednnLinear> other;
        if (bench.options().compare) {
          Result<OnednnLinear> created = OnednnLinear::Create(
              rows, shape.n, shape.k, OpsBench::CopiesForColdData(2 * shape.n * shape.k),
              stream.pool().num_threads());
          if (created.has_value()) {
            other = std::make_unique<OnednnLinear>(std::move(*created));
            bench_case.other_name = other->name();
            bench_case.other = [&other] { return other->Run(); };
          } else if (created.error().code != Code::kUnsupported) {
            return tl::unexpected<Error>(std::move(created.error()));
          }
        }
        DI_RETURN_IF_ERROR(bench.Measure(bench_case));
      }
    }
  }
  return {};
}

}  // namespace deepinfer
