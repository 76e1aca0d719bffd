// What the benchmarks of whole models check before they load one.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "model/config.h"

namespace deepinfer {

// The configuration of a model whose context holds `tokens`. kInvalidArgument if it does not;
// `options`, as in "--prompt and --tokens", are those that ask for them.
Result<ModelConfig> LoadConfigForContext(const std::string& model_dir, int64_t tokens,
                                         const std::string& options);

}  // namespace deepinfer
