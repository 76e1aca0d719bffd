// Norm of the latent query, and norm, rotation, record and page of the latent key, in one launch.
//
// Runs in every layer. Bound by memory at many rows: 7.4 KB per row of 1280 + 512 channels, of
// which 4.3 KB are written; by latency at few. Few rows: a row has a warp for each 256 channels, of
// the query and of the key beside each other, so that a thread has one 16-byte load between the
// launch and the reduction. Many rows: a warp per row and part, all its loads in flight. Both add
// in the same order (ops/rms_norm/rms_norm.cuh).
#include "ops/cache_records/cache_records.cuh"
#include "ops/latent_inputs/latent_inputs_impl.h"
#include "ops/rms_norm/rms_norm.cuh"
#include "ops/rope/rope.cuh"

namespace deepinfer::cuda {
namespace {

struct LatentInputsParams {
  Bf16Rows q, q_weight, q_grid, kv, kv_weight;
  RotationTable table;
  Q8RecordFormat format;
  uint8_t* records;
  int64_t record_stride;
  WindowPages pages;
  int64_t rows;
  int rows_per_block;
  int q_warps;  // per row; the block's first warps
  int kv_warps;
  float eps;
};

// A warp's chunks of a row and of the norm's weight. One chunk: the weight is loaded beforehand,
// while the kernel in front may still run. Several: when it is needed, from the first-level cache,
// so that it takes no registers from warps that have loads in flight.
template <int kChunks>
struct NormedRow {
  __device__ NormedRow(const Bf16Rows& norm_weight, int warps_per_row, int warp)
      : weights(norm_weight), warps(warps_per_row), first(warp) {
    if constexpr (kChunks == 1) weight = LoadChannels(weights, 0, Channel(0));
  }
  __device__ int Channel(int i) const {
    return (first + i * warps) * kChunkChannels + LaneId() * kLaneChannels;
  }
  __device__ void Load(const Bf16Rows& rows, int64_t row) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) x[i] = LoadChannels(rows, row, Channel(i));
  }
  __device__ float Scale(int channels, float eps, float* shared, int barrier) const {
    float squares[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float values[kLaneChannels];
      Unpack(x[i], values);
      squares[i] = SquareSum(values);
    }
    return RmsScale(squares, warps, first, channels, eps, shared, barrier);
  }
  // Chunk i after the norm: fp32 values that are bf16 numbers.
  __device__ void Values(int i, float scale, float (&values)[kLaneChannels]) const {
    Unpack(x[i], values);
    ScaleChannels(values, kChunks == 1 ? weight : LoadChannels(weights, 0, Channel(i)), scale);
  }
  const Bf16Rows& weights;
  int warps;
  int first;
  Bf16x8 weight;
  Bf16x8 x[kChunks];
};

template <int kQueryChunks, int kKeyChunks>
__global__ void __launch_bounds__(kQueryChunks == 1 ? 1024 : 128, kQueryChunks == 1 ? 1 : 8)
    LatentInputsKernel(const LatentInputsParams p) {
  const int query_warps = p.q_warps * p.rows_per_block;
  const bool is_query = WarpId() < query_warps;
  const int warp = is_query ? WarpId() : WarpId() - query_warps;
  const int warps = is_query ? p.q_warps : p.kv_warps;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.rows_per_block + warp / warps;
  if (row >= p.rows) return;
  auto* shared = DynamicShared<float>();
  if (is_query) {
    NormedRow<kQueryChunks> q(p.q_weight, warps, warp % warps);
    WaitForPreviousKernel();
    AllowNextKernel();
    q.Load(p.q, row);
    const float scale = q.Scale(p.q.channels, p.eps, shared, 1);
#pragma unroll
    for (int i = 0; i < kQueryChunks; ++i) {
      float values[kLaneChannels];
      q.Values(i, scale, values);
      const Q8Scale q8(LaneGroupMax<4>(Amax(values)));
      Bf16x8 grid;
      for (int j = 0; j < 4; ++j) grid.pairs[j] = Q8Grid(values[2 * j], values[2 * j + 1], q8);
      StoreChannels(p.q_grid, row, q.Channel(i), grid);
    }
    return;
  }
  NormedRow<kKeyChunks> kv(p.kv_weight, warps, warp % warps);
  WaitForPreviousKernel();
  AllowNextKernel();
  kv.Load(p.kv, row);
  uint8_t* place = p.pages.pages == nullptr ? nullptr : WindowPlace(p.pages, row);
  const float scale = kv.Scale(p.kv.channels, p.eps, shared + p.q_warps * kQueryChunks * 32, 2);
#pragma unroll
  for (int i = 0; i < kKeyChunks; ++i) {
    float values[kLaneChannels];
    kv.Values(i, scale, values);
    RotateChannels(p.table, row, kv.Channel(i), p.kv.channels, values);
    const Q8Piece piece = MakeQ8Piece(values, p.format.bf16);
    StoreQ8Piece(p.format, p.records + row * p.record_stride, kv.Channel(i), piece);
    if (place != nullptr) StoreQ8Piece(p.format, place, kv.Channel(i), piece);
  }
}

template <int kQueryChunks, int kKeyChunks>
Status LaunchLatentInputs(LatentInputsParams params, int q_warps, int kv_warps, int rows_per_block,
                          Stream& stream) {
  params.q_warps = q_warps;
  params.kv_warps = kv_warps;
  params.rows_per_block = rows_per_block;
  const LaunchConfig config{
      .grid = {static_cast<uint32_t>((params.rows + rows_per_block - 1) / rows_per_block)},
      .block = 32 * rows_per_block * (q_warps + kv_warps),
      .shared_bytes = 128 * (q_warps * kQueryChunks + kv_warps * kKeyChunks),
      .overlap_previous = true};
  return Launch("LatentInputs", LatentInputsKernel<kQueryChunks, kKeyChunks>, config, stream,
                params);
}

}  // namespace

Status LatentInputs(const LatentInputsArgs& args, Stream& stream) {
  const int64_t dim = args.kv.dim(1);
  const int64_t record_bytes = args.records.dim(1);
  const bool bf16 = record_bytes == 2 * dim;
  const int64_t unit = bf16 ? 16 : 8;
  const auto optional = [](const TensorView& view) {
    return view.empty() ? Bf16Rows() : Bf16Rows(view);
  };
  const LatentInputsParams params{
      .q = optional(args.q),
      .q_weight = optional(args.q_weight),
      .q_grid = optional(args.q_grid),
      .kv = Bf16Rows(args.kv),
      .kv_weight = Bf16Rows(args.kv_weight),
      .table = RotationTable(args.table, dim),
      .format = {.channels = static_cast<int>(dim),
                 .bf16 = bf16,
                 .vector = IsAligned(args.records.data(), args.records.row_stride(), unit) &&
                           (args.pages.empty() ||
                            IsAligned(args.pages.data(), args.pages.row_stride(), unit)) &&
                           record_bytes % unit == 0},
      .records = args.records.Row<uint8_t>(0),
      .record_stride = args.records.row_stride(),
      .pages = args.pages.empty() ? WindowPages() : WindowPages(args.pages, args.layout),
      .rows = args.layout.num_rows(),
      .rows_per_block = 1,
      .q_warps = 1,
      .kv_warps = 1,
      .eps = args.eps};
  const int q_chunks = NumChunks(params.q.channels);
  const int kv_chunks = NumChunks(params.kv.channels);
  if (params.rows > 4 * stream.sm_count() && q_chunks <= 5 && kv_chunks <= 2)
    return LaunchLatentInputs<5, 2>(params, q_chunks > 0 ? 1 : 0, 1, 2, stream);
  if (q_chunks + kv_chunks <= 32)
    return LaunchLatentInputs<1, 1>(params, q_chunks, kv_chunks, 1, stream);
  return Fail(Code::kUnsupported,
              fmt::format("LatentInputs: rows of {} and {} channels are wider than the {} that a "
                          "GPU's block holds.",
                          params.q.channels, params.kv.channels, 32 * kChunkChannels),
              "q");
}

}  // namespace deepinfer::cuda
