// Sparse latent attention on the device: the choice between its kernels, and the plain one.
//
// The plain kernel is for shapes that no tuned kernel takes (small models, GPUs without wgmma). A
// block attends with four heads of a row, one per warp; all of them decode each block of 64 keys to
// shared memory once; a lane computes whole scores of two keys, then sums channels of the
// numerator. Bound by fp32 multiply-adds, 4 * heads * keys * dim FLOPs per row. Every sum is a
// chain of its own in ascending channels or keys.
#include "ops/sparse_attention/sparse_attention_cuda.cuh"

namespace deepinfer::cuda {
namespace {

constexpr int kPlainHeads = 4;
constexpr int kPlainThreads = 32 * kPlainHeads;
constexpr int kBlockKeys = static_cast<int>(kAttentionBlock);

// Elements between decoded keys: an odd number of words, so that the same channels of 32 keys are
// in 32 banks.
__host__ __device__ constexpr int PlainStride(int dim) {
  return dim + 2;
}
int64_t PlainSharedBytes(int64_t dim) {
  return kBlockKeys * PlainStride(static_cast<int>(dim)) * 2 + kPlainHeads * dim * 4 * 2;
}

// Decodes one record, a warp's work. A null record is zeros.
__device__ void DecodeRecordWarp(const uint8_t* record, bool bf16, bool window, int dim,
                                 uint16_t* key) {
  for (int c = 2 * LaneId(); c < dim; c += 64) {
    uint32_t pair = 0;
    if (record != nullptr) {
      if (bf16) {
        const auto* values = reinterpret_cast<const uint16_t*>(record);
        pair = MulBf16x2(values[c] | static_cast<uint32_t>(values[c + 1]) << 16, kTwoToMinus32);
      } else if (window) {
        const uint32_t codes = record[c] | static_cast<uint32_t>(record[c + 1]) << 8;
        pair = MulBf16x2(E4M3PairBits<0>(codes), Q8Factor(record[dim + c / 32]));
      } else {
        const uint32_t codes = record[c / 2];
        pair = MulBf16x2(E2M1PairBits<0>(codes, codes << 4), Q4EFactor(record[dim / 2 + c / 16]));
      }
    }
    *reinterpret_cast<uint32_t*>(key + c) = pair;
  }
}

__global__ void __launch_bounds__(kPlainThreads) PlainAttentionKernel(const AttentionParams p) {
  auto* keys_shared = DynamicShared<uint16_t>();
  const int stride = PlainStride(p.dim);
  auto* q = reinterpret_cast<float*>(keys_shared + kBlockKeys * stride);
  auto* out = q + kPlainHeads * p.dim;
  const int warp = WarpId();
  const int lane = LaneId();
  const int row = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y) * kPlainHeads + warp;
  const bool active = head < p.heads;
  q += warp * p.dim;
  out += warp * p.dim;

  RowKeys keys = WindowKeys(p, row);
  keys.num_keys += SelectedCountWarp(p, row);
  const float* table = p.table + row * p.table_stride;
  const int first_rotated = p.dim - 2 * p.pairs;
  if (active) {
    const uint16_t* source = p.q + row * p.q_stride + static_cast<int64_t>(head) * p.dim;
    for (int c = 2 * lane; c < p.dim; c += 64) {
      float x0 = Bf16ToFloat(source[c]);
      float x1 = Bf16ToFloat(source[c + 1]);
      if (p.rotate_q && c >= first_rotated) {
        const float* angle = table + c - first_rotated;
        RotatePair(x0, x1, angle[0], angle[1]);
        x0 = Bf16ToFloat(FloatToBf16(x0));
        x1 = Bf16ToFloat(FloatToBf16(x1));
      }
      q[c] = x0;
      q[c + 1] = x1;
      out[c] = 0.0f;
      out[c + 1] = 0.0f;
    }
  }
  __syncwarp();

  float maximum = kFirstMaximum;
  float sum = 0.0f;
  for (int begin = 0; begin < keys.num_keys; begin += kBlockKeys) {
    const int size = min(kBlockKeys, keys.num_keys - begin);
    __syncthreads();
    for (int i = warp; i < kBlockKeys; i += kPlainHeads) {
      const bool window = begin + i < keys.num_window;
      DecodeRecordWarp(i < size ? KeyRecord(p, keys, begin + i) : nullptr,
                       window ? p.window_bf16 : p.kv_bf16, window, p.dim, keys_shared + i * stride);
    }
    __syncthreads();
    if (!active) continue;
    float score[2];
    float block_maximum = maximum;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = lane + 32 * i;
      float dot = 0.0f;
      for (int c = 0; c < p.dim; c += 2) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(keys_shared + k * stride + c);
        dot = fmaf(q[c], Bf16LowToFloat(pair), dot);
        dot = fmaf(q[c + 1], Bf16HighToFloat(pair), dot);
      }
      score[i] = k < size ? dot * p.scale : -INFINITY;
      block_maximum = fmaxf(block_maximum, score[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      block_maximum = fmaxf(block_maximum, __shfl_xor_sync(0xffffffffu, block_maximum, offset));
    const float rescale = Exp2(maximum - block_maximum);
    maximum = block_maximum;
    float block_sum = 0.0f;
    float probability[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float exact = Exp2(score[i] - maximum);
      block_sum += exact;
      probability[i] = Bf16ToFloat(FloatToBf16(exact));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      block_sum += __shfl_xor_sync(0xffffffffu, block_sum, offset);
    sum = fmaf(sum, rescale, block_sum);
    for (int c = 2 * lane; c < p.dim + 2 * lane; c += 64) {
      // Whole warps for the shuffles; lanes beyond the channels compute channels that they drop.
      const int channel = min(c, p.dim - 2);
      float y0 = out[channel] * rescale;
      float y1 = out[channel + 1] * rescale;
      for (int k = 0; k < kBlockKeys; ++k) {
        const float weight = __shfl_sync(0xffffffffu, probability[0 + (k >= 32 ? 1 : 0)], k & 31);
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(keys_shared + k * stride + channel);
        y0 = fmaf(weight, Bf16LowToFloat(pair), y0);
        y1 = fmaf(weight, Bf16HighToFloat(pair), y1);
      }
      __syncwarp();
      if (c < p.dim) {
        out[c] = y0;
        out[c + 1] = y1;
      }
      __syncwarp();
    }
  }
  if (!active) return;

  const float normaliser = keys.num_keys == 0 ? 0.0f : Normaliser(sum, maximum, p.sink[head]);
  uint16_t* target = p.out + row * p.out_stride + static_cast<int64_t>(head) * p.dim;
  // A group of 32 channels is 16 lanes, two channels each.
  for (int c = 2 * lane; c < p.dim + 2 * lane; c += 64) {
    const int channel = min(c, p.dim - 2);
    float x0 = out[channel] * normaliser;
    float x1 = out[channel + 1] * normaliser;
    if (!p.production) {
      x0 = Bf16ToFloat(FloatToBf16(x0));
      x1 = Bf16ToFloat(FloatToBf16(x1));
    }
    if (channel >= first_rotated) {
      const float* angle = table + channel - first_rotated;
      RotatePair(x0, x1, angle[0], -angle[1]);
    }
    float amax = fmaxf(fabsf(x0), fabsf(x1));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    const uint32_t pair = p.production ? Q8Pair(x0, x1, Q8Byte(amax)) : FloatsToBf16x2(x0, x1);
    if (c < p.dim) {
      target[c] = static_cast<uint16_t>(pair & 0xffffu);
      target[c + 1] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

Status PlainAttention(const AttentionParams& params, Stream& stream) {
  LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(params.rows);
  config.grid.y = static_cast<uint32_t>((params.heads + kPlainHeads - 1) / kPlainHeads);
  config.block = kPlainThreads;
  config.shared_bytes = static_cast<int>(PlainSharedBytes(params.dim));
  return Launch("sparse_attention_plain", PlainAttentionKernel, config, stream, params);
}

bool Aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

// Shapes and layouts that the kernels on wgmma take.
bool TakesWarpgroups(const AttentionParams& p, const Stream& stream) {
  return stream.compute_major() == 9 && p.dim == 512 && p.pairs == 32 &&
         (p.kv_blocks == nullptr || p.window_bf16 == p.kv_bf16) && Aligned(p.q, 2 * p.q_stride) &&
         Aligned(p.window_records, p.record_stride) && Aligned(p.window_pages, p.page_stride) &&
         Aligned(p.kv_blocks, p.kv_stride) && Aligned(p.table, 4 * p.table_stride) &&
         Aligned(p.out, 2 * p.out_stride);
}

bool TakesFewRows(const AttentionParams& p) {
  return p.rows * ((p.heads + 63) / 64) <= sparse_attention_choices.few_rows &&
         p.window + p.topk <= kFewRowsMaxKeys;
}

AttentionParams MakeParams(const SparseAttentionArgs& args) {
  const BatchLayout& layout = args.layout;
  const auto i32 = [](const TensorView& view) { return static_cast<const int32_t*>(view.data()); };
  const auto u8 = [](const TensorView& view) { return static_cast<const uint8_t*>(view.data()); };
  AttentionParams p = {};
  p.q = static_cast<const uint16_t*>(args.q.data());
  p.window_records = u8(args.window_records);
  p.window_pages = u8(args.window_pages);
  p.positions = i32(layout.positions);
  p.row_sequence = i32(layout.row_sequence);
  p.sequence_start = i32(layout.sequence_start);
  p.block_table = i32(layout.block_table);
  p.window_table = i32(layout.window_table);
  p.window_first_page = i32(layout.window_first_page);
  p.window_begin = i32(layout.window_begin);
  p.sink = static_cast<const float*>(args.sink.data());
  p.table = static_cast<const float*>(args.table.data());
  p.out = static_cast<uint16_t*>(args.out.data());
  p.q_stride = args.q.row_stride();
  p.record_stride = args.window_records.row_stride();
  p.page_stride = args.window_pages.row_stride();
  p.window_table_stride = layout.window_table.row_stride();
  p.table_stride = args.table.row_stride();
  p.out_stride = args.out.row_stride();
  p.rows = static_cast<int>(layout.num_rows());
  p.heads = static_cast<int>(args.q.dim(1));
  p.dim = static_cast<int>(args.q.dim(2));
  p.pairs = static_cast<int>(args.table.dim(1));
  p.window = static_cast<int>(args.window + args.block_rows);
  p.block_rows = static_cast<int>(args.block_rows);
  p.page_rows = MakeDivisor(args.window_pages.dim(1));
  p.window_bytes = static_cast<int>(args.window_pages.dim(2));
  p.window_bf16 = p.window_bytes == Bf16RecordBytes(p.dim);
  if (!args.kv_blocks.empty()) {
    p.kv_blocks = u8(args.kv_blocks);
    p.kv_stride = args.kv_blocks.row_stride();
    p.entries_per_block = MakeDivisor(args.kv_blocks.dim(1));
    p.kv_bytes = static_cast<int>(args.kv_blocks.dim(2));
    p.kv_bf16 = p.kv_bytes == Bf16RecordBytes(p.dim);
    p.block_table_stride = layout.block_table.row_stride();
    p.selected = i32(args.selected);
    p.selected_stride = args.selected.row_stride();
    p.topk = static_cast<int>(args.selected.dim(1));
  }
  p.rotate_q = args.rotate_q;
  p.production = args.numerics == Numerics::kProduction;
  p.scale = args.scale * kLog2E * kKeyFactorInverse;
  return p;
}

}  // namespace

Status SparseAttention(const SparseAttentionArgs& args, Stream& stream) {
  const AttentionParams params = MakeParams(args);
  if (params.rows == 0) return {};
  if (TakesWarpgroups(params, stream)) {
    return TakesFewRows(params) ? FewRowsAttention(params, stream)
                                : WarpgroupAttention(params, stream);
  }
  return PlainAttention(params, stream);
}

}  // namespace deepinfer::cuda
