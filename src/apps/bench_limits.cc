#include "apps/bench_limits.h"

#include <fmt/core.h>

#include <utility>

namespace deepinfer {

Result<ModelConfig> LoadConfigForContext(const std::string& model_dir, int64_t tokens,
                                         const std::string& options) {
  DI_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(model_dir));
  if (tokens <= config.max_position_embeddings) return config;
  return Fail(Code::kInvalidArgument,
              fmt::format("with {} a sequence has {} tokens; this model supports at most {}.",
                          options, tokens, config.max_position_embeddings));
}

}  // namespace deepinfer
