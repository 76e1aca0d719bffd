#include "ops/engram/engram.h"

#include "ops/dispatch.h"
#include "ops/engram/engram_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {

Status EngramHash(const EngramHashArgs& args, Stream& stream) {
  const int64_t rows = args.lookback.rows();
  const auto ngram = static_cast<int64_t>(args.multipliers.size());
  const auto lookups = static_cast<int64_t>(args.primes.size());
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.lookback, DType::kI32, {rows, ngram}, "EngramHash", "lookback"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.table_rows, DType::kI64, {rows, lookups}, "EngramHash", "table_rows"));
  if (ngram < 2 || lookups % (ngram - 1) != 0 || args.offsets.size() != args.primes.size()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("EngramHash: {} primes and {} offsets for n-grams up to {}.", lookups,
                            args.offsets.size(), ngram));
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::EngramHash(args, stream);
  const int64_t heads = lookups / (ngram - 1);
  stream.pool().ParallelFor(
      rows,
      [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* ids = args.lookback.Row<int32_t>(t);
          int64_t* out = args.table_rows.Row<int64_t>(t);
          int64_t hash = ids[0] * args.multipliers[0];
          for (int64_t n = 2; n <= ngram; ++n) {
            hash ^= ids[n - 1] * args.multipliers[static_cast<size_t>(n - 1)];
            for (int64_t h = 0; h < heads; ++h) {
              const auto i = static_cast<size_t>((n - 2) * heads + h);
              out[i] = hash % args.primes[i] + args.offsets[i];
            }
          }
        }
      },
      32);
  return {};
}

Status EngramGather(const EngramGatherArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.table_rows, DType::kI64, {-1, -1}, "EngramGather", "table_rows"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.weight, DType::kFp8E4M3, {-1, -1}, "EngramGather", "weight"));
  const int64_t rows = args.table_rows.rows();
  const int64_t lookups = args.table_rows.dim(1);
  const int64_t channels = args.weight.dim(1);
  if (channels % 32 != 0) {
    return Fail(Code::kInvalidArgument,
                fmt::format("EngramGather: {} channels are not a multiple of 32.", channels),
                "weight");
  }
  DI_RETURN_IF_ERROR(ExpectTensor(args.scale, DType::kE8M0, {args.weight.rows(), channels / 32},
                                  "EngramGather", "scale"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.out, DType::kBf16, {rows, lookups * channels}, "EngramGather", "out"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::EngramGather(args, stream);
  // Hash values are below the table's size by construction; anything else is a bug of the caller.
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < lookups; ++i) {
      const int64_t row = args.table_rows.Row<int64_t>(t)[i];
      DI_CHECK(row >= 0 && row < args.weight.rows());
    }
  }
  const bool use_reference = UseReference(stream, channels);
  stream.pool().ParallelFor(
      rows * lookups,
      [&](int64_t begin, int64_t end, int) {
        if (use_reference) return reference::EngramGather(args, begin, end);
        cpu::EngramGather(stream.cpu_level(), args, begin, end);
      },
      16);
  return {};
}

Status EngramApply(const EngramApplyArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.streams, DType::kBf16, {-1, 4, -1}, "EngramApply", "streams"));
  const int64_t rows = args.streams.rows();
  const int64_t hidden = args.streams.dim(2);
  DI_RETURN_IF_ERROR(ExpectTensor(args.kv, DType::kBf16, {rows, 5 * hidden}, "EngramApply", "kv"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.q_weight, DType::kBf16, {4, hidden}, "EngramApply", "q_weight"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.k_weight, DType::kBf16, {4, hidden}, "EngramApply", "k_weight"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::EngramApply(args, stream);
  if (UseReference(stream, hidden)) {
    stream.pool().ParallelFor(
        rows, [&](int64_t begin, int64_t end, int) { reference::EngramApply(args, begin, end); });
  } else {
    stream.pool().ParallelFor(4 * rows, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        cpu::EngramApply(stream.cpu_level(), args, i / 4, i % 4);
    });
  }
  return {};
}

}  // namespace deepinfer
