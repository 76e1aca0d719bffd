#include "text/json_schema_shape.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/quoted.h"

namespace deepinfer {
namespace {

enum class Kind : uint8_t {
  kSchema,
  kSchemas,     // a list of at least one
  kSchemaMap,   // an object of schemas
  kItems,       // a schema; in older drafts also a list of schemas
  kType,        // a name or a list of names
  kStrings,     // a list of different strings
  kStringsMap,  // an object of such lists
  kString,
  kReference,
  kBool,
  kCount,  // an integer from 0
  kNumber,
  kPositive,
  kList,
};

const std::map<std::string_view, Kind>& Keywords() {
  static const std::map<std::string_view, Kind> keywords = {
      {"additionalProperties", Kind::kSchema},
      {"unevaluatedProperties", Kind::kSchema},
      {"unevaluatedItems", Kind::kSchema},
      {"propertyNames", Kind::kSchema},
      {"contains", Kind::kSchema},
      {"not", Kind::kSchema},
      {"if", Kind::kSchema},
      {"then", Kind::kSchema},
      {"else", Kind::kSchema},
      {"items", Kind::kItems},
      {"allOf", Kind::kSchemas},
      {"anyOf", Kind::kSchemas},
      {"oneOf", Kind::kSchemas},
      {"prefixItems", Kind::kSchemas},
      {"properties", Kind::kSchemaMap},
      {"patternProperties", Kind::kSchemaMap},
      {"dependentSchemas", Kind::kSchemaMap},
      {"$defs", Kind::kSchemaMap},
      {"definitions", Kind::kSchemaMap},
      {"type", Kind::kType},
      {"required", Kind::kStrings},
      {"dependentRequired", Kind::kStringsMap},
      {"enum", Kind::kList},
      {"examples", Kind::kList},
      {"$ref", Kind::kReference},
      {"$id", Kind::kString},
      {"$schema", Kind::kString},
      {"$comment", Kind::kString},
      {"title", Kind::kString},
      {"description", Kind::kString},
      {"pattern", Kind::kString},
      {"format", Kind::kString},
      {"uniqueItems", Kind::kBool},
      {"deprecated", Kind::kBool},
      {"readOnly", Kind::kBool},
      {"writeOnly", Kind::kBool},
      {"minLength", Kind::kCount},
      {"maxLength", Kind::kCount},
      {"minItems", Kind::kCount},
      {"maxItems", Kind::kCount},
      {"minContains", Kind::kCount},
      {"maxContains", Kind::kCount},
      {"minProperties", Kind::kCount},
      {"maxProperties", Kind::kCount},
      {"minimum", Kind::kNumber},
      {"maximum", Kind::kNumber},
      {"exclusiveMinimum", Kind::kNumber},
      {"exclusiveMaximum", Kind::kNumber},
      {"multipleOf", Kind::kPositive},
  };
  return keywords;
}

class ShapeChecker {
 public:
  explicit ShapeChecker(const JsonValue& root) : root_(root) {
    const JsonValue* draft = root.Find("$schema");
    older_draft_ = draft != nullptr && draft->if_string() != nullptr &&
                   draft->if_string()->find("2020-12") == std::string::npos;
  }

  // Recursion is as deep as the schema. Paths are built on the way back from an error only.
  Status Check(const JsonValue& schema) {
    if (schema.if_bool() != nullptr) return {};
    const JsonValue::Object* members = schema.if_object();
    if (members == nullptr) return Wrong("must be an object, true or false");
    for (const auto& [key, value] : *members) {
      const auto keyword = Keywords().find(key);
      if (keyword == Keywords().end()) continue;
      Status status = CheckKeyword(keyword->second, value);
      if (!status.has_value()) return Under("." + key, std::move(status));
    }
    return {};
  }

 private:
  static tl::unexpected<Error> Wrong(std::string_view what) {
    return Fail(Code::kInvalidArgument, std::string(what));
  }
  // The field grows from its end.
  static Status Under(const std::string& step, Status status) {
    status.error().field = step + status.error().field;
    return status;
  }

  Status CheckKeyword(Kind kind, const JsonValue& value) {
    switch (kind) {
      case Kind::kItems:
        if (older_draft_ && value.if_array() != nullptr) return CheckList(value, 0);
        return Check(value);
      case Kind::kSchema:
        return Check(value);
      case Kind::kSchemas:
        return CheckList(value, 1);
      case Kind::kSchemaMap:
        if (value.if_object() == nullptr) return Wrong("must be an object");
        for (const auto& [name, schema] : *value.if_object()) {
          Status status = Check(schema);
          if (!status.has_value()) return Under("." + name, std::move(status));
        }
        return {};
      case Kind::kType:
        return CheckType(value);
      case Kind::kStrings:
        return CheckStrings(value);
      case Kind::kStringsMap:
        if (value.if_object() == nullptr) return Wrong("must be an object");
        for (const auto& [name, strings] : *value.if_object()) {
          Status status = CheckStrings(strings);
          if (!status.has_value()) return Under("." + name, std::move(status));
        }
        return {};
      case Kind::kString:
        if (value.if_string() == nullptr) return Wrong("must be a string");
        return {};
      case Kind::kReference:
        return CheckReference(value);
      case Kind::kBool:
        if (value.if_bool() == nullptr) return Wrong("must be true or false");
        return {};
      case Kind::kCount: {
        const double number = value.AsDouble();
        if (!value.is_number() || number < 0 || number != std::floor(number))
          return Wrong("must be an integer from 0");
        return {};
      }
      case Kind::kNumber:
        // Draft 4 wrote exclusive bounds as true and false.
        if (!value.is_number() && !(older_draft_ && value.if_bool() != nullptr))
          return Wrong("must be a number");
        return {};
      case Kind::kPositive:
        if (!value.is_number() || !(value.AsDouble() > 0)) return Wrong("must be a number above 0");
        return {};
      case Kind::kList:
        if (value.if_array() == nullptr) return Wrong("must be a list");
        return {};
    }
    return {};
  }

  Status CheckList(const JsonValue& value, size_t min_size) {
    const JsonValue::Array* schemas = value.if_array();
    if (schemas == nullptr) return Wrong("must be a list of schemas");
    if (schemas->size() < min_size) return Wrong("must not be empty");
    for (size_t i = 0; i < schemas->size(); ++i) {
      Status status = Check((*schemas)[i]);
      if (!status.has_value()) return Under(fmt::format("[{}]", i), std::move(status));
    }
    return {};
  }

  static bool IsTypeName(const JsonValue& value) {
    constexpr std::array<std::string_view, 7> kNames = {"object", "string",  "number", "integer",
                                                        "array",  "boolean", "null"};
    const std::string* name = value.if_string();
    return name != nullptr && std::find(kNames.begin(), kNames.end(), *name) != kNames.end();
  }

  static Status CheckType(const JsonValue& value) {
    if (value.if_array() != nullptr) {
      if (value.if_array()->empty()) return Wrong("must not be empty");
      for (const JsonValue& name : *value.if_array()) {
        if (!IsTypeName(name)) return Wrong("lists something that is no type");
      }
      return CheckStrings(value);
    }
    if (!IsTypeName(value))
      return Wrong("must be object, string, number, integer, array, boolean or null");
    return {};
  }

  static Status CheckStrings(const JsonValue& value) {
    if (value.if_array() == nullptr) return Wrong("must be a list of strings");
    std::set<std::string_view> seen;
    for (const JsonValue& text : *value.if_array()) {
      if (text.if_string() == nullptr) return Wrong("must be a list of strings");
      if (!seen.insert(*text.if_string()).second)
        return Wrong(fmt::format("names {} twice", Quoted(*text.if_string())));
    }
    return {};
  }

  Status CheckReference(const JsonValue& value) {
    const std::string* reference = value.if_string();
    if (reference == nullptr) return Wrong("must be a string");
    // Only a pointer into the schema can be followed here; anchors and other documents are left to
    // whoever compiles the schema.
    if (!reference->starts_with("#/")) return {};
    const JsonValue* at = &root_;
    std::string_view rest = std::string_view(*reference).substr(1);
    while (!rest.empty()) {
      rest.remove_prefix(1);  // '/'
      const std::string_view step = rest.substr(0, rest.find('/'));
      rest.remove_prefix(step.size());
      at = Member(*at, Unescaped(step));
      if (at == nullptr) return Wrong(fmt::format("leads nowhere: {}", Quoted(*reference)));
    }
    return {};
  }

  // JSON pointers write '~' as "~0" and '/' as "~1"; URLs write bytes as "%XX".
  static std::string Unescaped(std::string_view step) {
    std::string bytes;
    for (size_t i = 0; i < step.size(); ++i) {
      unsigned byte = 0;
      if (step[i] == '%' && i + 2 < step.size() &&
          std::from_chars(step.data() + i + 1, step.data() + i + 3, byte, 16).ptr ==
              step.data() + i + 3) {
        bytes += static_cast<char>(byte);
        i += 2;
      } else {
        bytes += step[i];
      }
    }
    std::string out;
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] == '~' && i + 1 < bytes.size() && (bytes[i + 1] == '0' || bytes[i + 1] == '1')) {
        out += bytes[++i] == '0' ? '~' : '/';
      } else {
        out += bytes[i];
      }
    }
    return out;
  }

  // Through an index where an object is large, so that many references into it take linear time.
  const JsonValue* Member(const JsonValue& value, const std::string& step) {
    if (const JsonValue::Array* items = value.if_array()) {
      size_t index = 0;
      const char* const end = step.data() + step.size();
      const auto [parsed, error] = std::from_chars(step.data(), end, index);
      return error == std::errc() && parsed == end && index < items->size() ? &(*items)[index]
                                                                            : nullptr;
    }
    const JsonValue::Object* members = value.if_object();
    constexpr size_t kFew = 16;
    if (members == nullptr || members->size() <= kFew) return value.Find(step);
    auto& index = indices_[&value];
    if (index.empty()) {
      for (const auto& [key, member] : *members) index.emplace(key, &member);
    }
    const auto found = index.find(step);
    return found == index.end() ? nullptr : found->second;
  }

  const JsonValue& root_;
  bool older_draft_ = false;
  std::map<const JsonValue*, std::map<std::string_view, const JsonValue*>> indices_;
};

}  // namespace

Status CheckJsonSchemaShape(const JsonValue& schema) {
  Status status = ShapeChecker(schema).Check(schema);
  if (!status.has_value()) {
    Error& error = status.error();
    constexpr size_t kMaxShown = 500;
    error.field = error.field.size() > kMaxShown
                      ? fmt::format("$ ({} bytes of a path)", error.field.size())
                      : "$" + error.field;
    error.message = fmt::format("{} {}.", error.field, error.message);
  }
  return status;
}

}  // namespace deepinfer
