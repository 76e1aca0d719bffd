// Operands of the indexer's tensor kernels: keys as the rows of A in registers, queries as the
// columns of B in shared memory, for two arithmetics.
//
// Channels are permuted so that each thread of a quad holds one group of 32 channels of its keys:
// its 16 bytes of codes have one scale, and no code needs to change threads. Keys are normalised to
// the largest of their four scales; that power of two multiplies the finished score.
//
// E4M3: a value of the Q4P grid is one of E4M3 while its group's scale is at most 11 binades below
// the key's largest, and a query's head likewise; powers of two go into the weights. Keys and rows
// for which that does not hold are "wide" and take the bf16 arithmetic, whose range is that of
// fp32.
#pragma once

#include "ops/indexer/indexer_cuda.cuh"
#include "packed_integers.cuh"
#include "warpgroup_e4m3.cuh"

namespace deepinfer::cuda {

inline constexpr int kHeads = 32;
inline constexpr int kChannels = 128;
inline constexpr int kPackedRecord = 68;
inline constexpr int kBf16Record = 2 * kChannels;

enum class KeyFormat {
  kPackedE4M3,  // packed records, E4M3 products
  kPackedBf16,  // packed records, bf16 products
  kBf16,        // bf16 records and products
};

// Bytes of a column of B, and k steps of one matrix instruction.
template <KeyFormat kFormat>
inline constexpr int kColumnBytes = kFormat == KeyFormat::kPackedE4M3 ? kChannels : 2 * kChannels;
template <KeyFormat kFormat>
inline constexpr int kKSteps = kColumnBytes<kFormat> / 32;

// Half of what the relu of a head's product is multiplied with: the relu is computed as d + |d|,
// twice max(d, 0), since the unit of additions has more room than that of comparisons, which
// decodes keys.
__device__ inline float HeadFactor(uint16_t weight, float power_of_two) {
  return __fmul_rn(Bf16ToFloat(weight), 0.5f * power_of_two);
}

// Where a head's factor lies among a row's: the eight that a thread of a quad needs are in
// sequence.
__device__ inline int FactorSlot(int head) {
  return head % 8 / 2 * 8 + head / 8 * 2 + head % 2;
}

// A thread's part of one packed key: the codes of its group, and all scales.
struct PackedKey {
  uint32_t codes[4];
  uint32_t scales;
};

__device__ inline PackedKey LoadPackedKey(const uint8_t* record, int quad_lane) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(record);
  PackedKey packed;
#pragma unroll
  for (int j = 0; j < 4; ++j) packed.codes[j] = words[4 * quad_lane + j];
  packed.scales = words[kChannels / 8];
  return packed;
}
__device__ inline uint32_t LargestScale(uint32_t scales) {
  return max(max(scales & 0xffu, (scales >> 8) & 0xffu), max((scales >> 16) & 0xffu, scales >> 24));
}
// Binades by which the thread's scale is below the largest.
__device__ inline uint32_t ScaleGap(const PackedKey& packed, int quad_lane) {
  return LargestScale(packed.scales) - ((packed.scales >> (8 * quad_lane)) & 0xffu);
}
__device__ inline float KeyFactor(uint32_t scales) {
  return __uint_as_float(LargestScale(scales) << 23);
}

// ---- bf16 ----

// Bf16 pairs of the codes i and i + 4 (i = 0 ... 3) of a word of eight, times `multiplier`, which
// includes 2^126: E2M1 bits at bf16 bits 15, 8, 7, 6 are the code's value times 2^-126.
__device__ inline void DecodeCodes(uint32_t word, uint32_t multiplier, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80008000u;
  constexpr uint32_t kMagnitudes = 0x01c001c0u;
  pairs[0] = MulBf16x2(((word << 12) & kSigns) | ((word << 6) & kMagnitudes), multiplier);
  pairs[1] = MulBf16x2(((word << 8) & kSigns) | ((word << 2) & kMagnitudes), multiplier);
  pairs[2] = MulBf16x2(((word << 4) & kSigns) | ((word >> 2) & kMagnitudes), multiplier);
  pairs[3] = MulBf16x2((word & kSigns) | ((word >> 6) & kMagnitudes), multiplier);
}

// The bf16 pairs of a packed key in the order of use, relative to the key's largest scale. Groups
// whose scale is more than 2^252 below it vanish.
__device__ inline void DecodePackedKeyBf16(const PackedKey& packed, int quad_lane,
                                           uint32_t (&values)[16]) {
  const int exponent = max(0, 253 - static_cast<int>(ScaleGap(packed, quad_lane)));
  const uint32_t multiplier = (static_cast<uint32_t>(exponent) << 7) * 0x00010001u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t pairs[4];
    DecodeCodes(packed.codes[j], multiplier, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[4 * j + i] = pairs[i];
  }
}

// A thread's part of a bf16 record in global memory: the pairs in the order of use.
__device__ inline void LoadBf16Key(const uint8_t* record, int quad_lane, uint32_t (&values)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = LoadStreaming(record + 64 * i + 16 * quad_lane);
    values[4 * i + 0] = v.x;
    values[4 * i + 1] = v.y;
    values[4 * i + 2] = v.z;
    values[4 * i + 3] = v.w;
  }
}

// A from the parts of the thread's two keys.
__device__ inline void CombineBf16(const uint32_t (&low)[16], const uint32_t (&high)[16],
                                   uint32_t (&a)[8][4]) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    a[s][0] = low[2 * s];
    a[s][1] = high[2 * s];
    a[s][2] = low[2 * s + 1];
    a[s][3] = high[2 * s + 1];
  }
}

// Byte offset of pair 4 j + i of the quad's thread `quad_lane` (order of the key loaders) in panels
// of [columns, 64 channels] with the 128-byte swizzle.
__device__ inline int QueryOffsetBf16(int columns, int column, int quad_lane, int j, int i) {
  const int byte = 32 * (2 * j + i / 2) + 4 * quad_lane + 16 * (i % 2);
  return byte / 128 * columns * 128 + column * 128 + ((byte % 128 / 16) ^ (column % 8)) * 16 +
         byte % 16;
}

// Queries of `rows` rows as the B operand, by the first kThreads threads of the block.
template <int kRows, bool kPacked, int kThreads>
__device__ void StageQueriesBf16(const IndexerProblem& problem, int row, int rows, uint8_t* panels,
                                 float* weights) {
  constexpr int kPieces = kChannels / 8;
  for (int e = static_cast<int>(threadIdx.x); e < rows * kHeads * kPieces; e += kThreads) {
    const int column = e / kPieces;
    const int piece = e % kPieces;
    const uint16_t* q = problem.q + (row + column / kHeads) * problem.q_stride +
                        column % kHeads * kChannels + 8 * piece;
    const uint4 v = *reinterpret_cast<const uint4*>(q);
    // Packed keys: piece is 4 t + j, pairs (c, c + 4). Bf16 keys: piece is 4 j + t, pairs (2c,
    // 2c+1).
    const int quad_lane = kPacked ? piece / 4 : piece % 4;
    const int j = kPacked ? piece % 4 : piece / 4;
    uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    if (kPacked) {
      pairs[0] = (v.x & 0xffffu) | (v.z << 16);
      pairs[1] = (v.x >> 16) | (v.z & 0xffff0000u);
      pairs[2] = (v.y & 0xffffu) | (v.w << 16);
      pairs[3] = (v.y >> 16) | (v.w & 0xffff0000u);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(
          panels + QueryOffsetBf16(kRows * kHeads, column, quad_lane, j, i)) = pairs[i];
    }
  }
  for (int e = static_cast<int>(threadIdx.x); e < rows * kHeads; e += kThreads) {
    const int h = e % kHeads;
    weights[e - h + FactorSlot(h)] =
        HeadFactor(problem.weights[(row + e / kHeads) * problem.weights_stride + h], 1.0f);
  }
}

// ---- E4M3 ----

// Exponent of the largest power of two of a normalised key's scale and of a normalised head: 6 *
// 2^6 and 1.5 * 2^8 are the largest values of theirs, below E4M3's 448.
inline constexpr int kKeyExponent = 6;
inline constexpr int kQueryExponent = 8;
inline constexpr int kLargestGap = 11;  // binades that a group's scale may be below the largest

// Whether a thread's part of a key does not fit. The scale does not matter where the group is zero.
__device__ inline bool IsWide(const PackedKey& packed, int quad_lane) {
  return ScaleGap(packed, quad_lane) > kLargestGap &&
         ((packed.codes[0] | packed.codes[1] | packed.codes[2] | packed.codes[3]) & 0x77777777u) !=
             0;
}

// A thread's parts of the two packed keys that it works on, which are 8 records apart. Scales of
// both are halves of a word.
struct PackedKeyPair {
  uint32_t low_codes[4];
  uint32_t high_codes[4];
  uint32_t largest;  // scales
  uint32_t gaps;     // binades by which the thread's scales are below
  bool wide;         // one of the two does not fit
};

__device__ inline PackedKeyPair LoadPackedKeyPair(const uint8_t* record, int quad_lane) {
  constexpr int kApart = kScoreBlock * kPackedRecord;
  PackedKeyPair pair;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pair.low_codes[j] = reinterpret_cast<const uint32_t*>(record)[4 * quad_lane + j];
    pair.high_codes[j] = reinterpret_cast<const uint32_t*>(record + kApart)[4 * quad_lane + j];
  }
  const uint8_t* scale = record + kChannels / 2 + quad_lane;
  const uint32_t own = scale[0] | (static_cast<uint32_t>(scale[kApart]) << 16);
  pair.largest = MaxU16x2(own, __shfl_xor_sync(0xffffffffu, own, 1));
  pair.largest = MaxU16x2(pair.largest, __shfl_xor_sync(0xffffffffu, pair.largest, 2));
  pair.gaps = pair.largest - own;
  pair.wide = false;
  constexpr uint32_t kToTopBit = 0x8000u - (kLargestGap + 1);  // reached by gaps that are too large
  if (((pair.gaps + kToTopBit * 0x00010001u) & 0x80008000u) != 0) {
    const uint32_t low =
        pair.low_codes[0] | pair.low_codes[1] | pair.low_codes[2] | pair.low_codes[3];
    const uint32_t high =
        pair.high_codes[0] | pair.high_codes[1] | pair.high_codes[2] | pair.high_codes[3];
    pair.wide = ((pair.gaps & 0xffffu) > kLargestGap && (low & 0x77777777u) != 0) ||
                ((pair.gaps >> 16) > kLargestGap && (high & 0x77777777u) != 0);
    pair.gaps = MinU16x2(pair.gaps, kLargestGap * 0x00010001u);
  }
  return pair;
}

// E4M3 codes, in order, of the thread's group of a key whose scale is `gap` below the largest.
__device__ inline void DecodeE4M3(const uint32_t (&packed_codes)[4], uint32_t gap,
                                  uint32_t (&values)[8]) {
  // E4M3 codes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^(6 - gap).
  const uint32_t lower = 0x6c686000u - gap * 0x08080800u;
  const uint32_t upper = 0x7c787470u - gap * 0x08080808u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t codes = packed_codes[j];
    const uint32_t shifted = codes << 4;
    const uint32_t magnitudes = codes & 0x77777777u;
    // The codes' signs as the top bits of four bytes: even codes from the shifted word.
    const uint32_t signs_low = __byte_perm(shifted, codes, 0x5140);
    const uint32_t signs_high = __byte_perm(shifted, codes, 0x7362);
    values[2 * j] = SelectBytes(lower, upper, magnitudes) | (signs_low & 0x80808080u);
    values[2 * j + 1] = SelectBytes(lower, upper, magnitudes >> 16) | (signs_high & 0x80808080u);
  }
}

__device__ inline void CombineE4M3(const uint32_t (&low)[8], const uint32_t (&high)[8],
                                   uint32_t (&a)[4][4]) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    a[s][0] = low[2 * s];
    a[s][1] = high[2 * s];
    a[s][2] = low[2 * s + 1];
    a[s][3] = high[2 * s + 1];
  }
}

// Four values, already scaled, as E4M3 codes; clears *exact if one is not representable.
__device__ inline uint32_t EncodeE4M3x4(const float (&x)[4], bool* exact) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float units = __fmul_rn(x[i], 512.0f);  // of the smallest subnormal
    *exact = *exact && fabsf(x[i]) <= 448.0f && (__float_as_uint(x[i]) & 0xfffffu) == 0 &&
             static_cast<float>(static_cast<int>(units)) == units;
  }
  return static_cast<uint32_t>(FloatsToE4M3x2(x[0], x[1])) |
         (static_cast<uint32_t>(FloatsToE4M3x2(x[2], x[3])) << 16);
}

// Queries of `rows` rows as the B operand, each head normalised, and weights that take the heads'
// powers of two back. Bit r of *wide_rows is set where row r does not fit.
template <int kThreads>
__device__ inline void StageQueriesE4M3(const IndexerProblem& problem, int row, int rows,
                                        uint8_t* panels, float* weights, unsigned* wide_rows) {
  constexpr int kPieces = kChannels / 8;
  static_assert(kPieces == 16, "a head's channels are spread over half a warp");
  for (int e = static_cast<int>(threadIdx.x); e < rows * kHeads * kPieces; e += kThreads) {
    const int column = e / kPieces;
    const int piece = e % kPieces;
    const int query_row = row + column / kHeads;
    const uint16_t* q =
        problem.q + query_row * problem.q_stride + column % kHeads * kChannels + 8 * piece;
    const uint4 v = *reinterpret_cast<const uint4*>(q);
    float x[2][4] = {
        {Bf16LowToFloat(v.x), Bf16HighToFloat(v.x), Bf16LowToFloat(v.y), Bf16HighToFloat(v.y)},
        {Bf16LowToFloat(v.z), Bf16HighToFloat(v.z), Bf16LowToFloat(v.w), Bf16HighToFloat(v.w)}};
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i / 4][i % 4]));
#pragma unroll
    for (int distance = 1; distance < kPieces; distance *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    bool exact = true;
    if (exponent < 64) {  // zero, or too small for its power of two to go into a weight
      exact = largest == 0.0f;
      exponent = 127 + kQueryExponent;
    }
    const float factor =
        __uint_as_float(static_cast<uint32_t>(254 + kQueryExponent - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = __fmul_rn(x[i / 4][i % 4], factor);
    // Piece 4 t + j: the eight channels that quad thread t brings to step j, four per register of
    // A.
    const int quad_lane = piece / 4;
    const int j = piece % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(panels + column * 128 + ((2 * j + i) ^ (column % 8)) * 16 +
                                   4 * quad_lane) = EncodeE4M3x4(x[i], &exact);
    }
    if (!exact) atomicOr(wide_rows, 1u << (column / kHeads));
    if (piece == 0) {
      const int h = column % kHeads;
      weights[column - h + FactorSlot(h)] = HeadFactor(
          problem.weights[query_row * problem.weights_stride + h],
          __uint_as_float(static_cast<uint32_t>(exponent - kQueryExponent - kKeyExponent) << 23));
    }
  }
}

// ---- Products ----

// Starts products[64 x 32 kRows] = keys * queries, columns from `first_column` of panels that have
// kPanelColumns. WaitProducts ends it.
template <KeyFormat kFormat, int kRows, int kPanelColumns, bool kWarpgroup>
__device__ inline void StartProducts(const uint32_t (&a)[kKSteps<kFormat>][4],
                                     const uint8_t* panels, int first_column,
                                     float (&products)[16 * kRows]) {
  constexpr bool kE4M3 = kFormat == KeyFormat::kPackedE4M3;
  panels += first_column * 128;
  if constexpr (kWarpgroup) {
    WarpgroupFenceRegisters(products);
    WarpgroupFence();
#pragma unroll
    for (int s = 0; s < kKSteps<kFormat>; ++s) {
      const uint64_t panel =
          SharedDescriptor(panels + s / 4 * kPanelColumns * 128, 16, 1024, Swizzle::k128Bytes);
      const uint64_t b = AdvanceDescriptor(panel, static_cast<uint32_t>(s % 4 * 32));
      if constexpr (kE4M3) {
        WarpgroupMmaRegistersE4M3(products, a[s], b, s > 0);
      } else {
        WarpgroupMmaRegisters<0>(products, a[s], b, s > 0);
      }
    }
    WarpgroupCommit();
  } else {
    const int lane = LaneId();
#pragma unroll
    for (int i = 0; i < 16 * kRows; ++i) products[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < kKSteps<kFormat>; ++s) {
#pragma unroll
      for (int j = 0; j < 4 * kRows; j += 2) {
        // Matrices of 8 columns by 16 bytes: columns 8 j and 8 (j + 1), two pieces of each.
        const int column = 8 * (j + lane / 16) + lane % 8;
        const int piece = s % 4 * 2 + lane / 8 % 2;
        uint32_t b[4];
        LoadMatrix4(
            b, panels + s / 4 * kPanelColumns * 128 + column * 128 + (piece ^ (column % 8)) * 16);
        float(&left)[4] = *reinterpret_cast<float(*)[4]>(&products[4 * j]);
        float(&right)[4] = *reinterpret_cast<float(*)[4]>(&products[4 * j + 4]);
        if constexpr (kE4M3) {
          MmaE4M3(left, a[s], {b[0], b[1]});
          MmaE4M3(right, a[s], {b[2], b[3]});
        } else {
          MmaBf16(left, a[s], {b[0], b[1]});
          MmaBf16(right, a[s], {b[2], b[3]});
        }
      }
    }
  }
}
// Waits until at most kPending later batches are under way.
template <bool kWarpgroup, int kPending, int kCount>
__device__ inline void WaitProducts(float (&products)[kCount]) {
  if constexpr (kWarpgroup) {
    WarpgroupWait<kPending>();
    WarpgroupFenceRegisters(products);
  }
}

}  // namespace deepinfer::cuda
