#include "model/step_memory.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "base/ceil_div.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/linear/linear_kernels.h"
#include "ops/quantize/group_quantize.h"
#include "tensor/stream.h"

namespace deepinfer {
namespace {

constexpr int64_t kBf16Bytes = 2;
constexpr int64_t kWordBytes = 4;  // fp32 and int32
constexpr int64_t kBlockTokens = 128;

// The same nesting of scopes as the model's, with sizes in place of memory.
class ScratchCount {
 public:
  void Add(int64_t bytes) {
    used_ += RoundUpScratch(bytes);
    peak_ = std::max(peak_, used_);
  }
  template <class Body>
  void Scope(const Body& body) {
    const int64_t saved = used_;
    body();
    used_ = saved;
  }
  int64_t peak() const {
    return peak_;
  }

 private:
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

class Counter {
 public:
  Counter(const ModelConfig& config, const StepShape& shape) : c_(config), s_(shape) {}

  int64_t Count() {
    Upload();
    Forward();
    return count_.peak();
  }

  // `s_` describes the rows of all blocks as those of a step.
  int64_t CountDrafts(int64_t block) {
    const int64_t sequences = s_.sequences;
    for (int i = 0; i < 4; ++i) Words(sequences);  // anchors, lengths, first pages, window begins
    Words(sequences * s_.table_pages);
    for (int i = 0; i < 3; ++i) Words(s_.rows);  // ids, positions, sequences
    Words(sequences + 1);
    const int64_t layer = c_.num_hidden_layers;
    Rows(c_.experts_per_row(layer));
    count_.Scope([&] { MixCoefficients(); });
    count_.Scope([&] { Attention(block, false); });
    count_.Scope([&] { MixtureOfExperts(layer); });
    Bf16(s_.rows * (c_.hidden_size + c_.dspark_markov_rank));
    Bf16(s_.rows * c_.hidden_size);
    Linear(s_.rows, c_.hidden_size);
    Words(sequences * c_.vocab_size);
    Linear(sequences, c_.dspark_markov_rank);
    constexpr int64_t kArgmaxEntries = 4096;
    if (s_.gpu) count_.Add(sequences * CeilDiv(c_.vocab_size, kArgmaxEntries) * 8);
    return count_.peak();
  }

 private:
  void Bf16(int64_t elements) {
    count_.Add(elements * kBf16Bytes);
  }
  void Words(int64_t elements) {
    count_.Add(elements * kWordBytes);
  }

  // A linear's prepared copy of its input, and what each thread takes.
  void Linear(int64_t rows, int64_t k) {
    if (s_.gpu) {
      // Sums of segments of K.
      constexpr int64_t kFewRows = 48;
      if (rows >= kFewRows) count_.Scope([&] { count_.Add(int64_t{48} << 20); });
      return;
    }
    constexpr int64_t kWaveRows = 2048;
    count_.Scope([&] {
      const int64_t padded = CeilDiv(k, kLinearBlock) * kLinearBlock;
      count_.Add(std::min(rows, kWaveRows) * (padded * kWordBytes + 64));
      count_.Add((kLinearMaxRows * kLinearTileOutputs * kWordBytes + kLinearScratchBytes) *
                 s_.num_threads);
    });
  }

  void Upload() {
    const int64_t rows = s_.rows;
    Words(rows);          // ids
    Words(s_.sequences);  // slots
    Words(s_.sequences * (CeilDiv(s_.context, kBlockTokens)));
    Words(s_.sequences * s_.table_pages);
    Words(s_.sequences);  // first pages
    for (int half = 0; half < 2; ++half) {
      Words(rows);              // positions
      Words(rows);              // sequence of each row
      Words(s_.sequences + 1);  // starts
      Words(s_.sequences);      // window begins
    }
    Words(rows);  // kept rows
    Words(rows * c_.engram_max_ngram_size);
    Words(s_.logit_rows);
    for (const int64_t ratio : Ratios()) {
      for (int i = 0; i < 3; ++i) Words(Entries(ratio));
    }
  }

  void Forward() {
    const int64_t rows = s_.rows;
    const int64_t pairs = c_.qk_rope_head_dim / 2;
    Rows(c_.num_experts_per_tok);
    Words(rows * pairs * 2);
    Words(rows * c_.index_topk);
    Words(rows * c_.candidate_topk_blocks);
    for (const int64_t ratio : Ratios()) Words(Entries(ratio) * pairs * 2);
    if (s_.drops_rows) {
      Bf16(rows * kHcStreams * c_.hidden_size);
      Words(rows * kHcStreams);
      for (int i = 0; i < 2; ++i) Bf16(rows * c_.hidden_size);
      Words(rows * pairs * 2);
      if (s_.drafts) Words(rows * pairs * 2);
    }
    count_.Scope([&] { MixCoefficients(); });
    if (s_.drafts) DraftContext();
    if (!c_.engram_layer_ids.empty()) count_.Scope([&] { Engram(); });
    count_.Scope([&] { Attention(0, !c_.index_source_layer_ids.empty()); });
    for (const int64_t layer : c_.kv_source_layer_ids) {
      count_.Scope([&] { CompressKeys(c_.ratio(layer)); });
    }
    count_.Scope([&] { MixtureOfExperts(0); });
    Bf16(s_.logit_rows * c_.hidden_size);
    Linear(s_.logit_rows, c_.hidden_size);
  }

  // What MakeStep takes.
  void Rows(int64_t experts_per_row) {
    const int64_t rows = s_.rows;
    Bf16(rows * kHcStreams * c_.hidden_size);
    for (int i = 0; i < 3; ++i) Words(rows * kHcStreams);
    Words(rows * kHcStreams * kHcStreams);
    for (int i = 0; i < 3; ++i) Bf16(rows * c_.hidden_size);
    Bf16(rows * c_.q_lora_rank);
    Words(rows * c_.qk_rope_head_dim);
    Words(rows * experts_per_row);
  }

  // The coefficients of a hyper-connection, in double precision.
  void MixCoefficients() {
    if (s_.gpu) return;
    count_.Add(s_.rows * kHcCoefficients * 8);
    count_.Add(s_.rows * 8);
  }

  // The target layers' streams stay to the end of the step.
  void DraftContext() {
    const int64_t rows = s_.rows;
    const int64_t width = std::ssize(c_.dspark_target_layer_ids) * c_.hidden_size;
    Bf16(rows * width);
    count_.Scope([&] {
      for (int i = 0; i < 2; ++i) Bf16(rows * c_.hidden_size);
      Linear(rows, width);
      for (int64_t stage = 0; stage < c_.num_nextn_predict_layers; ++stage) {
        Bf16(rows * c_.head_dim);
        count_.Add(rows * Bf16RecordBytes(c_.head_dim));
      }
      Linear(rows, c_.hidden_size);
    });
  }

  void Engram() {
    const int64_t lookups = c_.engram_rows_per_token();
    count_.Add(s_.rows * lookups * 8);
    Bf16(s_.rows * lookups * c_.engram_head_dim);
    Bf16(s_.rows * (kHcStreams + 1) * c_.hidden_size);
    Linear(s_.rows, lookups * c_.engram_head_dim);
  }

  // `block_rows` as of SparseAttention; without index and compressed keys for draft layers.
  void Attention(int64_t block_rows, bool indexed) {
    const int64_t rows = s_.rows;
    const int64_t wide = c_.num_attention_heads * c_.head_dim;
    Bf16(rows * c_.q_lora_rank);
    Bf16(rows * c_.head_dim);
    count_.Add(rows * Q8RecordBytes(c_.head_dim));
    Bf16(rows * wide);
    if (indexed) {
      Bf16(rows * c_.index_n_heads * c_.index_head_dim);
      Bf16(rows * c_.index_n_heads);
    }
    Linear(rows, std::max(c_.hidden_size, c_.q_lora_rank));
    if (indexed) count_.Scope([&] { SelectEntries(); });
    Bf16(rows * wide);
    const int64_t keys = c_.sliding_window + (block_rows > 0 ? block_rows : c_.index_topk);
    count_.Scope([&] {
      constexpr int64_t kKeysPerBlock = 64;
      if (s_.gpu) {
        // Lists of keys of many rows; exchanged probabilities of few.
        constexpr int64_t kFewRows = 16;
        constexpr int64_t kExchangeBytes = int64_t{96} << 10;
        count_.Add(rows * (keys + kKeysPerBlock) * 8);
        count_.Add(rows * kWordBytes);
        count_.Add(std::min(rows, kFewRows) * kExchangeBytes);
        return;
      }
      const int64_t stride = c_.head_dim + 16;
      const int64_t heads = c_.num_attention_heads;
      for (int i = 0; i < s_.num_threads; ++i) {
        Words(kKeysPerBlock * stride);
        Words(heads * stride);
        Words(heads * stride);
        Words(heads * kKeysPerBlock);
        Words(heads);
      }
      if (rows < 2 * s_.num_threads) Words(keys * stride);
    });
    Bf16(rows * c_.o_groups * c_.o_lora_rank);
    Linear(rows, wide / c_.o_groups);
    Linear(rows, c_.o_groups * c_.o_lora_rank);
  }

  void SelectEntries() {
    constexpr int64_t kWaveScores = 16 << 20;
    constexpr int64_t kTileKeys = 8;
    const int64_t rows = s_.rows;
    const int64_t heads = c_.index_n_heads;
    const int64_t channels = c_.index_head_dim;
    if (s_.gpu) {
      // Scores of a wave of rows, and the maxima of every eight of them, twice.
      constexpr int64_t kWaveScoreBytes = int64_t{256} << 20;
      const int64_t row = (s_.context + 128) * kWordBytes;
      const int64_t bytes = std::min(rows * row, std::max(row, kWaveScoreBytes));
      count_.Add(bytes + bytes / 4);
      return;
    }
    // Rows run in waves that hold so many scores, or those of one row.
    const int64_t scores = (s_.context + kTileKeys - 1) / kTileKeys * kTileKeys;
    count_.Add(std::min(rows * scores, std::max(scores, kWaveScores)) * kWordBytes);
    const int64_t groups = heads * channels / kQ4PGroup;
    for (int64_t bytes : {heads * channels, groups * kWordBytes, groups * kWordBytes,
                          heads * kWordBytes, int64_t{1}}) {
      count_.Add(rows * RoundUpScratch(bytes));
    }
  }

  void CompressKeys(int64_t ratio) {
    const int64_t entries = Entries(ratio);
    Bf16(entries * c_.head_dim);
    if (ratio == 1) {
      Bf16(entries * c_.hidden_size);
      Linear(entries, c_.hidden_size);
    } else {
      Words(s_.rows * c_.head_dim);
      Words(s_.rows * c_.head_dim);
      Linear(s_.rows, c_.hidden_size);
    }
    Bf16(entries * c_.index_head_dim);
    Linear(entries, c_.head_dim);
  }

  void MixtureOfExperts(int64_t layer) {
    const int64_t rows = s_.rows;
    const int64_t slots = rows * c_.experts_per_row(layer);
    Words(rows * c_.num_experts(layer));
    Linear(rows, c_.hidden_size);
    for (int i = 0; i < 4; ++i) Words(slots);
    Words(c_.num_experts(layer) + 1);
    for (int i = 0; i < 2; ++i) Bf16(slots * c_.moe_intermediate_size);
    Bf16(slots * c_.hidden_size);
    Bf16(rows * c_.hidden_size);
    Linear(slots, std::max(c_.hidden_size, c_.moe_intermediate_size));
  }

  // The distinct compression ratios.
  std::vector<int64_t> Ratios() const {
    std::vector<int64_t> ratios;
    for (const int64_t layer : c_.kv_source_layer_ids) {
      if (std::find(ratios.begin(), ratios.end(), c_.ratio(layer)) == ratios.end()) {
        ratios.push_back(c_.ratio(layer));
      }
    }
    return ratios;
  }
  // Entries that the rows of a step complete: a sequence's share may be one more than rounded down.
  int64_t Entries(int64_t ratio) const {
    return std::min(s_.rows, s_.rows / ratio + s_.sequences);
  }

  const ModelConfig& c_;
  const StepShape& s_;
  ScratchCount count_;
};

}  // namespace

int64_t StepScratchBytes(const ModelConfig& config, const StepShape& shape) {
  return Counter(config, shape).Count();
}

int64_t DraftScratchBytes(const ModelConfig& config, const DraftShape& shape) {
  const StepShape rows{.rows = shape.sequences * shape.block,
                       .sequences = shape.sequences,
                       .table_pages = shape.table_pages,
                       .num_threads = shape.num_threads,
                       .gpu = shape.gpu};
  return Counter(config, rows).CountDrafts(shape.block);
}

}  // namespace deepinfer
