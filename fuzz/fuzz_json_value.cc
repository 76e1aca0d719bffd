// Arbitrary bytes are refused or become a value that is written and read back unchanged.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_value.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy of exactly this size, so that a read beyond the text is a read beyond an allocation.
  const std::vector<char> copy(data, data + size);
  const auto value = deepinfer::JsonValue::Parse({copy.data(), copy.size()});
  if (!value.has_value()) return 0;
  for (const std::string& text : {value->Dump(), value->DumpCompact()}) {
    const auto again = deepinfer::JsonValue::Parse(text);
    if (!again.has_value() || !(*again == *value)) std::abort();
  }
  return 0;
}
