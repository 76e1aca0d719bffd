#include "base/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

namespace deepinfer {
namespace {

using Json = nlohmann::json;

std::vector<Json> EventsOf(const Json& trace, const char* phase) {
  std::vector<Json> events;
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") == phase) events.push_back(event);
  }
  return events;
}

TEST(TraceTest, AnEmptyTraceIsValid) {
  const Json trace = Json::parse(TraceRecorder().ToJson());
  EXPECT_TRUE(EventsOf(trace, "X").empty());
  EXPECT_EQ(trace.at("otherData").at("dropped_events"), 0);
}

TEST(TraceTest, SpansCarryTheirArgumentsAndNest) {
  TraceRecorder recorder;
  recorder.NameThread("engine \"one\"\\\n\xff");
  {
    TraceSpan outer(&recorder, "step");
    outer.Arg("rows", 7);
    outer.Arg("chunks", -2);
    outer.Arg("third", 3);
    outer.Arg("fourth is not kept", 4);
    { TraceSpan inner(&recorder, "plan"); }
    { TraceSpan inner(&recorder, "commit"); }
  }
  recorder.Counter("running", 5);
  const Json trace = Json::parse(recorder.ToJson());
  const std::vector<Json> spans = EventsOf(trace, "X");
  ASSERT_EQ(spans.size(), 3u);  // in the order of their ends
  EXPECT_EQ(spans[0].at("name"), "plan");
  EXPECT_EQ(spans[1].at("name"), "commit");
  EXPECT_EQ(spans[2].at("name"), "step");
  EXPECT_EQ(spans[2].at("args"), Json({{"rows", 7}, {"chunks", -2}, {"third", 3}}));
  const auto begin = [](const Json& span) { return span.at("ts").get<double>(); };
  const auto end = [&](const Json& span) { return begin(span) + span.at("dur").get<double>(); };
  EXPECT_LE(begin(spans[2]), begin(spans[0]));
  EXPECT_LE(end(spans[0]), begin(spans[1]) + 0.0005);
  EXPECT_LE(end(spans[1]), end(spans[2]) + 0.0005);
  const std::vector<Json> counters = EventsOf(trace, "C");
  ASSERT_EQ(counters.size(), 1u);
  EXPECT_EQ(counters[0].at("args").at("value"), 5);
  for (const Json& event : EventsOf(trace, "M")) {
    if (event.at("name") == "thread_name") {
      EXPECT_EQ(event.at("args").at("name"), "engine \"one\"\\??");
      EXPECT_EQ(event.at("tid"), spans[0].at("tid"));
    }
  }
}

TEST(TraceTest, TimesKeepNanoseconds) {
  TraceRecorder recorder;
  recorder.Complete("span", 1'234'005, 2'234'017);
  EXPECT_NE(recorder.ToJson().find("\"ts\":1234.005,\"dur\":1000.012"), std::string::npos);
}

TEST(TraceTest, ANullRecorderRecordsNothingAndCrashesNothing) {
  TraceSpan span(nullptr, "nothing");
  span.Arg("value", 1);
}

TEST(TraceTest, AFullBufferKeepsTheEndOrTheBeginningAndSaysSo) {
  for (const TraceFull when_full : {TraceFull::kDropOldest, TraceFull::kStop}) {
    TraceRecorder recorder({.max_events = 5000, .when_full = when_full});
    for (int64_t i = 0; i < 12'345; ++i) recorder.Complete("span", i * 1000, i * 1000);
    EXPECT_EQ(recorder.num_events(), 5000);
    EXPECT_EQ(recorder.num_dropped(), 7345);
    const Json trace = Json::parse(recorder.ToJson());
    const std::vector<Json> spans = EventsOf(trace, "X");
    ASSERT_EQ(spans.size(), 5000u);
    const double first = when_full == TraceFull::kStop ? 0 : 7345;
    for (size_t i = 0; i < spans.size(); ++i) {
      EXPECT_EQ(spans[i].at("ts").get<double>(), first + static_cast<double>(i));
    }
    EXPECT_EQ(trace.at("otherData").at("dropped_events"), 7345);
    EXPECT_NE(trace.at("otherData").at("note").get<std::string>().find("5000"), std::string::npos);
  }
}

TEST(TraceTest, ThreadsRecordAtTheSameTimeAndWhileTheTraceIsWritten) {
  TraceRecorder recorder({.max_events = 3000});
  constexpr int kThreads = 4;
  constexpr int64_t kSpans = 2000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&recorder] {
      recorder.NameThread("worker");
      for (int64_t i = 0; i < kSpans; ++i) {
        TraceSpan outer(&recorder, "outer");
        TraceSpan inner(&recorder, "inner");
        inner.Arg("i", i);
        recorder.Counter("i", i);
      }
    });
  }
  for (int i = 0; i < 5; ++i) EXPECT_NO_THROW(Json::parse(recorder.ToJson()));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(recorder.num_events() + recorder.num_dropped(), kThreads * kSpans * 3);
  const Json trace = Json::parse(recorder.ToJson());
  std::set<int64_t> names;
  for (const Json& event : EventsOf(trace, "M")) {
    if (event.at("name") == "thread_name") names.insert(event.at("tid").get<int64_t>());
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kThreads));
  // On each thread, a span that begins inside another ends inside it.
  std::map<int64_t, std::vector<std::pair<double, double>>> by_thread;
  for (const Json& span : EventsOf(trace, "X")) {
    by_thread[span.at("tid").get<int64_t>()].emplace_back(
        span.at("ts").get<double>(), span.at("ts").get<double>() + span.at("dur").get<double>());
  }
  for (auto& [thread, spans] : by_thread) {
    std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    std::vector<double> open;
    for (const auto& [begin, end] : spans) {
      while (!open.empty() && open.back() <= begin + 0.0005) open.pop_back();
      const double limit = open.empty() ? end : open.back();
      EXPECT_LE(end, limit + 0.0005) << "on thread " << thread;
      open.push_back(end);
    }
  }
}

TEST(TraceTest, TheReceiverCanStop) {
  TraceRecorder recorder;
  for (int i = 0; i < 5000; ++i) recorder.Counter("i", i);
  int pieces = 0;
  recorder.WriteJson([&](std::string_view) { return ++pieces < 2; });
  EXPECT_EQ(pieces, 2);
}

}  // namespace
}  // namespace deepinfer
