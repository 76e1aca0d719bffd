// Clocks for `deepinfer bench slice`: what a stream's work takes, as a whole and by parts of a
// step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.h"
#include "model/step_probe.h"
#include "tensor/buffer.h"
#include "tensor/stream.h"

namespace deepinfer {

// Places in a stream: events of a CUDA device, or times on a CPU, where work is done when it has
// been called.
class StreamMarks {
 public:
  explicit StreamMarks(Stream& stream) : stream_(stream) {}
  ~StreamMarks();
  StreamMarks(const StreamMarks&) = delete;
  StreamMarks& operator=(const StreamMarks&) = delete;

  // Forgets the marks; their events are used again.
  void Clear() {
    count_ = 0;
  }
  Status Add();
  size_t count() const {
    return count_;
  }
  // Waits for the stream; the times between neighbouring marks.
  Result<std::vector<double>> Seconds();

 private:
  Stream& stream_;
  size_t count_ = 0;
  std::vector<void*> events_;
  std::vector<std::chrono::steady_clock::time_point> times_;
};

// Marks where parts of a step begin, while it is told to.
class PartTimer : public StepProbe {
 public:
  explicit PartTimer(Stream& stream) : marks_(stream) {}

  Status Enter(StepPart part, Stream& stream) override;
  void Start();
  // Ends the last part. Adds nothing to what the step itself does.
  Status Stop();
  // Of the step between Start and Stop.
  Result<std::array<double, kNumStepParts>> PartSeconds();
  std::array<int64_t, kNumStepParts> PartVisits() const;

 private:
  bool timing_ = false;
  StreamMarks marks_;
  std::vector<StepPart> parts_;  // of the marks
};

// A recorded step; see tensor/cuda_device.h.
class StepGraph {
 public:
  StepGraph() = default;
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  Status Record(const std::function<Status()>& step, Stream& stream);
  Status Replay(Stream& stream);

 private:
  void* graph_ = nullptr;
};

// Two pieces of device memory, for copies from one to the other.
class DeviceCopies {
 public:
  // Each piece has so many bytes.
  static Result<DeviceCopies> Create(int64_t bytes, Stream& stream);
  Status Enqueue(int copies, Stream& stream);
  // Bytes read and written per second: the median of ten copies.
  Result<double> Measure(Stream& stream);

 private:
  Buffer source_;
  Buffer target_;
};

// The value that a share `q` of sorted values do not exceed.
double Quantile(const std::vector<double>& sorted, double q);

}  // namespace deepinfer
