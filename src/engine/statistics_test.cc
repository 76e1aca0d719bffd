#include "engine/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

namespace deepinfer {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

// A strict reader of Prometheus' text format 0.0.4 as far as we use it. Throws std::runtime_error.
struct ParsedMetrics {
  std::map<std::string, std::string> types;                               // by family
  std::map<std::string, std::map<std::string, double>> samples;           // name, labels as text
  std::map<std::string, std::vector<std::pair<double, double>>> buckets;  // le, count
  std::map<std::string, std::string> label_values;  // last value of each label
};

ParsedMetrics ParsePrometheus(const std::string& text) {
  const auto fail = [](const std::string& what) { throw std::runtime_error(what); };
  static const std::regex help(R"(# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+))");
  static const std::regex type(R"(# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram))");
  static const std::regex name_pattern(R"([a-zA-Z_:][a-zA-Z0-9_:]*)");
  static const std::regex label_pattern(R"([a-zA-Z_][a-zA-Z0-9_]*)");
  ParsedMetrics parsed;
  if (text.empty() || text.back() != '\n') fail("no line feed at the end");
  std::istringstream lines(text);
  std::string line;
  std::string helped;
  std::string family;
  while (std::getline(lines, line)) {
    std::smatch match;
    if (std::regex_match(line, match, help)) {
      helped = match[1];
      if (parsed.types.count(helped) > 0) fail("second HELP of " + helped);
      continue;
    }
    if (std::regex_match(line, match, type)) {
      family = match[1];
      if (family != helped) fail("TYPE without HELP: " + line);
      parsed.types[family] = match[2];
      continue;
    }
    size_t at = line.find_first_of("{ ");
    if (at == std::string::npos) fail("no value: " + line);
    const std::string name = line.substr(0, at);
    if (!std::regex_match(name, name_pattern)) fail("bad name: " + line);
    std::string labels;
    std::optional<double> le;
    const auto number = [&](const std::string& digits) {
      if (digits == "+Inf") return std::numeric_limits<double>::infinity();
      double value = 0;
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), value);
      if (error != std::errc() || end != digits.data() + digits.size()) fail("number: " + line);
      return value;
    };
    if (line[at] == '{') {
      ++at;
      while (true) {
        const size_t equals = line.find('=', at);
        if (equals == std::string::npos) fail("label without value: " + line);
        const std::string label = line.substr(at, equals - at);
        if (!std::regex_match(label, label_pattern)) fail("bad label: " + line);
        at = equals + 1;
        if (line.at(at) != '"') fail("label value without quote: " + line);
        std::string value;
        for (++at; line.at(at) != '"'; ++at) {
          if (line[at] != '\\') {
            value += line[at];
            continue;
          }
          ++at;
          if (line.at(at) == 'n') {
            value += '\n';
          } else if (line[at] == '\\' || line[at] == '"') {
            value += line[at];
          } else {
            fail("bad escape: " + line);
          }
        }
        if (label == "le") {
          le = number(value);
        } else {
          labels += label + "=" + value + ";";
          parsed.label_values[label] = value;
        }
        ++at;
        if (line.at(at) == '}') break;
        if (line.at(at) != ',') fail("labels are not separated: " + line);
        ++at;
      }
      ++at;
    }
    if (line.at(at) != ' ') fail("no space before the value: " + line);
    const double value = number(line.substr(at + 1));
    const std::string type_name = parsed.types[family];
    if (type_name == "histogram") {
      if (name != family + "_bucket" && name != family + "_sum" && name != family + "_count") {
        fail("not of the family " + family + ": " + line);
      }
      if (le.has_value() != (name == family + "_bucket")) fail("le is wrong: " + line);
      if (le.has_value()) {
        auto& buckets = parsed.buckets[family + labels];
        if (!buckets.empty() && (buckets.back().first >= *le || buckets.back().second > value)) {
          fail("buckets do not rise: " + line);
        }
        buckets.emplace_back(*le, value);
        continue;
      }
    } else if (name != family) {
      fail("not of the family " + family + ": " + line);
    }
    if (type_name == "counter" && name.find("_total") == std::string::npos) fail("name: " + line);
    if (!parsed.samples[name].emplace(labels, value).second) fail("twice: " + line);
  }
  for (const auto& [key, buckets] : parsed.buckets) {
    if (!std::isinf(buckets.back().first)) fail("no +Inf: " + key);
    if (parsed.samples[key + "_count"][""] != buckets.back().second) fail("count: " + key);
  }
  return parsed;
}

// What an engine would do, at random, with the bookkeeping that it needs.
class EngineModel {
 public:
  explicit EngineModel(EngineStatistics& statistics) : statistics_(statistics) {}

  LivingTotals Living() const {
    LivingTotals living;
    for (const auto& [id, sequences] : requests_) {
      ++living.requests;
      for (const SequenceTotals& sequence : sequences) living.Add(sequence);
    }
    return living;
  }

  void Submit(int64_t completions, int64_t prompt_tokens) {
    statistics_.RecordSubmitted();
    if (completions == 0) {
      statistics_.RecordRefused();
      ++refused;
      return;
    }
    std::vector<SequenceTotals>& sequences = requests_[next_++];
    for (int64_t i = 0; i < completions; ++i) {
      statistics_.RecordCreated(prompt_tokens);
      sequences.emplace_back();
      sequences.back().prompt_tokens = prompt_tokens;
    }
  }

  void Step() {
    PlannedStep planned;
    planned.plan_seconds = 1e-4;
    for (auto& [id, sequences] : requests_) {
      for (SequenceTotals& sequence : sequences) {
        if (!sequence.started) {
          if (*rc::gen::arbitrary<bool>()) continue;
          sequence.started = true;
          statistics_.RecordStarted(0.5);
          sequence.prompt_tokens_cached = *rc::gen::inRange<int64_t>(0, sequence.prompt_tokens);
          planned.prompt_tokens_cached += sequence.prompt_tokens_cached;
        } else if (*rc::gen::inRange(0, 8) == 0) {
          ++sequence.preemptions;
          ++planned.preemptions;
          planned.rows.recomputed += sequence.prompt_tokens_computed;
        }
        const int64_t known = sequence.prompt_tokens_cached + sequence.prompt_tokens_computed;
        if (known < sequence.prompt_tokens) {
          const int64_t rows = *rc::gen::inRange<int64_t>(1, sequence.prompt_tokens - known + 1);
          const RowCounts counts = CountRows(known, known + rows, 0, sequence.prompt_tokens);
          EXPECT_EQ(counts.prompt, rows);
          sequence.prompt_tokens_computed += counts.prompt;
          planned.rows.prompt += counts.prompt;
        } else {
          ++planned.rows.decode;
        }
      }
    }
    statistics_.RecordPlanned(planned);
    ExpectNoViolation();
    CommittedStep committed;
    committed.step_seconds = 0.01;
    committed.commit_seconds = 1e-5;
    for (auto request = requests_.begin(); request != requests_.end();) {
      std::vector<SequenceTotals>& sequences = request->second;
      for (size_t i = 0; i < sequences.size();) {
        SequenceTotals& sequence = sequences[i];
        if (sequence.prompt_tokens_cached + sequence.prompt_tokens_computed ==
            sequence.prompt_tokens) {
          if (sequence.completion_tokens++ == 0) {
            sequence.first_token_seconds = 1;
            statistics_.RecordFirstToken(1);
          }
          ++committed.completion_tokens;
        }
        if (*rc::gen::inRange(0, 4) != 0) {
          ++i;
          continue;
        }
        const auto reason = static_cast<EndReason>(*rc::gen::inRange(0, 5));
        sequence.total_seconds = 3;
        statistics_.RecordSequenceEnded(reason, sequence);
        auto [known, is_new] = reasons_.emplace(request->first, reason);
        if (!is_new) known->second = StrongerReason(known->second, reason);
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (sequences.empty()) {
        statistics_.RecordRequestEnded(reasons_.at(request->first));
        ++ended;
        request = requests_.erase(request);
      } else {
        ++request;
      }
    }
    for (const auto& [id, sequences] : requests_) {
      for (const SequenceTotals& sequence : sequences) {
        ++(sequence.started ? committed.sequences_running : committed.sequences_waiting);
      }
    }
    committed.blocks = {.total = 10, .used = 4, .reclaimable = 6, .unit_bytes = 100};
    statistics_.RecordCommitted(committed);
    ExpectNoViolation();
  }

  void ExpectNoViolation() const {
    RC_ASSERT(statistics_.FindViolation(Living()) == "");
  }

  int64_t refused = 0;
  int64_t ended = 0;

 private:
  EngineStatistics& statistics_;
  std::map<int64_t, std::vector<SequenceTotals>> requests_;
  std::map<int64_t, EndReason> reasons_;
  int64_t next_ = 0;
};

RC_GTEST_PROP(StatisticsTest, NumbersReconcileAfterAnyEvents, ()) {
  EngineStatistics statistics("model");
  EngineModel model(statistics);
  int64_t submitted = 0;
  const int events = *rc::gen::inRange(0, 60);
  for (int i = 0; i < events; ++i) {
    if (*rc::gen::inRange(0, 3) == 0) {
      model.Submit(*rc::gen::inRange<int64_t>(0, 4), *rc::gen::inRange<int64_t>(1, 300));
      ++submitted;
    } else {
      model.Step();
    }
  }
  const StatisticsSnapshot snapshot = statistics.Snapshot();
  RC_ASSERT(snapshot.requests_submitted == submitted);
  RC_ASSERT(snapshot.requests_ended[5] == model.refused);
  // Both formats say the same.
  const Json json = Json::parse(StatisticsJson(snapshot));
  ParsedMetrics metrics = ParsePrometheus(StatisticsPrometheus(snapshot));
  RC_ASSERT(json.size() == metrics.types.size());
  for (const auto& [name, type] : metrics.types) {
    if (type == "histogram") {
      RC_ASSERT(json.at(name).at("count").get<double>() == metrics.samples[name + "_count"][""]);
      RC_ASSERT(json.at(name).at("sum").get<double>() == metrics.samples[name + "_sum"][""]);
      continue;
    }
    double sum = 0;
    for (const auto& [labels, value] : metrics.samples[name]) sum += value;
    double json_sum = 0;
    const Json leaves = Json{{"", json.at(name)}}.flatten();
    for (const Json& leaf : leaves) json_sum += leaf.get<double>();
    RC_ASSERT(sum == json_sum);
  }
}

// Every rule finds its fault.
TEST(StatisticsTest, FaultsAreFound) {
  SequenceTotals sequence;
  sequence.prompt_tokens = 4;
  sequence.prompt_tokens_computed = 3;
  sequence.prompt_tokens_cached = 1;
  sequence.completion_tokens = 2;
  sequence.preemptions = 1;
  sequence.started = true;
  sequence.first_token_seconds = 1;
  sequence.total_seconds = 2;
  const PlannedStep planned{.rows = {.prompt = 3}, .prompt_tokens_cached = 1, .preemptions = 1};
  const CommittedStep committed{.completion_tokens = 2};
  using Fault = void (*)(SequenceTotals&, PlannedStep&, CommittedStep&, EngineStatistics&);
  const std::vector<std::pair<std::string, Fault>> faults = {
      {"", [](auto&, auto&, auto&, auto&) {}},
      {"requests submitted", [](auto&, auto&, auto&, auto& s) { s.RecordSubmitted(); }},
      {"requests submitted",
       [](auto&, auto&, auto&, auto& s) { s.RecordRequestEnded(EndReason::kStop); }},
      {"sequences created", [](auto&, auto&, auto&, auto& s) { s.RecordCreated(0); }},
      {"held, waiting", [](auto&, auto&, auto& c, auto&) { c.sequences_held = 1; }},
      {"held, waiting", [](auto&, auto&, auto& c, auto&) { c.sequences_waiting = 1; }},
      {"held, waiting", [](auto&, auto&, auto& c, auto&) { c.sequences_running = 1; }},
      {"prompt tokens submitted", [](auto& q, auto&, auto&, auto&) { q.prompt_tokens = 5; }},
      {"prompt tokens computed", [](auto&, auto& p, auto&, auto&) { p.rows.prompt = 2; }},
      {"prompt tokens cached", [](auto&, auto& p, auto&, auto&) { p.prompt_tokens_cached = 0; }},
      {"computed and cached",
       [](auto& q, auto& p, auto&, auto&) {
         q.prompt_tokens_cached = 2;
         p.prompt_tokens_cached = 2;
       }},
      {"completion tokens", [](auto&, auto&, auto& c, auto&) { c.completion_tokens = 3; }},
      {"preemptions", [](auto&, auto& p, auto&, auto&) { p.preemptions = 0; }},
      {"committed steps", [](auto&, auto&, auto&, auto& s) { s.RecordCommitted({}); }},
      {"queue_time", [](auto&, auto&, auto&, auto& s) { s.RecordStarted(1); }},
      {"first_token_time", [](auto&, auto&, auto&, auto& s) { s.RecordFirstToken(1); }},
      {"units of a pool",
       [](auto&, auto&, auto& c, auto&) { c.blocks = {.total = 3, .used = 2, .reclaimable = 2}; }},
      {"units used", [](auto&, auto&, auto& c, auto&) { c.slots = {.total = 3, .used = -1}; }},
      {"units reclaimable",
       [](auto&, auto&, auto& c, auto&) { c.window_pages = {.total = 3, .reclaimable = -1}; }},
  };
  for (const auto& [message, fault] : faults) {
    SequenceTotals q = sequence;
    PlannedStep p = planned;
    CommittedStep c = committed;
    EngineStatistics statistics("model");
    EngineStatistics* extra = &statistics;
    fault(q, p, c, *extra);
    statistics.RecordSubmitted();
    statistics.RecordCreated(4);
    statistics.RecordStarted(0.1);
    statistics.RecordPlanned(p);
    statistics.RecordFirstToken(1);
    statistics.RecordSequenceEnded(EndReason::kStop, q);
    statistics.RecordRequestEnded(EndReason::kStop);
    statistics.RecordCommitted(c);
    const std::string found = statistics.FindViolation({});
    if (message.empty()) {
      EXPECT_EQ(found, "");
    } else {
      EXPECT_THAT(found, HasSubstr(message));
    }
  }
  EngineStatistics refused("model");
  refused.RecordCreated(0);
  refused.RecordSequenceEnded(EndReason::kRefused, {});
  EXPECT_THAT(refused.FindViolation({}), HasSubstr("refused"));
}

TEST(StatisticsTest, RowsAreCountedByKind) {
  RowCounts rows = CountRows(10, 30, 5, 20);  // 10-14 again, 15-19 prompt, 20-29 output
  EXPECT_EQ(rows.recomputed, 5);
  EXPECT_EQ(rows.prompt, 5);
  EXPECT_EQ(rows.decode, 10);
  rows = CountRows(10, 30, 20, 20);
  EXPECT_EQ(rows.prompt, 0);
  EXPECT_EQ(rows.decode, 0);
  rows = CountRows(0, 20, 0, 20);
  EXPECT_EQ(rows.prompt, 20);
  EXPECT_EQ(rows.decode, 0);
}

TEST(StatisticsTest, TheReasonOfARequestIsTheStrongestOfItsCompletions) {
  EXPECT_EQ(StrongerReason(EndReason::kStop, EndReason::kLength), EndReason::kLength);
  EXPECT_EQ(StrongerReason(EndReason::kError, EndReason::kDeadline), EndReason::kError);
  EXPECT_EQ(StrongerReason(EndReason::kAbort, EndReason::kStop), EndReason::kAbort);
}

TEST(StatisticsTest, HistogramRangesIncludeTheirUpperEnds) {
  TimeHistogram histogram;
  histogram.Add(1e-5);
  histogram.Add(1.0001e-5);
  histogram.Add(2500);
  histogram.Add(2501);
  histogram.Add(-1);
  histogram.Add(std::nan(""));
  EXPECT_EQ(histogram.counts.front(), 3);
  EXPECT_EQ(histogram.counts[1], 1);
  EXPECT_EQ(histogram.counts[TimeHistogram::kBounds.size() - 1], 1);
  EXPECT_EQ(histogram.counts.back(), 1);
  EXPECT_EQ(histogram.count, 6);
  EXPECT_DOUBLE_EQ(histogram.sum_seconds, 1e-5 + 1.0001e-5 + 5001);
  EXPECT_EQ(histogram.max_seconds, 2501);
}

TEST(StatisticsTest, NamesOfCheckpointsAreEscaped) {
  StatisticsSnapshot snapshot;
  snapshot.model = "a \"model\"\\with\nlines";
  EXPECT_EQ(ParsePrometheus(StatisticsPrometheus(snapshot)).label_values.at("model"),
            snapshot.model);
  EXPECT_TRUE(Json::parse(StatisticsJson(snapshot)).at("deepinfer_info").contains(snapshot.model));
  snapshot.model = "\xff";
  EXPECT_EQ(ParsePrometheus(StatisticsPrometheus(snapshot)).label_values.at("model"),
            "\xef\xbf\xbd");
  EXPECT_TRUE(Json::parse(StatisticsJson(snapshot)).at("deepinfer_info").contains("\xef\xbf\xbd"));
}

TEST(StatisticsTest, NamesCarryTheirUnits) {
  const ParsedMetrics metrics = ParsePrometheus(StatisticsPrometheus({}));
  for (const auto& [name, type] : metrics.types) {
    EXPECT_EQ(name.rfind("deepinfer_", 0), 0u) << name;
    EXPECT_EQ(type == "counter", name.ends_with("_total")) << name;
    EXPECT_EQ(type == "histogram", name.ends_with("_seconds")) << name;
  }
}

TEST(StatisticsTest, TheSummaryNamesWhatHappened) {
  EngineStatistics statistics("model");
  for (int i = 0; i < 3; ++i) statistics.RecordSubmitted();
  statistics.RecordRefused();
  statistics.RecordRequestEnded(EndReason::kStop);
  statistics.RecordPlanned({.rows = {.prompt = 30, .decode = 10}, .plan_seconds = 0.001});
  statistics.RecordCommitted({.completion_tokens = 20, .step_seconds = 0.25});
  const std::string line = SummaryLine(statistics.Snapshot(), 2);
  EXPECT_THAT(line, HasSubstr("2 of 3 requests ended (1 stop, 1 refused)"));
  EXPECT_THAT(line, HasSubstr("30 prompt tokens computed, 0 cached; 20 completion tokens in 2 s "
                              "(15 + 10 tokens/s)"));
  EXPECT_THAT(line, HasSubstr("1 steps of 40 rows, 250 ms each and 1 ms of host work"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST(StatisticsTest, ThePageIsThatOfTheTable) {
  std::ifstream file(DI_TEST_DATA_DIR "/../../docs/metrics.md");
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_EQ(page.str(), MetricsPage())
      << "docs/metrics.md is out of date: run './dev docs', which writes it.";
}

TEST(StatisticsTest, AnotherThreadSeesWholeSteps) {
  EngineStatistics statistics("model");
  std::thread engine([&] {
    for (int i = 0; i < 20'000; ++i) {
      statistics.RecordPlanned({.rows = {.prompt = 1, .decode = 2, .recomputed = 3}});
      statistics.RecordCommitted({});
    }
  });
  for (int i = 0; i < 200; ++i) {
    const StatisticsSnapshot s = statistics.Snapshot();
    ASSERT_EQ(s.rows, 6 * s.steps);
    ASSERT_EQ(s.plan_time.count, s.steps);
    ASSERT_LE(s.step_time.count, s.steps);
  }
  engine.join();
}

}  // namespace
}  // namespace deepinfer
