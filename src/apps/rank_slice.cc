#include "apps/rank_slice.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "apps/random_weights.h"
#include "base/ceil_div.h"
#include "base/check.h"
#include "model/random_values.h"
#include "model/step_memory.h"
#include "ops/quantize/group_quantize.h"
#include "runtime/memory_plan.h"
#include "state/sequence_state.h"
#include "tensor/copy.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr int64_t kRollbackTokens = 6;  // as the executor's default
constexpr int64_t kPatternBytes = int64_t{32} << 20;

int64_t BlocksPerSequence(const RankSliceShape& shape) {
  return CeilDiv(shape.before + shape.rows, kBlockTokens);
}
// The first window page that the rows of a sequence see.
int64_t FirstPage(const ModelConfig& config, const RankSliceShape& shape) {
  return std::max<int64_t>(0, shape.before - config.sliding_window + 1) / kBlockTokens;
}
int64_t PagesPerSequence(const ModelConfig& config, const RankSliceShape& shape) {
  return BlocksPerSequence(shape) - FirstPage(config, shape);
}
int64_t Rows(const ModelConfig& config, const RankSliceShape& shape, int64_t layer) {
  return shape.sequences * (layer < config.decoder_start() ? shape.rows : shape.decoder_rows);
}

// Random bf16 numbers with three bits of fraction and exponents from 2^-4 to 2^-1: a vector of them
// is on the Q8 grid.
std::vector<uint16_t> GridValues(uint64_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(kPatternBytes / 8));
  const uint64_t key = RandomKey(seed, "grid");
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = RandomBits16(key, i);
    values[i] = static_cast<uint16_t>((bits & 0x8070u) | ((123u + (bits & 3u)) << 7));
  }
  return values;
}

// Records as the caches hold them: random codes, then scales that are `first_scale` plus the random
// bits of `scale_mask`.
Status FillRecords(const TensorView& view, int64_t code_bytes, uint8_t first_scale,
                   uint8_t scale_mask, uint64_t key, Stream& stream) {
  const int64_t record = view.dim(2);
  const int64_t records =
      std::min(view.dim(0) * view.dim(1), std::max<int64_t>(1, kPatternBytes / record));
  std::vector<uint8_t> bytes(static_cast<size_t>(records * record));
  stream.pool().ParallelFor(records, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < record; ++i) {
        const auto at = static_cast<uint64_t>(r * record + i);
        auto byte = static_cast<uint8_t>(RandomWord(key, at / 8) >> (8 * (at % 8)));
        if (i >= code_bytes) {
          byte = static_cast<uint8_t>(first_scale + (byte & scale_mask));
        } else if ((byte & 0x7f) == 0x7f) {
          byte ^= 1;  // the NaN of E4M3
        }
        bytes[at] = byte;
      }
    }
  });
  return FillRepeated(bytes.data(), std::ssize(bytes), view, stream);
}

}  // namespace

RankSliceBytes RankSliceMemory(const ModelConfig& config, const RankSliceShape& shape) {
  const int64_t rows = shape.sequences * shape.rows;
  const int64_t slots = rows * config.num_experts_per_tok;
  const CacheGeometry geometry = MakeCacheGeometry(config, kRollbackTokens);
  RankSliceBytes bytes;
  // The kernels' layouts have padding, and so has the allocator.
  bytes.weights = RandomWeightBytes(config, config.n_routed_experts / shape.ranks) / 50 * 51;
  bytes.caches =
      shape.sequences *
      (BlocksPerSequence(shape) * geometry.BytesPerBlock() +
       PagesPerSequence(config, shape) * geometry.BytesPerWindowPage() + geometry.BytesPerSlot());
  bytes.scratch = StepScratchBytes(config, {.rows = rows,
                                            .sequences = shape.sequences,
                                            .logit_rows = shape.sequences,
                                            .context = shape.before + shape.rows,
                                            .table_pages = PagesPerSequence(config, shape),
                                            .drops_rows = shape.decoder_rows < shape.rows,
                                            .num_threads = 1,
                                            .gpu = true});
  // The rows that arrive are as many as the slots, give or take a few.
  bytes.scratch += slots / 4 * (config.moe_intermediate_size + config.hidden_size) * 2;
  bytes.step = shape.sequences * config.vocab_size * 4;
  bytes.step += slots / 4 * 9 * config.hidden_size * 2 + config.num_hidden_layers * slots * 12;
  return bytes;
}

Result<std::unique_ptr<RankSlice>> RankSlice::Create(const ModelConfig& config,
                                                     const RankSliceShape& shape, Stream& stream) {
  DI_CHECK_EQ(config.n_routed_experts % shape.ranks, 0);
  DI_CHECK(shape.decoder_rows >= 1 && shape.decoder_rows <= shape.rows);
  std::unique_ptr<RankSlice> slice(new RankSlice(config, shape, stream));
  DI_ASSIGN_OR_RETURN(
      ModelWeights weights,
      MakeRandomWeights(config, config.n_routed_experts / shape.ranks, shape.seed, stream));
  slice->model_ = std::make_unique<Model>(config, std::move(weights), Numerics::kProduction);
  DI_RETURN_IF_ERROR(slice->MakeCaches());
  DI_RETURN_IF_ERROR(slice->MakeBatch());
  DI_RETURN_IF_ERROR(slice->DrawExperts());
  DI_RETURN_IF_ERROR(stream.Synchronize());
  return slice;
}

Status RankSlice::RunStep(StepProbe& probe) {
  probe.expert_rows = expert_rows_;
  probe.returned = returned_;
  return model_->Forward(batch_, caches_, logits_, nullptr, stream_, &probe);
}

Result<TensorView> RankSlice::Allocate(DType dtype, std::initializer_list<int64_t> shape) {
  const TensorView wanted(static_cast<void*>(nullptr), dtype, shape);
  DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(stream_.device(),
                                                      std::max<int64_t>(1, wanted.num_elements()) *
                                                          DTypeBytes(dtype)));
  const TensorView view = buffer.View(dtype, shape);
  buffers_.push_back(std::move(buffer));
  return view;
}

Result<TensorView> RankSlice::Upload(const std::vector<int32_t>& values,
                                     std::initializer_list<int64_t> shape) {
  DI_ASSIGN_OR_RETURN(const TensorView view, Allocate(DType::kI32, shape));
  DI_CHECK_EQ(view.num_elements(), std::ssize(values));
  DI_RETURN_IF_ERROR(CopyToDevice(values.data(), view, stream_));
  return view;
}

int32_t RankSlice::Draw(int64_t bound) {
  const uint64_t word = RandomWord(shape_.seed ^ 0x5eed, draws_++);
  return static_cast<int32_t>((word >> 32) * static_cast<uint64_t>(bound) >> 32);
}

Status RankSlice::MakeCaches() {
  const CacheGeometry geometry = MakeCacheGeometry(config_, kRollbackTokens);
  DI_ASSIGN_OR_RETURN(
      CacheMemory memory,
      CacheMemory::Create(geometry, stream_.device(), shape_.sequences * BlocksPerSequence(shape_),
                          shape_.sequences * PagesPerSequence(config_, shape_), shape_.sequences));
  memory_ = std::make_unique<CacheMemory>(std::move(memory));
  const auto key = [&](std::string_view name, int64_t number) {
    return RandomKey(shape_.seed + static_cast<uint64_t>(number), name);
  };
  const std::vector<uint8_t> zeros(4096);
  for (int64_t p = 0; p < std::ssize(geometry.producers); ++p) {
    // E4M3 scales 0.5 to 0.94, and powers of two from 1/2 to 1.
    caches_.kv_blocks.push_back(memory_->KvBlocks(p));
    DI_RETURN_IF_ERROR(FillRecords(caches_.kv_blocks.back(), config_.head_dim / 2, 0x30, 7,
                                   key("kv", p), stream_));
    caches_.index_blocks.push_back(memory_->IndexBlocks(p));
    DI_RETURN_IF_ERROR(FillRecords(caches_.index_blocks.back(), config_.index_head_dim / 2, 126, 1,
                                   key("index", p), stream_));
    caches_.remainders.push_back(memory_->Remainders(p));
    if (!caches_.remainders.back().empty()) {
      DI_RETURN_IF_ERROR(
          FillRepeated(zeros.data(), std::ssize(zeros), caches_.remainders.back(), stream_));
    }
  }
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    caches_.window_pages.push_back(memory_->WindowPages(layer));
    DI_RETURN_IF_ERROR(FillRecords(caches_.window_pages.back(), config_.head_dim, 119, 1,
                                   key("window", layer), stream_));
  }
  return {};
}

Status RankSlice::MakeBatch() {
  const int64_t sequences = shape_.sequences;
  const int64_t ngram = config_.engram_max_ngram_size;
  const int64_t blocks = BlocksPerSequence(shape_);
  const int64_t pages = PagesPerSequence(config_, shape_);
  struct HostRows {
    std::vector<int32_t> positions, sequence, start, window_begin;
  };
  HostRows all, decoder;
  std::vector<int32_t> ids, lookback, kept, logit_rows;
  const int64_t first_kept = shape_.rows - shape_.decoder_rows;
  for (int64_t s = 0; s < sequences; ++s) {
    all.start.push_back(static_cast<int32_t>(all.positions.size()));
    all.window_begin.push_back(0);
    decoder.start.push_back(static_cast<int32_t>(decoder.positions.size()));
    decoder.window_begin.push_back(first_kept > 0 ? static_cast<int32_t>(shape_.before + first_kept)
                                                  : 0);
    for (int64_t i = 0; i < shape_.rows; ++i) {
      const auto row = static_cast<int32_t>(all.positions.size());
      const auto position = static_cast<int32_t>(shape_.before + i);
      ids.push_back(Draw(config_.vocab_size));
      for (int64_t n = 0; n < ngram; ++n)
        lookback.push_back(Draw(config_.engram_compressed_vocab_size));
      all.positions.push_back(position);
      all.sequence.push_back(static_cast<int32_t>(s));
      if (i < first_kept) continue;
      if (i == shape_.rows - 1)
        logit_rows.push_back(static_cast<int32_t>(decoder.positions.size()));
      kept.push_back(row);
      decoder.positions.push_back(position);
      decoder.sequence.push_back(static_cast<int32_t>(s));
    }
  }
  all.start.push_back(static_cast<int32_t>(all.positions.size()));
  decoder.start.push_back(static_cast<int32_t>(decoder.positions.size()));

  // Units of a sequence lie anywhere, as in a pool that has been in use for long.
  const auto shuffled = [&](int64_t count) {
    std::vector<int32_t> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int64_t i = count - 1; i > 0; --i)
      std::swap(numbers[static_cast<size_t>(i)], numbers[static_cast<size_t>(Draw(i + 1))]);
    return numbers;
  };
  const auto upload = [&](const std::vector<int32_t>& values, TensorView* view) -> Status {
    DI_ASSIGN_OR_RETURN(*view, Upload(values, {std::ssize(values)}));
    return {};
  };
  BatchLayout& layout = batch_.layout;
  std::vector<int32_t> slots(static_cast<size_t>(sequences));
  std::iota(slots.begin(), slots.end(), 0);
  DI_RETURN_IF_ERROR(upload(slots, &layout.sequence_slot));
  DI_RETURN_IF_ERROR(upload(std::vector<int32_t>(static_cast<size_t>(sequences),
                                                 static_cast<int32_t>(FirstPage(config_, shape_))),
                            &layout.window_first_page));
  DI_ASSIGN_OR_RETURN(layout.block_table,
                      Upload(shuffled(sequences * blocks), {sequences, blocks}));
  DI_ASSIGN_OR_RETURN(layout.window_table, Upload(shuffled(sequences * pages), {sequences, pages}));
  batch_.decoder_layout = layout;
  const auto upload_rows = [&](const HostRows& rows, BatchLayout* to) -> Status {
    DI_RETURN_IF_ERROR(upload(rows.positions, &to->positions));
    DI_RETURN_IF_ERROR(upload(rows.sequence, &to->row_sequence));
    DI_RETURN_IF_ERROR(upload(rows.start, &to->sequence_start));
    return upload(rows.window_begin, &to->window_begin);
  };
  DI_RETURN_IF_ERROR(upload_rows(all, &layout));
  DI_RETURN_IF_ERROR(upload_rows(decoder, &batch_.decoder_layout));
  DI_RETURN_IF_ERROR(upload(ids, &batch_.token_ids));
  DI_ASSIGN_OR_RETURN(batch_.engram_lookback, Upload(lookback, {std::ssize(ids), ngram}));
  batch_.drops_rows = first_kept > 0;
  DI_RETURN_IF_ERROR(upload(kept, &batch_.kept_rows));
  DI_RETURN_IF_ERROR(upload(logit_rows, &batch_.logit_rows));
  for (const int64_t source : config_.kv_source_layer_ids) {
    const int64_t ratio = config_.ratio(source);
    const auto known = [ratio](const CompressedEntries& entries) { return entries.ratio == ratio; };
    if (std::any_of(batch_.entries.begin(), batch_.entries.end(), known)) continue;
    std::vector<int32_t> last_row, sequence, index;
    for (size_t row = 0; row < all.positions.size(); ++row) {
      if ((all.positions[row] + 1) % ratio != 0) continue;
      last_row.push_back(static_cast<int32_t>(row));
      sequence.push_back(all.sequence[row]);
      index.push_back(static_cast<int32_t>(all.positions[row] / ratio));
    }
    CompressedEntries entries;
    entries.ratio = ratio;
    DI_RETURN_IF_ERROR(upload(last_row, &entries.last_row));
    DI_RETURN_IF_ERROR(upload(sequence, &entries.sequence));
    DI_RETURN_IF_ERROR(upload(index, &entries.index));
    batch_.entries.push_back(entries);
  }
  DI_ASSIGN_OR_RETURN(logits_, Allocate(DType::kF32, {sequences, config_.vocab_size}));
  return {};
}

// Every token of every rank goes to k different experts, all equally likely. This rank holds the
// first ones. A token comes once, whatever the number of local experts that it goes to.
Status RankSlice::DrawExperts() {
  const int64_t experts = config_.n_routed_experts;
  const int64_t local = experts / shape_.ranks;
  const int64_t k = config_.num_experts_per_tok;
  work_ = {.sequences = shape_.sequences,
           .before = shape_.before,
           .rows = shape_.rows,
           .decoder_rows = shape_.decoder_rows,
           .expert_rows = {},
           .touched_experts = {}};
  int64_t most_tokens = 1;
  int64_t most_rows = 1;
  std::vector<int32_t> chosen(static_cast<size_t>(k));
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const int64_t tokens = Rows(config_, shape_, layer) * shape_.ranks;
    std::vector<std::vector<int32_t>> rows_of(static_cast<size_t>(local));
    int32_t arrived = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      bool comes = false;
      for (size_t slot = 0; slot < chosen.size();) {
        const int32_t expert = Draw(experts);
        const auto end = chosen.begin() + static_cast<std::ptrdiff_t>(slot);
        if (std::find(chosen.begin(), end, expert) != end) continue;
        chosen[slot++] = expert;
        if (expert >= local) continue;
        rows_of[static_cast<size_t>(expert)].push_back(arrived);
        comes = true;
      }
      if (comes) ++arrived;
    }
    std::vector<int32_t> row_index, offsets{0};
    int64_t touched = 0;
    for (const std::vector<int32_t>& rows : rows_of) {
      row_index.insert(row_index.end(), rows.begin(), rows.end());
      offsets.push_back(static_cast<int32_t>(row_index.size()));
      if (!rows.empty()) ++touched;
    }
    const int64_t rows = std::ssize(row_index);
    std::vector<float> weights(row_index.size());
    for (float& weight : weights) weight = 0.1f + 0.001f * static_cast<float>(Draw(512));
    ExpertRows here;
    DI_ASSIGN_OR_RETURN(here.row_index, Upload(row_index, {rows}));
    DI_ASSIGN_OR_RETURN(here.group_offsets, Upload(offsets, {local + 1}));
    DI_ASSIGN_OR_RETURN(here.grouped_weight, Allocate(DType::kF32, {rows}));
    DI_RETURN_IF_ERROR(CopyToDevice(weights.data(), here.grouped_weight, stream_));
    expert_rows_.push_back(here);
    work_.expert_rows.push_back(rows);
    work_.touched_experts.push_back(touched);
    most_tokens = std::max<int64_t>(most_tokens, arrived);
    most_rows = std::max(most_rows, Rows(config_, shape_, layer));
  }
  const std::vector<uint16_t> values = GridValues(shape_.seed);
  const int64_t bytes = std::ssize(values) * 2;
  DI_ASSIGN_OR_RETURN(const TensorView x,
                      Allocate(DType::kBf16, {most_tokens, config_.hidden_size}));
  DI_RETURN_IF_ERROR(FillRepeated(values.data(), bytes, x, stream_));
  for (ExpertRows& rows : expert_rows_) rows.x = x;
  DI_ASSIGN_OR_RETURN(returned_, Allocate(DType::kBf16, {most_rows * k, config_.hidden_size}));
  return FillRepeated(values.data(), bytes, returned_, stream_);
}

}  // namespace deepinfer
