// Measures the output parser on one thread and prints the result as JSON:
//
//   output_parser_bench [TOKENIZER_JSON]
//
// Speeds are the best of seven runs, in millions of bytes per second of CPU time of the thread;
// with a tokenizer also nanoseconds per id, decoding included.
#include <fmt/core.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu_features.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

constexpr int kRuns = 7;

double ThreadCpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double BestSeconds(const std::function<void()>& action) {
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    const double start = ThreadCpuSeconds();
    action();
    const double seconds = ThreadCpuSeconds() - start;
    if (run == 0 || seconds < best) best = seconds;
  }
  return best;
}

std::string Repeated(std::string_view text, size_t bytes) {
  std::string out;
  out.reserve(bytes + text.size());
  while (out.size() < bytes) out += text;
  return out;
}

OutputParserOptions Options(OutputParserOptions::Policy policy) {
  OutputParserOptions options;
  options.tools = true;
  options.stop = {"Observation:", "\nUser:"};
  options.policy = policy;
  return options;
}

// The bytes of all events keep the work observable.
size_t Parse(const OutputParserOptions& options, std::string_view text, size_t piece) {
  OutputParser parser(options);
  std::vector<OutputEvent> events;
  size_t size = 0;
  const auto take = [&] {
    for (const OutputEvent& event : events) {
      if (const auto* content = std::get_if<ContentEvent>(&event)) size += content->text.size();
      if (const auto* arguments = std::get_if<ArgumentsEvent>(&event))
        size += arguments->text.size();
    }
    events.clear();
  };
  for (size_t at = 0; at < text.size(); at += piece) {
    parser.Push(text.substr(at, piece), &events);
    take();
  }
  parser.Finish(OutputEnd::kStop, &events);
  take();
  return size;
}

Status Run(const char* tokenizer_path) {
  constexpr size_t kBytes = size_t{8} << 20;
  constexpr std::string_view kProse =
      "The quick brown fox jumps over the lazy dog, because a < b and the sun is out.\n"
      "Ein kurzer Satz mit Umlauten: Größe, Übung, Straße; 然后是一些中文。\n\n";
  const std::string prose = Repeated(kProse, kBytes);
  const std::string call =
      "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"write\">\n<｜DSML｜ parameter name=\"text\" "
      "string=\"true\">" +
      prose + "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>";
  size_t sizes = 0;
  fmt::print("{{\n  \"cpu\": \"{}\"", HostCpuFeatures().brand);
  for (const auto& [name, policy] :
       {std::pair{"recommended", OutputParserOptions::Policy::kRecommended},
        std::pair{"toolkit", OutputParserOptions::Policy::kToolkit}}) {
    const OutputParserOptions options = Options(policy);
    const auto show = [&](const char* what, std::string_view text, size_t piece) {
      const double seconds = BestSeconds([&] { sizes += Parse(options, text, piece); });
      fmt::print(",\n  \"{}_{}_mb_per_s\": {:.0f}", name, what,
                 static_cast<double>(text.size()) * 1e-6 / seconds);
    };
    show("content", prose, size_t{64} << 10);
    show("content_in_pieces_of_4", prose, 4);
    show("string_argument", call, size_t{64} << 10);
    show("newlines_only", Repeated("\n", kBytes), size_t{64} << 10);
    show("open_brackets_only", Repeated("<", kBytes), size_t{64} << 10);
  }
  if (tokenizer_path != nullptr) {
    DI_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(tokenizer_path));
    DI_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                        tokenizer.Encode(std::string_view(prose).substr(0, size_t{1} << 20)));
    const double seconds = BestSeconds([&] {
      OutputParser parser(Options(OutputParserOptions::Policy::kRecommended), &tokenizer);
      std::vector<OutputEvent> events;
      for (const int32_t id : ids) {
        parser.PushToken(id, &events);
        sizes += events.size();
        events.clear();
      }
      parser.Finish(OutputEnd::kStop, &events);
    });
    fmt::print(",\n  \"ns_per_id\": {:.0f}", seconds * 1e9 / static_cast<double>(ids.size()));
  }
  const double start_seconds = BestSeconds([&] {
    for (int i = 0; i < 1000; ++i)
      sizes += Parse(Options(OutputParserOptions::Policy::kRecommended), "Hi.", 3);
  });
  fmt::print(",\n  \"us_per_short_answer\": {:.2f}\n}}\n", start_seconds * 1e3);
  return sizes > 0 ? Status() : Fail(Code::kInternal, "The parser gave no text.");
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  if (argc > 2) {
    fmt::print(stderr, "usage: output_parser_bench [TOKENIZER_JSON]\n");
    return 2;
  }
  const deepinfer::Status status = deepinfer::Run(argc == 2 ? argv[1] : nullptr);
  if (!status.has_value()) {
    fmt::print(stderr, "output_parser_bench: {}\n", status.error().message);
    return 1;
  }
  return 0;
}
