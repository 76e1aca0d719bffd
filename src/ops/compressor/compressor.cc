#include "ops/compressor/compressor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/compressor/compressor_impl.h"
#include "ops/validate.h"
#include "tensor/float_formats.h"

namespace deepinfer {

Status CompressPairs(const CompressPairsArgs& args, Stream& stream) {
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.key, DType::kF32, {args.layout.num_rows(), -1}, "CompressPairs", "key"));
  const int64_t dim = args.key.dim(1);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.gate, DType::kF32, {args.layout.num_rows(), dim}, "CompressPairs", "gate"));
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.remainders, DType::kF32, {-1, -1, 2 * dim}, "CompressPairs", "remainders"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.pooled, DType::kBf16, {args.entries.count(), dim},
                                  "CompressPairs", "pooled"));
  if (stream.device().kind == DeviceKind::kCuda) return cuda::CompressPairs(args, stream);
  const int32_t* positions = args.layout.positions.Row<int32_t>(0);
  const int32_t* start = args.layout.sequence_start.Row<int32_t>(0);
  const int32_t* slots = args.layout.sequence_slot.Row<int32_t>(0);
  const int32_t* last_row = args.entries.last_row.Row<int32_t>(0);
  const int32_t* index = args.entries.index.Row<int32_t>(0);
  const int32_t* sequence = args.entries.sequence.Row<int32_t>(0);
  const int64_t remainder_rows = args.remainders.dim(1);
  const auto remainder_of = [&](int64_t slot, int64_t position) {
    return args.remainders.Row<float>(slot) + position % remainder_rows * 2 * dim;
  };
  stream.pool().ParallelFor(args.entries.count(), [&](int64_t begin, int64_t end, int) {
    for (int64_t e = begin; e < end; ++e) {
      if (index[e] < 0) continue;
      const int64_t second = last_row[e];
      const int64_t first = second - 1;
      const bool carried = first < start[sequence[e]];
      const float* remainder =
          carried ? remainder_of(slots[sequence[e]], positions[second] - 1) : nullptr;
      const float* k0 = carried ? remainder : args.key.Row<float>(first);
      const float* g0 = carried ? remainder + dim : args.gate.Row<float>(first);
      const float* k1 = args.key.Row<float>(second);
      const float* g1 = args.gate.Row<float>(second);
      Bf16* out = args.pooled.Row<Bf16>(e);
      for (int64_t d = 0; d < dim; ++d) {
        const float largest = std::max(g0[d], g1[d]);
        const float e0 = std::exp(g0[d] - largest);
        const float e1 = std::exp(g1[d] - largest);
        const float sum = e0 + e1;
        out[d] = F32ToBf16(e0 / sum * k0[d] + e1 / sum * k1[d]);
      }
    }
  });
  // Only after every entry has read its carried half.
  for (int64_t s = 0; s < args.layout.num_sequences(); ++s) {
    for (int64_t r = std::max<int64_t>(start[s], start[s + 1] - remainder_rows); r < start[s + 1];
         ++r) {
      float* remainder = remainder_of(slots[s], positions[r]);
      std::memcpy(remainder, args.key.Row<float>(r), static_cast<size_t>(dim) * 4);
      std::memcpy(remainder + dim, args.gate.Row<float>(r), static_cast<size_t>(dim) * 4);
    }
  }
  return {};
}

}  // namespace deepinfer
