// Lines that hold any JSON object with an id: those whose fields nest deeper than a fixed set, like
// requests and conversations. Lines of known fields are read by apps/jsonl.h.
#pragma once

#include <string_view>

#include "apps/jsonl.h"
#include "base/json_value.h"

namespace deepinfer {

struct JsonLine {
  JsonValue value;        // an object
  std::string_view text;  // as it was written
};

// The text must outlive the result.
ParsedLine<JsonLine> ParseJsonLine(std::string_view line);

}  // namespace deepinfer
