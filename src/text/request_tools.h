// The tools of a request: checked, made strict, chosen from, and written as the constraint of a
// decoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deepinfer/chat.h"
#include "text/request_fields.h"

namespace deepinfer {

// What a request asks of the tools.
struct RequestedChoice {
  enum class Kind : uint8_t { kAuto, kNone, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;  // of kNamed
  std::string path;  // of the field, for messages
};

// A function as a request declares it.
struct DeclaredTool {
  std::string name;
  std::optional<std::string> description;
  const JsonValue* parameters = nullptr;  // null: not given
  std::optional<bool> strict;
  bool defer_loading = false;
  // What the checkpoint profile shows; null: name, description and parameters as above.
  const JsonValue* function = nullptr;
  std::string path;            // of the function in the request
  std::string parameters_key;  // "parameters" or "input_schema"
  bool parameters_required = false;
  bool name_checked = false;  // the parts of a name with a namespace have been checked
};

// A request may show the same schema or description again and again by naming it; what that makes
// of a body is at most so many bytes.
inline constexpr size_t kMaxRepeatedBytes = size_t{16} << 20;

// Up to 128 letters, digits, '_' and '-'.
void CheckToolName(const std::string& name, const std::string& path, RequestReader* reader);

class RequestTools {
 public:
  explicit RequestTools(RequestReader* reader) : reader_(reader) {}

  void Add(const DeclaredTool& declared);
  bool empty() const {
    return tools_.empty();
  }
  const Tool* Find(const std::string& name) const;

  // Applies the choice: afterwards only what the model may call is left. To be called once, after
  // all tools are there.
  ToolChoice Choose(const RequestedChoice& choice, bool thinking);
  // Whether the tools are shown to the model at all.
  bool visible() const {
    return visible_ && !tools_.empty();
  }
  const std::vector<Tool>& tools() const {
    return tools_;
  }
  // A compact JSON list of the tools.
  std::string ConstraintJson() const;

 private:
  RequestReader* reader_;
  RequestReader pending_;  // what is wrong, unless the tools are hidden
  std::vector<Tool> tools_;
  std::vector<std::string> constraints_;  // one JSON object per tool
  std::vector<std::string> paths_;
  std::map<std::string, size_t> by_name_;
  bool visible_ = true;
};

}  // namespace deepinfer
