// Hyper-connections on vectors.
//
// HcMix: 24 dot products of 4 * hidden channels per row: 0.98 MFLOP on 41 KB of streams and 1.97 MB
// of fn. One row is bound by reading fn, many rows by fp32 multiply-adds. Channels are cut into
// chunks of 1024; a chunk of fn (96 KB) stays in the second-level cache while all rows pass over
// it, in register tiles of 4 rows x 3 outputs. Per chunk a dot product has one fp32 sum per lane;
// chunk results are added in double, ascending. That order is fixed by the width alone, so a row's
// bits do not depend on the number of rows or threads, and the error stays near 1e-7. With fewer
// rows than threads the outputs are spread, never the channels. Bits differ between AVX2 and
// AVX-512 (8 or 16 partial sums).
//
// HcCollapseNorm: reads 4 streams, writes y and its quantised copy; 41 + 20 KB per row, bound by
// the caches, or by memory when the streams come from there. Same bits as the reference but for the
// norm's statistic (see ops/rms_norm). HcExpand: 92 KB per row, 20 multiply-adds per channel;
// element-wise, bitwise the reference's results.
//
// Measured 2026-11-30, 2-core AMD EPYC (AVX2), one thread, processor time, hidden 5120: HcMix 15.2
// us per row at 64 rows = 65 GFLOP/s, 64 % of the fp32 multiply-add peak, the scalar Sinkhorn
// iterations included; 44 us for one row with fn in the last-level cache (45 GB/s). HcCollapseNorm
// with both outputs 8.0 us per row, HcExpand 7.5 us.
#include <cmath>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/hyper_connection/hyper_connection_cpu.cc"
// The order matters: targets first, then the header that includes this file once per instruction
// set.
// clang-format off
#include "ops/simd_targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/hyper_connection/hyper_connection_impl.h"
#include "ops/rms_norm/rms_norm-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

namespace {

constexpr int64_t kChunk = 1024;
constexpr int64_t kRowTile = 4;
constexpr int64_t kOutputTile = 3;
static_assert(kHcCoefficients % kOutputTile == 0 && cpu::kHcOutputTile == kOutputTile);

// Adds the products of kRows chunks of streams with kOutputTile chunks of fn to sums[row *
// kHcCoefficients + output].
template <int kRows>
HWY_INLINE void MixTile(const float* v, const float* fn, int64_t fn_stride, int64_t size,
                        double* sums) {
  const F32 d;
  VecF32 sum[kRows][kOutputTile];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kOutputTile; ++k) sum[r][k] = hn::Zero(d);
  }
  for (int64_t i = 0; i < size; i += kLanes) {
    VecF32 weight[kOutputTile];
    for (int k = 0; k < kOutputTile; ++k) weight[k] = hn::LoadU(d, fn + k * fn_stride + i);
    for (int r = 0; r < kRows; ++r) {
      const VecF32 value = hn::LoadU(d, v + r * kChunk + i);
      for (int k = 0; k < kOutputTile; ++k) sum[r][k] = hn::MulAdd(value, weight[k], sum[r][k]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kOutputTile; ++k)
      sums[r * kHcCoefficients + k] +=
          static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum[r][k])));
  }
}

}  // namespace

void HcMixVector(const HcMixArgs& args, int64_t row_begin, int64_t row_end, int64_t output_begin,
                 int64_t output_end, double* sums, double* squares) {
  const F32 d;
  const int64_t width = args.streams.row_size();
  const int64_t fn_stride = args.fn.row_stride();
  std::vector<float> v(static_cast<size_t>(kRowTile * kChunk));
  for (int64_t begin = 0; begin < width; begin += kChunk) {
    const int64_t size = std::min(kChunk, width - begin);
    for (int64_t t = row_begin; t < row_end; t += kRowTile) {
      const int64_t rows = std::min(kRowTile, row_end - t);
      for (int64_t r = 0; r < rows; ++r) {
        const Bf16* streams = args.streams.Row<Bf16>(t + r) + begin;
        VecF64 low = hn::Zero(F64());
        VecF64 high = hn::Zero(F64());
        for (int64_t i = 0; i < size; i += kLanes) {
          const VecF32 value = LoadBf16(streams + i);
          hn::StoreU(value, d, v.data() + r * kChunk + i);
          if (output_begin == 0) AddSquares(value, low, high);
        }
        if (output_begin == 0) squares[t + r] += SumLanes(low, high);
      }
      for (int64_t k = output_begin; k < output_end; k += kOutputTile) {
        const float* fn = args.fn.Row<float>(k) + begin;
        double* target = sums + t * kHcCoefficients + k;
        if (rows == kRowTile) {
          MixTile<kRowTile>(v.data(), fn, fn_stride, size, target);
        } else {
          for (int64_t r = 0; r < rows; ++r) {
            MixTile<1>(v.data() + r * kChunk, fn, fn_stride, size, target + r * kHcCoefficients);
          }
        }
      }
    }
  }
}

void HcCollapseNormVector(const HcCollapseNormArgs& args, int64_t row_begin, int64_t row_end) {
  const F32 d;
  const int64_t hidden = args.streams.dim(2);
  std::vector<float> x(static_cast<size_t>(hidden));
  for (int64_t r = row_begin; r < row_end; ++r) {
    const int64_t t = args.row_index.empty() ? r : args.row_index.Row<int32_t>(r)[0];
    const Bf16* streams = args.streams.Row<Bf16>(t);
    const float* pre = args.pre.Row<float>(t);
    VecF64 low = hn::Zero(F64());
    VecF64 high = hn::Zero(F64());
    for (int64_t i = 0; i < hidden; i += kLanes) {
      VecF32 sum = hn::Mul(hn::Set(d, pre[0]), LoadBf16(streams + i));
      for (int64_t s = 1; s < kHcStreams; ++s)
        sum = hn::MulAdd(hn::Set(d, pre[s]), LoadBf16(streams + s * hidden + i), sum);
      sum = RoundBf16(sum);
      hn::StoreU(sum, d, x.data() + i);
      AddSquares(sum, low, high);
    }
    FinishRmsNorm(x.data(), SumLanes(low, high), args.weight.Row<Bf16>(0), hidden, args.norm_eps,
                  args.y.Row<Bf16>(r), args.y_grid.empty() ? nullptr : args.y_grid.Row<Bf16>(r));
  }
}

void HcExpandVector(const HcExpandArgs& args, int64_t row, int64_t begin, int64_t end) {
  const F32 d;
  const int64_t hidden = args.x.dim(1);
  const Bf16* x = args.x.Row<Bf16>(row);
  const float* post = args.post.Row<float>(row);
  const float* comb = args.comb.Row<float>(row);
  Bf16* streams = args.streams.Row<Bf16>(row);
  for (int64_t i = begin; i < end; i += kLanes) {
    const VecF32 y = LoadBf16(x + i);
    VecF32 h[kHcStreams];
    for (int64_t s = 0; s < kHcStreams; ++s) h[s] = LoadBf16(streams + s * hidden + i);
    for (int64_t j = 0; j < kHcStreams; ++j) {
      VecF32 sum = hn::Mul(hn::Set(d, post[j]), y);
      for (int64_t s = 0; s < kHcStreams; ++s)
        sum = hn::MulAdd(hn::Set(d, comb[4 * s + j]), h[s], sum);
      StoreBf16(sum, streams + j * hidden + i);
    }
  }
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deepinfer::cpu {

void HcMixSums(CpuLevel level, const HcMixArgs& args, int64_t row_begin, int64_t row_end,
               int64_t output_begin, int64_t output_end, double* sums, double* squares) {
  DI_SIMD_FUNCTION(level, HcMixVector)
  (args, row_begin, row_end, output_begin, output_end, sums, squares);
}

void HcCollapseNorm(CpuLevel level, const HcCollapseNormArgs& args, int64_t row_begin,
                    int64_t row_end) {
  DI_SIMD_FUNCTION(level, HcCollapseNormVector)(args, row_begin, row_end);
}

void HcExpand(CpuLevel level, const HcExpandArgs& args, int64_t row, int64_t begin, int64_t end) {
  DI_SIMD_FUNCTION(level, HcExpandVector)(args, row, begin, end);
}

}  // namespace deepinfer::cpu
#endif  // HWY_ONCE
