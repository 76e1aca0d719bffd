#include "apps/random_weights.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/random_values.h"
#include "model/rope_frequencies.h"
#include "model/weight_memory.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "tensor/copy.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

// Where a weight may begin in the random bytes: places are a multiple of kPlace below kSlack.
constexpr int64_t kPlace = 512;
constexpr int64_t kSlack = int64_t{4} << 20;

// bf16 numbers of magnitude 2^-10 to 2^-6 and either sign.
uint16_t SmallBf16(uint16_t bits) {
  return static_cast<uint16_t>((bits & 0x807fu) | ((117u + ((bits >> 7) & 3u)) << 7));
}

class Maker {
 public:
  Maker(const ModelConfig& config, int64_t local_experts, uint64_t seed, Stream& stream)
      : config_(config), local_experts_(local_experts), seed_(seed), stream_(stream) {}

  Result<ModelWeights> Run() {
    DI_RETURN_IF_ERROR(MakeBytes());
    const int64_t hidden = config_.hidden_size;
    weights_.engram_constants = ComputeEngramConstants(config_);
    DI_ASSIGN_OR_RETURN(weights_.embed, Table(DType::kBf16, config_.vocab_size, hidden));
    DI_ASSIGN_OR_RETURN(weights_.norm, Ones({hidden}));
    DI_ASSIGN_OR_RETURN(weights_.head, Bf16Linear(config_.vocab_size, hidden));
    DI_ASSIGN_OR_RETURN(weights_.window_frequencies, Uploaded(WindowRopeFrequencies(config_)));
    DI_ASSIGN_OR_RETURN(weights_.compressed_frequencies,
                        Uploaded(CompressedRopeFrequencies(config_)));
    weights_.layers.resize(static_cast<size_t>(config_.num_hidden_layers));
    for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer)
      DI_RETURN_IF_ERROR(MakeLayer(layer, weights_.layers[static_cast<size_t>(layer)]));
    DI_RETURN_IF_ERROR(stream_.Synchronize());
    return std::move(weights_);
  }

 private:
  Status MakeBytes() {
    const int64_t hidden = config_.hidden_size;
    const int64_t wide = config_.num_attention_heads * config_.head_dim;
    int64_t codes = std::max({wide * config_.q_lora_rank, wide * config_.o_lora_rank,
                              config_.o_groups * config_.o_lora_rank * hidden,
                              config_.moe_intermediate_size * hidden});
    codes = std::max(codes, (kHcStreams + 1) * hidden * config_.engram_rows_per_token() *
                                config_.engram_head_dim);
    const int64_t table = std::max({config_.vocab_size, config_.n_routed_experts, config_.head_dim,
                                    config_.index_n_heads}) *
                          hidden * 2;
    DI_ASSIGN_OR_RETURN(bf16_, RandomBytes("bf16", table + kSlack, [](uint64_t word) {
                          uint64_t values = 0;
                          for (int shift = 0; shift < 64; shift += 16) {
                            values |= uint64_t{SmallBf16(static_cast<uint16_t>(word >> shift))}
                                      << shift;
                          }
                          return values;
                        }));
    DI_ASSIGN_OR_RETURN(codes_, RandomBytes("codes", codes + kSlack, [](uint64_t word) {
                          // E4M3 has its NaN where all seven bits below the sign are set.
                          for (int shift = 0; shift < 64; shift += 8) {
                            if ((word >> shift & 0x7f) == 0x7f) word ^= uint64_t{1} << shift;
                          }
                          return word;
                        }));
    // Powers of two that bring codes (E2M1: 2.9 on average, E4M3: 110) to about 0.01.
    const auto exponents = [](uint64_t low) {
      return
          [low](uint64_t word) { return (word & 0x0101010101010101u) + 0x0101010101010101u * low; };
    };
    DI_ASSIGN_OR_RETURN(fp4_scales_, RandomBytes("fp4", codes / 16 + kSlack, exponents(118)));
    DI_ASSIGN_OR_RETURN(fp8_scales_, RandomBytes("fp8", codes / 16 + kSlack, exponents(113)));
    return {};
  }

  template <class Form>
  Result<Buffer> RandomBytes(std::string_view name, int64_t bytes, const Form& form) {
    const int64_t words = (bytes + 7) / 8;
    DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate({}, words * 8));
    const uint64_t key = RandomKey(seed_, name);
    auto* out = static_cast<uint64_t*>(buffer.data());
    stream_.pool().ParallelFor(words, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        out[i] = form(RandomWord(key, static_cast<uint64_t>(i)));
    });
    return buffer;
  }

  // Bytes of one of the buffers from another place at every call.
  const void* From(const Buffer& buffer) {
    const uint64_t draw = RandomWord(RandomKey(seed_, "places"), draws_++);
    return static_cast<const char*>(buffer.data()) +
           static_cast<int64_t>(draw % (kSlack / kPlace)) * kPlace;
  }

  LinearSource Source(WeightFormat format, int64_t n, int64_t k) {
    LinearSource source{.format = format, .n = n, .k = k, .weight = {}, .scale = {}};
    switch (format) {
      case WeightFormat::kBf16:
        source.weight = TensorView(From(bf16_), DType::kBf16, {n, k});
        break;
      case WeightFormat::kFp8Block:
        source.weight = TensorView(From(codes_), DType::kFp8E4M3, {n, k});
        source.scale = TensorView(From(fp8_scales_), DType::kE8M0, {(n + 31) / 32, (k + 31) / 32});
        break;
      case WeightFormat::kFp4Group:
        source.weight = TensorView(From(codes_), DType::kFp4x2, {n, k / 2});
        source.scale = TensorView(From(fp4_scales_), DType::kE8M0, {n, k / 32});
        break;
    }
    return source;
  }

  Result<LinearWeight> Pack(WeightFormat format, int64_t n, int64_t k) {
    DI_ASSIGN_OR_RETURN(LinearWeight weight, PackLinearWeight(Source(format, n, k), stream_));
    weights_.packed_bytes += weight.bytes();
    return weight;
  }
  Result<LinearWeight> Bf16Linear(int64_t n, int64_t k) {
    return Pack(WeightFormat::kBf16, n, k);
  }
  Result<LinearWeight> Fp8Linear(int64_t n, int64_t k) {
    return Pack(WeightFormat::kFp8Block, n, k);
  }

  Status Experts(int64_t n, int64_t k, std::vector<LinearWeight>* weights,
                 std::vector<const LinearWeight*>* pointers) {
    std::vector<LinearSource> sources;
    for (int64_t e = 0; e < local_experts_; ++e)
      sources.push_back(Source(WeightFormat::kFp4Group, n, k));
    DI_ASSIGN_OR_RETURN(*weights, PackLinearStack(sources, stream_));
    for (const LinearWeight& weight : *weights) {
      weights_.packed_bytes += weight.bytes();
      pointers->push_back(&weight);
    }
    return {};
  }

  Result<TensorView> Allocated(DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView wanted(static_cast<void*>(nullptr), dtype, shape);
    const int64_t bytes = wanted.num_elements() * DTypeBytes(dtype);
    DI_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(stream_.device(), bytes));
    const TensorView view = buffer.View(dtype, shape);
    weights_.packed_bytes += bytes;
    weights_.buffers.push_back(std::move(buffer));
    return view;
  }
  Result<TensorView> Ones(std::initializer_list<int64_t> shape) {
    DI_ASSIGN_OR_RETURN(const TensorView view, Allocated(DType::kBf16, shape));
    const std::vector<Bf16> ones(static_cast<size_t>(view.num_elements()), F32ToBf16(1.0f));
    DI_RETURN_IF_ERROR(CopyToDevice(ones.data(), view, stream_));
    return view;
  }
  // Normal values of a standard deviation.
  Result<TensorView> Floats(std::initializer_list<int64_t> shape, float deviation) {
    DI_ASSIGN_OR_RETURN(const TensorView view, Allocated(DType::kF32, shape));
    std::vector<float> values(static_cast<size_t>(view.num_elements()));
    const uint64_t key = RandomKey(seed_, "floats") + draws_++;
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = deviation * NormalQuantiles()[RandomBits16(key, i)];
    DI_RETURN_IF_ERROR(CopyToDevice(values.data(), view, stream_));
    return view;
  }
  Result<TensorView> Uploaded(const std::vector<float>& values) {
    DI_ASSIGN_OR_RETURN(const TensorView view,
                        Allocated(DType::kF32, {static_cast<int64_t>(values.size())}));
    DI_RETURN_IF_ERROR(CopyToDevice(values.data(), view, stream_));
    return view;
  }
  Result<TensorView> Table(DType dtype, int64_t rows, int64_t channels) {
    DI_ASSIGN_OR_RETURN(const TensorView view, Allocated(dtype, {rows, channels}));
    const Buffer& bytes = dtype == DType::kBf16      ? bf16_
                          : dtype == DType::kFp8E4M3 ? codes_
                                                     : fp8_scales_;
    DI_RETURN_IF_ERROR(FillRepeated(bytes.data(), bytes.bytes() / kPlace * kPlace, view, stream_));
    return view;
  }

  Result<HcWeights> Hc() {
    const int64_t width = kHcStreams * config_.hidden_size;
    HcWeights hc;
    const auto deviation = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)));
    DI_ASSIGN_OR_RETURN(hc.fn, Floats({kHcCoefficients, width}, deviation));
    DI_ASSIGN_OR_RETURN(hc.base, Floats({kHcCoefficients}, 0.5f));
    DI_ASSIGN_OR_RETURN(hc.scale, Floats({3}, 0.5f));
    return hc;
  }

  Status MakeLayer(int64_t layer, LayerWeights& w) {
    const int64_t hidden = config_.hidden_size;
    const int64_t dim = config_.head_dim;
    const int64_t heads = config_.num_attention_heads;
    const int64_t low = config_.q_lora_rank;
    const int64_t rank = config_.o_lora_rank;
    const int64_t groups = config_.o_groups;
    const int64_t inner = config_.moe_intermediate_size;
    DI_ASSIGN_OR_RETURN(w.attn_norm, Ones({hidden}));
    DI_ASSIGN_OR_RETURN(w.ffn_norm, Ones({hidden}));
    DI_ASSIGN_OR_RETURN(w.wq_a, Fp8Linear(low, hidden));
    DI_ASSIGN_OR_RETURN(w.q_norm, Ones({low}));
    DI_ASSIGN_OR_RETURN(w.wq_b, Fp8Linear(heads * dim, low));
    DI_ASSIGN_OR_RETURN(w.wkv, Fp8Linear(dim, hidden));
    DI_ASSIGN_OR_RETURN(w.kv_norm, Ones({dim}));
    for (int64_t group = 0; group < groups; ++group) {
      DI_ASSIGN_OR_RETURN(LinearWeight wo_a, Fp8Linear(rank, heads / groups * dim));
      w.wo_a.push_back(std::move(wo_a));
    }
    DI_ASSIGN_OR_RETURN(w.wo_b, Fp8Linear(hidden, groups * rank));
    DI_ASSIGN_OR_RETURN(w.attn_sink, Floats({heads}, 1.0f));
    DI_ASSIGN_OR_RETURN(w.hc_attn, Hc());
    DI_ASSIGN_OR_RETURN(w.hc_ffn, Hc());
    DI_ASSIGN_OR_RETURN(w.gate, Bf16Linear(config_.n_routed_experts, hidden));
    DI_ASSIGN_OR_RETURN(w.gate_bias, Floats({config_.n_routed_experts}, 0.01f));
    DI_ASSIGN_OR_RETURN(w.shared_w1, Fp8Linear(inner, hidden));
    DI_ASSIGN_OR_RETURN(w.shared_w2, Fp8Linear(hidden, inner));
    DI_ASSIGN_OR_RETURN(w.shared_w3, Fp8Linear(inner, hidden));
    DI_RETURN_IF_ERROR(Experts(inner, hidden, &w.experts.w1, &w.experts.w1_ptr));
    DI_RETURN_IF_ERROR(Experts(hidden, inner, &w.experts.w2, &w.experts.w2_ptr));
    DI_RETURN_IF_ERROR(Experts(inner, hidden, &w.experts.w3, &w.experts.w3_ptr));
    if (config_.is_kv_source(layer)) {
      w.compressor = std::make_unique<CompressorWeights>();
      DI_ASSIGN_OR_RETURN(w.compressor->wkv, Bf16Linear(dim, hidden));
      if (config_.ratio(layer) == 2) {
        DI_ASSIGN_OR_RETURN(w.compressor->wgate, Bf16Linear(dim, hidden));
      }
      DI_ASSIGN_OR_RETURN(w.compressor->norm, Ones({dim}));
      DI_ASSIGN_OR_RETURN(w.compressor->index_wk, Bf16Linear(config_.index_head_dim, dim));
      DI_ASSIGN_OR_RETURN(w.compressor->index_k_norm, Ones({config_.index_head_dim}));
    }
    if (config_.is_index_source(layer)) {
      w.indexer = std::make_unique<IndexerWeights>();
      DI_ASSIGN_OR_RETURN(w.indexer->wq_b,
                          Fp8Linear(config_.index_n_heads * config_.index_head_dim, low));
      DI_ASSIGN_OR_RETURN(w.indexer->weights_proj, Bf16Linear(config_.index_n_heads, hidden));
    }
    if (const int64_t table = config_.engram_index(layer); table >= 0) {
      const int64_t rows = config_.engram_num_embeddings[static_cast<size_t>(table)];
      const int64_t channels = config_.engram_head_dim;
      w.engram = std::make_unique<EngramWeights>();
      DI_ASSIGN_OR_RETURN(w.engram->table, Table(DType::kFp8E4M3, rows, channels));
      DI_ASSIGN_OR_RETURN(w.engram->scale, Table(DType::kE8M0, rows, channels / 32));
      DI_ASSIGN_OR_RETURN(w.engram->wkv, Fp8Linear((kHcStreams + 1) * hidden,
                                                   config_.engram_rows_per_token() * channels));
      DI_ASSIGN_OR_RETURN(w.engram->q_weight, Ones({kHcStreams, hidden}));
      DI_ASSIGN_OR_RETURN(w.engram->k_weight, Ones({kHcStreams, hidden}));
    }
    return {};
  }

  const ModelConfig& config_;
  const int64_t local_experts_;
  const uint64_t seed_;
  Stream& stream_;
  ModelWeights weights_;
  Buffer bf16_, codes_, fp4_scales_, fp8_scales_;  // on the host
  uint64_t draws_ = 0;
};

}  // namespace

Result<ModelWeights> MakeRandomWeights(const ModelConfig& config, int64_t local_experts,
                                       uint64_t seed, Stream& stream) {
  return Maker(config, local_experts, seed, stream).Run();
}

int64_t RandomWeightBytes(const ModelConfig& config, int64_t local_experts) {
  ModelConfig local = config;
  local.n_routed_experts = local_experts;
  local.num_nextn_predict_layers = 0;
  // The router chooses among all experts.
  const int64_t router = (config.n_routed_experts - local_experts) * (2 * config.hidden_size + 4);
  return GpuWeightMemory(local, 1, false).resident_bytes() + config.num_hidden_layers * router;
}

Status FillRepeated(const void* pattern, int64_t bytes, const TensorView& view, Stream& stream) {
  const int64_t total = view.num_elements() * DTypeBytes(view.dtype());
  const auto part = [&](int64_t begin, int64_t size) {
    return TensorView(static_cast<char*>(view.data()) + begin, DType::kU8, {size}, view.device());
  };
  int64_t filled = std::min(bytes, total);
  DI_RETURN_IF_ERROR(CopyToDevice(pattern, part(0, filled), stream));
  while (filled < total) {
    const int64_t size = std::min(filled, total - filled);
    DI_RETURN_IF_ERROR(CopyOnDevice(part(0, size), part(filled, size), stream));
    filled += size;
  }
  return {};
}

}  // namespace deepinfer
