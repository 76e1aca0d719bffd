#include "model/model_weights.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "base/log.h"
#include "model/rope_frequencies.h"
#include "tensor/copy.h"

namespace deepinfer {
namespace {

constexpr std::chrono::seconds kReportInterval(5);
constexpr int64_t kDropInterval = int64_t{32} << 20;

class Loader {
 public:
  Loader(ModelWeights& weights, const Checkpoint& checkpoint, const ModelConfig& config,
         TableMemory engram_memory, bool drafting, Stream& stream)
      : weights_(weights),
        checkpoint_(checkpoint),
        config_(config),
        engram_memory_(engram_memory),
        num_layers_(config.num_hidden_layers + (drafting ? config.num_nextn_predict_layers : 0)),
        stream_(stream) {}

  Status Run() {
    DI_ASSIGN_OR_RETURN(weights_.embed, Table("embed.weight", TableMemory::kDevice));
    DI_ASSIGN_OR_RETURN(weights_.norm, Copied("norm.weight"));
    DI_ASSIGN_OR_RETURN(weights_.head, Bf16Linear("head.weight"));
    DI_ASSIGN_OR_RETURN(weights_.window_frequencies, Uploaded(WindowRopeFrequencies(config_)));
    DI_ASSIGN_OR_RETURN(weights_.compressed_frequencies,
                        Uploaded(CompressedRopeFrequencies(config_)));
    weights_.layers.resize(static_cast<size_t>(num_layers_));
    auto last_report = std::chrono::steady_clock::now();
    for (int64_t layer = 0; layer < num_layers_; ++layer) {
      const int64_t stage = layer - config_.num_hidden_layers;
      const std::string prefix =
          stage < 0 ? fmt::format("layers.{}.", layer) : fmt::format("mtp.{}.", stage);
      const Status status = LoadLayer(layer, prefix, weights_.layers[static_cast<size_t>(layer)]);
      if (!status.has_value())
        return WithContext(status.error(), fmt::format("Cannot load '{}'", prefix));
      const auto now = std::chrono::steady_clock::now();
      if (now - last_report >= kReportInterval) {
        last_report = now;
        Log(LogLevel::kInfo, "loading weights layer={}/{} bytes={}", layer + 1, num_layers_,
            weights_.packed_bytes);
      }
    }
    if (num_layers_ > config_.num_hidden_layers) DI_RETURN_IF_ERROR(LoadDraft());
    checkpoint_.DropResidentPages();
    return {};
  }

 private:
  // The inventory has been checked, so a missing tensor is a caller's mistake, but still an error
  // rather than a crash.
  Result<TensorView> Mapped(const std::string& name) {
    const TensorEntry* entry = checkpoint_.Find(name);
    if (entry == nullptr)
      return Fail(Code::kNotFound, fmt::format("The checkpoint has no tensor '{}'.", name));
    return entry->View();
  }

  Result<TensorView> Copied(const std::string& name) {
    DI_ASSIGN_OR_RETURN(const TensorView view, Mapped(name));
    const int64_t bytes = view.num_elements() * DTypeBytes(view.dtype());
    DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(stream_.device(), bytes));
    TensorView copy;
    if (view.rank() == 1) {
      copy = buffer.View(view.dtype(), {view.dim(0)});
    } else {
      copy = buffer.View(view.dtype(), {view.dim(0), view.dim(1)});
    }
    DI_RETURN_IF_ERROR(CopyToDevice(view.data(), copy, stream_));
    weights_.packed_bytes += bytes;
    weights_.buffers.push_back(std::move(buffer));
    return copy;
  }

  Result<TensorView> Uploaded(const std::vector<float>& values) {
    const auto count = static_cast<int64_t>(values.size());
    DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(stream_.device(), count * 4));
    const TensorView view = buffer.View(DType::kF32, {count});
    DI_RETURN_IF_ERROR(CopyToDevice(values.data(), view, stream_));
    weights_.buffers.push_back(std::move(buffer));
    return view;
  }

  Result<LinearWeight> Pack(const LinearSource& source) {
    DI_ASSIGN_OR_RETURN(LinearWeight weight, PackLinearWeight(source, stream_));
    weights_.packed_bytes += weight.bytes();
    DropPagesNowAndThen();
    return weight;
  }

  // Packed weights have been read for the last time. Their pages would stay in the process, and its
  // peak would be twice the weights.
  void DropPagesNowAndThen() {
    if (weights_.packed_bytes - dropped_at_ < kDropInterval) return;
    dropped_at_ = weights_.packed_bytes;
    checkpoint_.DropResidentPages();
  }

  // A table of which a step reads few rows: left in the mapped file on a CPU; a GPU gets a copy, in
  // its own memory or in page-locked host memory that it reads row by row.
  Result<TensorView> Table(const std::string& name, TableMemory memory) {
    if (stream_.device().kind == DeviceKind::kCpu) return Mapped(name);
    if (memory == TableMemory::kDevice) return Copied(name);
    DI_ASSIGN_OR_RETURN(const TensorView view, Mapped(name));
    const int64_t bytes = view.num_elements() * DTypeBytes(view.dtype());
    DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::AllocatePinned(bytes));
    constexpr int64_t kPiece = int64_t{1} << 22;
    const auto* from = static_cast<const char*>(view.data());
    auto* to = static_cast<char*>(buffer.data());
    stream_.pool().ParallelForDynamic(
        (bytes + kPiece - 1) / kPiece, 1, [&](int64_t begin, int64_t end, int) {
          std::memcpy(to + begin * kPiece, from + begin * kPiece,
                      static_cast<size_t>(std::min(end * kPiece, bytes) - begin * kPiece));
        });
    const TensorView copy(buffer.data(), view.dtype(), {view.dim(0), view.dim(1)},
                          stream_.device());
    weights_.host_bytes += bytes;
    weights_.buffers.push_back(std::move(buffer));
    checkpoint_.DropResidentPages();
    return copy;
  }

  Result<LinearWeight> Bf16Linear(const std::string& name) {
    DI_ASSIGN_OR_RETURN(const TensorView view, Mapped(name));
    return Pack({.format = WeightFormat::kBf16,
                 .n = view.dim(0),
                 .k = view.dim(1),
                 .weight = view,
                 .scale = {}});
  }

  // `prefix` + ".weight" and ".scale"; rows [row_begin, row_begin + rows) or all of them. The
  // format follows from the dtype.
  Result<LinearWeight> QuantizedLinear(const std::string& prefix, int64_t row_begin = 0,
                                       int64_t rows = -1) {
    DI_ASSIGN_OR_RETURN(const LinearSource source, QuantizedSource(prefix, row_begin, rows));
    return Pack(source);
  }

  // One linear of every expert of a layer.
  Result<std::vector<LinearWeight>> ExpertStack(const std::string& prefix, const char* name,
                                                int64_t count) {
    std::vector<LinearSource> sources;
    for (int64_t e = 0; e < count; ++e) {
      DI_ASSIGN_OR_RETURN(const LinearSource source,
                          QuantizedSource(fmt::format("{}ffn.experts.{}.{}", prefix, e, name)));
      sources.push_back(source);
    }
    DI_ASSIGN_OR_RETURN(std::vector<LinearWeight> weights, PackLinearStack(sources, stream_));
    for (const LinearWeight& weight : weights) weights_.packed_bytes += weight.bytes();
    DropPagesNowAndThen();
    return weights;
  }

  Result<LinearSource> QuantizedSource(const std::string& prefix, int64_t row_begin = 0,
                                       int64_t rows = -1) {
    DI_ASSIGN_OR_RETURN(TensorView weight, Mapped(prefix + ".weight"));
    DI_ASSIGN_OR_RETURN(TensorView scale, Mapped(prefix + ".scale"));
    const bool fp4 = weight.dtype() == DType::kFp4x2;
    if (rows >= 0) {
      const int64_t scale_rows = fp4 ? 1 : 32;
      if (row_begin % scale_rows != 0 || rows % scale_rows != 0) {
        return Fail(
            Code::kUnsupported,
            fmt::format("'{}' cannot be split into groups of {} rows: its scale blocks have {}.",
                        prefix, rows, scale_rows));
      }
      weight = weight.Rows(row_begin, row_begin + rows);
      scale = scale.Rows(row_begin / scale_rows, (row_begin + rows) / scale_rows);
    }
    return LinearSource{.format = fp4 ? WeightFormat::kFp4Group : WeightFormat::kFp8Block,
                        .n = weight.dim(0),
                        .k = fp4 ? 2 * weight.dim(1) : weight.dim(1),
                        .weight = weight,
                        .scale = scale};
  }

  Result<HcWeights> Hc(const std::string& prefix) {
    HcWeights hc;
    DI_ASSIGN_OR_RETURN(hc.fn, Copied(prefix + "_fn"));
    DI_ASSIGN_OR_RETURN(hc.base, Copied(prefix + "_base"));
    DI_ASSIGN_OR_RETURN(hc.scale, Copied(prefix + "_scale"));
    return hc;
  }

  Status LoadLayer(int64_t layer, const std::string& prefix, LayerWeights& w) {
    DI_ASSIGN_OR_RETURN(w.attn_norm, Copied(prefix + "attn_norm.weight"));
    DI_ASSIGN_OR_RETURN(w.ffn_norm, Copied(prefix + "ffn_norm.weight"));
    DI_ASSIGN_OR_RETURN(w.wq_a, QuantizedLinear(prefix + "attn.wq_a"));
    DI_ASSIGN_OR_RETURN(w.q_norm, Copied(prefix + "attn.q_norm.weight"));
    DI_ASSIGN_OR_RETURN(w.wq_b, QuantizedLinear(prefix + "attn.wq_b"));
    DI_ASSIGN_OR_RETURN(w.wkv, QuantizedLinear(prefix + "attn.wkv"));
    DI_ASSIGN_OR_RETURN(w.kv_norm, Copied(prefix + "attn.kv_norm.weight"));
    for (int64_t group = 0; group < config_.o_groups; ++group) {
      DI_ASSIGN_OR_RETURN(
          LinearWeight wo_a,
          QuantizedLinear(prefix + "attn.wo_a", group * config_.o_lora_rank, config_.o_lora_rank));
      w.wo_a.push_back(std::move(wo_a));
    }
    DI_ASSIGN_OR_RETURN(w.wo_b, QuantizedLinear(prefix + "attn.wo_b"));
    DI_ASSIGN_OR_RETURN(w.attn_sink, Copied(prefix + "attn.attn_sink"));
    DI_ASSIGN_OR_RETURN(w.hc_attn, Hc(prefix + "hc_attn"));
    DI_ASSIGN_OR_RETURN(w.hc_ffn, Hc(prefix + "hc_ffn"));
    DI_ASSIGN_OR_RETURN(w.gate, Bf16Linear(prefix + "ffn.gate.weight"));
    DI_ASSIGN_OR_RETURN(w.gate_bias, Copied(prefix + "ffn.gate.bias"));
    DI_ASSIGN_OR_RETURN(w.shared_w1, QuantizedLinear(prefix + "ffn.shared_experts.w1"));
    DI_ASSIGN_OR_RETURN(w.shared_w2, QuantizedLinear(prefix + "ffn.shared_experts.w2"));
    DI_ASSIGN_OR_RETURN(w.shared_w3, QuantizedLinear(prefix + "ffn.shared_experts.w3"));
    const int64_t experts = config_.num_experts(layer);
    DI_ASSIGN_OR_RETURN(w.experts.w1, ExpertStack(prefix, "w1", experts));
    DI_ASSIGN_OR_RETURN(w.experts.w2, ExpertStack(prefix, "w2", experts));
    DI_ASSIGN_OR_RETURN(w.experts.w3, ExpertStack(prefix, "w3", experts));
    for (size_t e = 0; e < w.experts.w1.size(); ++e) {
      w.experts.w1_ptr.push_back(&w.experts.w1[e]);
      w.experts.w2_ptr.push_back(&w.experts.w2[e]);
      w.experts.w3_ptr.push_back(&w.experts.w3[e]);
    }
    if (config_.is_kv_source(layer)) {
      w.compressor = std::make_unique<CompressorWeights>();
      DI_ASSIGN_OR_RETURN(w.compressor->wkv, Bf16Linear(prefix + "attn.compressor.wkv.weight"));
      if (config_.ratio(layer) == 2) {
        DI_ASSIGN_OR_RETURN(w.compressor->wgate,
                            Bf16Linear(prefix + "attn.compressor.wgate.weight"));
      }
      DI_ASSIGN_OR_RETURN(w.compressor->norm, Copied(prefix + "attn.compressor.norm.weight"));
      DI_ASSIGN_OR_RETURN(w.compressor->index_wk, Bf16Linear(prefix + "attn.indexer.wk.weight"));
      DI_ASSIGN_OR_RETURN(w.compressor->index_k_norm,
                          Copied(prefix + "attn.indexer.k_norm.weight"));
    }
    if (config_.is_index_source(layer)) {
      w.indexer = std::make_unique<IndexerWeights>();
      DI_ASSIGN_OR_RETURN(w.indexer->wq_b, QuantizedLinear(prefix + "attn.indexer.wq_b"));
      DI_ASSIGN_OR_RETURN(w.indexer->weights_proj,
                          Bf16Linear(prefix + "attn.indexer.weights_proj.weight"));
    }
    if (config_.engram_index(layer) >= 0) {
      w.engram = std::make_unique<EngramWeights>();
      DI_ASSIGN_OR_RETURN(w.engram->table, Table(prefix + "engram.embed.weight", engram_memory_));
      DI_ASSIGN_OR_RETURN(w.engram->scale, Table(prefix + "engram.embed.scale", engram_memory_));
      DI_ASSIGN_OR_RETURN(w.engram->wkv, QuantizedLinear(prefix + "engram.wkv"));
      DI_ASSIGN_OR_RETURN(w.engram->q_weight, Copied(prefix + "engram.q_weight"));
      DI_ASSIGN_OR_RETURN(w.engram->k_weight, Copied(prefix + "engram.k_weight"));
    }
    return {};
  }

  Status LoadDraft() {
    weights_.draft = std::make_unique<DraftWeights>();
    DraftWeights& w = *weights_.draft;
    const std::string last = fmt::format("mtp.{}.", config_.num_nextn_predict_layers - 1);
    DI_ASSIGN_OR_RETURN(w.main_proj, QuantizedLinear("mtp.0.main_proj"));
    DI_ASSIGN_OR_RETURN(w.main_norm, Copied("mtp.0.main_norm.weight"));
    DI_ASSIGN_OR_RETURN(w.norm, Copied(last + "norm.weight"));
    DI_ASSIGN_OR_RETURN(w.markov_embed,
                        Table(last + "markov_head.embed.weight", TableMemory::kDevice));
    DI_ASSIGN_OR_RETURN(w.markov_head, Bf16Linear(last + "markov_head.head.weight"));
    DI_ASSIGN_OR_RETURN(w.confidence, Copied(last + "confidence_head.proj.weight"));
    return {};
  }

  ModelWeights& weights_;
  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const TableMemory engram_memory_;
  const int64_t num_layers_;  // draft stages among them
  Stream& stream_;
  int64_t dropped_at_ = 0;  // packed_bytes when the file's pages were dropped last
};

}  // namespace

Result<ModelWeights> LoadModelWeights(std::shared_ptr<const Checkpoint> checkpoint,
                                      const ModelConfig& config, TableMemory engram_memory,
                                      bool drafting, Stream& stream) {
  ModelWeights weights;
  weights.engram_constants = ComputeEngramConstants(config);
  DI_RETURN_IF_ERROR(Loader(weights, *checkpoint, config, engram_memory, drafting, stream).Run());
  weights.checkpoint = std::move(checkpoint);
  return weights;
}

}  // namespace deepinfer
