#include "text/request_tools.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/quoted.h"
#include "text/json_schema_shape.h"

namespace deepinfer {
namespace {

constexpr size_t kMaxNameBytes = 128;

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-';
}

JsonValue OrNull(const std::optional<std::string>& text) {
  return text.has_value() ? JsonValue(*text) : JsonValue();
}

// The parameters that the model is shown and held to.
JsonValue EffectiveParameters(const DeclaredTool& declared, RequestReader* reader) {
  const std::string path = FieldPath(declared.path, declared.parameters_key);
  const bool strict = declared.strict.value_or(false);
  if (declared.parameters == nullptr && declared.parameters_required)
    reader->Refuse(path, "is missing");
  // A strict schema is checked while it is rebuilt.
  if (declared.parameters != nullptr && !strict) {
    const Status shape = CheckJsonSchemaShape(*declared.parameters);
    if (!shape.has_value()) {
      reader->Refuse(path, fmt::format("is not a valid JSON schema: {}",
                                       WithoutFullStop(shape.error().message)));
      return {};
    }
    const JsonValue* type = declared.parameters->Find("type");
    if (type == nullptr || type->if_string() == nullptr || *type->if_string() != "object") {
      reader->Refuse(path, "must be a JSON schema of the type \"object\"");
      return {};
    }
  }
  JsonValue parameters =
      declared.parameters != nullptr ? *declared.parameters : JsonValue(JsonValue::Object());
  if (!strict) return parameters;
  if (declared.parameters == nullptr) parameters.Set("type", "object");
  Result<JsonValue> rebuilt = StrictSchema(parameters);
  if (!rebuilt.has_value()) {
    reader->Refuse(
        path, fmt::format("cannot be made strict: {}", WithoutFullStop(rebuilt.error().message)));
    return {};
  }
  return *std::move(rebuilt);
}

}  // namespace

void CheckToolName(const std::string& name, const std::string& path, RequestReader* reader) {
  if (name.empty()) {
    reader->Refuse(path, "must not be empty");
  } else if (name.size() > kMaxNameBytes) {
    reader->Refuse(path,
                   fmt::format("has {} bytes; at most {} are allowed", name.size(), kMaxNameBytes));
  } else if (!std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    reader->Refuse(
        path, fmt::format("is {}; only letters, digits, '_' and '-' are allowed", Quoted(name)));
  }
}

void RequestTools::Add(const DeclaredTool& declared) {
  if (!declared.name_checked)
    CheckToolName(declared.name, FieldPath(declared.path, "name"), reader_);
  if (!by_name_.emplace(declared.name, tools_.size()).second) {
    pending_.Refuse(FieldPath(declared.path, "name"),
                    fmt::format("is {}, the name of another tool; names must be unique",
                                Quoted(declared.name)));
    return;
  }
  JsonValue parameters = EffectiveParameters(declared, &pending_);

  Tool tool;
  tool.name = declared.name;
  tool.strict = declared.strict.value_or(false);
  tool.defer_loading = declared.defer_loading;
  if (tool.strict) tool.recipe_parameters = parameters.Dump();
  if (declared.function != nullptr) {
    tool.function = declared.function->Dump();
  } else {
    JsonValue function;
    function.Set("name", declared.name);
    if (declared.description.has_value()) function.Set("description", *declared.description);
    if (declared.parameters != nullptr) function.Set("parameters", *declared.parameters);
    tool.function = function.Dump();
  }

  JsonValue function;
  function.Set("name", declared.name);
  function.Set("description", OrNull(declared.description));
  function.Set("parameters", std::move(parameters));
  function.Set("strict", declared.strict.has_value() ? JsonValue(*declared.strict) : JsonValue());
  JsonValue constraint;
  constraint.Set("type", "function");
  constraint.Set("function", std::move(function));
  if (declared.defer_loading) constraint.Set("defer_loading", true);

  tools_.push_back(std::move(tool));
  constraints_.push_back(constraint.DumpCompact());
  paths_.push_back(declared.path);
}

const Tool* RequestTools::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tools_[found->second];
}

ToolChoice RequestTools::Choose(const RequestedChoice& choice, bool thinking) {
  using Kind = RequestedChoice::Kind;
  if (tools_.empty()) return ToolChoice::kAuto;
  if (choice.kind == Kind::kNone) {
    visible_ = false;
    return ToolChoice::kNone;
  }
  reader_->Adopt(pending_);
  if (choice.kind == Kind::kNamed) {
    const auto found = by_name_.find(choice.name);
    if (found == by_name_.end()) {
      reader_->Refuse(choice.path,
                      fmt::format("names {}, which is none of the tools", Quoted(choice.name)));
      return ToolChoice::kAuto;
    }
    const size_t kept = found->second;
    tools_ = {tools_[kept]};
    constraints_ = {constraints_[kept]};
    paths_ = {paths_[kept]};
    by_name_ = {{choice.name, 0}};
  }
  for (size_t i = 1; i < tools_.size(); ++i) {
    if (tools_[i].strict == tools_[0].strict) continue;
    reader_->Refuse(FieldPath(paths_[i], "strict"),
                    "differs from the first tool's; strict and other tools cannot be mixed");
    break;
  }
  if (choice.kind == Kind::kAuto) return ToolChoice::kAuto;
  if (thinking)
    reader_->Refuse(choice.path, "forces a call, which is not possible in thinking mode");
  return ToolChoice::kRequired;
}

std::string RequestTools::ConstraintJson() const {
  std::string out = "[";
  for (const std::string& constraint : constraints_) {
    if (out.size() > 1) out += ',';
    out += constraint;
  }
  return out + "]";
}

}  // namespace deepinfer
