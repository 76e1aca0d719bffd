// The index of a checkpoint from anywhere is refused or names shards that cannot leave their
// directory. Seed the corpus with tests/data/model/two/checkpoint/model.safetensors.index.json.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "weights/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto index = deepinfer::ParseCheckpointIndex({reinterpret_cast<const char*>(data), size});
  if (!index.has_value()) {
    if (index.error().message.empty()) std::abort();
    return 0;
  }
  for (const auto& [tensor, shard] : index->weight_map) {
    if (tensor.empty() || shard.find('/') != std::string::npos ||
        !std::string_view(shard).ends_with(".safetensors"))
      std::abort();
  }
  if (index->total_size.value_or(0) < 0) std::abort();
  return 0;
}
