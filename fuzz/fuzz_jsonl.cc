// Input lines of every command: whatever the bytes are, parsing ends with a value or with an error
// that can be printed.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "apps/jsonl.h"
#include "base/utf8.h"

namespace {

// An output line must be valid UTF-8 without a line end, also when the message quotes the input.
void Require(bool condition) {
  if (!condition) std::abort();
}

template <class T>
void CheckParsed(const deepinfer::ParsedLine<T>& parsed) {
  if (parsed.value.has_value()) {
    Require(parsed.id.has_value());
    return;
  }
  Require(!parsed.value.error().message.empty());
  const std::string line = deepinfer::ErrorLine(parsed.id, 1, parsed.value.error());
  Require(!deepinfer::FindInvalidUtf8(line).has_value() && line.find('\n') == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string_view line(reinterpret_cast<const char*>(bytes), size);
  const auto generate = deepinfer::ParseGenerateLine(line);
  CheckParsed(generate);
  if (generate.value.has_value()) Require(generate.value->sampling_params.Validate().empty());
  CheckParsed(deepinfer::ParseTextLine(line));
  CheckParsed(deepinfer::ParseIdsLine(line));
  CheckParsed(deepinfer::ParseLogitsLine(line));
  const auto params = deepinfer::ParseSamplingParams(line);
  if (params.has_value()) Require(params->Validate().empty());
  return 0;
}
