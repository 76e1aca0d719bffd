// Vector building blocks of the operations: bf16 conversions, exponential, group quantisers,
// rotation. Included once per instruction set by <op>_cpu.cc files (Highway's "-inl.h" convention).
//
// Everything here but Exp is bitwise equal to the scalar definitions (tensor/float_formats.h,
// ops/quantize/group_quantize.h, ops/rope/rotate.h), NaN included, at every vector width.
#include "ops/simd_targets.h"

#if defined(DEEPINFER_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DEEPINFER_OPS_SIMD_INL_H_
#undef DEEPINFER_OPS_SIMD_INL_H_
#else
#define DEEPINFER_OPS_SIMD_INL_H_
#endif

#include "hwy/highway.h"
#include "ops/quantize/group_quantize.h"
#include "tensor/float_formats.h"

HWY_BEFORE_NAMESPACE();
namespace deepinfer {
namespace HWY_NAMESPACE {
#if DI_SIMD_PASS

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;  // half as wide
using F64 = hn::Repartition<double, F32>;
using VecF32 = hn::Vec<F32>;
using VecF64 = hn::Vec<F64>;
using VecU32 = hn::Vec<U32>;

inline constexpr int64_t kLanes = HWY_TARGET == HWY_AVX3 ? 16 : 8;

HWY_INLINE VecF32 LoadBf16(const Bf16* x) {
  const U16 du16;
  const U32 du32;
  const auto bits = hn::LoadU(du16, &x->bits);
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

// Round to nearest even; NaN stays a quiet NaN with its sign.
HWY_INLINE VecU32 Bf16Bits(VecF32 x) {
  const U32 du32;
  const VecU32 bits = hn::BitCast(du32, x);
  const VecU32 high = hn::ShiftRight<16>(bits);
  const VecU32 rounded = hn::ShiftRight<16>(
      hn::Add(bits, hn::Add(hn::Set(du32, 0x7fff), hn::And(high, hn::Set(du32, 1)))));
  const auto nan = hn::RebindMask(du32, hn::IsNaN(x));
  return hn::IfThenElse(nan, hn::Or(high, hn::Set(du32, 0x40)), rounded);
}

HWY_INLINE void StoreBf16(VecF32 x, Bf16* out) {
  const U16 du16;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(I32(), Bf16Bits(x))), du16, &out->bits);
}

HWY_INLINE VecF32 RoundBf16(VecF32 x) {
  return hn::BitCast(F32(), hn::ShiftLeft<16>(Bf16Bits(x)));
}

// Sum of squares in double, lane by lane; exact to about 1e-16 for bf16 inputs, so the fp32
// statistic made from it is that of the reference except when it lies within that distance of a
// rounding boundary.
HWY_INLINE void AddSquares(VecF32 x, VecF64& low, VecF64& high) {
  const F64 dd;
  const hn::Half<F32> dh;
  const VecF64 a = hn::PromoteTo(dd, hn::LowerHalf(dh, x));
  const VecF64 b = hn::PromoteTo(dd, hn::UpperHalf(dh, x));
  low = hn::MulAdd(a, a, low);
  high = hn::MulAdd(b, b, high);
}

HWY_INLINE double SumLanes(VecF64 low, VecF64 high) {
  const F64 dd;
  return hn::GetLane(hn::SumOfLanes(dd, hn::Add(low, high)));
}

// exp(x), relative error below 2e-7 where the result is a normal number; gradual underflow, +inf
// above 88.73, NaN for NaN. Cephes' polynomial of degree 5 on [-ln2/2, ln2/2]; the power of two is
// applied in two factors so that neither overflows early.
HWY_INLINE VecF32 Exp(VecF32 x) {
  const F32 d;
  const I32 di;
  // Operand order: minimum and maximum return their second operand when one is NaN.
  x = hn::Min(hn::Set(d, 89.0f), hn::Max(hn::Set(d, -105.0f), x));
  const VecF32 n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504088896341f)));
  VecF32 r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  VecF32 p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto rest = hn::Sub(exponent, half);
  const auto bias = hn::Set(di, 127);
  const VecF32 scale0 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VecF32 scale1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(rest, bias)));
  return hn::Mul(hn::Mul(p, scale0), scale1);
}

// Largest magnitude of `count` values; NaN is ignored, as in GroupAmax.
HWY_INLINE float VectorAmax(const float* x, int64_t count) {
  const F32 d;
  VecF32 amax = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) amax = hn::Max(hn::Abs(hn::LoadU(d, x + i)), amax);
  return hn::GetLane(hn::MaxOfLanes(d, amax));
}

// The E4M3 grid point of x after clamping to +-448.
HWY_INLINE VecF32 RoundE4M3(VecF32 x) {
  const F32 d;
  const U32 du;
  const VecF32 sign = hn::And(x, hn::Set(d, -0.0f));
  const VecF32 a = hn::Min(hn::Abs(x), hn::Set(d, 448.0f));
  const VecU32 bits = hn::BitCast(du, a);
  const VecU32 odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1));
  const VecU32 rounded =
      hn::AndNot(hn::Set(du, 0xfffff), hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7ffff))));
  const VecF32 shift = hn::Set(d, 0x1p14f);  // its ulp is the subnormal step 2^-9
  const VecF32 subnormal = hn::Sub(hn::Add(a, shift), shift);
  const VecF32 magnitude =
      hn::IfThenElse(hn::Lt(a, hn::Set(d, 0x1p-6f)), subnormal, hn::BitCast(d, rounded));
  const VecF32 nan = hn::BitCast(d, hn::Set(du, 0x7fc00000u));
  return hn::IfThenElse(hn::IsNaN(x), nan, hn::Or(magnitude, sign));
}

// kLanes E4M3 codes as fp32. As a half float a code has the same mantissa and an exponent bias
// larger by 8; widening by the F16C instruction avoids both a gather and subnormal fp32 arithmetic.
HWY_INLINE VecF32 LoadE4M3(const uint8_t* codes) {
  const F32 d;
  const hn::Rebind<int8_t, F32> d8;
  const hn::Rebind<int16_t, F32> di16;
  const U16 d16;
  const hn::Rebind<hwy::float16_t, F32> dh;
  const auto wide = hn::PromoteTo(di16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes)));
  // The sign extension leaves two copies of the sign on top; the lower one is cleared.
  const auto halves = hn::And(hn::BitCast(d16, hn::ShiftLeft<7>(wide)), hn::Set(d16, 0xbfff));
  const auto nan_code = hn::Eq(hn::And(halves, hn::Set(d16, 0x7fff)), hn::Set(d16, 0x3f80));
  const auto bits = hn::IfThenElse(nan_code, hn::Set(d16, 0x7e00), halves);
  return hn::Mul(hn::PromoteTo(d, hn::BitCast(dh, bits)), hn::Set(d, 256.0f));
}

// Q8 of one group of 32 values at `x`, stored as bf16.
HWY_INLINE void Q8GroupToBf16(const float* x, Bf16* out) {
  const F32 d;
  const uint8_t byte = Q8ScaleByte(VectorAmax(x, kQ8Group));
  const VecF32 scale = hn::Set(d, E8M0ToF32(byte));
  const VecF32 inverse = hn::Set(d, E8M0ToF32(static_cast<uint8_t>(254 - byte)));
  for (int64_t i = 0; i < kQ8Group; i += kLanes) {
    StoreBf16(hn::Mul(RoundE4M3(hn::Mul(hn::LoadU(d, x + i), inverse)), scale), out + i);
  }
}

HWY_INLINE void Q8RowToBf16(const float* x, int64_t channels, Bf16* out) {
  for (int64_t i = 0; i < channels; i += kQ8Group) Q8GroupToBf16(x + i, out + i);
}

// The E2M1 grid point of x after clamping to +-6: one mantissa bit, step 1/2 below 1. NaN becomes
// +-6, as in F32ToE2M1.
HWY_INLINE VecF32 RoundE2M1(VecF32 x) {
  const F32 d;
  const U32 du;
  const VecF32 sign = hn::And(x, hn::Set(d, -0.0f));
  const VecF32 a = hn::Min(hn::Abs(x), hn::Set(d, 6.0f));  // 6 for NaN
  const VecU32 bits = hn::BitCast(du, a);
  const VecU32 odd = hn::And(hn::ShiftRight<22>(bits), hn::Set(du, 1));
  const VecU32 rounded =
      hn::AndNot(hn::Set(du, 0x3fffff), hn::Add(bits, hn::Add(odd, hn::Set(du, 0x1fffff))));
  const VecF32 shift = hn::Set(d, 0x1p22f);  // its ulp is 1/2
  const VecF32 small = hn::Sub(hn::Add(a, shift), shift);
  const VecF32 magnitude =
      hn::IfThenElse(hn::Lt(a, hn::Set(d, 1.0f)), small, hn::BitCast(d, rounded));
  return hn::Or(magnitude, sign);
}

// Q4P of one group of 32 values at `x`, stored as bf16.
HWY_INLINE void Q4PGroupToBf16(const float* x, Bf16* out) {
  const F32 d;
  const uint8_t byte = Q4PScaleByte(VectorAmax(x, kQ4PGroup));
  const VecF32 scale = hn::Set(d, E8M0ToF32(byte));
  const VecF32 inverse =
      hn::Set(d, E8M0ToF32(static_cast<uint8_t>(254 - byte)));  // a power of two: same as dividing
  for (int64_t i = 0; i < kQ4PGroup; i += kLanes) {
    StoreBf16(hn::Mul(RoundE2M1(hn::Mul(hn::LoadU(d, x + i), inverse)), scale), out + i);
  }
}

// Rotates pairs: x = {x0, x1, ...}, table = {cos, sin, ...}. See RotatePairs for the fused
// operations.
HWY_INLINE VecF32 Rotate(VecF32 x, VecF32 table) {
  const F32 d;
  const VecF32 swapped = hn::Shuffle2301(table);
  const VecF32 minus_even = hn::OddEven(hn::Zero(d), hn::Set(d, -0.0f));
  const VecF32 product = hn::Xor(hn::Mul(hn::DupOdd(x), swapped), minus_even);
  return hn::MulAdd(hn::DupEven(x), table, product);
}

HWY_INLINE VecF32 RotateBack(VecF32 x, VecF32 table) {
  const F32 d;
  const VecF32 minus_odd = hn::OddEven(hn::Set(d, -0.0f), hn::Zero(d));
  return Rotate(x, hn::Xor(table, minus_odd));
}

#endif  // DI_SIMD_PASS
}  // namespace HWY_NAMESPACE
}  // namespace deepinfer
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
