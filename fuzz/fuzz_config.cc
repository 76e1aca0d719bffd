// A config.json from anywhere is refused or is a model that everything derived from it can handle:
// roles, sources, Engram constants, and an inventory whose sizes do not overflow. Seed the corpus
// with tests/data/configs.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "model/config.h"
#include "model/engram_constants.h"
#include "model/inventory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace deepinfer;
  const auto config = ParseModelConfig({reinterpret_cast<const char*>(data), size});
  if (!config.has_value()) {
    if (config.error().message.empty()) std::abort();
    return 0;
  }
  for (int64_t layer = 0; layer < config->num_hidden_layers; ++layer) {
    const int64_t kv = config->kv_source(layer);
    const int64_t index = config->index_source(layer);
    if ((config->role(layer) == LayerRole::kWindowOnly) != (kv < 0)) std::abort();
    if (kv > layer || index > layer || index < kv) std::abort();
    if (kv >= 0 && config->ratio(kv) != config->ratio(layer)) std::abort();
  }
  const EngramConstants constants = ComputeEngramConstants(*config);
  if (constants.layers.size() != config->engram_num_embeddings.size()) std::abort();
  for (size_t i = 0; i < constants.layers.size(); ++i) {
    if (constants.layers[i].rows != config->engram_num_embeddings[i]) std::abort();
    for (const int64_t multiplier : constants.layers[i].multipliers) {
      int64_t product = 0;
      if (__builtin_mul_overflow(multiplier, config->engram_compressed_vocab_size - 1, &product))
        std::abort();
    }
  }
  int64_t bytes = 0;
  for (const TensorSpec& tensor : ExpectedTensors(*config)) {
    for (const int64_t dim : tensor.shape) {
      if (dim < 1) std::abort();
    }
    if (__builtin_add_overflow(bytes, StoredBytes(tensor), &bytes)) std::abort();
  }
  return 0;
}
