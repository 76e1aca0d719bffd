// The schema of a strict tool, rebuilt: only the keywords that a strict schema may have are kept,
// in a fixed order, and every property of an object is required. References to definitions stay
// though the definitions go, as in the vendor's toolkit.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/quoted.h"
#include "text/chat_request.h"

namespace deepinfer {
namespace {

// A member that is absent or null.
const JsonValue* Given(const JsonValue& schema, std::string_view key) {
  const JsonValue* value = schema.Find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

class StrictSchemaBuilder {
 public:
  Result<JsonValue> Top(const JsonValue& schema) {
    const JsonValue* type = schema.Find("type");
    if (type == nullptr || type->if_string() == nullptr || *type->if_string() != "object")
      return Wrong("", "must be a schema of the type object");
    return Object(schema, /*may_be_empty=*/true);
  }

 private:
  tl::unexpected<Error> Wrong(std::string_view member, std::string_view what) const {
    constexpr size_t kMaxShown = 500;
    std::string path = path_ + std::string(member);
    if (path.size() > kMaxShown) path = fmt::format("$ ({} bytes of a path)", path.size());
    return Fail(Code::kInvalidArgument, fmt::format("{} {}.", path, what), path);
  }
  // Goes on at a part of the schema; returns the size of the path to go back to.
  size_t Enter(std::string_view step) {
    const size_t mark = path_.size();
    path_ += step;
    return mark;
  }

  // Recursion is as deep as the schema.
  Result<JsonValue> Any(const JsonValue& schema) {
    if (const JsonValue* type = schema.Find("type")) {
      if (type->if_array() != nullptr) return TypeList(schema, *type->if_array());
      return Typed(schema, *type);
    }
    if (const JsonValue* choices = schema.Find("anyOf")) return AnyOf(schema, *choices);
    if (const JsonValue* reference = schema.Find("$ref")) {
      if (reference->if_string() == nullptr) return Wrong(".$ref", "must be a string");
      JsonValue out;
      out.Set("$ref", *reference);
      return out;
    }
    return Wrong("", "needs one of 'type', 'anyOf' and '$ref' in a strict schema");
  }

  Result<JsonValue> Typed(const JsonValue& schema, const JsonValue& type) {
    const std::string name = type.if_string() != nullptr ? *type.if_string() : "";
    if (name == "object") return Object(schema, /*may_be_empty=*/false);
    if (name == "string") return String(schema);
    if (name == "number" || name == "integer") return Number(schema, name == "integer");
    if (name == "array") return Array(schema);
    if (name == "boolean" || name == "null") {
      JsonValue out;
      out.Set("type", type);
      DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
      return out;
    }
    return Wrong(".type", "must be object, string, number, integer, boolean, array or null");
  }

  Result<JsonValue> TypeList(const JsonValue& schema, const JsonValue::Array& types) {
    constexpr std::array<std::string_view, 5> kScalars = {"string", "number", "integer", "boolean",
                                                          "null"};
    for (const JsonValue& type : types) {
      const std::string* name = type.if_string();
      if (name == nullptr || std::find(kScalars.begin(), kScalars.end(), *name) == kScalars.end())
        return Wrong(".type", "may list only string, number, integer, boolean and null");
    }
    JsonValue out;
    out.Set("type", types);
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    return out;
  }

  Result<JsonValue> Object(const JsonValue& schema, bool may_be_empty) {
    JsonValue::Object properties;
    JsonValue::Array required;
    std::set<std::string_view> names;
    if (const JsonValue* given = Given(schema, "properties")) {
      if (given->if_object() == nullptr) return Wrong(".properties", "must be an object");
      for (const auto& [name, property] : *given->if_object()) {
        const size_t mark = Enter(fmt::format(".properties.{}", name));
        DI_ASSIGN_OR_RETURN(JsonValue rebuilt, Any(property));
        path_.resize(mark);
        properties.emplace_back(name, std::move(rebuilt));
        required.push_back(name);
        names.insert(name);
      }
    }
    if (properties.empty() && !may_be_empty)
      return Wrong("", "is an object without properties, which a strict schema may not have");
    if (const JsonValue* additional = Given(schema, "additionalProperties")) {
      const bool* allowed = additional->if_bool();
      if (allowed == nullptr || *allowed)
        return Wrong(".additionalProperties", "must be false in a strict schema");
    }
    DI_RETURN_IF_ERROR(CheckRequired(schema, names));
    JsonValue out;
    out.Set("type", "object");
    out.Set("properties", std::move(properties));
    out.Set("additionalProperties", false);
    out.Set("required", std::move(required));
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    return out;
  }

  Status CheckRequired(const JsonValue& schema, const std::set<std::string_view>& names) {
    const JsonValue* required = Given(schema, "required");
    if (required == nullptr) return {};
    constexpr std::string_view field = ".required";
    if (required->if_array() == nullptr) return Wrong(field, "must be a list");
    std::set<std::string_view> seen;
    for (const JsonValue& name : *required->if_array()) {
      if (name.if_string() == nullptr) return Wrong(field, "must be a list of strings");
      if (!names.contains(*name.if_string()))
        return Wrong(field,
                     fmt::format("names {}, which is no property", Quoted(*name.if_string())));
      if (!seen.insert(*name.if_string()).second)
        return Wrong(field, fmt::format("names {} twice", Quoted(*name.if_string())));
    }
    if (seen.size() != names.size())
      return Wrong(field, "must name all properties in a strict schema");
    return {};
  }

  Result<JsonValue> String(const JsonValue& schema) {
    JsonValue out;
    out.Set("type", "string");
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    DI_RETURN_IF_ERROR(KeepString(schema, "pattern", &out));
    if (const JsonValue* format = Given(schema, "format")) {
      constexpr std::array<std::string_view, 5> kFormats = {"email", "hostname", "ipv4", "ipv6",
                                                            "uuid"};
      const std::string* name = format->if_string();
      if (name == nullptr || std::find(kFormats.begin(), kFormats.end(), *name) == kFormats.end())
        return Wrong(".format", "must be email, hostname, ipv4, ipv6 or uuid in a strict schema");
      out.Set("format", *format);
    }
    if (const JsonValue* values = Given(schema, "enum")) {
      if (values->if_array() == nullptr) return Wrong(".enum", "must be a list");
      for (const JsonValue& value : *values->if_array()) {
        if (value.if_string() == nullptr) return Wrong(".enum", "must be a list of strings");
      }
      out.Set("enum", *values);
    }
    return out;
  }

  Result<JsonValue> Number(const JsonValue& schema, bool integer) {
    JsonValue out;
    out.Set("type", integer ? "integer" : "number");
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    for (const std::string_view key : {"const", "default", "minimum", "maximum", "exclusiveMinimum",
                                       "exclusiveMaximum", "multipleOf"}) {
      const JsonValue* value = Given(schema, key);
      if (value == nullptr) continue;
      if (integer ? value->if_int64() == nullptr : !value->is_number())
        return Wrong(fmt::format(".{}", key),
                     integer ? "must be an integer of 64 bits" : "must be a number");
      out.Set(key, *value);
    }
    return out;
  }

  Result<JsonValue> Array(const JsonValue& schema) {
    const JsonValue* items = schema.Find("items");
    if (items == nullptr) return Wrong("", "is an array without 'items'");
    const size_t mark = Enter(".items");
    DI_ASSIGN_OR_RETURN(JsonValue rebuilt, Any(*items));
    path_.resize(mark);
    JsonValue out;
    out.Set("type", "array");
    out.Set("items", std::move(rebuilt));
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    return out;
  }

  Result<JsonValue> AnyOf(const JsonValue& schema, const JsonValue& choices) {
    if (choices.if_array() == nullptr) return Wrong(".anyOf", "must be a list");
    JsonValue::Array rebuilt;
    for (const JsonValue& choice : *choices.if_array()) {
      const size_t mark = Enter(fmt::format(".anyOf[{}]", rebuilt.size()));
      const JsonValue* type = choice.Find("type");
      if (type == nullptr) return Wrong("", "needs a 'type' in a strict schema");
      DI_ASSIGN_OR_RETURN(JsonValue one, Typed(choice, *type));
      path_.resize(mark);
      rebuilt.push_back(std::move(one));
    }
    JsonValue out;
    out.Set("anyOf", std::move(rebuilt));
    DI_RETURN_IF_ERROR(KeepString(schema, "description", &out));
    return out;
  }

  Status KeepString(const JsonValue& schema, std::string_view key, JsonValue* out) {
    const JsonValue* value = Given(schema, key);
    if (value == nullptr) return {};
    if (value->if_string() == nullptr) return Wrong(fmt::format(".{}", key), "must be a string");
    out->Set(key, *value);
    return {};
  }

  std::string path_ = "$";
};

}  // namespace

Result<JsonValue> StrictSchema(const JsonValue& schema) {
  return StrictSchemaBuilder().Top(schema);
}

}  // namespace deepinfer
