#include "model/inventory.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "base/problem_list.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

using enum StoredDType;

// Appends the tensors of one checkpoint in file order.
class Builder {
 public:
  explicit Builder(const ModelConfig& config) : config_(config) {}

  std::vector<TensorSpec> Build() {
    const int64_t hidden = config_.hidden_size;
    group_ = TensorGroup::kEmbedding;
    Add("embed.weight", kBf16, {config_.vocab_size, hidden});
    AddVision();
    for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) AddLayer(layer);
    prefix_.clear();
    group_ = TensorGroup::kEmbedding;
    Add("head.weight", kBf16, {config_.vocab_size, hidden});
    Add("norm.weight", kBf16, {hidden});
    for (int64_t stage = 0; stage < config_.num_nextn_predict_layers; ++stage) AddDraftStage(stage);
    for (size_t i = 0; i < config_.engram_layer_ids.size(); ++i) AddEngram(i);
    return std::move(specs_);
  }

 private:
  void Add(std::string_view suffix, StoredDType dtype, std::vector<int64_t> shape) {
    TensorSpec spec;
    spec.name = prefix_ + std::string(suffix);
    spec.dtype = dtype;
    spec.shape = std::move(shape);
    spec.group = group_;
    specs_.push_back(std::move(spec));
  }
  // An FP8 matrix with one scale per 32 x 32 block; scales precede the codes in the file.
  void AddFp8(const std::string& name, int64_t rows, int64_t columns) {
    Add(name + ".scale", kF8E8M0, {(rows + 31) / 32, (columns + 31) / 32});
    Add(name + ".weight", kF8E4M3, {rows, columns});
  }

  void AddAttention() {
    const ModelConfig& c = config_;
    Add("attn_norm.weight", kBf16, {c.hidden_size});
    Add("ffn_norm.weight", kBf16, {c.hidden_size});
    AddFp8("attn.wq_a", c.q_lora_rank, c.hidden_size);
    Add("attn.q_norm.weight", kBf16, {c.q_lora_rank});
    AddFp8("attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank);
    AddFp8("attn.wkv", c.head_dim, c.hidden_size);
    Add("attn.kv_norm.weight", kBf16, {c.head_dim});
    AddFp8("attn.wo_a", c.o_groups * c.o_lora_rank,
           c.num_attention_heads / c.o_groups * c.head_dim);
    AddFp8("attn.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank);
    Add("attn.attn_sink", kF32, {c.num_attention_heads});
  }
  void AddHyperConnections() {
    // pre and post per stream, and the streams x streams combination.
    const int64_t mix = (2 + config_.hc_mult) * config_.hc_mult;
    for (const char* site : {"hc_attn_", "hc_ffn_"}) {
      Add(std::string(site) + "fn", kF32, {mix, config_.hc_mult * config_.hidden_size});
      Add(std::string(site) + "base", kF32, {mix});
      Add(std::string(site) + "scale", kF32, {3});
    }
  }
  void AddRouter(int64_t experts) {
    Add("ffn.gate.weight", kBf16, {experts, config_.hidden_size});
    Add("ffn.gate.bias", kF32, {experts});
    Add("ffn.gate.bias_vl", kF32, {experts});
  }
  void AddSharedExpert() {
    const int64_t inner = config_.moe_intermediate_size;
    AddFp8("ffn.shared_experts.w1", inner, config_.hidden_size);
    AddFp8("ffn.shared_experts.w2", config_.hidden_size, inner);
    AddFp8("ffn.shared_experts.w3", inner, config_.hidden_size);
  }
  // Per expert the three scale planes, then the three weight planes, so that one read fetches
  // either.
  void AddExperts(int64_t count) {
    const int64_t hidden = config_.hidden_size;
    const int64_t inner = config_.moe_intermediate_size;
    for (int64_t expert = 0; expert < count; ++expert) {
      const std::string name = fmt::format("ffn.experts.{}.", expert);
      Add(name + "w1.scale", kF8E8M0, {inner, hidden / 32});
      Add(name + "w2.scale", kF8E8M0, {hidden, inner / 32});
      Add(name + "w3.scale", kF8E8M0, {inner, hidden / 32});
      Add(name + "w1.weight", kI8, {inner, hidden / 2});
      Add(name + "w2.weight", kI8, {hidden, inner / 2});
      Add(name + "w3.weight", kI8, {inner, hidden / 2});
    }
  }

  void AddLayer(int64_t layer) {
    const ModelConfig& c = config_;
    prefix_ = fmt::format("layers.{}.", layer);
    group_ = TensorGroup::kAttention;
    AddAttention();
    group_ = TensorGroup::kCompressorIndexer;
    if (c.is_kv_source(layer)) {
      Add("attn.compressor.wkv.weight", kBf16, {c.head_dim, c.hidden_size});
      if (c.ratio(layer) > 1)
        Add("attn.compressor.wgate.weight", kBf16, {c.head_dim, c.hidden_size});
      Add("attn.compressor.norm.weight", kBf16, {c.head_dim});
      Add("attn.indexer.wk.weight", kBf16, {c.index_head_dim, c.head_dim});
      Add("attn.indexer.k_norm.weight", kBf16, {c.index_head_dim});
    }
    if (c.is_index_source(layer)) {
      AddFp8("attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank);
      Add("attn.indexer.weights_proj.weight", kBf16, {c.index_n_heads, c.hidden_size});
    }
    group_ = TensorGroup::kHyperConnections;
    AddHyperConnections();
    group_ = TensorGroup::kRouter;
    AddRouter(c.n_routed_experts);
    group_ = TensorGroup::kSharedExperts;
    AddSharedExpert();
    group_ = TensorGroup::kRoutedExperts;
    AddExperts(c.n_routed_experts);
  }

  void AddDraftStage(int64_t stage) {
    const ModelConfig& c = config_;
    prefix_ = fmt::format("mtp.{}.", stage);
    group_ = TensorGroup::kDraft;
    if (stage == 0) {
      AddFp8("main_proj", c.hidden_size,
             static_cast<int64_t>(c.dspark_target_layer_ids.size()) * c.hidden_size);
      Add("main_norm.weight", kBf16, {c.hidden_size});
    }
    AddAttention();
    AddHyperConnections();
    AddRouter(c.dspark_n_routed_experts);
    AddSharedExpert();
    group_ = TensorGroup::kDraftExperts;
    AddExperts(c.dspark_n_routed_experts);
    group_ = TensorGroup::kDraft;
    if (stage == c.num_nextn_predict_layers - 1) {
      Add("norm.weight", kBf16, {c.hidden_size});
      Add("markov_head.embed.weight", kBf16, {c.vocab_size, c.dspark_markov_rank});
      Add("markov_head.head.weight", kBf16, {c.vocab_size, c.dspark_markov_rank});
      Add("confidence_head.proj.weight", kBf16, {1, c.hidden_size + c.dspark_markov_rank});
    }
  }

  void AddEngram(size_t index) {
    const ModelConfig& c = config_;
    prefix_ = fmt::format("layers.{}.engram.", c.engram_layer_ids[index]);
    const int64_t rows = c.engram_num_embeddings[index];
    group_ = TensorGroup::kEngramTable;
    // Unlike other FP8 matrices, every row has scales of its own.
    Add("embed.scale", kF8E8M0, {rows, c.engram_head_dim / 32});
    Add("embed.weight", kF8E4M3, {rows, c.engram_head_dim});
    group_ = TensorGroup::kEngram;
    AddFp8("wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_rows_per_token() * c.engram_head_dim);
    Add("q_weight", kBf16, {c.hc_mult, c.hidden_size});
    Add("k_weight", kBf16, {c.hc_mult, c.hidden_size});
  }

  void AddVision() {
    const VisionConfig& v = config_.vision;
    const int64_t hidden = config_.hidden_size;
    group_ = TensorGroup::kVision;
    prefix_ = "vision.";
    Add("patch_embed.proj.weight", kBf16, {v.hidden_size, 3 * v.patch_size * v.patch_size});
    Add("patch_embed.proj.bias", kBf16, {v.hidden_size});
    for (int64_t block = 0; block < v.num_hidden_layers; ++block) {
      prefix_ = fmt::format("vision.blocks.{}.", block);
      Add("norm1.weight", kBf16, {v.hidden_size});
      Add("attn.wqkv.weight", kBf16, {3 * v.hidden_size, v.hidden_size});
      Add("attn.wqkv.bias", kBf16, {3 * v.hidden_size});
      Add("attn.wo.weight", kBf16, {v.hidden_size, v.hidden_size});
      Add("attn.wo.bias", kBf16, {v.hidden_size});
      Add("norm2.weight", kBf16, {v.hidden_size});
      Add("mlp.w1.weight", kBf16, {2 * v.intermediate_size, v.hidden_size});
      Add("mlp.w2.weight", kBf16, {v.hidden_size, v.intermediate_size});
    }
    prefix_.clear();
    Add("vision.norm.weight", kBf16, {v.hidden_size});
    Add("aligner.w1.weight", kBf16,
        {hidden, v.hidden_size * v.downsample_ratio * v.downsample_ratio});
    Add("aligner.w1.bias", kBf16, {hidden});
    Add("aligner.w2.weight", kBf16, {hidden, hidden});
    Add("aligner.w2.bias", kBf16, {hidden});
    for (const char* name : {"image_start", "image_end", "image_newline"})
      Add(name, kBf16, {hidden});
  }

  const ModelConfig& config_;
  std::string prefix_;
  TensorGroup group_ = TensorGroup::kEmbedding;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::string_view TensorGroupName(TensorGroup group) {
  switch (group) {
    case TensorGroup::kEmbedding:
      return "embedding and head";
    case TensorGroup::kAttention:
      return "attention";
    case TensorGroup::kHyperConnections:
      return "hyper-connections";
    case TensorGroup::kCompressorIndexer:
      return "compressor and indexer";
    case TensorGroup::kRouter:
      return "router";
    case TensorGroup::kSharedExperts:
      return "shared experts";
    case TensorGroup::kRoutedExperts:
      return "routed experts";
    case TensorGroup::kEngramTable:
      return "Engram tables";
    case TensorGroup::kEngram:
      return "Engram projections";
    case TensorGroup::kDraftExperts:
      return "draft experts";
    case TensorGroup::kDraft:
      return "draft layers";
    case TensorGroup::kVision:
      return "vision";
  }
  return "";
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config) {
  return Builder(config).Build();
}

size_t NumPublishedShards(const ModelConfig& config) {
  return static_cast<size_t>(config.num_hidden_layers + 3 + config.num_nextn_predict_layers) +
         config.engram_layer_ids.size();
}

size_t PublishedShard(const TensorSpec& tensor, const ModelConfig& config) {
  const int64_t layers = config.num_hidden_layers;
  // The number after the first dot: the layer of "layers.7.x", the stage of "mtp.1.x".
  const auto number = [&] { return std::stoll(tensor.name.substr(tensor.name.find('.') + 1)); };
  switch (tensor.group) {
    case TensorGroup::kEmbedding:
      return tensor.name == "embed.weight" ? 0 : static_cast<size_t>(2 + layers);
    case TensorGroup::kVision:
      return 1;
    case TensorGroup::kDraft:
    case TensorGroup::kDraftExperts:
      return static_cast<size_t>(3 + layers + number());
    case TensorGroup::kEngram:
    case TensorGroup::kEngramTable:
      return static_cast<size_t>(3 + layers + config.num_nextn_predict_layers +
                                 config.engram_index(number()));
    default:
      return static_cast<size_t>(2 + number());
  }
}

std::array<GroupSize, kNumTensorGroups> SizesByGroup(const std::vector<TensorSpec>& tensors) {
  std::array<GroupSize, kNumTensorGroups> sizes = {};
  for (const TensorSpec& tensor : tensors) {
    GroupSize& size = sizes[static_cast<size_t>(tensor.group)];
    ++size.tensors;
    size.bytes += StoredBytes(tensor);
  }
  return sizes;
}

Status CheckInventory(const Checkpoint& checkpoint, const ModelConfig& config) {
  const std::vector<TensorSpec> expected = ExpectedTensors(config);
  const auto shard_name = [&](const TensorEntry& entry) {
    return checkpoint.shards()[static_cast<size_t>(entry.shard)].name;
  };
  size_t missing = 0;
  size_t different = 0;
  size_t unexpected = 0;
  size_t matching = 0;
  // Kept apart so that each kind of problem is represented among the printed lines.
  constexpr size_t kLinesPerKind = 14;
  std::vector<std::string> lines[3];
  const auto note = [&](size_t kind, std::string line) {
    if (lines[kind].size() < kLinesPerKind) lines[kind].push_back(std::move(line));
  };
  // Per shard: tensors in it and how many of them fit, to recognise a shard of another model.
  std::vector<int64_t> fitting(checkpoint.shards().size(), 0);
  std::unordered_map<std::string_view, const TensorSpec*> spec_of;
  spec_of.reserve(expected.size());
  for (const TensorSpec& spec : expected) {
    spec_of.emplace(spec.name, &spec);
    const TensorEntry* found = checkpoint.Find(spec.name);
    if (found == nullptr) {
      ++missing;
      note(0,
           fmt::format("{} is missing: expected {}.", spec.name, ToString(spec.dtype, spec.shape)));
    } else if (found->dtype != spec.dtype || found->shape != spec.shape) {
      ++different;
      note(1, fmt::format("{} differs: expected {}, found {} in {} at offset {}.", spec.name,
                          ToString(spec.dtype, spec.shape), ToString(found->dtype, found->shape),
                          shard_name(*found), found->file_offset));
    } else {
      ++matching;
      ++fitting[static_cast<size_t>(found->shard)];
    }
  }
  for (const TensorEntry& entry : checkpoint.tensors()) {
    if (spec_of.contains(entry.name)) continue;
    ++unexpected;
    note(2, fmt::format("{} is unexpected: found {} in {} at offset {}.", Quoted(entry.name),
                        ToString(entry.dtype, entry.shape), shard_name(entry), entry.file_offset));
  }
  if (missing + different + unexpected == 0) return {};

  ProblemList problems(3 * kLinesPerKind + 8);
  size_t foreign_shards = 0;
  for (size_t i = 0; i < fitting.size(); ++i) {
    const Checkpoint::Shard& shard = checkpoint.shards()[i];
    if (shard.num_tensors == 0 || fitting[i] > 0) continue;
    if (++foreign_shards > 8) continue;
    problems.Add(fmt::format(
        "Shard {} belongs to another model: none of its {} tensors fits this configuration.",
        shard.name, shard.num_tensors));
  }
  constexpr const char* kKinds[] = {"missing", "different", "unexpected"};
  const size_t counts[] = {missing, different, unexpected};
  for (size_t kind = 0; kind < 3; ++kind) {
    for (std::string& line : lines[kind]) problems.Add(std::move(line));
    if (counts[kind] > lines[kind].size()) {
      problems.Add(
          fmt::format("... and {} more {}.", counts[kind] - lines[kind].size(), kKinds[kind]));
    }
  }
  return problems.ToError(
      Code::kInvalidArgument,
      fmt::format("The tensors of {} do not match its config.json: of {} expected tensors {} are "
                  "missing and {} have another type "
                  "or shape; {} of the {} stored tensors are unexpected{}",
                  Quoted(checkpoint.dir()), expected.size(), missing, different, unexpected,
                  checkpoint.tensors().size(),
                  matching == 0 ? " (none matches: these are the shards of another model)" : ""));
}

}  // namespace deepinfer
