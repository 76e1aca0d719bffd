#include "model/random_checkpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/quoted.h"
#include "base/thread_pool.h"
#include "model/config.h"
#include "model/engram_constants.h"
#include "model/engram_token_map.h"
#include "model/inventory.h"
#include "model/random_values.h"
#include "tensor/float_formats.h"
#include "weights/safetensors.h"

namespace deepinfer {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- Configurations --------------------------------------------------------------------------

// Values that both presets share.
Json CommonConfig() {
  return Json{{"architectures", {"DeepseekV41ForCausalLM"}},
              {"model_type", "deepseek_v41"},
              {"dtype", "bfloat16"},
              {"bos_token_id", 0},
              {"eos_token_id", 1},
              {"pad_token_id", 2},
              {"image_token_id", 0},
              {"tie_word_embeddings", false},
              {"quantization_config",
               {{"quant_method", "fp8"},
                {"activation_scheme", "dynamic"},
                {"weight_block_size", {32, 32}},
                {"scale_fmt", "ue8m0"},
                {"expert_dtype", "fp4"}}},
              {"text_config",
               {{"model_type", "deepseek_v41_text"},
                {"num_key_value_heads", 1},
                {"hidden_act", "silu"},
                {"rms_norm_eps", 1e-20},
                {"attention_bias", false},
                {"rope_theta", 10000.0},
                {"n_shared_experts", 1},
                {"scoring_func", "sqrtsoftplus"},
                {"topk_method", "noaux_tc"},
                {"norm_topk_prob", true},
                {"routed_scaling_factor", 1.5},
                {"hc_mult", 4},
                {"hc_sinkhorn_iters", 20},
                {"hc_eps", 1e-6},
                {"engram_max_ngram_size", 4},
                {"engram_pad_token_id", 2},
                {"tie_word_embeddings", false}}},
              {"vision_config",
               {{"model_type", "deepseek_v41_vision"},
                {"num_hidden_layers", 2},
                {"hidden_size", 64},
                {"num_attention_heads", 2},
                {"intermediate_size", 96},
                {"patch_size", 2},
                {"rope_theta", 10000.0},
                {"downsample_ratio", 3},
                {"max_image_tokens", 64},
                {"min_pixels", 64},
                {"max_wh_ratio", nullptr}}}};
}

// Fills in what follows from the other values: special token ids, the compressed vocabulary of the
// generated tokenizer, and the rows of the Engram tables. Returns the validated text.
Result<std::string> Completed(Json config) {
  Json& text = config["text_config"];
  const int64_t vocab = text["vocab_size"];
  DI_ASSIGN_OR_RETURN(const std::string tokenizer, SmallTokenizerJson(vocab));
  DI_ASSIGN_OR_RETURN(const TokenCompression compression, CompressVocabulary(tokenizer));
  // Chat markers end the vocabulary; the image placeholder is the fifth from the end, "system" the
  // first of the twelve.
  config["image_token_id"] = vocab - 5;
  text["dspark_noise_token_id"] = vocab - 12;
  text["engram_compressed_vocab_size"] = compression.num_keys;
  ModelConfig engram;
  engram.engram_layer_ids = text["engram_layer_ids"].get<std::vector<int64_t>>();
  engram.engram_max_ngram_size = text["engram_max_ngram_size"];
  engram.engram_vocab_size = text["engram_vocab_size"];
  engram.engram_n_heads = text["engram_n_heads"];
  text["engram_num_embeddings"] = EngramTableRows(engram);
  std::string json = config.dump(1) + "\n";
  DI_RETURN_IF_ERROR(ParseModelConfig(json));
  return json;
}

// ---- Values ----------------------------------------------------------------------------------

// How the elements of one tensor are drawn. `sigma` of quantised tensors is that of the values they
// represent.
struct Recipe {
  enum class Kind { kNormal, kUniform, kHyperBase, kSelection, kFp8, kFp4, kScale };
  Kind kind = Kind::kNormal;
  uint64_t key = 0;
  double center = 0;       // kUniform
  double sigma = 1;        // standard deviation; half width for kUniform
  int32_t scale_byte = 0;  // kScale: before the jitter of -1, 0 or 1
  // A donor's normal values are blended in, so that this tensor resembles it: 0.9 of the donor, the
  // rest its own.
  uint64_t donor_key = 0;
  // Element (r, c) resembles donor element (head r / head_rows * donor_stride, channel of r %
  // head_rows, c).
  int64_t head_rows = 0;  // 0: the identity
  int64_t donor_head_rows = 0;
  int64_t donor_head_stride = 1;
  int64_t rope_rows = 0;
  int64_t columns = 1;
};

// Row of the donor: channels keep their place, rotated channels stay at the end.
int64_t DonorRow(const Recipe& recipe, int64_t row) {
  if (recipe.head_rows == 0) return row;
  const int64_t head = row / recipe.head_rows;
  const int64_t channel = row % recipe.head_rows;
  const int64_t from_end = recipe.head_rows - channel;
  const int64_t donor_channel = from_end <= recipe.rope_rows ? recipe.donor_head_rows - from_end
                                                             : channel % recipe.donor_head_rows;
  return head * recipe.donor_head_stride * recipe.donor_head_rows + donor_channel;
}

constexpr double kDonorShare = 0.9;
constexpr double kOwnShare = 0.43588989435406735;  // sqrt(1 - 0.9^2)

// Codes span about four standard deviations; these keep the largest below the end of the range.
constexpr double kMinFp8CodeSigma = 32;
constexpr double kMinFp4CodeSigma = 1.25;

// The power of two that brings `sigma` to a code deviation in [min_code_sigma, 2 min_code_sigma).
int ScaleExponent(double sigma, double min_code_sigma) {
  int exponent = 0;
  std::frexp(sigma / min_code_sigma, &exponent);
  return exponent - 1;
}

// The stored element of each 16-bit draw. Most tensors share a few tables.
template <class T>
using DrawTable = std::array<T, 65536>;

class Tables {
 public:
  // E4M3 codes of normal values with this deviation.
  const DrawTable<uint8_t>& Fp8(double code_sigma) {
    return Get(fp8_, code_sigma, [&](uint32_t bits) {
      return F32ToE4M3(static_cast<float>(NormalQuantiles()[bits] * code_sigma));
    });
  }
  // Pairs of E2M1 codes; each has eight of the bits.
  const DrawTable<uint8_t>& Fp4(double code_sigma) {
    return Get(fp4_, code_sigma, [&](uint32_t bits) {
      const auto code = [&](uint32_t byte) {
        return F32ToE2M1(static_cast<float>(NormalQuantiles()[byte * 256 + 128] * code_sigma));
      };
      return static_cast<uint8_t>(code(bits & 255) | (code(bits >> 8) << 4));
    });
  }
  const DrawTable<uint16_t>& Bf16(double sigma) {
    return Get(bf16_, sigma, [&](uint32_t bits) {
      return F32ToBf16(static_cast<float>(sigma * NormalQuantiles()[bits])).bits;
    });
  }

 private:
  template <class T, class F>
  const DrawTable<T>& Get(std::map<double, std::unique_ptr<DrawTable<T>>>& tables, double sigma,
                          F value) {
    std::unique_ptr<DrawTable<T>>& table = tables[sigma];
    if (!table) {
      table = std::make_unique<DrawTable<T>>();
      for (uint32_t bits = 0; bits < 65536; ++bits) (*table)[bits] = value(bits);
    }
    return *table;
  }
  std::map<double, std::unique_ptr<DrawTable<uint8_t>>> fp8_;
  std::map<double, std::unique_ptr<DrawTable<uint8_t>>> fp4_;
  std::map<double, std::unique_ptr<DrawTable<uint16_t>>> bf16_;
};

// How one tensor is drawn, with the table of its kind, if it has one.
struct Source {
  Recipe recipe;
  const DrawTable<uint8_t>* bytes = nullptr;
  const DrawTable<uint16_t>* halves = nullptr;

  Source(const Recipe& of, StoredDType dtype, Tables& tables) : recipe(of) {
    if (recipe.kind == Recipe::Kind::kFp8 && recipe.donor_key == 0) {
      bytes = &tables.Fp8(std::ldexp(recipe.sigma, -ScaleExponent(recipe.sigma, kMinFp8CodeSigma)));
    } else if (recipe.kind == Recipe::Kind::kFp4) {
      bytes = &tables.Fp4(std::ldexp(recipe.sigma, -ScaleExponent(recipe.sigma, kMinFp4CodeSigma)));
    } else if (recipe.kind == Recipe::Kind::kNormal && dtype == StoredDType::kBf16) {
      halves = &tables.Bf16(recipe.sigma);
    }
  }
};

class Recipes {
 public:
  Recipes(const ModelConfig& config, uint64_t seed) : config_(config), seed_(seed) {}

  Recipe For(const StoredTensor& tensor) const {
    if (tensor.name.ends_with(".scale") && tensor.dtype == StoredDType::kF8E8M0)
      return ScaleRecipe(tensor);
    return WeightRecipe(tensor.name, tensor.dtype, tensor.shape);
  }

 private:
  static bool EndsWith(std::string_view name, std::initializer_list<std::string_view> suffixes) {
    return std::any_of(suffixes.begin(), suffixes.end(),
                       [&](std::string_view s) { return name.ends_with(s); });
  }

  // Linear weights have deviation gain / sqrt(inputs). Gains below 1 are on the last matrix of a
  // branch: a sub-layer's output is then about a tenth of the residual.
  static double Gain(std::string_view name) {
    if (name.ends_with("attn.wo_b.weight")) return 0.25;
    if (name.find("shared_experts.w2") != std::string_view::npos) return 0.12;
    if (name.ends_with(".w2.weight") && name.find("ffn.experts.") != std::string_view::npos)
      return 0.25;
    if (name.ends_with("ffn.gate.weight")) return 0.7;
    if (name.ends_with("markov_head.head.weight")) return 0.5;
    if (name == "head.weight") return 1.5;
    if (EndsWith(name, {"hc_attn_fn", "hc_ffn_fn"})) return 0.6;
    return 1;
  }

  Recipe WeightRecipe(const std::string& name, StoredDType dtype,
                      std::span<const int64_t> shape) const {
    Recipe recipe;
    recipe.key = RandomKey(seed_, name);
    recipe.columns = shape.size() < 2 ? 1 : shape.back();
    const int64_t inputs = dtype == StoredDType::kI8 ? 2 * recipe.columns : recipe.columns;
    recipe.sigma = Gain(name) / std::sqrt(static_cast<double>(inputs));
    if (dtype == StoredDType::kI8) {
      recipe.kind = Recipe::Kind::kFp4;
    } else if (dtype == StoredDType::kF8E4M3) {
      recipe.kind = Recipe::Kind::kFp8;
      if (name.ends_with("engram.embed.weight")) recipe.sigma = 0.25;
      AddDonor(name, recipe);
    } else if (EndsWith(name, {"norm.weight", "norm1.weight", "norm2.weight", "engram.q_weight",
                               "engram.k_weight", "hc_attn_scale", "hc_ffn_scale"})) {
      recipe.kind = Recipe::Kind::kUniform;
      recipe.center = 1;
      recipe.sigma = 0.2;
    } else if (EndsWith(name, {"ffn.gate.bias", "ffn.gate.bias_vl"})) {
      recipe.kind = Recipe::Kind::kUniform;
      recipe.sigma = 0.3;
    } else if (name.ends_with(".bias")) {
      recipe.kind = Recipe::Kind::kUniform;
      recipe.sigma = 0.1;
    } else if (EndsWith(name, {"hc_attn_base", "hc_ffn_base"})) {
      recipe.kind = Recipe::Kind::kHyperBase;
    } else if (name.ends_with("attn.indexer.wk.weight")) {
      // Index keys are a subset of the compressed keys' channels, slightly disturbed.
      recipe.kind = Recipe::Kind::kSelection;
      recipe.sigma *= 0.3;
      recipe.head_rows = config_.index_head_dim;
      recipe.donor_head_rows = config_.head_dim;
      recipe.rope_rows = config_.qk_rope_head_dim;
    } else if (EndsWith(name, {"embed.weight", "attn.attn_sink"}) || name.starts_with("image_")) {
      recipe.sigma = 1;
    }
    return recipe;
  }

  // Queries of layers that take another layer's selection resemble that layer's queries, and index
  // queries resemble the attention's: otherwise the selected entries are not those with large
  // attention weights.
  void AddDonor(const std::string& name, Recipe& recipe) const {
    for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      const std::string prefix = fmt::format("layers.{}.attn.", layer);
      if (!name.starts_with(prefix)) continue;
      const std::string_view suffix = std::string_view(name).substr(prefix.size());
      const int64_t source = config_.index_source(layer);
      if ((suffix == "wq_a.weight" || suffix == "wq_b.weight") && source >= 0 && source != layer) {
        recipe.donor_key = RandomKey(seed_, fmt::format("layers.{}.attn.{}", source, suffix));
      } else if (suffix == "indexer.wq_b.weight") {
        recipe.donor_key = RandomKey(seed_, prefix + "wq_b.weight");
        recipe.head_rows = config_.index_head_dim;
        recipe.donor_head_rows = config_.head_dim;
        recipe.donor_head_stride =
            std::max<int64_t>(1, config_.num_attention_heads / config_.index_n_heads);
        recipe.rope_rows = config_.qk_rope_head_dim;
      }
      return;
    }
  }

  Recipe ScaleRecipe(const StoredTensor& scale) const {
    const std::string base =
        scale.name.substr(0, scale.name.size() - std::string_view(".scale").size());
    const bool fp4 = base.find("ffn.experts.") != std::string::npos;
    // The codes' shape follows from that of the scales: 32 columns each, half as many bytes for
    // FP4.
    const int64_t columns = scale.shape[1] * (fp4 ? 16 : 32);
    const int64_t shape[] = {scale.shape[0], columns};
    Recipe recipe =
        WeightRecipe(base + ".weight", fp4 ? StoredDType::kI8 : StoredDType::kF8E4M3, shape);
    recipe.kind = Recipe::Kind::kScale;
    recipe.scale_byte =
        127 + ScaleExponent(recipe.sigma, fp4 ? kMinFp4CodeSigma : kMinFp8CodeSigma);
    recipe.columns = scale.shape[1];
    // A tensor that resembles another one has its jitter as well; heads count rows of blocks here.
    recipe.key = RandomKey(recipe.donor_key != 0 ? recipe.donor_key : recipe.key, "jitter");
    recipe.head_rows /= 32;
    recipe.donor_head_rows /= 32;
    recipe.rope_rows = (recipe.rope_rows + 31) / 32;
    return recipe;
  }

  const ModelConfig& config_;
  uint64_t seed_;
};

double Normal(uint64_t key, int64_t index) {
  return NormalQuantiles()[RandomBits16(key, static_cast<uint64_t>(index))];
}

double RealValue(const Recipe& recipe, int64_t index) {
  switch (recipe.kind) {
    case Recipe::Kind::kUniform: {
      const double unit =
          (RandomBits16(recipe.key, static_cast<uint64_t>(index)) + 0.5) / 32768 - 1;
      return recipe.center + recipe.sigma * unit;
    }
    case Recipe::Kind::kHyperBase:
      // The combination needs a wide spread; with a smaller one the four streams become equal.
      return Normal(recipe.key, index) * (index < 8 ? 1.2 : 4.0);
    case Recipe::Kind::kSelection: {
      const int64_t row = index / recipe.columns;
      const double selected = DonorRow(recipe, row) == index % recipe.columns ? 1 : 0;
      return selected + recipe.sigma * Normal(recipe.key, index);
    }
    default:
      return recipe.sigma * Normal(recipe.key, index);
  }
}

// Little-endian, as the file format wants it.
template <class T>
std::byte* Put(T value, std::byte* out) {
  for (size_t b = 0; b < sizeof(T); ++b) *out++ = static_cast<std::byte>((value >> (8 * b)) & 0xff);
  return out;
}

// Elements [begin, end) from a table; one word of random bits serves four.
template <class T>
void FillFromTable(uint64_t key, const DrawTable<T>& table, int64_t begin, int64_t end,
                   std::byte* out) {
  const auto single = [&](int64_t i) {
    out = Put(table[RandomBits16(key, static_cast<uint64_t>(i))], out);
  };
  int64_t i = begin;
  for (; i < end && i % 4 != 0; ++i) single(i);
  for (; i + 4 <= end; i += 4) {
    const uint64_t word = RandomWord(key, static_cast<uint64_t>(i / 4));
    for (int shift = 0; shift < 64; shift += 16) out = Put(table[(word >> shift) & 0xffff], out);
  }
  for (; i < end; ++i) single(i);
}

// Elements [begin, end) of a tensor as stored.
void Fill(const Source& source, StoredDType dtype, int64_t begin, int64_t end, std::byte* out) {
  const Recipe& recipe = source.recipe;
  if (recipe.kind == Recipe::Kind::kScale) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t donor =
          recipe.head_rows == 0
              ? i
              : DonorRow(recipe, i / recipe.columns) * recipe.columns + i % recipe.columns;
      const int32_t jitter = RandomBits16(recipe.key, static_cast<uint64_t>(donor)) % 3 - 1;
      *out++ = static_cast<std::byte>(recipe.scale_byte + jitter);
    }
  } else if (recipe.kind == Recipe::Kind::kFp8 && recipe.donor_key != 0) {
    const double code_sigma =
        std::ldexp(recipe.sigma, -ScaleExponent(recipe.sigma, kMinFp8CodeSigma));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t donor =
          DonorRow(recipe, i / recipe.columns) * recipe.columns + i % recipe.columns;
      const double z =
          kDonorShare * Normal(recipe.donor_key, donor) + kOwnShare * Normal(recipe.key, i);
      *out++ = static_cast<std::byte>(F32ToE4M3(static_cast<float>(z * code_sigma)));
    }
  } else if (source.bytes != nullptr) {
    FillFromTable(recipe.key, *source.bytes, begin, end, out);
  } else if (source.halves != nullptr) {
    FillFromTable(recipe.key, *source.halves, begin, end, out);
  } else if (dtype == StoredDType::kBf16) {
    for (int64_t i = begin; i < end; ++i)
      out = Put(F32ToBf16(static_cast<float>(RealValue(recipe, i))).bits, out);
  } else {
    for (int64_t i = begin; i < end; ++i)
      out = Put(std::bit_cast<uint32_t>(static_cast<float>(RealValue(recipe, i))), out);
  }
}

// ---- Files -----------------------------------------------------------------------------------

Status WriteTextFile(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) return Fail(Code::kUnavailable, fmt::format("Cannot write '{}'.", path.string()));
  return {};
}

std::string ShardName(size_t shard, size_t num_shards) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
}

// Makes an empty directory with room for `bytes`. Unfinished shards of an interrupted run with as
// many shards are removed if the directory holds nothing else; finished ones could be anybody's.
Status PrepareDirectory(const std::string& dir, size_t num_shards, int64_t bytes) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error || !fs::is_directory(dir)) {
    return Fail(Code::kUnavailable,
                fmt::format("Cannot create the directory {}: {}.", Quoted(dir), error.message()));
  }
  std::set<std::string> unfinished;
  for (size_t shard = 0; shard < num_shards; ++shard)
    unfinished.insert(ShardName(shard, num_shards) + ".partial");
  std::vector<fs::path> leftovers;
  std::string foreign;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (unfinished.contains(name) && it->symlink_status(error).type() == fs::file_type::regular) {
      leftovers.push_back(it->path());
    } else if (foreign.empty() || name < foreign) {
      foreign = name;
    }
  }
  if (error) {
    return Fail(Code::kUnavailable,
                fmt::format("Cannot read the directory {}: {}.", Quoted(dir), error.message()));
  }
  if (!foreign.empty()) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("The directory {} is not empty, it holds {}; nothing was written. Choose "
                    "another directory or, if an interrupted run left the files, delete them.",
                    Quoted(dir), Quoted(foreign)));
  }
  for (const fs::path& leftover : leftovers) {
    if (!fs::remove(leftover, error) && error) {
      return Fail(Code::kUnavailable,
                  fmt::format("Cannot remove {}, left by an interrupted run: {}.",
                              Quoted(leftover.string()), error.message()));
    }
  }
  const fs::space_info space = fs::space(dir, error);
  if (!error && space.available < static_cast<uint64_t>(bytes)) {
    return Fail(Code::kResourceExhausted,
                fmt::format("The checkpoint needs {} bytes, but only {} are free at {}.", bytes,
                            space.available, Quoted(dir)));
  }
  return {};
}

}  // namespace

Result<std::string> TinyConfigJson() {
  Json config = CommonConfig();
  config["text_config"].update(Json{{"vocab_size", 512},
                                    {"hidden_size", 256},
                                    {"moe_intermediate_size", 64},
                                    {"num_hidden_layers", 10},
                                    {"num_attention_heads", 8},
                                    {"head_dim", 64},
                                    {"qk_rope_head_dim", 16},
                                    {"q_lora_rank", 64},
                                    {"o_lora_rank", 32},
                                    {"o_groups", 4},
                                    {"swiglu_limit", 1.0},
                                    {"max_position_embeddings", 1024},
                                    {"compress_rope_theta", 1000.0},
                                    {"rope_scaling",
                                     {{"rope_type", "yarn"},
                                      {"factor", 4.0},
                                      {"beta_fast", 32},
                                      {"beta_slow", 1},
                                      {"original_max_position_embeddings", 64}}},
                                    {"n_routed_experts", 16},
                                    {"num_experts_per_tok", 3},
                                    {"sliding_window", 8},
                                    {"compress_ratios", {0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0}},
                                    {"kv_source_layer_ids", {2, 4, 6}},
                                    {"index_source_layer_ids", {2, 4, 6, 8}},
                                    {"index_n_heads", 4},
                                    {"index_head_dim", 64},
                                    {"index_topk", 16},
                                    {"candidate_source_layer_id", 6},
                                    {"candidate_topk_blocks", 6},
                                    {"candidate_block_size", 4},
                                    {"engram_layer_ids", {1, 4}},
                                    {"engram_vocab_size", 1000},
                                    {"engram_n_heads", 2},
                                    {"engram_head_dim", 64},
                                    {"num_nextn_predict_layers", 3},
                                    {"dspark_block_size", 3},
                                    {"dspark_target_layer_ids", {7, 8, 9}},
                                    {"dspark_markov_rank", 32},
                                    {"dspark_n_routed_experts", 8},
                                    {"dspark_num_experts_per_tok", 2}});
  return Completed(std::move(config));
}

Result<std::string> SliceConfigJson(const SliceOptions& options) {
  const auto check = [](std::string_view field, int64_t value, int64_t min, int64_t max) -> Status {
    if (value >= min && value <= max) return {};
    return Fail(Code::kInvalidArgument,
                fmt::format("{} is {}; allowed are {} to {}.", field, value, min, max),
                std::string(field));
  };
  DI_RETURN_IF_ERROR(check("layers", options.layers, 1, 40));
  DI_RETURN_IF_ERROR(check("experts", options.experts, 1, 384));
  DI_RETURN_IF_ERROR(check("engram_rows", options.engram_rows, 1000, 384006168));
  DI_RETURN_IF_ERROR(check("vocab", options.vocab, 320, 129280));
  DI_RETURN_IF_ERROR(check("draft_layers", options.draft_layers, 0, 3));
  DI_RETURN_IF_ERROR(check("draft_experts", options.draft_experts, 1, 128));

  const int64_t layers = options.layers;
  const int64_t encoder = std::max<int64_t>(0, layers - std::max<int64_t>(2, layers / 2));
  const int64_t window_only = encoder >= 2 ? std::max<int64_t>(1, encoder / 10) : 0;
  std::vector<int64_t> ratios;
  for (int64_t layer = 0; layer < layers; ++layer)
    ratios.push_back(layer < window_only ? 0 : (layer < encoder ? 2 : 1));
  ratios.resize(static_cast<size_t>(layers + options.draft_layers), 0);
  std::vector<int64_t> kv_sources;
  for (int64_t layer = window_only; layer < encoder; layer += 6) kv_sources.push_back(layer);
  std::vector<int64_t> engram_layers;
  if (encoder > 0) {
    engram_layers.push_back(std::min<int64_t>(1, encoder - 1));
    if (kv_sources.back() > engram_layers[0]) engram_layers.push_back(kv_sources.back());
  }
  kv_sources.push_back(encoder);
  std::vector<int64_t> index_sources = kv_sources;
  const int64_t stride = layers - encoder < 5 ? 1 : 4;
  for (int64_t layer = encoder + stride; layer < layers; layer += stride) {
    index_sources.push_back(layer);
    if (stride == 1) break;
  }
  std::vector<int64_t> targets;
  if (options.draft_layers > 0) {
    for (int64_t layer = std::max(encoder, layers - 3); layer < layers; ++layer)
      targets.push_back(layer);
  }
  Json config = CommonConfig();
  config["vision_config"]["num_hidden_layers"] = 1;
  config["text_config"].update(
      Json{{"vocab_size", options.vocab},
           {"hidden_size", 5120},
           {"moe_intermediate_size", 2304},
           {"num_hidden_layers", layers},
           {"num_attention_heads", 64},
           {"head_dim", 512},
           {"qk_rope_head_dim", 64},
           {"q_lora_rank", 1280},
           {"o_lora_rank", 1024},
           {"o_groups", 8},
           {"swiglu_limit", 10.0},
           {"max_position_embeddings", 1048576},
           {"compress_rope_theta", 160000.0},
           {"rope_scaling",
            {{"rope_type", "yarn"},
             {"factor", 16},
             {"beta_fast", 32},
             {"beta_slow", 1},
             {"original_max_position_embeddings", 65536}}},
           {"n_routed_experts", options.experts},
           {"num_experts_per_tok", std::min<int64_t>(6, options.experts)},
           {"sliding_window", 128},
           {"compress_ratios", ratios},
           {"kv_source_layer_ids", kv_sources},
           {"index_source_layer_ids", index_sources},
           {"index_n_heads", 32},
           {"index_head_dim", 128},
           {"index_topk", 512},
           {"candidate_source_layer_id", encoder},
           {"candidate_topk_blocks", 2048},
           {"candidate_block_size", 8},
           {"engram_layer_ids", engram_layers},
           {"engram_vocab_size", options.engram_rows / 24},
           {"engram_n_heads", 8},
           {"engram_head_dim", 256},
           {"num_nextn_predict_layers", options.draft_layers},
           {"dspark_block_size", 5},
           {"dspark_target_layer_ids", targets},
           {"dspark_markov_rank", 256},
           {"dspark_n_routed_experts", options.draft_experts},
           {"dspark_num_experts_per_tok", std::min<int64_t>(3, options.draft_experts)}});
  return Completed(std::move(config));
}

Status WriteRandomCheckpoint(const RandomCheckpointOptions& options) {
  DI_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(options.config_json));
  DI_ASSIGN_OR_RETURN(const std::string tokenizer, SmallTokenizerJson(config.vocab_size));
  std::vector<std::vector<StoredTensor>> shards(NumPublishedShards(config));
  int64_t total = 0;
  for (TensorSpec& tensor : ExpectedTensors(config)) {
    total += StoredBytes(tensor);
    shards[PublishedShard(tensor, config)].push_back(std::move(tensor));
  }
  DI_RETURN_IF_ERROR(PrepareDirectory(options.dir, shards.size(), total));

  const fs::path dir = options.dir;
  const Recipes recipes(config, options.seed);
  Tables tables;
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool,
                      ThreadPool::Create(options.num_threads));
  // Large enough that the threads' start costs nothing, small enough to stay in the cache until it
  // is written.
  constexpr int64_t kPieceElements = int64_t{1} << 21;
  std::vector<std::byte> piece(static_cast<size_t>(4 * kPieceElements));
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t done = 0;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const std::string name = ShardName(shard, shards.size());
    DI_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                        SafetensorsWriter::Create((dir / name).string(), shards[shard]));
    for (const StoredTensor& tensor : shards[shard]) {
      weight_map[tensor.name] = name;
      const Source source(recipes.For(tensor), tensor.dtype, tables);
      const int64_t element_bytes = StoredDTypeBytes(tensor.dtype);
      const int64_t elements = StoredBytes(tensor) / element_bytes;
      for (int64_t first = 0; first < elements; first += kPieceElements) {
        const int64_t count = std::min(kPieceElements, elements - first);
        pool->ParallelFor(
            count,
            [&](int64_t begin, int64_t end, int) {
              Fill(source, tensor.dtype, first + begin, first + end,
                   piece.data() + begin * element_bytes);
            },
            16384);
        DI_RETURN_IF_ERROR(
            writer.Write(std::span(piece).first(static_cast<size_t>(count * element_bytes))));
        done += count * element_bytes;
        if (options.progress) options.progress(done, total);
      }
    }
    DI_RETURN_IF_ERROR(writer.Finish());
  }
  const nlohmann::json tokenizer_config = {{"add_bos_token", false},
                                           {"add_eos_token", false},
                                           {"bos_token", "<｜begin▁of▁sentence｜>"},
                                           {"eos_token", "<｜end▁of▁sentence｜>"},
                                           {"pad_token", "<｜▁pad▁｜>"},
                                           {"clean_up_tokenization_spaces", false},
                                           {"model_max_length", config.max_position_embeddings},
                                           {"tokenizer_class", "PreTrainedTokenizerFast"}};
  const nlohmann::json generation_config = {{"bos_token_id", 0},
                                            {"eos_token_id", 1},
                                            {"do_sample", true},
                                            {"temperature", 1.0},
                                            {"top_p", 1.0}};
  const nlohmann::json index = {{"metadata", {{"total_size", total}}},
                                {"weight_map", std::move(weight_map)}};
  DI_RETURN_IF_ERROR(WriteTextFile(dir / "tokenizer.json", tokenizer));
  DI_RETURN_IF_ERROR(WriteTextFile(dir / "tokenizer_config.json", tokenizer_config.dump(1) + "\n"));
  DI_RETURN_IF_ERROR(
      WriteTextFile(dir / "generation_config.json", generation_config.dump(1) + "\n"));
  DI_RETURN_IF_ERROR(WriteTextFile(dir / "model.safetensors.index.json", index.dump(1) + "\n"));
  // Last, so that an interrupted run does not leave a directory that looks like a checkpoint.
  return WriteTextFile(dir / "config.json", options.config_json);
}

}  // namespace deepinfer
