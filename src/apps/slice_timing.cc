#include "apps/slice_timing.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"

namespace deepinfer {

StreamMarks::~StreamMarks() {
  for (void* event : events_) cuda::DestroyEvent(event);
}

Status StreamMarks::Add() {
  if (stream_.device().kind == DeviceKind::kCpu) {
    times_.resize(count_);
    times_.push_back(std::chrono::steady_clock::now());
  } else {
    if (count_ == events_.size()) {
      DI_ASSIGN_OR_RETURN(void* const event, cuda::CreateEvent(stream_.device().index));
      events_.push_back(event);
    }
    DI_RETURN_IF_ERROR(cuda::RecordEvent(events_[count_], stream_.cuda_stream()));
  }
  ++count_;
  return {};
}

Result<std::vector<double>> StreamMarks::Seconds() {
  DI_RETURN_IF_ERROR(stream_.Synchronize());
  std::vector<double> seconds;
  for (size_t i = 1; i < count_; ++i) {
    if (stream_.device().kind == DeviceKind::kCpu) {
      seconds.push_back(std::chrono::duration<double>(times_[i] - times_[i - 1]).count());
      continue;
    }
    DI_ASSIGN_OR_RETURN(const float ms, cuda::ElapsedMilliseconds(events_[i - 1], events_[i]));
    seconds.push_back(static_cast<double>(ms) * 1e-3);
  }
  return seconds;
}

Status PartTimer::Enter(StepPart part, Stream&) {
  if (!timing_) return {};
  parts_.push_back(part);
  return marks_.Add();
}

void PartTimer::Start() {
  marks_.Clear();
  parts_.clear();
  timing_ = true;
}

Status PartTimer::Stop() {
  timing_ = false;
  return marks_.Add();
}

Result<std::array<double, kNumStepParts>> PartTimer::PartSeconds() {
  DI_ASSIGN_OR_RETURN(const std::vector<double> seconds, marks_.Seconds());
  DI_CHECK_EQ(seconds.size(), parts_.size());
  std::array<double, kNumStepParts> sums{};
  for (size_t i = 0; i < seconds.size(); ++i) sums[static_cast<size_t>(parts_[i])] += seconds[i];
  return sums;
}

std::array<int64_t, kNumStepParts> PartTimer::PartVisits() const {
  std::array<int64_t, kNumStepParts> visits{};
  for (const StepPart part : parts_) ++visits[static_cast<size_t>(part)];
  return visits;
}

StepGraph::~StepGraph() {
  if (graph_ != nullptr) cuda::DestroyGraph(graph_);
}

Status StepGraph::Record(const std::function<Status()>& step, Stream& stream) {
  DI_CHECK(graph_ == nullptr);
  DI_RETURN_IF_ERROR(cuda::BeginCapture(stream.cuda_stream()));
  const Status recorded = step();
  Result<void*> graph = cuda::EndCapture(stream.cuda_stream());
  if (graph.has_value()) graph_ = *graph;
  DI_RETURN_IF_ERROR(recorded);
  return graph.has_value() ? Status() : Status(tl::unexpected(graph.error()));
}

Status StepGraph::Replay(Stream& stream) {
  return cuda::LaunchGraph(graph_, stream.cuda_stream());
}

Result<DeviceCopies> DeviceCopies::Create(int64_t bytes, Stream& stream) {
  DeviceCopies copies;
  DI_ASSIGN_OR_RETURN(copies.source_, Buffer::AllocateZeroed(stream.device(), bytes));
  DI_ASSIGN_OR_RETURN(copies.target_, Buffer::Allocate(stream.device(), bytes));
  return copies;
}

Status DeviceCopies::Enqueue(int copies, Stream& stream) {
  const TensorView source = source_.View(DType::kU8, {source_.bytes()});
  const TensorView target = target_.View(DType::kU8, {source_.bytes()});
  for (int i = 0; i < copies; ++i) DI_RETURN_IF_ERROR(CopyOnDevice(source, target, stream));
  return {};
}

Result<double> DeviceCopies::Measure(Stream& stream) {
  constexpr int kCopies = 10;
  StreamMarks marks(stream);
  DI_RETURN_IF_ERROR(Enqueue(2, stream));
  DI_RETURN_IF_ERROR(marks.Add());
  for (int i = 0; i < kCopies; ++i) {
    DI_RETURN_IF_ERROR(Enqueue(1, stream));
    DI_RETURN_IF_ERROR(marks.Add());
  }
  DI_ASSIGN_OR_RETURN(std::vector<double> seconds, marks.Seconds());
  std::sort(seconds.begin(), seconds.end());
  return 2.0 * static_cast<double>(source_.bytes()) / Quantile(seconds, 0.5);
}

double Quantile(const std::vector<double>& sorted, double q) {
  DI_CHECK(!sorted.empty());
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5)];
}

}  // namespace deepinfer
