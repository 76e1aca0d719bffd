#include "runtime/step_graphs.h"

#include <algorithm>
#include <bit>

#include "tensor/cuda_device.h"

namespace deepinfer {

StepGraphs::~StepGraphs() {
  Clear();
}

int64_t StepGraphs::PaddedRows(int64_t rows) {
  if (rows <= 4) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return (rows + 7) / 8 * 8;
}

int64_t StepGraphs::PaddedUnits(int64_t units) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(units)));
}

Status StepGraphs::Run(const Shape& shape, Stream& stream, const std::function<Status()>& forward) {
  const auto [found, is_new] =
      graphs_.try_emplace({shape.rows, shape.blocks, shape.pages}, nullptr);
  if (is_new) return forward();
  if (found->second == nullptr) {
    DI_RETURN_IF_ERROR(cuda::BeginCapture(stream.cuda_stream()));
    const Status recorded = forward();
    Result<void*> graph = cuda::EndCapture(stream.cuda_stream());
    DI_RETURN_IF_ERROR(recorded);
    DI_ASSIGN_OR_RETURN(found->second, std::move(graph));
  }
  return cuda::LaunchGraph(found->second, stream.cuda_stream());
}

void StepGraphs::Clear() {
  for (const auto& [shape, graph] : graphs_) {
    if (graph != nullptr) cuda::DestroyGraph(graph);
  }
  graphs_.clear();
}

int64_t StepGraphs::num_recorded() const {
  return std::count_if(graphs_.begin(), graphs_.end(),
                       [](const auto& entry) { return entry.second != nullptr; });
}

}  // namespace deepinfer
