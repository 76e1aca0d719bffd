// The CUDA half of ops/hyper_connection/hc_collapse.h. Arguments have been validated.
#pragma once

#include "ops/hyper_connection/hc_collapse.h"

namespace deepinfer::cuda {

Status HcCollapse(const HcCollapseArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
