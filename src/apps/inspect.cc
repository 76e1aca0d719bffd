#include "apps/inspect.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "apps/output.h"
#include "apps/print.h"
#include "model/weight_memory.h"
#include "ops/quantize/group_quantize.h"
#include "weights/checkpoint.h"

namespace deepinfer {
namespace {

void AddStateSizes(const ModelConfig& config, InspectReport& report) {
  report.window_bytes = (config.num_hidden_layers + config.num_nextn_predict_layers) *
                        config.sliding_window * Q8RecordBytes(config.head_dim);
  const int64_t entry = Q4ERecordBytes(config.head_dim) + Q4PRecordBytes(config.index_head_dim);
  for (const int64_t layer : config.kv_source_layer_ids) {
    report.kv_bytes_per_token +=
        static_cast<double>(entry) / static_cast<double>(config.ratio(layer));
    // Key and gate of the first token of a group, in fp32.
    if (config.ratio(layer) > 1) report.compressor_bytes += 2 * config.head_dim * 4;
  }
}

std::string ListText(const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) text += fmt::format("{}{}", text.empty() ? "" : ", ", id);
  return text.empty() ? "none" : text;
}

std::string_view RoleName(LayerRole role) {
  switch (role) {
    case LayerRole::kWindowOnly:
      return "window";
    case LayerRole::kFull:
      return "full";
    case LayerRole::kReindex:
      return "reindex";
    case LayerRole::kReuse:
      return "reuse";
  }
  return "";
}

// "0-1 window, 2 full, 3-7 reuse, ..."
std::string ScheduleText(const ModelConfig& config) {
  std::string text;
  for (int64_t layer = 0; layer < config.num_hidden_layers;) {
    int64_t last = layer;
    while (last + 1 < config.num_hidden_layers && config.role(last + 1) == config.role(layer) &&
           config.ratio(last + 1) == config.ratio(layer) &&
           config.role(layer) != LayerRole::kFull) {
      ++last;
    }
    text += fmt::format("{}{}", text.empty() ? "" : ", ", layer);
    if (last > layer) text += fmt::format("-{}", last);
    text += fmt::format(" {}", RoleName(config.role(layer)));
    if (config.ratio(layer) > 0) text += fmt::format("/{}", config.ratio(layer));
    layer = last + 1;
  }
  return text;
}

int64_t SequenceBytes(const InspectReport& report, int64_t tokens) {
  return report.window_bytes + report.compressor_bytes +
         static_cast<int64_t>(std::ceil(report.kv_bytes_per_token * static_cast<double>(tokens)));
}

}  // namespace

Result<InspectReport> InspectCheckpoint(const std::string& dir) {
  InspectReport report;
  report.dir = dir;
  DI_ASSIGN_OR_RETURN(report.config, LoadModelConfig(dir));
  DI_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir));
  DI_RETURN_IF_ERROR(CheckInventory(checkpoint, report.config));
  report.num_shards = static_cast<int64_t>(checkpoint.shards().size());
  report.num_tensors = static_cast<int64_t>(checkpoint.tensors().size());
  report.tensor_bytes = checkpoint.total_bytes();
  report.groups = SizesByGroup(ExpectedTensors(report.config));
  const WeightMemory cpu = CpuWeightMemory(report.config, false);
  report.cpu_mapped_bytes = cpu.mapped_bytes();
  report.cpu_packed_bytes = cpu.resident_bytes();
  report.cpu_draft_bytes =
      CpuWeightMemory(report.config, true).resident_bytes() - report.cpu_packed_bytes;
  for (const int64_t ranks : {1, 4, 8, 16, 64}) {
    report.ranks.push_back({ranks, GpuWeightMemory(report.config, ranks, true).resident_bytes()});
  }
  AddStateSizes(report.config, report);
  return report;
}

std::string ReportText(const InspectReport& report) {
  const ModelConfig& c = report.config;
  std::string out = fmt::format("{}\n\nConfiguration\n", report.dir);
  const auto row = [&](std::string_view name, const std::string& value) {
    out += fmt::format("  {:<22}{}\n", name, value);
  };
  row("vocabulary", fmt::format("{} tokens", c.vocab_size));
  row("layers",
      fmt::format("{} ({} encoder, {} decoder), {} draft", c.num_hidden_layers, c.decoder_start(),
                  c.num_hidden_layers - c.decoder_start(), c.num_nextn_predict_layers));
  row("roles (role/ratio)", ScheduleText(c));
  row("hidden", fmt::format("{} x {} streams", c.hidden_size, c.hc_mult));
  row("attention", fmt::format("{} heads x {} ({} rotated), window {}", c.num_attention_heads,
                               c.head_dim, c.qk_rope_head_dim, c.sliding_window));
  row("index",
      fmt::format("{} heads x {}, top {}, {} candidate blocks of {}", c.index_n_heads,
                  c.index_head_dim, c.index_topk, c.candidate_topk_blocks, c.candidate_block_size));
  row("experts", fmt::format("{} routed, top {}, 1 shared, inner size {}", c.n_routed_experts,
                             c.num_experts_per_tok, c.moe_intermediate_size));
  row("Engram layers", c.engram_layer_ids.empty()
                           ? "none"
                           : fmt::format("{} with {} rows of {}", ListText(c.engram_layer_ids),
                                         ListText(c.engram_num_embeddings), c.engram_head_dim));
  row("context", fmt::format("{} tokens", c.max_position_embeddings));

  out += fmt::format("\nTensors: {} in {} shards, {} bytes ({})\n", report.num_tensors,
                     report.num_shards, report.tensor_bytes, HumanBytes(report.tensor_bytes));
  out += fmt::format("  {:<24}{:>9}{:>20}{:>10}\n", "group", "tensors", "bytes", "");
  for (size_t i = 0; i < kNumTensorGroups; ++i) {
    out += fmt::format("  {:<24}{:>9}{:>20}{:>10}\n", TensorGroupName(static_cast<TensorGroup>(i)),
                       report.groups[i].tensors, report.groups[i].bytes,
                       HumanBytes(report.groups[i].bytes));
  }

  out += "\nMemory for weights\n";
  row("CPU", fmt::format("{}, and {} mapped from the files (embedding, Engram tables)",
                         HumanBytes(report.cpu_packed_bytes), HumanBytes(report.cpu_mapped_bytes)));
  if (report.cpu_draft_bytes > 0)
    row("CPU, drafting", fmt::format("{} more", HumanBytes(report.cpu_draft_bytes)));
  for (const InspectReport::RankNeed& need : report.ranks) {
    row(fmt::format("{} GPU{}", need.ranks, need.ranks == 1 ? "" : "s"),
        fmt::format("{}{}", HumanBytes(need.weight_bytes), need.ranks == 1 ? "" : " each"));
  }
  out +=
      "  A CPU run does not load the vision tower. Experts and Engram tables are split evenly over "
      "the GPUs, whose figures\n"
      "  include the draft layers; everything else is on each of them.\n";
  out += "\nMemory per sequence\n";
  row("per token", fmt::format("{:g} B", report.kv_bytes_per_token));
  row("fixed", fmt::format("{} B (windows {} B, incomplete groups {} B)",
                           report.window_bytes + report.compressor_bytes, report.window_bytes,
                           report.compressor_bytes));
  row("at full context", HumanBytes(SequenceBytes(report, c.max_position_embeddings)));
  return out;
}

std::string ReportJson(const InspectReport& report) {
  using Json = nlohmann::ordered_json;
  const ModelConfig& c = report.config;
  Json layers = Json::array();
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    layers.push_back({{"layer", layer},
                      {"ratio", c.ratio(layer)},
                      {"role", RoleName(c.role(layer))},
                      {"kv_source", c.kv_source(layer)},
                      {"index_source", c.index_source(layer)},
                      {"engram", c.engram_index(layer) >= 0}});
  }
  Json groups = Json::array();
  for (size_t i = 0; i < kNumTensorGroups; ++i) {
    const auto group = static_cast<TensorGroup>(i);
    groups.push_back({{"group", TensorGroupName(group)},
                      {"tensors", report.groups[i].tensors},
                      {"bytes", report.groups[i].bytes},
                      {"split_over_ranks", IsSplitOverRanks(group)}});
  }
  Json ranks = Json::array();
  for (const InspectReport::RankNeed& need : report.ranks) {
    ranks.push_back({{"ranks", need.ranks}, {"weight_bytes_per_rank", need.weight_bytes}});
  }
  const Json root = {{"directory", report.dir},
                     {"config",
                      {{"vocab_size", c.vocab_size},
                       {"hidden_size", c.hidden_size},
                       {"num_hidden_layers", c.num_hidden_layers},
                       {"num_draft_layers", c.num_nextn_predict_layers},
                       {"decoder_start", c.decoder_start()},
                       {"num_attention_heads", c.num_attention_heads},
                       {"head_dim", c.head_dim},
                       {"sliding_window", c.sliding_window},
                       {"n_routed_experts", c.n_routed_experts},
                       {"num_experts_per_tok", c.num_experts_per_tok},
                       {"index_topk", c.index_topk},
                       {"engram_layer_ids", c.engram_layer_ids},
                       {"engram_num_embeddings", c.engram_num_embeddings},
                       {"max_position_embeddings", c.max_position_embeddings},
                       {"layers", std::move(layers)}}},
                     {"shards", report.num_shards},
                     {"tensors", report.num_tensors},
                     {"bytes", report.tensor_bytes},
                     {"groups", std::move(groups)},
                     {"memory",
                      {{"cpu_packed_bytes", report.cpu_packed_bytes},
                       {"cpu_mapped_bytes", report.cpu_mapped_bytes},
                       {"cpu_draft_bytes", report.cpu_draft_bytes},
                       {"gpu", std::move(ranks)},
                       {"kv_bytes_per_token", report.kv_bytes_per_token},
                       {"window_bytes_per_sequence", report.window_bytes},
                       {"compressor_bytes_per_sequence", report.compressor_bytes}}}};
  // A directory name need not be UTF-8.
  return root.dump(1, ' ', false, Json::error_handler_t::replace);
}

int RunInspect(const InspectOptions& options) {
  const Result<InspectReport> report = InspectCheckpoint(options.dir);
  if (!report) return PrintError(report.error());
  return ExitStatus(Print("{}\n", options.json ? ReportJson(*report) : ReportText(*report)));
}

}  // namespace deepinfer
