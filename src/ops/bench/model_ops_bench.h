// Benchmarks of the operations beside the linear layers, for the table in ops_bench.cc.
#pragma once

#include "ops/bench/ops_bench_cases.h"

namespace deepinfer {

Status BenchSparseAttention(OpsBench& bench);
Status BenchIndexer(OpsBench& bench);
Status BenchHyperConnection(OpsBench& bench);
Status BenchRowOps(OpsBench& bench);  // norms, quantiser, SwiGLU, combine, RoPE

}  // namespace deepinfer
