#include "base/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "base/check.h"

namespace deepinfer {
namespace {

// Small numbers instead of the system's, in the order in which threads first ask.
uint32_t ThreadNumber() {
  static std::atomic<uint32_t> next{1};
  thread_local const uint32_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

// A JSON string. Bytes beyond ASCII become '?': names are ours.
void AppendString(std::string_view text, fmt::memory_buffer* out) {
  out->push_back('"');
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (byte >= 0x20 && byte < 0x7f) {
      out->push_back(c);
    } else {
      out->push_back('?');
    }
  }
  out->push_back('"');
}

// Microseconds, which the format wants, without losing nanoseconds.
void AppendMicroseconds(int64_t nanoseconds, fmt::memory_buffer* out) {
  fmt::format_to(std::back_inserter(*out), "{}.{:03}", nanoseconds / 1000, nanoseconds % 1000);
}

}  // namespace

TraceRecorder::TraceRecorder(TraceOptions options)
    : options_(options), start_(std::chrono::steady_clock::now()) {
  DI_CHECK(options_.max_events >= 1);
  chunks_.reserve(static_cast<size_t>((options_.max_events + kChunkEvents - 1) / kChunkEvents));
}

int64_t TraceRecorder::Now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                              start_)
      .count();
}

void TraceRecorder::NameThread(std::string_view name) {
  const uint32_t thread = ThreadNumber();
  const std::lock_guard lock(mutex_);
  if (thread_names_.size() < kMaxNamedThreads || thread_names_.count(thread) > 0) {
    thread_names_[thread] = name;
  }
}

void TraceRecorder::Complete(TraceName name, int64_t begin, int64_t end, const TraceArg* args,
                             int num_args) {
  Event event{name.text(), begin, std::max<int64_t>(0, end - begin), ThreadNumber(), 0, {}};
  event.num_args = std::clamp(num_args, 0, kMaxArgs);
  std::copy_n(args, event.num_args, event.args.begin());
  Append(event);
}

void TraceRecorder::Counter(TraceName name, int64_t value) {
  Append({name.text(), Now(), kCounterEvent, ThreadNumber(), 1, {TraceArg{"value", value}}});
}

void TraceRecorder::Append(const Event& event) {
  const std::lock_guard lock(mutex_);
  if (end_ - begin_ == options_.max_events) {
    ++dropped_;
    if (options_.when_full == TraceFull::kStop) return;
    ++begin_;
  }
  if (end_ < options_.max_events && end_ % kChunkEvents == 0) {
    chunks_.push_back(std::make_unique<Event[]>(
        static_cast<size_t>(std::min(kChunkEvents, options_.max_events - end_))));
  }
  At(end_++) = event;
}

int64_t TraceRecorder::num_events() const {
  const std::lock_guard lock(mutex_);
  return end_ - begin_;
}

int64_t TraceRecorder::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

void TraceRecorder::WriteJson(const std::function<bool(std::string_view)>& write) const {
  constexpr int64_t kEventsPerPiece = 1024;
  std::map<uint32_t, std::string> names;
  int64_t next = 0;
  int64_t end = 0;
  int64_t dropped = 0;
  {
    const std::lock_guard lock(mutex_);
    names = thread_names_;
    next = begin_;
    end = end_;
    dropped = dropped_;
  }
  fmt::memory_buffer out;
  const auto append = [&](std::string_view text) { out.append(text); };
  append("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  append("{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"deepinfer\"}}");
  for (const auto& [thread, name] : names) {
    fmt::format_to(std::back_inserter(out),
                   ",\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":{},\"args\":"
                   "{{\"name\":",
                   thread);
    AppendString(name, &out);
    append("}}");
  }
  std::vector<Event> piece;
  while (next < end) {
    piece.clear();
    {
      // In pieces, so that threads that record never wait for the receiver. What has given way
      // since the beginning is counted as dropped.
      const std::lock_guard lock(mutex_);
      if (begin_ > next) {
        dropped += std::min(begin_, end) - next;
        next = std::min(begin_, end);
      }
      const int64_t stop = std::min(end, next + kEventsPerPiece);
      while (next < stop) piece.push_back(At(next++));
    }
    for (const Event& event : piece) {
      append(",\n{\"name\":");
      AppendString(event.name, &out);
      fmt::format_to(std::back_inserter(out), ",\"ph\":\"{}\",\"pid\":1,\"tid\":{},\"ts\":",
                     event.duration == kCounterEvent ? "C" : "X", event.thread);
      AppendMicroseconds(event.begin, &out);
      if (event.duration != kCounterEvent) {
        append(",\"dur\":");
        AppendMicroseconds(event.duration, &out);
      }
      if (event.num_args > 0) {
        append(",\"args\":{");
        for (int i = 0; i < event.num_args; ++i) {
          const TraceArg& arg = event.args[static_cast<size_t>(i)];
          if (i > 0) append(",");
          AppendString(arg.name.text(), &out);
          fmt::format_to(std::back_inserter(out), ":{}", arg.value);
        }
        append("}");
      }
      append("}");
    }
    if (!write({out.data(), out.size()})) return;
    out.clear();
  }
  fmt::format_to(std::back_inserter(out), "\n],\"otherData\":{{\"dropped_events\":{}", dropped);
  if (dropped > 0) {
    fmt::format_to(std::back_inserter(out),
                   ",\"note\":\"The buffer holds {} events; {} are missing at {}.\"",
                   options_.max_events, dropped,
                   options_.when_full == TraceFull::kStop ? "the end" : "the beginning");
  }
  append("}}\n");
  write({out.data(), out.size()});
}

std::string TraceRecorder::ToJson() const {
  std::string text;
  WriteJson([&](std::string_view piece) {
    text += piece;
    return true;
  });
  return text;
}

}  // namespace deepinfer
