#include "ops/indexer/indexer.h"

#include <algorithm>
#include <vector>

#include "ops/dispatch.h"
#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/validate.h"

namespace deepinfer {
namespace {

int64_t VisibleEntries(const IndexerArgs& args, int64_t row) {
  return (args.layout.positions.Row<int32_t>(0)[row] + int64_t{1}) / args.ratio;
}

void RunReference(const IndexerArgs& args, Stream& stream) {
  stream.pool().ParallelForDynamic(args.layout.num_rows(), 1, [&](int64_t begin, int64_t end, int) {
    std::vector<float> scores;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t n_vis = VisibleEntries(args, r);
      scores.resize(static_cast<size_t>(n_vis));
      reference::IndexerScores(args, r, n_vis, scores.data());
      IndexerSelectRow(args, r, n_vis, scores.data());
    }
  });
}

// Whether everything visible is chosen, whatever the scores.
bool ScoresMatter(const IndexerArgs& args, int64_t n_vis) {
  const int64_t blocks = (n_vis + args.candidate_block_size - 1) / args.candidate_block_size;
  return n_vis > args.selected.dim(1) ||
         (!args.candidates_out.empty() && blocks > args.candidates_out.dim(1));
}

// Numbers of the tiles that hold entries of the row's candidate blocks, ascending.
std::vector<int32_t> CandidateTiles(const IndexerArgs& args, int64_t row, int64_t n_vis) {
  std::vector<int32_t> tiles;
  const int32_t* blocks = args.candidates_in.Row<int32_t>(row);
  for (int64_t c = 0; c < args.candidates_in.dim(1) && blocks[c] >= 0; ++c) {
    const int64_t first = blocks[c] * args.candidate_block_size;
    const int64_t end = std::min(first + args.candidate_block_size, n_vis);
    for (int64_t tile = first / cpu::kIndexTile; tile * cpu::kIndexTile < end; ++tile) {
      if (tiles.empty() || tiles.back() < tile) tiles.push_back(static_cast<int32_t>(tile));
    }
  }
  return tiles;
}

// A piece of work: some rows of one sequence against a range of tiles.
struct Task {
  int64_t row_begin;
  int64_t row_end;
  int64_t tile_begin;
  int64_t tile_end;
};

constexpr int64_t kRowsPerTask =
    8;  // rows that share a decoded key; their codes stay in the second-level cache
constexpr int64_t kTilesPerTask =
    256;  // 2,048 keys: enough tasks for every thread when one row is decoded
constexpr int64_t kWaveScores = 16 << 20;  // scores held at once: 64 MB, or one row's

void RunVector(const IndexerArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  const int64_t heads = args.q.dim(1);
  const int64_t channels = args.q.dim(2);
  const int64_t groups = channels / kQ4PGroup;
  const int32_t* sequence = args.layout.row_sequence.Row<int32_t>(0);
  const bool listed = !args.candidates_in.empty() && args.candidates_out.empty();
  for (int64_t wave = 0, wave_end = 0; wave < rows; wave = wave_end) {
    ScratchScope scope(stream);
    std::vector<cpu::IndexQuery> queries;
    std::vector<std::vector<int32_t>> lists;
    std::vector<Task> tasks;
    int64_t held = 0;
    for (wave_end = wave; wave_end < rows; ++wave_end) {
      const int64_t n_vis = VisibleEntries(args, wave_end);
      const int64_t tiles = (n_vis + cpu::kIndexTile - 1) / cpu::kIndexTile;
      if (wave_end > wave && held + tiles * cpu::kIndexTile > kWaveScores) break;
      held += tiles * cpu::kIndexTile;
      cpu::IndexQuery query;
      query.codes = scope.Allocate<int8_t>(heads * channels);
      query.scales = scope.Allocate<float>(heads * groups);
      query.starts = scope.Allocate<int32_t>(heads * groups);
      query.weights = scope.Allocate<float>(heads);
      query.scores = scope.Allocate<float>(tiles * cpu::kIndexTile);
      query.tiles = ScoresMatter(args, n_vis) ? tiles : 0;
      if (query.tiles == 0) std::fill_n(query.scores, n_vis, 0.0f);
      queries.push_back(query);
      lists.push_back(listed && query.tiles > 0 ? CandidateTiles(args, wave_end, n_vis)
                                                : std::vector<int32_t>());
    }
    const auto query_of = [&](int64_t row) -> const cpu::IndexQuery& {
      return queries[static_cast<size_t>(row - wave)];
    };
    for (int64_t row = wave; row < wave_end;) {
      int64_t end = row + 1;
      while (!listed && end < wave_end && end - row < kRowsPerTask &&
             sequence[end] == sequence[row])
        ++end;
      // Rows of a sequence ascend in position: the last one sees most.
      const int64_t tiles =
          listed ? static_cast<int64_t>(lists[static_cast<size_t>(row - wave)].size())
                 : query_of(end - 1).tiles;
      for (int64_t tile = 0; tile < tiles; tile += kTilesPerTask) {
        tasks.push_back({row, end, tile, std::min(tiles, tile + kTilesPerTask)});
      }
      row = end;
    }
    stream.pool().ParallelFor(wave_end - wave, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        if (queries[static_cast<size_t>(i)].tiles > 0)
          cpu::PrepareIndexQuery(args, wave + i, queries[static_cast<size_t>(i)]);
      }
    });
    stream.pool().ParallelForDynamic(
        static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) {
            const Task& task = tasks[static_cast<size_t>(i)];
            const std::span<const cpu::IndexQuery> group(
                &query_of(task.row_begin), static_cast<size_t>(task.row_end - task.row_begin));
            const int32_t* list =
                listed ? lists[static_cast<size_t>(task.row_begin - wave)].data() : nullptr;
            cpu::ScoreIndexTiles(args, sequence[task.row_begin], group, list, task.tile_begin,
                                 task.tile_end);
          }
        });
    stream.pool().ParallelForDynamic(wave_end - wave, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        IndexerSelectRow(args, wave + i, VisibleEntries(args, wave + i),
                         queries[static_cast<size_t>(i)].scores);
      }
    });
  }
}

}  // namespace

Status Indexer(const IndexerArgs& args, Stream& stream) {
  const int64_t rows = args.layout.num_rows();
  DI_RETURN_IF_ERROR(ExpectTensor(args.q, DType::kBf16, {rows, -1, -1}, "Indexer", "q"));
  const int64_t channels = args.q.dim(2);
  DI_RETURN_IF_ERROR(
      ExpectTensor(args.weights, DType::kBf16, {rows, args.q.dim(1)}, "Indexer", "weights"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.blocks, DType::kU8, {-1, -1, -1}, "Indexer", "blocks"));
  DI_RETURN_IF_ERROR(ExpectRecords(args.blocks, Q4PRecordBytes(channels), Bf16RecordBytes(channels),
                                   "Indexer", "blocks"));
  DI_RETURN_IF_ERROR(ExpectTensor(args.selected, DType::kI32, {rows, -1}, "Indexer", "selected"));
  if (!args.candidates_in.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.candidates_in, DType::kI32, {rows, -1}, "Indexer", "candidates_in"));
  }
  if (!args.candidates_out.empty()) {
    DI_RETURN_IF_ERROR(
        ExpectTensor(args.candidates_out, DType::kI32, {rows, -1}, "Indexer", "candidates_out"));
  }
  if (channels % kQ4PGroup != 0 || args.ratio < 1 || args.candidate_block_size < 1) {
    return Fail(Code::kInvalidArgument,
                fmt::format("Indexer: {} channels, ratio {} and candidate blocks of {}; channels "
                            "must be a multiple of {}, the others "
                            "at least 1.",
                            channels, args.ratio, args.candidate_block_size, kQ4PGroup),
                "q");
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::Indexer(args, stream);
  // Entry numbers are 32 bits wide and vector tiles hold at most 512 channels.
  if (UseReference(stream, channels) || channels > 512 || args.numerics == Numerics::kReference) {
    RunReference(args, stream);
  } else {
    RunVector(args, stream);
  }
  return {};
}

}  // namespace deepinfer
