// Measures the tokenizer on one thread and prints the result as JSON:
//
//   tokenizer_bench TOKENIZER_JSON TEXT [IDS_OUT]
//
// Speeds are millions of UTF-8 bytes per second of CPU time of the thread, the best of seven runs
// (and the first run, in which caches are cold). IDS_OUT receives the ids of the whole text as
// little-endian 32-bit integers, for comparison with other libraries (bench/tokenizer_compare.py
// does that).
#include <fmt/core.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu_features.h"
#include "base/mapped_file.h"
#include "text/incremental_decoder.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

constexpr int kRuns = 7;

double ThreadCpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct Timing {
  double first = 0;
  double best = 0;
};

Timing Measure(const std::function<void()>& action) {
  Timing timing;
  for (int run = 0; run < kRuns; ++run) {
    const double start = ThreadCpuSeconds();
    action();
    const double seconds = ThreadCpuSeconds() - start;
    if (run == 0) timing.first = timing.best = seconds;
    timing.best = std::min(timing.best, seconds);
  }
  return timing;
}

// Texts of at least 4000 bytes that end with a line, like the reference measurement uses.
std::vector<std::string_view> SplitIntoDocuments(std::string_view text) {
  std::vector<std::string_view> documents;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find('\n', std::min(begin + 4000, text.size()));
    end = end == std::string_view::npos ? text.size() : end + 1;
    documents.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return documents;
}

Status Run(const std::string& tokenizer_path, const std::string& text_path, const char* ids_path) {
  const double load_start = ThreadCpuSeconds();
  DI_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(tokenizer_path));
  const double load_seconds = ThreadCpuSeconds() - load_start;
  DI_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(text_path));
  const std::string text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  const double megabytes = static_cast<double>(text.size()) * 1e-6;

  const EncodeOptions options;
  DI_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text, options));
  if (ids_path != nullptr) {
    std::FILE* out = std::fopen(ids_path, "wb");
    const bool written =
        out != nullptr && std::fwrite(ids.data(), sizeof(int32_t), ids.size(), out) == ids.size();
    if (out == nullptr || std::fclose(out) != 0 || !written) {
      return Fail(Code::kUnavailable, fmt::format("Cannot write '{}'.", ids_path));
    }
  }
  const std::vector<std::string_view> documents = SplitIntoDocuments(text);
  size_t num_ids = 0;  // keeps the work observable
  const Timing encode = Measure([&] { num_ids += tokenizer.Encode(text, options)->size(); });
  const Timing encode_documents = Measure([&] {
    for (const std::string_view document : documents)
      num_ids += tokenizer.Encode(document, options)->size();
  });
  bool round_trip = true;
  const Timing decode = Measure([&] { round_trip = tokenizer.Decode(ids) == text && round_trip; });
  const Timing incremental = Measure([&] {
    IncrementalDecoder decoder(tokenizer);
    size_t size = 0;
    for (const int32_t id : ids) size += decoder.Push(id).size();
    size += decoder.Flush().size();
    round_trip = size == text.size() && round_trip;
  });

  fmt::print("{{\n");
  fmt::print("  \"cpu\": \"{}\",\n", HostCpuFeatures().brand);
  fmt::print("  \"text_bytes\": {},\n  \"ids\": {},\n  \"documents\": {},\n", text.size(),
             ids.size(), documents.size());
  fmt::print("  \"round_trip\": {},\n  \"load_seconds\": {:.3f},\n", round_trip, load_seconds);
  const auto show = [&](const char* name, const Timing& timing, const char* end) {
    fmt::print("  \"{}\": {{\"mb_per_s\": {:.1f}, \"first_run_mb_per_s\": {:.1f}}}{}\n", name,
               megabytes / timing.best, megabytes / timing.first, end);
  };
  show("encode_one_text", encode, ",");
  show("encode_documents", encode_documents, ",");
  show("decode", decode, ",");
  show("incremental_decode", incremental, "");
  fmt::print("}}\n");
  if (!round_trip || num_ids == 0)
    return Fail(Code::kInternal, "The decoded text differs from the input.");
  return {};
}

}  // namespace
}  // namespace deepinfer

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    fmt::print(stderr, "usage: tokenizer_bench TOKENIZER_JSON TEXT [IDS_OUT]\n");
    return 2;
  }
  const deepinfer::Status status = deepinfer::Run(argv[1], argv[2], argc == 4 ? argv[3] : nullptr);
  if (!status.has_value()) {
    fmt::print(stderr, "tokenizer_bench: {}\n", status.error().message);
    return 1;
  }
  return 0;
}
