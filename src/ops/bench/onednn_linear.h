// oneDNN's matmul for y = x * W^T, the comparison of the linear benchmark. Present only where the
// library is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"

namespace deepinfer {

class OnednnLinear {
 public:
  // bf16 x, weights and y where oneDNN has a real implementation for this CPU, else fp32. `copies`
  // weights of its preferred layout, so that runs read cold memory. Errors: kUnsupported (built
  // without oneDNN), kInternal.
  static Result<OnednnLinear> Create(int64_t m, int64_t n, int64_t k, int64_t copies, int threads);
  OnednnLinear(OnednnLinear&&) noexcept;
  ~OnednnLinear();

  // One call with the next copy of the weights.
  Status Run();
  // "oneDNN 2.6.3 bf16 brgemm:avx512_core_amx".
  const std::string& name() const {
    return name_;
  }

 private:
  struct Impl;
  OnednnLinear();
  std::unique_ptr<Impl> impl_;
  std::string name_;
};

}  // namespace deepinfer
