#include "model/decoder_replay.h"

#include <algorithm>
#include <string>

namespace deepinfer {

Status CheckDecoderReplay(const ModelConfig& config) {
  const int64_t begin = config.decoder_start();
  const auto refuse = [](const char* field, const std::string& why) -> Status {
    return Fail(Code::kUnsupported, "Bounded replay of the decoder is not possible: " + why,
                std::string("text_config.") + field);
  };
  if (begin >= config.num_hidden_layers)
    return refuse("compress_ratios",
                  "no layer has compression ratio 1, so there is no decoder half.");
  for (int64_t layer : config.engram_layer_ids) {
    if (layer < begin) continue;
    return refuse("engram_layer_ids",
                  fmt::format("layer {} reads n-gram tables; only layers before {}, where the "
                              "decoder half begins, may.",
                              layer, begin));
  }
  for (int64_t layer = begin; layer < config.num_hidden_layers; ++layer) {
    if (config.kv_source(layer) != begin) {
      return refuse("kv_source_layer_ids",
                    fmt::format("layer {} uses the compressed keys of layer {}; all layers of the "
                                "decoder half must use those of its first, {}.",
                                layer, config.kv_source(layer), begin));
    }
    if (config.index_source(layer) < begin) {
      return refuse("index_source_layer_ids",
                    fmt::format("layer {} uses the selection of layer {}, before the decoder half, "
                                "which begins at {}.",
                                layer, config.index_source(layer), begin));
    }
  }
  if (config.candidate_source_layer_id >= 0 && config.candidate_source_layer_id < begin) {
    return refuse(
        "candidate_source_layer_id",
        fmt::format("candidates come from layer {}, before the decoder half, which begins "
                    "at {}.",
                    config.candidate_source_layer_id, begin));
  }
  const std::vector<int64_t>& taps = config.dspark_target_layer_ids;
  const auto before = std::count_if(taps.begin(), taps.end(), [&](int64_t l) { return l < begin; });
  if (before != 0 && before != std::ssize(taps)) {
    return refuse("dspark_target_layer_ids",
                  fmt::format("the draft head reads layers on both sides of {}, where the decoder "
                              "half begins.",
                              begin));
  }
  return {};
}

}  // namespace deepinfer
