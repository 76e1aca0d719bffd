// An optional record of what happened when, for a trace viewer (Chrome's, Perfetto): spans and
// counters of all threads in one bounded buffer. Whoever wants to be traced holds a pointer that is
// null when tracing is off; a span then costs one comparison. The library writes no files: the text
// is handed to a callback. Not for statistics, which are kept always (engine/statistics.h).
//
//   TraceSpan span(recorder, "plan");        // recorder may be null
//   span.Arg("rows", step.num_rows);
//   ...                                      // until the end of the scope
//   if (recorder != nullptr) recorder->Counter("running", scheduler.num_running());
//
// Names are string literals, so that a recording allocates nothing but the buffer itself and traces
// of different builds line up.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace deepinfer {

// A string literal.
class TraceName {
 public:
  template <size_t N>
  consteval TraceName(const char (&text)[N]) : text_(text) {}  // NOLINT: implicit on purpose
  constexpr const char* text() const {
    return text_;
  }

 private:
  const char* text_;
};

struct TraceArg {
  TraceName name = "";
  int64_t value = 0;
};

enum class TraceFull : uint8_t {
  kDropOldest,  // the end of the run is kept
  kStop,        // the beginning is
};

struct TraceOptions {
  int64_t max_events = 1 << 18;  // at least 1; an event takes 80 bytes
  TraceFull when_full = TraceFull::kDropOldest;
};

// All methods may be called from any thread.
class TraceRecorder {
 public:
  static constexpr int kMaxArgs = 3;
  static constexpr size_t kMaxNamedThreads = 4096;

  explicit TraceRecorder(TraceOptions options = {});
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // Nanoseconds since the recorder was made; never decreases.
  int64_t Now() const;
  // The name of the calling thread in the trace; only ASCII is kept.
  void NameThread(std::string_view name);
  // A span of the calling thread; begin and end are values of Now(). Spans of one thread should
  // nest, as scopes do. At most kMaxArgs arguments are kept.
  void Complete(TraceName name, int64_t begin, int64_t end, const TraceArg* args = nullptr,
                int num_args = 0);
  // The value of a quantity from now on.
  void Counter(TraceName name, int64_t value);

  int64_t num_events() const;   // in the buffer
  int64_t num_dropped() const;  // that found no room, or gave way

  // Hands the trace over in pieces, in the JSON format that trace viewers read. Events recorded
  // meanwhile are left out. `write` returns false to stop.
  void WriteJson(const std::function<bool(std::string_view)>& write) const;
  std::string ToJson() const;

 private:
  static constexpr int64_t kChunkEvents = 4096;

  struct Event {
    const char* name;
    int64_t begin;
    int64_t duration;  // kCounterEvent: a counter
    uint32_t thread;
    int32_t num_args;
    std::array<TraceArg, kMaxArgs> args;
  };
  static constexpr int64_t kCounterEvent = -1;

  void Append(const Event& event);
  Event& At(int64_t number) const {
    const int64_t place = number % options_.max_events;
    return chunks_[static_cast<size_t>(place / kChunkEvents)][place % kChunkEvents];
  }

  const TraceOptions options_;
  const std::chrono::steady_clock::time_point start_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Event[]>> chunks_;  // a ring of max_events places, made as needed
  int64_t begin_ = 0;                             // numbers of the events in the buffer
  int64_t end_ = 0;
  int64_t dropped_ = 0;
  std::map<uint32_t, std::string> thread_names_;
};

// A span from here to the end of the scope.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder* recorder, TraceName name) : recorder_(recorder), name_(name) {
    if (recorder_ != nullptr) begin_ = recorder_->Now();
  }
  ~TraceSpan() {
    if (recorder_ != nullptr) {
      recorder_->Complete(name_, begin_, recorder_->Now(), args_.data(), num_args_);
    }
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  void Arg(TraceName name, int64_t value) {
    if (recorder_ != nullptr && num_args_ < TraceRecorder::kMaxArgs) {
      args_[static_cast<size_t>(num_args_++)] = {name, value};
    }
  }

 private:
  TraceRecorder* const recorder_;
  const TraceName name_;
  int64_t begin_ = 0;
  int num_args_ = 0;
  std::array<TraceArg, TraceRecorder::kMaxArgs> args_;
};

}  // namespace deepinfer
