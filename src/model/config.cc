#include "model/config.h"

#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "base/mapped_file.h"
#include "base/problem_list.h"
#include "base/quoted.h"
#include "model/engram_constants.h"

namespace deepinfer {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

// Activations are quantised in groups of 32 channels and FP8 weights in blocks of 32 x 32.
constexpr int64_t kQuantGroup = 32;
// Bounds of the engine, generous multiples of the released sizes. They keep every product of
// dimensions far below 2^63 and every table of per-layer or per-expert objects small, whatever the
// file says.
constexpr int64_t kMaxWidth = 65536;
constexpr int64_t kMaxVocab = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 256;
constexpr int64_t kMaxDraftLayers = 16;
constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxExpertsOfAllLayers = 65536;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxHeadDim = 4096;
// Positions are exact in fp32 up to here, and rotary angles are computed from fp32 positions.
constexpr int64_t kMaxPositions = int64_t{1} << 24;
constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;

// One JSON object under validation. Every getter records a problem and leaves the destination
// untouched when it fails.
class Section {
 public:
  Section(std::string path, object json, ProblemList& problems)
      : path_(std::move(path)), json_(json), problems_(problems) {
    std::set<std::string_view> keys;
    for (const auto [key, value] : json_) {
      if (!keys.insert(key).second) {
        problems_.Add(fmt::format("{} occurs twice.", PathOf(key)), PathOf(key));
      }
    }
  }

  std::string PathOf(std::string_view key) const {
    const std::string shown = Quoted(key);
    return path_ + (path_.empty() ? "" : ".") + shown.substr(1, shown.size() - 2);
  }

  void Refuse(std::string_view key, std::string_view value, std::string_view allowed) {
    problems_.Add(fmt::format("{} is {}; {}.", PathOf(key), value, allowed), PathOf(key));
  }

  std::optional<element> Find(std::string_view key) const {
    element value;
    if (json_.at_key(key).get(value) != simdjson::SUCCESS) return std::nullopt;
    return value;
  }
  // Like Find; a key that is absent is a problem.
  std::optional<element> Require(std::string_view key) {
    std::optional<element> value = Find(key);
    if (!value) problems_.Add(fmt::format("{} is missing.", PathOf(key)), PathOf(key));
    return value;
  }

  void Int(std::string_view key, int64_t min, int64_t max, int64_t& out, int64_t multiple_of = 1) {
    const std::optional<element> value = Require(key);
    if (!value) return;
    int64_t number = 0;
    if (!ReadInt(*value, number) || number < min || number > max || number % multiple_of != 0) {
      Refuse(key, Shown(*value),
             multiple_of == 1
                 ? fmt::format("allowed are integers from {} to {}", min, max)
                 : fmt::format("allowed are multiples of {} from {} to {}", multiple_of, min, max));
      return;
    }
    out = number;
  }

  // A finite number, in (min, max] or, with `closed`, in [min, max].
  template <class T>
  void Real(std::string_view key, double min, double max, bool closed, T& out) {
    const std::optional<element> value = Require(key);
    if (!value) return;
    double number = 0;
    if (value->is_bool() || value->get_double().get(number) != simdjson::SUCCESS ||
        !std::isfinite(number) || !(closed ? number >= min : number > min) || number > max) {
      Refuse(key, Shown(*value),
             fmt::format("allowed are numbers {} {} and at most {}",
                         closed ? "of at least" : "above", min, max));
      return;
    }
    out = static_cast<T>(number);
  }

  void IntList(std::string_view key, int64_t min, int64_t max, size_t max_length,
               std::vector<int64_t>& out) {
    const std::optional<element> value = Require(key);
    if (!value) return;
    array list;
    if (value->get_array().get(list) != simdjson::SUCCESS) {
      Refuse(key, Shown(*value), "it must be a list of integers");
      return;
    }
    std::vector<int64_t> numbers;
    for (const element item : list) {
      int64_t number = 0;
      if (numbers.size() == max_length) {
        Refuse(key, "too long", fmt::format("at most {} entries are allowed", max_length));
        return;
      }
      if (!ReadInt(item, number) || number < min || number > max) {
        Refuse(fmt::format("{}[{}]", key, numbers.size()), Shown(item),
               fmt::format("allowed are integers from {} to {}", min, max));
        return;
      }
      numbers.push_back(number);
    }
    out = std::move(numbers);
  }

  // The key must be present with exactly this JSON value, written in minimal form.
  void Fixed(std::string_view key, std::string_view json) {
    const std::optional<element> value = Require(key);
    if (value) CheckFixed(key, *value, json);
  }
  // An absent key means this value.
  void FixedIfPresent(std::string_view key, std::string_view json) {
    const std::optional<element> value = Find(key);
    if (value) CheckFixed(key, *value, json);
  }

  std::optional<Section> Sub(std::string_view key) {
    const std::optional<element> value = Require(key);
    if (!value) return std::nullopt;
    object sub;
    if (value->get_object().get(sub) != simdjson::SUCCESS) {
      Refuse(key, Shown(*value), "it must be an object");
      return std::nullopt;
    }
    return Section(PathOf(key), sub, problems_);
  }

  static std::string Shown(element value) {
    const std::string text = Quoted(simdjson::minify(value), 100);
    return text.substr(1, text.size() - (text.back() == '\'' ? 2 : 1));
  }

  // An integer, also when written as 64.0.
  static bool ReadInt(element value, int64_t& out) {
    if (value.is_int64()) return value.get_int64().get(out) == simdjson::SUCCESS;
    double real = 0;
    if (!value.is_double() || value.get_double().get(real) != simdjson::SUCCESS) return false;
    if (!(std::fabs(real) < 0x1p53) || real != std::trunc(real)) return false;
    out = static_cast<int64_t>(real);
    return true;
  }

 private:
  void CheckFixed(std::string_view key, element value, std::string_view json) {
    std::string text = simdjson::minify(value);
    double number = 0;
    // 0 and 0.0 are the same number.
    if (value.is_double() && value.get_double().get(number) == simdjson::SUCCESS && number == 0)
      text = "0";
    if (text != json) Refuse(key, Shown(value), fmt::format("this engine supports {} only", json));
  }

  std::string path_;
  object json_;
  ProblemList& problems_;
};

// A faulty vocab_size is one problem, not one more for every token id.
int64_t VocabBound(const ModelConfig& config) {
  return config.vocab_size == 0 ? kMaxVocab : config.vocab_size;
}

void CheckTokenId(Section& section, std::string_view key, const ModelConfig& config, int64_t& out) {
  section.Int(key, 0, VocabBound(config) - 1, out);
}

void ParseText(Section& text, ModelConfig& config) {
  text.FixedIfPresent("model_type", "\"deepseek_v41_text\"");
  text.Int("vocab_size", 8, kMaxVocab, config.vocab_size);
  text.Int("hidden_size", kQuantGroup, kMaxWidth, config.hidden_size, kQuantGroup);
  text.Int("moe_intermediate_size", kQuantGroup, kMaxWidth, config.moe_intermediate_size,
           kQuantGroup);
  text.Int("num_hidden_layers", 1, kMaxLayers, config.num_hidden_layers);
  text.Int("num_attention_heads", 1, kMaxHeads, config.num_attention_heads);
  text.Fixed("num_key_value_heads", "1");
  text.Int("head_dim", kQuantGroup, kMaxHeadDim, config.head_dim, kQuantGroup);
  text.Int("qk_rope_head_dim", 2, kMaxHeadDim, config.qk_rope_head_dim, 2);
  text.Int("q_lora_rank", kQuantGroup, kMaxWidth, config.q_lora_rank, kQuantGroup);
  text.Int("o_lora_rank", kQuantGroup, kMaxWidth, config.o_lora_rank, kQuantGroup);
  text.Int("o_groups", 1, kMaxHeads, config.o_groups);
  text.Fixed("hidden_act", "\"silu\"");
  text.Real("swiglu_limit", 0, 1e6, false, config.swiglu_limit);
  text.Real("rms_norm_eps", 0, 1, true, config.rms_norm_eps);
  text.Fixed("attention_bias", "false");
  text.FixedIfPresent("attention_dropout", "0");
  text.FixedIfPresent("tie_word_embeddings", "false");
  text.Int("max_position_embeddings", 1, kMaxPositions, config.max_position_embeddings);
  text.Real("rope_theta", 1, 1e12, false, config.rope_theta);
  text.Real("compress_rope_theta", 1, 1e12, false, config.compress_rope_theta);
  if (std::optional<Section> scaling = text.Sub("rope_scaling")) {
    scaling->Fixed("rope_type", "\"yarn\"");
    scaling->Real("factor", 1, 1e6, true, config.rope_factor);
    scaling->Real("beta_fast", 0, 1e6, false, config.rope_beta_fast);
    scaling->Real("beta_slow", 0, 1e6, false, config.rope_beta_slow);
    scaling->Int("original_max_position_embeddings", 1, kMaxPositions,
                 config.rope_original_positions);
    if (config.rope_beta_fast <= config.rope_beta_slow) {
      scaling->Refuse("beta_fast", fmt::format("{}", config.rope_beta_fast),
                      fmt::format("it must exceed beta_slow = {}", config.rope_beta_slow));
    }
  }
  text.Int("n_routed_experts", 1, kMaxExperts, config.n_routed_experts);
  text.Fixed("n_shared_experts", "1");
  text.Int("num_experts_per_tok", 1, 64, config.num_experts_per_tok);
  text.Fixed("scoring_func", "\"sqrtsoftplus\"");
  text.Fixed("topk_method", "\"noaux_tc\"");
  text.Fixed("norm_topk_prob", "true");
  text.Real("routed_scaling_factor", 0, 1e6, false, config.routed_scaling_factor);
  if (text.Find("gate_temp")) text.Real("gate_temp", 0, 1e6, false, config.gate_temp);
  text.Int("sliding_window", 1, kMaxWidth, config.sliding_window);
  text.IntList("compress_ratios", 0, 2, kMaxLayers + kMaxDraftLayers, config.compress_ratios);
  text.IntList("kv_source_layer_ids", 0, kMaxLayers - 1, kMaxLayers, config.kv_source_layer_ids);
  text.IntList("index_source_layer_ids", 0, kMaxLayers - 1, kMaxLayers,
               config.index_source_layer_ids);
  text.Int("index_n_heads", 1, kMaxHeads, config.index_n_heads);
  text.Int("index_head_dim", kQuantGroup, kMaxHeadDim, config.index_head_dim, kQuantGroup);
  text.Int("index_topk", 1, kMaxWidth, config.index_topk);
  if (const std::optional<element> source = text.Find("candidate_source_layer_id");
      source && !source->is_null()) {
    text.Int("candidate_source_layer_id", -1, kMaxLayers - 1, config.candidate_source_layer_id);
  }
  text.Int("candidate_topk_blocks", 1, int64_t{1} << 20, config.candidate_topk_blocks);
  text.Int("candidate_block_size", 1, 4096, config.candidate_block_size);
  text.Int("hc_mult", 4, 4, config.hc_mult);
  text.Int("hc_sinkhorn_iters", 1, 1000, config.hc_sinkhorn_iters);
  text.Real("hc_eps", 0, 1, true, config.hc_eps);
  text.FixedIfPresent("hc_shifted", "true");
  text.FixedIfPresent("use_fp4_sparse_kv", "true");
  text.FixedIfPresent("dspark_target_attn_input", "true");

  text.IntList("engram_layer_ids", 0, kMaxLayers - 1, 16, config.engram_layer_ids);
  text.IntList("engram_num_embeddings", 1, int64_t{1} << 40, 16, config.engram_num_embeddings);
  text.Int("engram_max_ngram_size", 2, 8, config.engram_max_ngram_size);
  text.Int("engram_vocab_size", 2, int64_t{1} << 28, config.engram_vocab_size);
  text.Int("engram_n_heads", 1, 64, config.engram_n_heads);
  text.Int("engram_head_dim", kQuantGroup, kMaxHeadDim, config.engram_head_dim, kQuantGroup);
  CheckTokenId(text, "engram_pad_token_id", config, config.engram_pad_token_id);
  text.Int("engram_compressed_vocab_size", 1, VocabBound(config),
           config.engram_compressed_vocab_size);

  text.Int("num_nextn_predict_layers", 0, kMaxDraftLayers, config.num_nextn_predict_layers);
  text.Int("dspark_block_size", 1, 64, config.dspark_block_size);
  CheckTokenId(text, "dspark_noise_token_id", config, config.dspark_noise_token_id);
  text.IntList("dspark_target_layer_ids", 0, kMaxLayers - 1, 16, config.dspark_target_layer_ids);
  text.Int("dspark_markov_rank", 1, kMaxWidth, config.dspark_markov_rank);
  text.Int("dspark_n_routed_experts", 1, kMaxExperts, config.dspark_n_routed_experts);
  text.Int("dspark_num_experts_per_tok", 1, 64, config.dspark_num_experts_per_tok);

  if (const std::optional<element> ids = text.Find("index_k_source_layer_ids")) {
    std::vector<int64_t> key_sources;
    text.IntList("index_k_source_layer_ids", 0, kMaxLayers - 1, kMaxLayers, key_sources);
    if (key_sources != config.kv_source_layer_ids) {
      text.Refuse("index_k_source_layer_ids", Section::Shown(*ids),
                  "this engine supports the value of kv_source_layer_ids only");
    }
  }
}

void ParseVision(Section& vision, VisionConfig& config) {
  vision.FixedIfPresent("model_type", "\"deepseek_v41_vision\"");
  vision.Int("num_hidden_layers", 1, kMaxLayers, config.num_hidden_layers);
  vision.Int("hidden_size", 4, kMaxWidth, config.hidden_size, 4);
  vision.Int("num_attention_heads", 1, kMaxHeads, config.num_attention_heads);
  vision.Int("intermediate_size", 1, kMaxWidth, config.intermediate_size);
  vision.Int("patch_size", 1, 256, config.patch_size);
  vision.Int("downsample_ratio", 1, 16, config.downsample_ratio);
  vision.Int("max_image_tokens", 4, kMaxWidth, config.max_image_tokens);
  vision.Int("min_pixels", 0, int64_t{1} << 32, config.min_pixels);
  vision.Real("rope_theta", 1, 1e12, false, config.rope_theta);
  if (const std::optional<element> ratio = vision.Find("max_wh_ratio");
      ratio && !ratio->is_null()) {
    vision.Real("max_wh_ratio", 0, 1e6, false, config.max_wh_ratio);
  }
}

std::string Listed(const std::vector<int64_t>& ids) {
  std::string text = "[";
  for (size_t i = 0; i < ids.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", ids[i]);
  return text + "]";
}

bool StrictlyAscending(const std::vector<int64_t>& ids) {
  return std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) == ids.end();
}

// Rules between keys. Runs only when every key by itself is valid, so that it may index freely.
void CheckStructure(const ModelConfig& config, Section& text, Section& vision) {
  const int64_t layers = config.num_hidden_layers;
  const auto divides = [&](Section& section, std::string_view key, int64_t value,
                           std::string_view by_key, int64_t by) {
    if (value % by != 0)
      section.Refuse(key, fmt::format("{}", value),
                     fmt::format("it must be a multiple of {} = {}", by_key, by));
  };
  const auto at_most = [&](std::string_view key, int64_t value, std::string_view limit_key,
                           int64_t limit) {
    if (value > limit)
      text.Refuse(key, fmt::format("{}", value),
                  fmt::format("it must not exceed {} = {}", limit_key, limit));
  };
  divides(text, "num_attention_heads", config.num_attention_heads, "o_groups", config.o_groups);
  at_most("qk_rope_head_dim", config.qk_rope_head_dim, "head_dim", config.head_dim);
  at_most("qk_rope_head_dim", config.qk_rope_head_dim, "index_head_dim", config.index_head_dim);
  at_most("num_experts_per_tok", config.num_experts_per_tok, "n_routed_experts",
          config.n_routed_experts);
  at_most("dspark_num_experts_per_tok", config.dspark_num_experts_per_tok,
          "dspark_n_routed_experts", config.dspark_n_routed_experts);
  const int64_t experts = layers * config.n_routed_experts +
                          config.num_nextn_predict_layers * config.dspark_n_routed_experts;
  if (experts > kMaxExpertsOfAllLayers) {
    text.Refuse("n_routed_experts", fmt::format("{}", config.n_routed_experts),
                fmt::format("with {} layers that makes {} experts in all, at most {} are allowed",
                            layers, experts, kMaxExpertsOfAllLayers));
  }
  const auto in_model = [&](std::string_view key, const std::vector<int64_t>& ids) {
    if (!StrictlyAscending(ids)) {
      text.Refuse(key, Listed(ids), "layer ids must be strictly ascending");
      return false;
    }
    if (!ids.empty() && ids.back() >= layers) {
      text.Refuse(key, Listed(ids),
                  fmt::format("layer ids must be below num_hidden_layers = {}", layers));
      return false;
    }
    return true;
  };
  bool ids_valid = in_model("kv_source_layer_ids", config.kv_source_layer_ids);
  ids_valid = in_model("index_source_layer_ids", config.index_source_layer_ids) && ids_valid;
  ids_valid = in_model("engram_layer_ids", config.engram_layer_ids) && ids_valid;
  ids_valid = in_model("dspark_target_layer_ids", config.dspark_target_layer_ids) && ids_valid;

  const auto expected_ratios = static_cast<size_t>(layers + config.num_nextn_predict_layers);
  if (config.compress_ratios.size() != expected_ratios) {
    text.Refuse(
        "compress_ratios", fmt::format("a list of {} entries", config.compress_ratios.size()),
        fmt::format("num_hidden_layers + num_nextn_predict_layers = {} + {} entries are needed",
                    layers, config.num_nextn_predict_layers));
    ids_valid = false;
  }
  if (ids_valid) {
    const int64_t decoder = config.decoder_start();
    for (int64_t layer = 0; layer < static_cast<int64_t>(expected_ratios); ++layer) {
      const std::string key = fmt::format("compress_ratios[{}]", layer);
      const int64_t ratio = config.ratio(layer);
      if (layer >= layers) {
        if (ratio != 0) text.Refuse(key, fmt::format("{}", ratio), "draft layers have ratio 0");
        continue;
      }
      if (layer > decoder && ratio != 1) {
        text.Refuse(key, fmt::format("{}", ratio),
                    fmt::format("all layers after the first one of ratio 1 (layer {}) have ratio 1",
                                decoder));
        continue;
      }
      if (ratio == 0) continue;
      const int64_t source = config.kv_source(layer);
      if (source < 0 || config.ratio(source) != ratio) {
        text.Refuse(key, fmt::format("{}", ratio),
                    source < 0
                        ? "no layer of kv_source_layer_ids lies at or before this layer"
                        : fmt::format("its compressed keys come from layer {}, whose ratio is {}",
                                      source, config.ratio(source)));
      }
    }
    for (const int64_t layer : config.index_source_layer_ids) {
      if (config.ratio(layer) == 0) {
        text.Refuse(
            "index_source_layer_ids", Listed(config.index_source_layer_ids),
            fmt::format("layer {} has compression ratio 0 and nothing to select from", layer));
      }
    }
    for (const int64_t layer : config.kv_source_layer_ids) {
      if (!config.is_index_source(layer)) {
        text.Refuse("kv_source_layer_ids", Listed(config.kv_source_layer_ids),
                    fmt::format("layer {} is not in index_source_layer_ids", layer));
      }
      if (layer > decoder) {
        text.Refuse("kv_source_layer_ids", Listed(config.kv_source_layer_ids),
                    fmt::format("layer {} lies behind the first layer of ratio 1 ({}), which "
                                "produces the only compressed keys "
                                "of all later layers",
                                layer, decoder));
      }
    }
    const int64_t candidate = config.candidate_source_layer_id;
    if (candidate != (decoder < layers ? decoder : -1)) {
      text.Refuse("candidate_source_layer_id", fmt::format("{}", candidate),
                  decoder < layers
                      ? fmt::format("it must be the first layer of ratio 1, {}", decoder)
                      : "without layers of ratio 1 it must be absent or -1");
    }
    if (!config.engram_layer_ids.empty() && config.engram_layer_ids.back() >= decoder) {
      text.Refuse("engram_layer_ids", Listed(config.engram_layer_ids),
                  fmt::format("Engram layers lie before the first layer of ratio 1, {}", decoder));
    }
    const std::vector<int64_t>& targets = config.dspark_target_layer_ids;
    if (!targets.empty() && targets.front() < decoder && targets.back() >= decoder) {
      text.Refuse("dspark_target_layer_ids", Listed(targets),
                  fmt::format("they must all lie on one side of layer {}", decoder));
    }
    if (targets.empty() != (config.num_nextn_predict_layers == 0)) {
      text.Refuse("dspark_target_layer_ids", Listed(targets),
                  fmt::format("with num_nextn_predict_layers = {} it must {}be empty",
                              config.num_nextn_predict_layers,
                              config.num_nextn_predict_layers == 0 ? "" : "not "));
    }
  }
  if (config.candidate_topk_blocks * config.candidate_block_size < config.index_topk) {
    text.Refuse("index_topk", fmt::format("{}", config.index_topk),
                fmt::format("it must not exceed candidate_topk_blocks x candidate_block_size = {}",
                            config.candidate_topk_blocks * config.candidate_block_size));
  }
  if (config.engram_num_embeddings.size() != config.engram_layer_ids.size()) {
    text.Refuse("engram_num_embeddings", Listed(config.engram_num_embeddings),
                fmt::format("one entry per Engram layer is needed, {} in all",
                            config.engram_layer_ids.size()));
  } else {
    const std::vector<int64_t> rows = EngramTableRows(config);
    if (rows != config.engram_num_embeddings) {
      text.Refuse("engram_num_embeddings", Listed(config.engram_num_embeddings),
                  fmt::format("the sums of the primes from engram_vocab_size = {} on are {}",
                              config.engram_vocab_size, Listed(rows)));
    }
  }
  const VisionConfig& v = config.vision;
  if (v.hidden_size % v.num_attention_heads != 0 ||
      v.hidden_size / v.num_attention_heads % 4 != 0) {
    vision.Refuse("num_attention_heads", fmt::format("{}", v.num_attention_heads),
                  fmt::format("hidden_size = {} must split into heads of a multiple of 4 channels",
                              v.hidden_size));
  }
}

// The first number of a JSON text that the parser refuses. The parser itself gives no position.
struct BadNumber {
  std::string text;     // quoted
  std::string key;      // the last key before it, quoted; empty if there is none
  int64_t line = 1;     // from 1
  std::string problem;  // "does not fit: ..."
};

std::optional<BadNumber> FindBadNumber(std::string_view json) {
  BadNumber found;
  std::string_view last_string;
  for (size_t i = 0; i < json.size();) {
    const char c = json[i];
    if (c == '"') {
      size_t end = i + 1;
      while (end < json.size() && json[end] != '"') end += json[end] == '\\' ? 2 : 1;
      if (end >= json.size()) return std::nullopt;
      last_string = json.substr(i + 1, end - i - 1);
      i = end + 1;
      continue;
    }
    if (c == ':') found.key = Quoted(last_string);
    if (c == '\n') ++found.line;
    if (c != '-' && (c < '0' || c > '9')) {
      ++i;
      continue;
    }
    const size_t end = std::min(json.find_first_not_of("+-.0123456789eE", i), json.size());
    const std::string_view token = json.substr(i, end - i);
    i = end;
    const char* const first = token.data();
    const char* const last = first + token.size();
    std::from_chars_result parsed{};
    if (token.find_first_of(".eE") != std::string_view::npos) {
      // Too small a number is zero to the parser; too large a one is what it refuses.
      double value = 0;
      parsed = std::from_chars(first, last, value);
      if (parsed.ec == std::errc::result_out_of_range) {
        const size_t exponent = token.find_first_of("eE");
        if (exponent != std::string_view::npos && token.substr(exponent + 1).starts_with('-'))
          parsed.ec = {};
      }
    } else if (token.front() == '-') {
      int64_t value = 0;
      parsed = std::from_chars(first, last, value);
    } else {
      uint64_t value = 0;
      parsed = std::from_chars(first, last, value);
    }
    found.text = Quoted(token, 60);
    if (parsed.ec == std::errc::result_out_of_range) {
      found.problem = "does not fit: integers have 64 bits, others are below 1.8e308 in magnitude";
      return found;
    }
    const std::string_view digits = token.substr(token.front() == '-' ? 1 : 0);
    const bool leading_zero =
        digits.size() > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9';
    if (parsed.ec != std::errc{} || parsed.ptr != last || leading_zero) {
      found.problem = "is not written as JSON demands";
      return found;
    }
  }
  return std::nullopt;
}

// What a config of another model says about itself, or an empty string.
std::string ForeignModel(object root) {
  // Values that are not strings are shown as they are written.
  std::string_view type;
  std::string_view architecture;
  std::string shown_type = "missing";
  std::string shown_architectures = "missing";
  element value;
  if (root.at_key("model_type").get(value) == simdjson::SUCCESS) {
    shown_type =
        value.get_string().get(type) == simdjson::SUCCESS ? Quoted(type) : Section::Shown(value);
  }
  size_t count = 0;
  if (root.at_key("architectures").get(value) == simdjson::SUCCESS) {
    shown_architectures = Section::Shown(value);
    array architectures;
    if (value.get_array().get(architectures) == simdjson::SUCCESS) {
      for (const element item : architectures) {
        if (count++ == 0 && item.get_string().get(architecture) != simdjson::SUCCESS)
          architecture = {};
      }
    }
  }
  if (type == "deepseek_v4" || architecture == "DeepseekV4ForCausalLM") {
    return "This is a DeepSeek-V4 checkpoint (model_type deepseek_v4). This engine runs "
           "DeepSeek-V4.1-Flash (model_type "
           "deepseek_v41) only; the two differ in layer schedule, compression and tensors.";
  }
  if (shown_type == "missing" && shown_architectures == "missing") {
    return "The file has neither model_type nor architectures, so it is not a model's config.json.";
  }
  if (type != "deepseek_v41" || architecture != "DeepseekV41ForCausalLM" || count != 1) {
    return fmt::format(
        "The file describes another model: model_type is {} and architectures is {}. "
        "This engine "
        "runs DeepSeek-V4.1-Flash only: model_type 'deepseek_v41' and the single architecture "
        "'DeepseekV41ForCausalLM'.",
        shown_type, shown_architectures);
  }
  return {};
}

}  // namespace

LayerRole ModelConfig::role(int64_t layer) const {
  if (ratio(layer) == 0) return LayerRole::kWindowOnly;
  if (is_kv_source(layer)) return LayerRole::kFull;
  return is_index_source(layer) ? LayerRole::kReindex : LayerRole::kReuse;
}

namespace {

// The largest id <= layer of an ascending list, or -1.
int64_t SourceOf(const std::vector<int64_t>& ids, int64_t layer) {
  const auto it = std::upper_bound(ids.begin(), ids.end(), layer);
  return it == ids.begin() ? -1 : *(it - 1);
}

}  // namespace

int64_t ModelConfig::kv_source(int64_t layer) const {
  return ratio(layer) == 0 ? -1 : SourceOf(kv_source_layer_ids, layer);
}

int64_t ModelConfig::index_source(int64_t layer) const {
  return ratio(layer) == 0 ? -1 : SourceOf(index_source_layer_ids, layer);
}

bool ModelConfig::is_kv_source(int64_t layer) const {
  return std::binary_search(kv_source_layer_ids.begin(), kv_source_layer_ids.end(), layer);
}

bool ModelConfig::is_index_source(int64_t layer) const {
  return std::binary_search(index_source_layer_ids.begin(), index_source_layer_ids.end(), layer);
}

int64_t ModelConfig::engram_index(int64_t layer) const {
  const auto it = std::find(engram_layer_ids.begin(), engram_layer_ids.end(), layer);
  return it == engram_layer_ids.end() ? -1 : it - engram_layer_ids.begin();
}

int64_t ModelConfig::decoder_start() const {
  for (int64_t layer = 0; layer < num_hidden_layers; ++layer) {
    if (ratio(layer) == 1) return layer;
  }
  return num_hidden_layers;
}

Result<ModelConfig> ParseModelConfig(std::string_view json) {
  if (static_cast<int64_t>(json.size()) > kMaxConfigBytes) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The configuration has {} bytes; at most {} are allowed.", json.size(),
                            kMaxConfigBytes));
  }
  simdjson::dom::parser parser;
  element document;
  if (const auto error = parser.parse(json.data(), json.size()).get(document);
      error != simdjson::SUCCESS) {
    if (error == simdjson::NUMBER_ERROR) {
      if (const std::optional<BadNumber> bad = FindBadNumber(json)) {
        return Fail(
            Code::kInvalidArgument,
            fmt::format("The configuration is not valid: the number {} in line {}{} {}.", bad->text,
                        bad->line, bad->key.empty() ? "" : fmt::format(" (key {})", bad->key),
                        bad->problem),
            bad->key.empty() ? "" : bad->key.substr(1, bad->key.size() - 2));
      }
    }
    return Fail(Code::kInvalidArgument,
                fmt::format("The configuration is not valid JSON: {}.",
                            WithoutFullStop(simdjson::error_message(error))));
  }
  object root_object;
  if (document.get_object().get(root_object) != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument, "The configuration is not a JSON object.");
  }
  if (std::string foreign = ForeignModel(root_object); !foreign.empty()) {
    return Fail(Code::kUnsupported, std::move(foreign), "model_type");
  }

  ProblemList problems(100);
  ModelConfig config;
  Section root("", root_object, problems);
  root.Fixed("dtype", "\"bfloat16\"");
  root.FixedIfPresent("tie_word_embeddings", "false");
  if (std::optional<Section> quantization = root.Sub("quantization_config")) {
    quantization->Fixed("quant_method", "\"fp8\"");
    quantization->Fixed("activation_scheme", "\"dynamic\"");
    quantization->Fixed("weight_block_size", "[32,32]");
    quantization->Fixed("scale_fmt", "\"ue8m0\"");
    quantization->Fixed("expert_dtype", "\"fp4\"");
  }
  std::optional<Section> text = root.Sub("text_config");
  if (text) ParseText(*text, config);
  std::optional<Section> vision = root.Sub("vision_config");
  if (vision) ParseVision(*vision, config.vision);
  CheckTokenId(root, "bos_token_id", config, config.bos_token_id);
  CheckTokenId(root, "eos_token_id", config, config.eos_token_id);
  CheckTokenId(root, "pad_token_id", config, config.pad_token_id);
  CheckTokenId(root, "image_token_id", config, config.image_token_id);
  if (problems.empty()) CheckStructure(config, *text, *vision);
  if (!problems.empty()) {
    return problems.ToError(Code::kInvalidArgument,
                            fmt::format("The model configuration has {} problem{}", problems.size(),
                                        problems.size() == 1 ? "" : "s"));
  }
  return config;
}

Result<ModelConfig> LoadModelConfig(const std::string& dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (dir.empty())
    return Fail(Code::kInvalidArgument,
                "The model directory is empty; it must be the path of a checkpoint directory.");
  const fs::file_status status = fs::status(dir, error);
  if (status.type() == fs::file_type::none) {
    return Fail(Code::kUnavailable, fmt::format("Cannot open the model directory {}: {}.",
                                                Quoted(dir), error.message()));
  }
  if (!fs::exists(status)) {
    // "owner/name" with exactly one slash, not anchored, is how models are called on the hub.
    const bool anchored = dir.front() == '/' || dir.front() == '.' || dir.front() == '~';
    if (!anchored && std::count(dir.begin(), dir.end(), '/') == 1 && dir.back() != '/') {
      return Fail(Code::kNotFound, fmt::format("There is no directory {}. It looks like the name "
                                               "of a model on the Hugging Face hub; this "
                                               "engine reads local directories only. Download the "
                                               "model first and give the path of its directory.",
                                               Quoted(dir)));
    }
    return Fail(Code::kNotFound,
                fmt::format("The model directory {} does not exist.", Quoted(dir)));
  }
  if (!fs::is_directory(status)) {
    return Fail(Code::kInvalidArgument,
                fmt::format("{} is a file; the model must be given as the directory that holds "
                            "config.json and the shards.",
                            Quoted(dir)));
  }
  const std::string path = (fs::path(dir) / "config.json").string();
  const Result<MappedFile> file = MappedFile::Open(path);
  if (!file) {
    if (file.error().code != Code::kNotFound) return tl::unexpected<Error>(file.error());
    return Fail(
        Code::kNotFound,
        fmt::format("The directory {} has no config.json: it is not a checkpoint.", Quoted(dir)));
  }
  Result<ModelConfig> config =
      ParseModelConfig({reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()});
  if (!config) return WithContext(std::move(config.error()), path);
  return config;
}

}  // namespace deepinfer
