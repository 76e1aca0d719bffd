#include "ops/cuda/emulated/matrix.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "ops/cuda/emulated/fibers.h"
#include "tensor/float_formats.h"

namespace deepinfer::cuda::emulated {
namespace {

const std::array<float, 256>& E4M3Values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table;
    for (int code = 0; code < 256; ++code)
      table[static_cast<size_t>(code)] = E4M3ToF32(static_cast<uint8_t>(code));
    return table;
  }();
  return values;
}

// d[m x n] += a[m x k] * b[k x n], rows one after another. Without contraction of the two
// operations (a flag of the whole build), so that all versions give the same bits.
template <int kN>
[[gnu::target_clones("avx512f", "avx2", "default")]] void AddProducts(float* __restrict__ d,
                                                                      const float* __restrict__ a,
                                                                      const float* __restrict__ b,
                                                                      int m, int k) {
  for (int row = 0; row < m; ++row)
    for (int step = 0; step < k; ++step)
      for (int column = 0; column < kN; ++column)
        d[row * kN + column] += a[row * k + step] * b[step * kN + column];
}

// The elements of registers a and b of a warp, and of a warpgroup's a, are at the same places for
// every type when counted in registers: 4 bytes at bytes 4t and 4t + 16 of rows g and g + 8.
template <int kPerRegister, class Decode>
void UnpackRows(const uint32_t* a, int lane, int k, float* rows, Decode decode) {
  const int g = lane / 4;
  const int t = lane % 4;
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < kPerRegister; ++e)
      rows[(g + 8 * (i % 2)) * k + (t + 4 * (i / 2)) * kPerRegister + e] = decode(a[i], e);
}

template <int kPerRegister, class Decode>
void RunWarpMma(void* const* lanes, Decode decode) {
  constexpr int kK = 8 * kPerRegister;
  float a[16 * kK];
  float b[kK * 8];
  float d[16 * 8];
  for (int lane = 0; lane < 32; ++lane) {
    const WarpMma& mma = *static_cast<const WarpMma*>(lanes[lane]);
    const int g = lane / 4;
    const int t = lane % 4;
    UnpackRows<kPerRegister>(mma.a, lane, kK, a, decode);
    for (int i = 0; i < 2; ++i)
      for (int e = 0; e < kPerRegister; ++e)
        b[((t + 4 * i) * kPerRegister + e) * 8 + g] = decode(mma.b[i], e);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = mma.d[i];
  }
  AddProducts<8>(d, a, b, 16, kK);
  for (int lane = 0; lane < 32; ++lane) {
    const WarpMma& mma = *static_cast<const WarpMma*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) mma.d[i] = d[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2];
  }
}

// Elements of a register, or of four bytes of memory.
struct DecodeBf16 {
  float operator()(uint32_t word, int element) const {
    return std::bit_cast<float>(element == 0 ? word << 16 : word & 0xffff0000u);
  }
};
struct DecodeE4M3 {
  const std::array<float, 256>& values = E4M3Values();
  float operator()(uint32_t word, int element) const {
    return values[(word >> (8 * element)) & 0xffu];
  }
};

// An operand of a warpgroup in shared memory. The address of an element is computed as if there
// were no swizzle; then bits 4 to 6 of the address are changed by bits 7 to 9.
class SharedOperand {
 public:
  SharedOperand(uint64_t descriptor, const char* what) : what_(what) {
    if ((descriptor & 0x3fffc000c000c000u) != 0)
      KernelFailed("%s with descriptor 0x%016llx: bits that are not used are set", what,
                   static_cast<unsigned long long>(descriptor));
    start_ = static_cast<uint32_t>(descriptor & 0x3fffu) << 4;
    leading_ = static_cast<uint32_t>((descriptor >> 16) & 0x3fffu) << 4;
    stride_ = static_cast<uint32_t>((descriptor >> 32) & 0x3fffu) << 4;
    switch (descriptor >> 62) {
      case 1:
        width_ = 128;
        break;
      case 2:
        width_ = 64;
        break;
      case 3:
        width_ = 32;
        break;
      default:
        width_ = 16;
        break;
    }
    // The rows that the swizzle tells apart must be counted from the beginning of a tile.
    if (width_ > 16 && (start_ & (width_ * 8 - 1) & ~127u) != 0)
      KernelFailed("%s with an operand at shared address 0x%x, in the middle of a tile of %u bytes",
                   what, start_, width_ * 8);
  }

  // 16 bytes of row m or n; `piece` counts along k (K-major).
  const unsigned char* Piece(uint32_t row, uint32_t piece) const {
    const uint32_t along = width_ == 16 ? leading_ : 16;
    return At(start_ + row % 8 * width_ + row / 8 * stride_ + piece * along);
  }
  // 16 bytes of row k; `piece` counts along m or n (MN-major).
  const unsigned char* PieceAcross(uint32_t k, uint32_t piece) const {
    if (width_ == 16) return At(start_ + k % 8 * 16 + k / 8 * leading_ + piece * stride_);
    const uint32_t pieces = width_ / 16;
    return At(start_ + k % 8 * width_ + k / 8 * stride_ + piece % pieces * 16 +
              piece / pieces * leading_);
  }

 private:
  const unsigned char* At(uint32_t address) const {
    const uint32_t mask = width_ - 16;  // 0x70, 0x30, 0x10 or none of the address bits 4 to 6
    return SharedMemoryAt(address ^ ((address >> 3) & mask), 16, what_);
  }

  const char* what_;
  uint32_t start_;
  uint32_t leading_;
  uint32_t stride_;
  uint32_t width_;  // bytes of a swizzled row; 16: none
};

template <int kPerRegister, int kN, class Decode>
void RunWarpgroupMmaOf(void* const* threads, const char* what, Decode decode) {
  constexpr int kK = 8 * kPerRegister;
  constexpr int kPerPiece = 4 * kPerRegister;
  const WarpgroupMma& first = *static_cast<const WarpgroupMma*>(threads[0]);
  static thread_local float a[64 * kK];
  static thread_local float b[kK * kN];
  static thread_local float d[64 * kN];
  const auto unpack = [&](const unsigned char* piece, float* out, int step) {
    for (int e = 0; e < kPerPiece; ++e) {
      uint32_t word;
      std::memcpy(&word, piece + e / kPerRegister * 4, 4);
      out[e * step] = decode(word, e % kPerRegister);
    }
  };
  for (int i = 0; i < 128; ++i) {
    const WarpgroupMma& mma = *static_cast<const WarpgroupMma*>(threads[i]);
    if (mma.count != first.count || mma.b != first.b || mma.accumulate != first.accumulate ||
        mma.transposed_b != first.transposed_b ||
        (mma.a_registers == nullptr) != (first.a_registers == nullptr) ||
        (mma.a_registers == nullptr && mma.a != first.a))
      KernelFailed("%s with operands that differ between the threads of the warpgroup", what);
    if (mma.a_registers != nullptr)
      UnpackRows<kPerRegister>(mma.a_registers, i % 32, kK, a + i / 32 * 16 * kK, decode);
  }
  if (first.a_registers == nullptr) {
    const SharedOperand operand(first.a, what);
    for (uint32_t row = 0; row < 64; ++row)
      for (uint32_t piece = 0; piece < 2; ++piece)
        unpack(operand.Piece(row, piece), a + row * kK + piece * kPerPiece, 1);
  }
  const SharedOperand operand(first.b, what);
  if (first.transposed_b) {
    for (uint32_t k = 0; k < kK; ++k)
      for (uint32_t piece = 0; piece < kN / kPerPiece; ++piece)
        unpack(operand.PieceAcross(k, piece), b + k * kN + piece * kPerPiece, 1);
  } else {
    for (uint32_t column = 0; column < kN; ++column)
      for (uint32_t piece = 0; piece < 2; ++piece)
        unpack(operand.Piece(column, piece), b + piece * kPerPiece * kN + column, kN);
  }
  // Accumulators 2 i and 2 i + 1 of a thread lie side by side.
  const auto place = [](int thread, int i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 2);
    return &d[row * kN + i / 2 * 8 + 2 * (thread % 4)];
  };
  if (!first.accumulate) std::fill_n(d, 64 * kN, 0.0f);
  for (int thread = 0; first.accumulate && thread < 128; ++thread)
    for (int i = 0; i < kN / 4; ++i)
      std::memcpy(place(thread, i), static_cast<const WarpgroupMma*>(threads[thread])->d + 2 * i,
                  8);
  AddProducts<kN>(d, a, b, 64, kK);
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < kN / 4; ++i)
      std::memcpy(static_cast<const WarpgroupMma*>(threads[thread])->d + 2 * i, place(thread, i),
                  8);
}

template <int kPerRegister, class Decode>
void RunWarpgroupMma(void* const* threads, const char* what, Decode decode) {
  switch (static_cast<const WarpgroupMma*>(threads[0])->count) {
    case 4:
      return RunWarpgroupMmaOf<kPerRegister, 8>(threads, what, decode);
    case 8:
      return RunWarpgroupMmaOf<kPerRegister, 16>(threads, what, decode);
    case 16:
      return RunWarpgroupMmaOf<kPerRegister, 32>(threads, what, decode);
    case 32:
      return RunWarpgroupMmaOf<kPerRegister, 64>(threads, what, decode);
    case 40:
      return RunWarpgroupMmaOf<kPerRegister, 80>(threads, what, decode);
    case 48:
      return RunWarpgroupMmaOf<kPerRegister, 96>(threads, what, decode);
    case 64:
      return RunWarpgroupMmaOf<kPerRegister, 128>(threads, what, decode);
    case 96:
      return RunWarpgroupMmaOf<kPerRegister, 192>(threads, what, decode);
    case 128:
      return RunWarpgroupMmaOf<kPerRegister, 256>(threads, what, decode);
    default:
      KernelFailed("%s of an N that is not offered", what);
  }
}

}  // namespace

void RunWarpMmaBf16(void* const* lanes) {
  RunWarpMma<2>(lanes, DecodeBf16());
}
void RunWarpMmaE4M3(void* const* lanes) {
  RunWarpMma<4>(lanes, DecodeE4M3());
}

void RunWarpLoad(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const void* row = static_cast<const WarpLoad*>(lanes[8 * i + lane / 4])->row;
      std::memcpy(&static_cast<const WarpLoad*>(lanes[lane])->r[i],
                  static_cast<const char*>(row) + lane % 4 * 4, 4);
    }
}

void RunWarpLoadTransposed(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        const void* row = static_cast<const WarpLoad*>(lanes[8 * i + lane % 4 * 2 + e])->row;
        std::memcpy(&pair[e], static_cast<const char*>(row) + lane / 4 * 2, 2);
      }
      static_cast<const WarpLoad*>(lanes[lane])->r[i] =
          pair[0] | (static_cast<uint32_t>(pair[1]) << 16);
    }
}

void RunWarpStore(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      void* row = static_cast<const WarpStore*>(lanes[8 * i + lane / 4])->row;
      std::memcpy(static_cast<char*>(row) + lane % 4 * 4,
                  &static_cast<const WarpStore*>(lanes[lane])->r[i], 4);
    }
}

void RunWarpStoreTransposed(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = static_cast<const WarpStore*>(lanes[lane])->r[i];
      for (int e = 0; e < 2; ++e) {
        void* row = static_cast<const WarpStore*>(lanes[8 * i + lane % 4 * 2 + e])->row;
        const uint16_t element = static_cast<uint16_t>(pair >> (16 * e));
        std::memcpy(static_cast<char*>(row) + lane / 4 * 2, &element, 2);
      }
    }
}

void RunWarpgroupMmaBf16(void* const* threads) {
  RunWarpgroupMma<2>(threads, "WarpgroupMma (bf16)", DecodeBf16());
}
void RunWarpgroupMmaE4M3(void* const* threads) {
  RunWarpgroupMma<4>(threads, "WarpgroupMma (E4M3)", DecodeE4M3());
}

}  // namespace deepinfer::cuda::emulated
