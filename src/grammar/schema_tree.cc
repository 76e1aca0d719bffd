#include "grammar/schema_tree.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "grammar/decimal_ranges.h"
#include "grammar/pattern.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

using NodeId = GrammarTree::NodeId;
using RuleId = GrammarTree::RuleId;
constexpr int64_t kUnbounded = GrammarTree::kUnbounded;

// What resolving references and merging may build, in bytes of schema text, over all.
constexpr int64_t kMaxWork = int64_t{64} << 20;
constexpr int64_t kMaxRules = 50'000;
constexpr int kMaxMerges = 64;  // references and "allOf" branches met at one place
constexpr size_t kMaxMergedProperties = 2'000;
constexpr size_t kMaxKeywords = 1'000;  // of one schema
constexpr int64_t kMostCounted = 16;
constexpr int64_t kMaxDivisor = 200;
constexpr int64_t kMaxListedMultiples = 2'000;
constexpr int64_t kMaxCountedStates = 4'000;
constexpr int kMaxAlternativeDepth = 16;

// Between the bars of the marker of tool calls.
constexpr std::string_view kMarkerRest = "DSML";

enum Type : uint32_t {
  kNull = 1,
  kBoolean = 2,
  kInteger = 4,
  kNumber = 8,
  kString = 16,
  kArray = 32,
  kObject = 64,
  kAllTypes = kNull | kBoolean | kNumber | kString | kArray | kObject,
};

constexpr std::pair<std::string_view, Type> kTypeNames[] = {
    {"null", kNull},     {"boolean", kBoolean}, {"integer", kInteger}, {"number", kNumber},
    {"string", kString}, {"array", kArray},     {"object", kObject}};

// Keywords that restrict values of one type only.
constexpr std::pair<std::string_view, uint32_t> kTypedKeywords[] = {
    {"minimum", kNumber},
    {"maximum", kNumber},
    {"exclusiveMinimum", kNumber},
    {"exclusiveMaximum", kNumber},
    {"multipleOf", kNumber},
    {"minLength", kString},
    {"maxLength", kString},
    {"pattern", kString},
    {"format", kString},
    {"items", kArray},
    {"prefixItems", kArray},
    {"additionalItems", kArray},
    {"minItems", kArray},
    {"maxItems", kArray},
    {"uniqueItems", kArray},
    {"properties", kObject},
    {"required", kObject},
    {"additionalProperties", kObject},
    {"patternProperties", kObject},
    {"propertyNames", kObject},
    {"minProperties", kObject},
    {"maxProperties", kObject},
    {"unevaluatedProperties", kObject}};

constexpr std::string_view kAnnotations[] = {"title",
                                             "description",
                                             "default",
                                             "examples",
                                             "example",
                                             "$comment",
                                             "$id",
                                             "$schema",
                                             "id",
                                             "deprecated",
                                             "readOnly",
                                             "writeOnly",
                                             "$defs",
                                             "definitions",
                                             "$vocabulary",
                                             "contentMediaType",
                                             "contentEncoding",
                                             "discriminator",
                                             "externalDocs",
                                             "xml"};

bool IsAnnotation(std::string_view key) {
  return key.starts_with("x-") ||
         std::find(std::begin(kAnnotations), std::end(kAnnotations), key) != std::end(kAnnotations);
}

std::optional<uint32_t> TypedKeyword(std::string_view key) {
  for (const auto& [name, type] : kTypedKeywords) {
    if (name == key) return type;
  }
  return std::nullopt;
}

uint32_t TypeOfValue(const JsonValue& value) {
  if (value.is_null()) return kNull;
  if (value.if_bool() != nullptr) return kBoolean;
  if (value.if_string() != nullptr) return kString;
  if (value.if_array() != nullptr) return kArray;
  if (value.if_object() != nullptr) return kObject;
  const double* number = value.if_double();
  if (number == nullptr || std::floor(*number) == *number) return kInteger | kNumber;
  return kNumber;
}

// Equal as JSON Schema has it: 1 and 1.0 are.
bool SameJson(const JsonValue& a, const JsonValue& b) {
  if (a.is_number() && b.is_number()) return a == b || a.AsDouble() == b.AsDouble();
  const JsonValue::Array* array = a.if_array();
  const JsonValue::Array* other_array = b.if_array();
  if (array != nullptr && other_array != nullptr) {
    return std::equal(array->begin(), array->end(), other_array->begin(), other_array->end(),
                      SameJson);
  }
  const JsonValue::Object* object = a.if_object();
  const JsonValue::Object* other_object = b.if_object();
  if (object != nullptr && other_object != nullptr) {
    if (object->size() != other_object->size()) return false;
    return std::all_of(object->begin(), object->end(), [&](const JsonValue::Member& member) {
      const JsonValue* other = b.Find(member.first);
      return other != nullptr && SameJson(member.second, *other);
    });
  }
  return a == b;
}

std::string PointerToken(std::string_view key) {
  std::string out;
  for (const char c : key) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
  return out;
}

std::string Inside(const std::string& path, std::string_view key) {
  return fmt::format("{}/{}", path, PointerToken(key));
}

// Patterns of the formats that are enforced, in the syntax of grammar/pattern.h.
std::optional<std::string_view> FormatPattern(std::string_view format) {
#define DI_DATE                                                 \
  "([0-9]{3}[1-9]-(((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))" \
  "|((0[469]|11)-(0[1-9]|[12][0-9]|30))|(02-(0[1-9]|1[0-9]|2[0-8]))))"
#define DI_TIME                                               \
  "(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?" \
  "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))"
#define DI_LABEL "[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
#define DI_OCTET "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define DI_H16 "[0-9A-Fa-f]{1,4}"
#define DI_DAYS                              \
  "([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?" \
  "|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
#define DI_HOURS                              \
  "T([0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?" \
  "|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}S)"
  static constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
      {"date", "^" DI_DATE "$"},
      {"time", "^" DI_TIME "$"},
      {"date-time", "^" DI_DATE "T" DI_TIME "$"},
      {"email", "^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@" DI_LABEL "(\\." DI_LABEL ")+$"},
      {"hostname", "^" DI_LABEL "(\\." DI_LABEL ")*$"},
      {"ipv4", "^(" DI_OCTET "\\.){3}" DI_OCTET "$"},
      {"ipv6", "^((" DI_H16 ":){7}" DI_H16 "|(" DI_H16 ":){1,6}:|::(" DI_H16 ":){0,5}" DI_H16
               "|(" DI_H16 ":){1,3}(:" DI_H16 "){1,3})$"},
      {"uuid", "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"},
      {"uri", "^[A-Za-z][A-Za-z0-9+.-]*://" DI_LABEL "(\\." DI_LABEL
              ")*(:[0-9]{1,5})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"
              "(\\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?$"},
      {"duration", "^P([0-9]{1,6}W|" DI_DAYS "(" DI_HOURS ")?|" DI_HOURS ")$"},
      {"json-pointer", "^(/([^~/]|~[01])*)*$"},
  };
#undef DI_DATE
#undef DI_TIME
#undef DI_LABEL
#undef DI_OCTET
#undef DI_H16
#undef DI_DAYS
#undef DI_HOURS
  for (const auto& [name, pattern] : kFormats) {
    if (name == format) return pattern;
  }
  return std::nullopt;
}

CodePointSet WithoutBar() {
  return Complement({{0, 0}, {kMarkerBar, kMarkerBar}});
}

class Converter {
 public:
  Converter(const JsonValue& root, const JsonTextOptions& options, GrammarTree* tree)
      : root_(root), options_(options), tree_(tree) {}

  Status ConvertSchema() {
    RuleFor(root_, "#");
    return Finish();
  }

  Result<NodeId> ConvertParameters(const ParameterMarkup& markup) {
    plain_text_ = markup.plain_text;
    shared_rules_ = markup.shared_rules;
    DI_ASSIGN_OR_RETURN(const NodeId node, Parameters(root_, "#", 0, markup));
    DI_RETURN_IF_ERROR(Finish());
    return node;
  }

  Status ConvertAnyObject() {
    const RuleId rule = tree_->AddRule("#");
    tree_->SetBody(rule, AnyObject());
    return Finish();
  }

 private:
  struct Work {
    RuleId rule;
    JsonValue schema;
    std::string path;
  };

  Status Finish() {
    while (!work_.empty()) {
      const Work item = std::move(work_.front());
      work_.pop_front();
      DI_ASSIGN_OR_RETURN(const NodeId body, Convert(item.schema, item.path));
      tree_->SetBody(item.rule, body);
      if (tree_->full() || tree_->num_rules() > kMaxRules || spent_ > kMaxWork) {
        return Fail(Code::kResourceExhausted,
                    fmt::format("The schema is too large to compile, at {}.", item.path),
                    item.path);
      }
    }
    return {};
  }

  // ---- Errors -----------------------------------------------------------------------------------
  tl::unexpected<Error> Wrong(const std::string& path, std::string_view what) const {
    return Fail(Code::kInvalidArgument, fmt::format("The schema is wrong at {}: {}.", path, what),
                path);
  }
  tl::unexpected<Error> Unsupported(const std::string& path, std::string_view what) const {
    return Fail(Code::kUnsupported,
                fmt::format("The schema at {} cannot be enforced: {}.", path, what), path);
  }

  // ---- Rules for schemas ------------------------------------------------------------------------
  // Equal schemas share a rule; that also ends the recursion of references.
  RuleId RuleFor(const JsonValue& schema, const std::string& path) {
    std::string text = schema.DumpCompact();
    spent_ += static_cast<int64_t>(text.size());
    // With a reference inside, what it says depends on the root.
    const bool shared = shared_rules_ != nullptr && text.find("\"$ref\"") == std::string::npos;
    auto& rules = shared ? *shared_rules_ : rule_of_schema_;
    const auto [entry, is_new] = rules.try_emplace(std::move(text), 0);
    if (is_new) {
      entry->second = tree_->AddRule(path);
      work_.push_back({entry->second, schema, path});
    }
    return entry->second;
  }
  NodeId Use(const JsonValue& schema, const std::string& path) {
    return tree_->Reference(RuleFor(schema, path));
  }

  Result<const JsonValue*> Target(const JsonValue& reference, const std::string& path) const {
    const std::string* text = reference.if_string();
    if (text == nullptr) return Wrong(path, "a reference must be a string");
    if (!text->starts_with("#") || (text->size() > 1 && (*text)[1] != '/')) {
      return Unsupported(path, fmt::format("the reference {} does not point into the schema as "
                                           "\"#/...\" does",
                                           Quoted(*text)));
    }
    const JsonValue* at = &root_;
    std::string_view rest = std::string_view(*text).substr(1);
    while (!rest.empty()) {
      rest.remove_prefix(1);
      const size_t end = std::min(rest.find('/'), rest.size());
      DI_ASSIGN_OR_RETURN(const std::string token, Unescaped(rest.substr(0, end), path));
      rest.remove_prefix(end);
      const JsonValue* next = nullptr;
      if (const JsonValue::Array* array = at->if_array()) {
        size_t index = 0;
        for (const char c : token) {
          index = c >= '0' && c <= '9' && index < array->size() ? index * 10 + (c - '0')
                                                                : array->size();
        }
        if (!token.empty() && index < array->size()) next = &(*array)[index];
      } else {
        next = at->Find(token);
      }
      if (next == nullptr) {
        return Wrong(path, fmt::format("the reference {} points to nothing", Quoted(*text)));
      }
      at = next;
    }
    return at;
  }

  Result<std::string> Unescaped(std::string_view token, const std::string& path) const {
    std::string out;
    for (size_t i = 0; i < token.size(); ++i) {
      if (token[i] == '~' && i + 1 < token.size() && (token[i + 1] == '0' || token[i + 1] == '1')) {
        out += token[++i] == '0' ? '~' : '/';
      } else if (token[i] == '~') {
        return Wrong(path, "a reference has a '~' that is not \"~0\" or \"~1\"");
      } else if (token[i] == '%') {
        return Unsupported(path, "the reference has percent signs");
      } else {
        out += token[i];
      }
    }
    return out;
  }

  // ---- Merging: "$ref" and "allOf" beside other keywords ----------------------------------------
  // One object that says what the schema, its reference and its "allOf" branches say together.
  Result<JsonValue> Flat(JsonValue schema, const std::string& path) {
    for (int merges = 0;; ++merges) {
      if (merges > kMaxMerges) {
        return Fail(Code::kResourceExhausted,
                    fmt::format("More than {} references and \"allOf\" branches meet at {}; a "
                                "schema must not consist of itself.",
                                kMaxMerges, path),
                    path);
      }
      if (const bool* boolean = schema.if_bool()) {
        return *boolean ? JsonValue(JsonValue::Object{}) : JsonValue(false);
      }
      const JsonValue::Object* object = schema.if_object();
      if (object == nullptr) return Wrong(path, "a schema must be an object or a boolean");
      if (object->size() > kMaxKeywords) {
        return Wrong(path, fmt::format("it has more than {} keywords", kMaxKeywords));
      }
      std::vector<JsonValue> branches;
      JsonValue rest = JsonValue::Object{};
      for (const auto& [key, value] : *object) {
        if (key == "$ref") {
          DI_ASSIGN_OR_RETURN(const JsonValue* target, Target(value, Inside(path, key)));
          branches.push_back(*target);
        } else if (key == "allOf") {
          const JsonValue::Array* list = value.if_array();
          if (list == nullptr || list->empty()) {
            return Wrong(Inside(path, key), "\"allOf\" must be a list with at least one schema");
          }
          branches.insert(branches.end(), list->begin(), list->end());
        } else if (!IsAnnotation(key)) {
          rest.Set(key, value);
        }
      }
      if (branches.empty()) return rest;
      if (static_cast<int>(branches.size()) > kMaxMerges) merges = kMaxMerges;
      for (const JsonValue& branch : branches) {
        spent_ += 64;
        DI_ASSIGN_OR_RETURN(rest, Merged(rest, branch, path));
        if (rest.if_object() == nullptr) return rest;
      }
      if (spent_ > kMaxWork) {
        return Fail(Code::kResourceExhausted,
                    fmt::format("The schema's references are too large together, at {}.", path),
                    path);
      }
      schema = std::move(rest);
    }
  }

  static JsonValue Both(const JsonValue& a, const JsonValue& b) {
    if (a == b) return a;
    JsonValue both = JsonValue::Object{};
    both.Set("allOf", JsonValue::Array{a, b});
    return both;
  }

  // What an object schema says about a property that it may not name.
  static JsonValue OtherProperties(const JsonValue& schema) {
    const JsonValue* additional = schema.Find("additionalProperties");
    return additional == nullptr ? JsonValue(true) : *additional;
  }

  Result<JsonValue> Merged(const JsonValue& a, const JsonValue& b, const std::string& path) {
    if (const bool* boolean = b.if_bool()) return *boolean ? a : JsonValue(false);
    const JsonValue::Object* more = b.if_object();
    if (more == nullptr) return Wrong(path, "a schema must be an object or a boolean");
    JsonValue result = a;
    if (NamesItems(a) && NamesItems(b) && (HasPrefix(a) || HasPrefix(b)) &&
        !(SameKeyword(a, b, "items") && SameKeyword(a, b, "prefixItems") &&
          SameKeyword(a, b, "additionalItems"))) {
      return Unsupported(Inside(path, "prefixItems"),
                         "it is combined with the items of another branch");
    }
    const bool properties_meet = NamesProperties(a) && NamesProperties(b);
    if (properties_meet) DI_RETURN_IF_ERROR(MergeProperties(a, b, path, &result));
    for (const auto& [key, value] : *more) {
      spent_ += 16;
      if (IsAnnotation(key)) continue;
      if (properties_meet && (key == "properties" || key == "additionalProperties")) continue;
      const JsonValue* old = result.Find(key);
      if (key == "$ref" && old != nullptr) {
        JsonValue reference = JsonValue::Object{};
        reference.Set(key, value);
        result.Set("allOf", Appended(result.Find("allOf"), std::move(reference)));
        continue;
      }
      if (key == "allOf" && old != nullptr && value.if_array() != nullptr) {
        JsonValue all = *old;
        for (const JsonValue& item : *value.if_array()) all = Appended(&all, item);
        result.Set(key, std::move(all));
        continue;
      }
      if (key == "unevaluatedProperties" || key == "unevaluatedItems") {
        return Unsupported(Inside(path, key), "it is inside a reference or an \"allOf\" branch");
      }
      if (old == nullptr) {
        result.Set(key, value);
      } else if (!(*old == value)) {
        DI_ASSIGN_OR_RETURN(JsonValue merged, MergedKeyword(key, *old, value, path));
        result.Set(key, std::move(merged));
      }
    }
    return result;
  }

  static JsonValue Appended(const JsonValue* list, JsonValue item) {
    JsonValue::Array out;
    if (list != nullptr && list->if_array() != nullptr) out = *list->if_array();
    out.push_back(std::move(item));
    return out;
  }

  static bool NamesItems(const JsonValue& schema) {
    return schema.Find("items") != nullptr || schema.Find("prefixItems") != nullptr;
  }
  static bool HasPrefix(const JsonValue& schema) {
    const JsonValue* items = schema.Find("items");
    return schema.Find("prefixItems") != nullptr ||
           (items != nullptr && items->if_array() != nullptr);
  }
  static bool SameKeyword(const JsonValue& a, const JsonValue& b, std::string_view key) {
    const JsonValue* one = a.Find(key);
    const JsonValue* two = b.Find(key);
    return one == nullptr || two == nullptr ? one == two : *one == *two;
  }
  static bool NamesProperties(const JsonValue& schema) {
    return schema.Find("properties") != nullptr || schema.Find("additionalProperties") != nullptr;
  }

  Status MergeProperties(const JsonValue& a, const JsonValue& b, const std::string& path,
                         JsonValue* result) {
    if (a.Find("patternProperties") != nullptr || b.Find("patternProperties") != nullptr) {
      return Unsupported(Inside(path, "patternProperties"),
                         "it is combined with properties of another branch");
    }
    JsonValue merged = JsonValue::Object{};
    for (const JsonValue* schema : {&a, &b}) {
      const JsonValue* properties = schema->Find("properties");
      if (properties == nullptr) continue;
      if (properties->if_object() == nullptr) {
        return Wrong(Inside(path, "properties"), "\"properties\" must be an object");
      }
      if (properties->if_object()->size() > kMaxMergedProperties) {
        return Fail(
            Code::kResourceExhausted,
            fmt::format("More than {} properties are combined at {}.", kMaxMergedProperties, path),
            path);
      }
      const JsonValue& other = schema == &a ? b : a;
      const JsonValue* others = other.Find("properties");
      for (const auto& [name, value] : *properties->if_object()) {
        spent_ += 16;
        if (merged.Find(name) != nullptr) continue;
        const JsonValue* same = others == nullptr ? nullptr : others->Find(name);
        merged.Set(name, Conjunction(value, same == nullptr ? OtherProperties(other) : *same));
      }
    }
    result->Set("properties", std::move(merged));
    if (a.Find("additionalProperties") != nullptr || b.Find("additionalProperties") != nullptr) {
      result->Set("additionalProperties", Conjunction(OtherProperties(a), OtherProperties(b)));
    }
    return {};
  }

  static JsonValue Conjunction(const JsonValue& a, const JsonValue& b) {
    for (const auto& [one, two] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      if (const bool* boolean = one->if_bool()) return *boolean ? *two : JsonValue(false);
    }
    return Both(a, b);
  }

  Result<JsonValue> MergedKeyword(const std::string& key, const JsonValue& a, const JsonValue& b,
                                  const std::string& path) {
    const std::string place = Inside(path, key);
    if (key.starts_with("min") || key == "exclusiveMinimum") {
      if (!a.is_number() || !b.is_number()) return Wrong(place, "a number is expected");
      return a.AsDouble() >= b.AsDouble() ? a : b;
    }
    if (key.starts_with("max") || key == "exclusiveMaximum") {
      if (!a.is_number() || !b.is_number()) return Wrong(place, "a number is expected");
      return a.AsDouble() <= b.AsDouble() ? a : b;
    }
    if (key == "type") {
      DI_ASSIGN_OR_RETURN(const uint32_t types, Types(a, place));
      DI_ASSIGN_OR_RETURN(const uint32_t others, Types(b, place));
      // Whole numbers are numbers.
      uint32_t both = types & others;
      if ((types | others) & kNumber && (types | others) & kInteger &&
          types & (kNumber | kInteger) && others & (kNumber | kInteger)) {
        both |= kInteger;
      }
      JsonValue::Array names;
      for (const auto& [name, type] : kTypeNames) {
        if (both & type) names.emplace_back(std::string(name));
      }
      if (names.empty()) return Wrong(place, "no type is left of what is required together");
      return names;
    }
    if (key == "required") {
      JsonValue::Array names = a.if_array() == nullptr ? JsonValue::Array{} : *a.if_array();
      if (b.if_array() == nullptr) return Wrong(place, "a list is expected");
      for (const JsonValue& name : *b.if_array()) {
        spent_ += 16;
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
      return names;
    }
    if (key == "enum") {
      JsonValue::Array values;
      if (a.if_array() == nullptr || b.if_array() == nullptr) {
        return Wrong(place, "a list is expected");
      }
      spent_ += static_cast<int64_t>(a.if_array()->size() * b.if_array()->size());
      if (spent_ > kMaxWork) return Unsupported(place, "the lists are too long together");
      for (const JsonValue& value : *a.if_array()) {
        const auto same = [&](const JsonValue& other) { return SameJson(value, other); };
        if (std::any_of(b.if_array()->begin(), b.if_array()->end(), same)) values.push_back(value);
      }
      return values;
    }
    if (key == "items" || key == "propertyNames") return Both(a, b);
    if (key == "uniqueItems") return JsonValue(a == JsonValue(true) || b == JsonValue(true));
    if (key == "const") {
      if (SameJson(a, b)) return a;
      return Wrong(place, "two different values are required together");
    }
    if (key == "multipleOf") {
      const int64_t* one = a.if_int64();
      const int64_t* two = b.if_int64();
      if (one != nullptr && two != nullptr && *one > 0 && *two > 0 && *one <= kMaxDivisor &&
          *two <= kMaxDivisor) {
        return JsonValue(std::lcm(*one, *two));
      }
    }
    return Unsupported(place, "it is given twice with different values, beside each other");
  }

  // ---- One schema -------------------------------------------------------------------------------
  Result<NodeId> Convert(const JsonValue& original, const std::string& path) {
    DI_ASSIGN_OR_RETURN(const JsonValue schema, Flat(original, path));
    if (schema.if_bool() != nullptr) return tree_->Choice({});
    DI_RETURN_IF_ERROR(CheckKeywords(schema, path));

    for (const std::string_view keyword : {"anyOf", "oneOf"}) {
      if (const JsonValue* options = schema.Find(keyword)) {
        return Alternatives(schema, keyword, *options, path);
      }
    }
    DI_ASSIGN_OR_RETURN(uint32_t types, TypesOf(schema, path));
    if (schema.Find("const") != nullptr || schema.Find("enum") != nullptr) {
      return Listed(schema, types, path);
    }
    std::vector<NodeId> choices;
    if (types & kObject) {
      DI_ASSIGN_OR_RETURN(const NodeId node, ObjectOf(schema, path));
      choices.push_back(node);
    }
    if (types & kArray) {
      DI_ASSIGN_OR_RETURN(const NodeId node, ArrayOf(schema, path));
      choices.push_back(node);
    }
    if (types & kString) {
      DI_ASSIGN_OR_RETURN(const NodeId node, StringOf(schema, path));
      choices.push_back(node);
    }
    if (types & (kNumber | kInteger)) {
      DI_ASSIGN_OR_RETURN(const NodeId node, NumberOf(schema, (types & kNumber) == 0, path));
      choices.push_back(node);
    }
    if (types & kBoolean) {
      choices.push_back(tree_->Literal("true"));
      choices.push_back(tree_->Literal("false"));
    }
    if (types & kNull) choices.push_back(tree_->Literal("null"));
    return tree_->Choice(std::move(choices));
  }

  Status CheckKeywords(const JsonValue& schema, const std::string& path) const {
    for (const auto& [key, value] : *schema.if_object()) {
      if (TypedKeyword(key) || key == "type" || key == "enum" || key == "const" || key == "anyOf" ||
          key == "oneOf") {
        continue;
      }
      const std::string place = Inside(path, key);
      if (key == "unevaluatedItems" && value == JsonValue(false)) continue;
      if (key == "nullable" && value == JsonValue(false)) continue;
      return Unsupported(place, fmt::format("the keyword {} is not supported", Quoted(key)));
    }
    return {};
  }

  Result<uint32_t> Types(const JsonValue& value, const std::string& path) const {
    const auto one = [&](const JsonValue& name) -> uint32_t {
      const std::string* text = name.if_string();
      if (text == nullptr) return 0;
      for (const auto& [known, type] : kTypeNames) {
        if (known == *text) return type;
      }
      return 0;
    };
    uint32_t types = 0;
    if (const JsonValue::Array* list = value.if_array()) {
      for (const JsonValue& name : *list) {
        const uint32_t type = one(name);
        if (type == 0) return Wrong(path, fmt::format("{} is no type", Quoted(name.Dump())));
        types |= type;
      }
    } else {
      types = one(value);
    }
    if (types == 0) {
      return Wrong(path, fmt::format("{} is no type; the types are null, boolean, integer, number, "
                                     "string, array and object",
                                     Quoted(value.Dump())));
    }
    if (types & kNumber) types &= ~uint32_t{kInteger};
    return types;
  }

  // Without "type": the types that its keywords speak of, or all.
  Result<uint32_t> TypesOf(const JsonValue& schema, const std::string& path) const {
    if (const JsonValue* type = schema.Find("type")) return Types(*type, Inside(path, "type"));
    if (schema.Find("const") != nullptr || schema.Find("enum") != nullptr) {
      return uint32_t{kAllTypes};
    }
    uint32_t types = 0;
    for (const auto& [key, value] : *schema.if_object()) {
      if (const auto typed = TypedKeyword(key)) types |= *typed;
    }
    return types == 0 ? uint32_t{kAllTypes} : types;
  }

  // Each with what the schema says beside them.
  Result<std::vector<JsonValue>> MergedAlternatives(const JsonValue& schema,
                                                    std::string_view keyword,
                                                    const JsonValue& options,
                                                    const std::string& path) {
    const std::string place = Inside(path, keyword);
    const JsonValue::Array* list = options.if_array();
    if (list == nullptr || list->empty()) {
      return Wrong(place, fmt::format("\"{}\" must be a list with at least one schema", keyword));
    }
    JsonValue base = JsonValue::Object{};
    for (const auto& [key, value] : *schema.if_object()) {
      if (key != keyword) base.Set(key, value);
    }
    if (base.Find("unevaluatedProperties") != nullptr) {
      // Everything that an alternative names is merged into one object before it is looked at.
      base.Set("additionalProperties", true);
    }
    std::vector<JsonValue> merged;
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string branch = Inside(place, std::to_string(i));
      DI_ASSIGN_OR_RETURN(JsonValue option, Flat((*list)[i], branch));
      if (option.if_bool() != nullptr) continue;
      spent_ += 64;
      if (!base.if_object()->empty()) {
        DI_ASSIGN_OR_RETURN(option, Merged(base, option, branch));
      }
      merged.push_back(std::move(option));
    }
    if (keyword == "oneOf") {
      if (merged.size() > 256) return Unsupported(place, "it has more than 256 alternatives");
      for (size_t i = 0; i < merged.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (Disjoint(merged[j], merged[i], 4)) continue;
          return Unsupported(
              place, fmt::format("the alternatives {} and {} may allow the same value; \"anyOf\" "
                                 "is enforced without that condition",
                                 j, i));
        }
      }
    }
    return merged;
  }

  Result<NodeId> Alternatives(const JsonValue& schema, std::string_view keyword,
                              const JsonValue& options, const std::string& path) {
    DI_ASSIGN_OR_RETURN(const std::vector<JsonValue> merged,
                        MergedAlternatives(schema, keyword, options, path));
    std::vector<NodeId> choices;
    for (size_t i = 0; i < merged.size(); ++i) {
      choices.push_back(Use(merged[i], Inside(Inside(path, keyword), std::to_string(i))));
    }
    return tree_->Choice(std::move(choices));
  }

  // Whether no value is allowed by both, as far as types, listed values and such properties show.
  bool Disjoint(const JsonValue& a, const JsonValue& b, int depth) {
    if (a == JsonValue(false) || b == JsonValue(false)) return true;
    spent_ += 256;
    if (a.if_object() == nullptr || b.if_object() == nullptr || depth == 0) return false;
    const Result<JsonValue> flat_a = Flat(a, "#");
    const Result<JsonValue> flat_b = Flat(b, "#");
    if (!flat_a || !flat_b || flat_a->if_object() == nullptr || flat_b->if_object() == nullptr) {
      return false;
    }
    const std::vector<JsonValue> values_a = ValuesOf(*flat_a);
    const std::vector<JsonValue> values_b = ValuesOf(*flat_b);
    if (!values_a.empty() && !values_b.empty()) {
      spent_ += static_cast<int64_t>(values_a.size() * values_b.size());
      if (spent_ > kMaxWork) return false;
      return std::none_of(values_a.begin(), values_a.end(), [&](const JsonValue& value) {
        return std::any_of(values_b.begin(), values_b.end(),
                           [&](const JsonValue& other) { return SameJson(value, other); });
      });
    }
    const uint32_t types_a = Overlap(*flat_a, values_a);
    const uint32_t types_b = Overlap(*flat_b, values_b);
    if ((types_a & types_b) == 0) return true;
    if ((types_a & types_b) != kObject) return false;
    for (const auto& [name, schema_a] : Required(*flat_a)) {
      for (const auto& [other_name, schema_b] : Required(*flat_b)) {
        if (name == other_name && Disjoint(*schema_a, *schema_b, depth - 1)) return true;
      }
    }
    return false;
  }

  static std::vector<JsonValue> ValuesOf(const JsonValue& schema) {
    if (const JsonValue* value = schema.Find("const")) return {*value};
    const JsonValue* list = schema.Find("enum");
    if (list != nullptr && list->if_array() != nullptr) return *list->if_array();
    return {};
  }

  uint32_t Overlap(const JsonValue& schema, const std::vector<JsonValue>& values) const {
    uint32_t types = 0;
    if (!values.empty()) {
      for (const JsonValue& value : values) types |= TypeOfValue(value);
    } else if (schema.Find("anyOf") != nullptr || schema.Find("oneOf") != nullptr) {
      types = kAllTypes;
    } else {
      types = TypesOf(schema, "#").value_or(kAllTypes);
    }
    return types & kInteger ? types | kNumber : types;
  }

  static std::vector<std::pair<std::string, const JsonValue*>> Required(const JsonValue& schema) {
    std::vector<std::pair<std::string, const JsonValue*>> found;
    const JsonValue* required = schema.Find("required");
    const JsonValue* properties = schema.Find("properties");
    if (required == nullptr || required->if_array() == nullptr || properties == nullptr) return {};
    for (const JsonValue& name : *required->if_array()) {
      const std::string* text = name.if_string();
      const JsonValue* property = text == nullptr ? nullptr : properties->Find(*text);
      if (property != nullptr && found.size() < 16) found.emplace_back(*text, property);
    }
    return found;
  }

  // ---- Listed values ----------------------------------------------------------------------------
  // Those that have one of the types.
  Result<std::vector<JsonValue>> ListedValues(const JsonValue& schema, uint32_t types,
                                              const std::string& path) {
    std::vector<JsonValue> values;
    if (const JsonValue* list = schema.Find("enum")) {
      if (list->if_array() == nullptr || list->if_array()->empty()) {
        return Wrong(Inside(path, "enum"), "\"enum\" must be a list with at least one value");
      }
      values = *list->if_array();
    }
    if (const JsonValue* value = schema.Find("const")) {
      const auto same = [&](const JsonValue& other) { return SameJson(*value, other); };
      if (schema.Find("enum") != nullptr && std::none_of(values.begin(), values.end(), same)) {
        return Wrong(Inside(path, "const"), "the value is not among those of \"enum\"");
      }
      values = {*value};
    }
    uint32_t present = 0;
    std::vector<JsonValue> listed;
    std::set<std::string> written;
    for (const JsonValue& value : values) {
      const uint32_t type = TypeOfValue(value);
      if ((type & types) == 0) continue;
      present |= type;
      if (written.insert(value.DumpCompact()).second) listed.push_back(value);
    }
    if (listed.empty()) return Wrong(path, "none of the listed values has the type");
    for (const auto& [key, ignored] : *schema.if_object()) {
      const auto typed = TypedKeyword(key);
      if (typed && (*typed & present)) {
        return Unsupported(Inside(path, key), "it stands beside listed values of its type");
      }
    }
    return listed;
  }

  Result<NodeId> Listed(const JsonValue& schema, uint32_t types, const std::string& path) {
    DI_ASSIGN_OR_RETURN(const std::vector<JsonValue> values, ListedValues(schema, types, path));
    std::vector<NodeId> choices;
    for (const JsonValue& value : values) choices.push_back(ValueText(value));
    return tree_->Choice(std::move(choices));
  }

  NodeId ValueText(const JsonValue& value) {
    if (const JsonValue::Array* array = value.if_array()) {
      std::vector<NodeId> parts = {tree_->Literal("["), Space()};
      for (size_t i = 0; i < array->size(); ++i) {
        if (i > 0) parts.push_back(Comma());
        parts.push_back(ValueText((*array)[i]));
      }
      parts.push_back(Space());
      parts.push_back(tree_->Literal("]"));
      return tree_->Sequence(std::move(parts));
    }
    if (const JsonValue::Object* object = value.if_object()) {
      std::vector<NodeId> parts = {tree_->Literal("{"), Space()};
      for (size_t i = 0; i < object->size(); ++i) {
        if (i > 0) parts.push_back(Comma());
        parts.push_back(tree_->Literal(JsonQuoted((*object)[i].first)));
        parts.push_back(Colon());
        parts.push_back(ValueText((*object)[i].second));
      }
      parts.push_back(Space());
      parts.push_back(tree_->Literal("}"));
      return tree_->Sequence(std::move(parts));
    }
    return tree_->Literal(value.DumpCompact());
  }

  // ---- White space ------------------------------------------------------------------------------
  NodeId Space() {
    if (options_.max_whitespace == 0) return tree_->Empty();
    // As alternatives: with a counted repetition here, the library reached states from which it
    // allowed nothing (SchemaTable.RandomSchemasHaveNoDeadEndsAndYieldJson found them).
    const auto space = [&] { return tree_->Class({{'\t', '\n'}, {'\r', '\r'}, {' ', ' '}}); };
    if (options_.max_whitespace > 4) {
      std::vector<NodeId> spaces;
      for (int i = 0; i < options_.max_whitespace; ++i) {
        spaces.push_back(tree_->Choice({tree_->Empty(), space()}));
      }
      return tree_->Sequence(std::move(spaces));
    }
    std::vector<NodeId> counts;
    for (int count = 0; count <= options_.max_whitespace; ++count) {
      std::vector<NodeId> spaces;
      for (int i = 0; i < count; ++i) spaces.push_back(space());
      counts.push_back(tree_->Sequence(std::move(spaces)));
    }
    return tree_->Choice(std::move(counts));
  }
  NodeId Comma() {
    return tree_->Sequence({Space(), tree_->Literal(","), Space()});
  }
  NodeId Colon() {
    return tree_->Sequence({Space(), tree_->Literal(":"), Space()});
  }

  // ---- Any value --------------------------------------------------------------------------------
  NodeId AnyValue() {
    return Use(JsonValue::Object{}, "#");
  }
  NodeId AnyObject() {
    return Map(JsonString(FreeCharacter(), 0, kUnbounded), AnyValue(), 0, kUnbounded);
  }

  // An object whose keys are all of one kind.
  NodeId Map(NodeId key, NodeId value, int64_t min, int64_t max) {
    const NodeId member = tree_->Sequence({key, Colon(), value});
    const NodeId next = tree_->Sequence({Comma(), member});
    std::vector<NodeId> choices;
    if (max != 0) {
      choices.push_back(
          tree_->Sequence({member, tree_->Repeat(next, std::max<int64_t>(min - 1, 0),
                                                 max == kUnbounded ? kUnbounded : max - 1)}));
    }
    if (min == 0) choices.push_back(tree_->Empty());
    return Braced("{", tree_->Choice(std::move(choices)), "}");
  }

  NodeId Braced(std::string_view open, NodeId inside, std::string_view close) {
    return tree_->Sequence({tree_->Literal(open), Space(), inside, Space(), tree_->Literal(close)});
  }

  // ---- Strings ----------------------------------------------------------------------------------
  // One character in any of its spellings; a surrogate pair is one.
  NodeId FreeCharacter() {
    const auto hex = [&] { return tree_->Class({{'0', '9'}, {'A', 'F'}, {'a', 'f'}}); };
    const auto hexes = [&](int64_t count) { return tree_->Repeat(hex(), count, count); };
    const NodeId plain = tree_->Class(Complement({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}));
    const NodeId letter = tree_->Class({{'"', '"'},
                                        {'\\', '\\'},
                                        {'/', '/'},
                                        {'b', 'b'},
                                        {'f', 'f'},
                                        {'n', 'n'},
                                        {'r', 'r'},
                                        {'t', 't'}});
    const NodeId basic = tree_->Choice(
        {tree_->Sequence(
             {tree_->Class({{'0', '9'}, {'A', 'C'}, {'a', 'c'}, {'E', 'F'}, {'e', 'f'}}),
              hexes(3)}),
         tree_->Sequence(
             {tree_->Class({{'D', 'D'}, {'d', 'd'}}),
              tree_->Choice(
                  {tree_->Sequence({tree_->Class({{'0', '7'}}), hexes(2)}),
                   tree_->Sequence({tree_->Class({{'8', '9'}, {'A', 'B'}, {'a', 'b'}}), hexes(2),
                                    tree_->Literal("\\u"), tree_->Class({{'D', 'D'}, {'d', 'd'}}),
                                    tree_->Class({{'C', 'F'}, {'c', 'f'}}), hexes(2)})})})});
    const NodeId escape =
        tree_->Sequence({tree_->Literal("\\"),
                         tree_->Choice({letter, tree_->Sequence({tree_->Literal("u"), basic})})});
    return tree_->Choice({plain, escape});
  }

  // Up to kMostCounted characters are counted one by one, in states of an automaton. A greater
  // upper bound is a budget of characters as they are written, of which an escape has several: it
  // never lets a string be too long, and cuts it early only by its escapes.
  NodeId JsonString(NodeId character, int64_t min, int64_t max) {
    if (std::max(min, max) <= kMostCounted) {
      return tree_->Automaton(tree_->Sequence(
          {tree_->Literal("\""), tree_->Repeat(character, min, max), tree_->Literal("\"")}));
    }
    // A great lower bound is counted by the library, character by character.
    NodeId characters = tree_->Repeat(character, min, kUnbounded);
    if (min <= 2 * kMostCounted) tree_->Automaton(characters);
    if (max != kUnbounded) {
      const RuleId rule = tree_->AddRule("a string");
      tree_->SetBody(rule, characters);
      tree_->SetMaxCharacters(rule, max);
      characters = tree_->Reference(rule);
    }
    return tree_->Sequence({tree_->Literal("\""), characters, tree_->Literal("\"")});
  }

  Result<int64_t> CountOf(const JsonValue& schema, std::string_view key, int64_t fallback,
                          const std::string& path) const {
    const JsonValue* value = schema.Find(key);
    if (value == nullptr) return fallback;
    const std::string place = Inside(path, key);
    double number = value->AsDouble();
    if (!value->is_number() || number < 0 || std::floor(number) != number) {
      return Wrong(place, fmt::format("\"{}\" must be a whole number of at least 0", key));
    }
    if (number > static_cast<double>(GrammarTree::kMaxRepeat)) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("\"{}\" is {} at {}; at most {} is possible.", key, value->Dump(),
                              place, GrammarTree::kMaxRepeat),
                  place);
    }
    return static_cast<int64_t>(number);
  }

  struct Bounds {
    int64_t min = 0;
    int64_t max = kUnbounded;
  };
  Result<Bounds> BoundsOf(const JsonValue& schema, std::string_view min_key,
                          std::string_view max_key, const std::string& path) const {
    Bounds bounds;
    DI_ASSIGN_OR_RETURN(bounds.min, CountOf(schema, min_key, 0, path));
    DI_ASSIGN_OR_RETURN(bounds.max, CountOf(schema, max_key, kUnbounded, path));
    if (bounds.max != kUnbounded && bounds.max < bounds.min) {
      return Wrong(Inside(path, max_key), fmt::format("\"{}\" is below \"{}\"", max_key, min_key));
    }
    return bounds;
  }

  // How a string is spelled: with quotes and escapes, or as it is.
  enum class Spelling : uint8_t { kJson, kPlain };

  Result<NodeId> StringOf(const JsonValue& schema, const std::string& path,
                          Spelling spelling = Spelling::kJson) {
    DI_ASSIGN_OR_RETURN(const Bounds bounds, BoundsOf(schema, "minLength", "maxLength", path));
    const JsonValue* pattern = schema.Find("pattern");
    const JsonValue* format = schema.Find("format");
    if (pattern != nullptr && pattern->if_string() == nullptr) {
      return Wrong(Inside(path, "pattern"), "a pattern must be a string");
    }
    if (format != nullptr && format->if_string() == nullptr) {
      return Wrong(Inside(path, "format"), "a format must be a string");
    }
    static constexpr std::string_view kNumberFormats[] = {"int32", "int64", "float", "double"};
    if (format != nullptr && (*format->if_string() == "password" ||
                              std::find(std::begin(kNumberFormats), std::end(kNumberFormats),
                                        *format->if_string()) != std::end(kNumberFormats))) {
      format = nullptr;
    }
    if (format != nullptr && pattern != nullptr) {
      return Unsupported(Inside(path, "format"), "it stands beside a pattern");
    }
    if (format != nullptr) {
      const auto known = FormatPattern(*format->if_string());
      if (!known) {
        return Unsupported(Inside(path, "format"),
                           fmt::format("the format {} is not known", Quoted(*format->if_string())));
      }
      return PatternString(*known, bounds, Inside(path, "format"), spelling);
    }
    if (pattern != nullptr) {
      return PatternString(*pattern->if_string(), bounds, Inside(path, "pattern"), spelling);
    }
    if (spelling == Spelling::kPlain) return PlainText(bounds);
    return JsonString(FreeCharacter(), bounds.min, bounds.max);
  }

  Result<NodeId> PatternString(std::string_view pattern, const Bounds& bounds,
                               const std::string& place, Spelling spelling = Spelling::kJson) {
    const auto at_place = [&](Error error) {
      error.field = place;
      return WithContext(std::move(error), fmt::format("The schema at {}", place));
    };
    if (bounds.min > 0 || bounds.max != kUnbounded) {
      // Lengths beside a pattern: where they follow from it, or it repeats one class.
      GrammarTree scratch;
      const auto raw = PatternToTree(pattern, PatternUse::kWholeText, &scratch);
      if (!raw) return at_place(raw.error());
      const GrammarTree::Lengths lengths = scratch.LengthsOf(*raw);
      const bool anchored = pattern.starts_with('^') && pattern.ends_with('$');
      const bool follows =
          lengths.min >= bounds.min &&
          (bounds.max == kUnbounded || (lengths.max != kUnbounded && lengths.max <= bounds.max));
      if (!anchored || !follows) {
        const CodePointSet* only = anchored ? scratch.OnlyClassOf(*raw) : nullptr;
        if (only == nullptr) {
          return Unsupported(place, "a length stands beside it that does not follow from it");
        }
        const int64_t min = std::max(bounds.min, lengths.min);
        int64_t max = bounds.max;
        if (lengths.max != kUnbounded) {
          max = max == kUnbounded ? lengths.max : std::min(max, lengths.max);
        }
        if (max != kUnbounded && max < min) return tree_->Choice({});
        if (spelling == Spelling::kPlain) {
          return tree_->Repeat(tree_->Class(Intersection(*only, WithoutBar())), min, max);
        }
        return JsonString(JsonCharacters(*only, tree_), min, max);
      }
    }
    const auto body = PatternToTree(
        pattern,
        spelling == Spelling::kPlain ? PatternUse::kInsideValue : PatternUse::kInsideJsonString,
        tree_);
    if (!body) return at_place(body.error());
    if (spelling == Spelling::kPlain) return body;
    return tree_->Sequence({tree_->Literal("\""), *body, tree_->Literal("\"")});
  }

  // ---- Numbers ----------------------------------------------------------------------------------
  struct NumberBounds {
    std::optional<double> low;
    std::optional<double> high;
    bool low_exclusive = false;
    bool high_exclusive = false;
    std::optional<int64_t> whole_low;
    std::optional<int64_t> whole_high;
    bool none = false;  // no whole number is left
  };

  Result<NumberBounds> NumberBoundsOf(const JsonValue& schema, const std::string& path) const {
    NumberBounds bounds;
    for (const std::string_view key :
         {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
      const JsonValue* value = schema.Find(key);
      if (value == nullptr) continue;
      if (value->if_bool() != nullptr) {
        return Unsupported(Inside(path, key), "the boolean form of old drafts is not supported");
      }
      if (!value->is_number()) return Wrong(Inside(path, key), "a number is expected");
      const bool exclusive = key.starts_with("ex");
      const double number = value->AsDouble();
      const bool is_low = key.ends_with("inimum");
      // For whole numbers, exactly where it fits.
      constexpr double kFar = 9.2e18;
      std::optional<int64_t> whole;
      if (const int64_t* exact = value->if_int64()) {
        whole = *exact;
        if (exclusive && is_low && *exact == std::numeric_limits<int64_t>::max())
          bounds.none = true;
        if (exclusive && !is_low && *exact == std::numeric_limits<int64_t>::min()) {
          bounds.none = true;
        }
        if (exclusive && !bounds.none) *whole += is_low ? 1 : -1;
      } else if (std::abs(number) < kFar) {
        const double inner = is_low ? std::ceil(number) : std::floor(number);
        whole = static_cast<int64_t>(inner);
        if (exclusive && inner == number) *whole += is_low ? 1 : -1;
      } else if ((number > 0) == is_low) {
        return Unsupported(Inside(path, key), "the bound has more than 18 digits");
      }
      if (is_low) {
        if (whole && (!bounds.whole_low || *whole > *bounds.whole_low)) bounds.whole_low = whole;
        if (!bounds.low || number > *bounds.low || (number == *bounds.low && exclusive)) {
          bounds.low = number;
          bounds.low_exclusive = exclusive;
        }
      } else {
        if (whole && (!bounds.whole_high || *whole < *bounds.whole_high)) {
          bounds.whole_high = whole;
        }
        if (!bounds.high || number < *bounds.high || (number == *bounds.high && exclusive)) {
          bounds.high = number;
          bounds.high_exclusive = exclusive;
        }
      }
    }
    return bounds;
  }

  Result<NodeId> NumberOf(const JsonValue& schema, bool whole, const std::string& path) {
    DI_ASSIGN_OR_RETURN(NumberBounds bounds, NumberBoundsOf(schema, path));
    if (const JsonValue* format = schema.Find("format")) {
      if (format->if_string() != nullptr && whole) {
        const bool small = *format->if_string() == "int32";
        if (small || *format->if_string() == "int64") {
          const int64_t low =
              small ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int64_t>::min();
          const int64_t high =
              small ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int64_t>::max();
          bounds.whole_low = std::max(bounds.whole_low.value_or(low), low);
          bounds.whole_high = std::min(bounds.whole_high.value_or(high), high);
        }
      }
    }
    int64_t divisor = 0;
    if (const JsonValue* value = schema.Find("multipleOf")) {
      const std::string place = Inside(path, "multipleOf");
      const double number = value->AsDouble();
      if (!value->is_number() || number <= 0) return Wrong(place, "a number above 0 is expected");
      if (std::floor(number) != number || number > 1e9) {
        return Unsupported(place, "only whole numbers up to 1,000,000,000 are supported");
      }
      whole = true;  // multiples of whole numbers are whole numbers
      divisor = static_cast<int64_t>(number);
    }
    if (bounds.none) return tree_->Choice({});
    if (divisor > 1) return MultiplesOf(divisor, bounds, Inside(path, "multipleOf"));
    if (whole) return IntegerRange(bounds.whole_low, bounds.whole_high, tree_);
    if (!bounds.low && !bounds.high) {
      return tree_->Sequence(
          {tree_->Repeat(tree_->Literal("-"), 0, 1), IntegerRange(0, std::nullopt, tree_),
           tree_->Repeat(tree_->Sequence({tree_->Literal("."),
                                          tree_->Repeat(tree_->Class({{'0', '9'}}), 1, 20)}),
                         0, 1),
           tree_->Repeat(
               tree_->Sequence({tree_->Class({{'E', 'E'}, {'e', 'e'}}),
                                tree_->Repeat(tree_->Class({{'+', '+'}, {'-', '-'}}), 0, 1),
                                tree_->Repeat(tree_->Class({{'0', '9'}}), 1, 2)}),
               0, 1)});
    }
    std::optional<DecimalBound> low;
    std::optional<DecimalBound> high;
    if (bounds.low) {
      low = DecimalBoundOf(*bounds.low, bounds.low_exclusive);
      if (!low) return Unsupported(path, "a bound needs more than 19 digits");
    }
    if (bounds.high) {
      high = DecimalBoundOf(*bounds.high, bounds.high_exclusive);
      if (!high) return Unsupported(path, "a bound needs more than 19 digits");
    }
    return DecimalRange(low, high, tree_);
  }

  Result<NodeId> MultiplesOf(int64_t divisor, const NumberBounds& bounds,
                             const std::string& place) {
    if (!bounds.whole_low && !bounds.whole_high) {
      if (divisor > kMaxDivisor) {
        return Unsupported(place,
                           fmt::format("without bounds, at most {} is possible", kMaxDivisor));
      }
      return IntegerMultiples(divisor, tree_);
    }
    if (!bounds.whole_low || !bounds.whole_high) {
      return Unsupported(place, "it stands beside one bound; give both or none");
    }
    const auto low = static_cast<__int128>(*bounds.whole_low);
    const auto high = static_cast<__int128>(*bounds.whole_high);
    if (low > high) return tree_->Choice({});
    if ((high - low) / divisor > kMaxListedMultiples) {
      return Unsupported(
          place, fmt::format("more than {} numbers are between the bounds", kMaxListedMultiples));
    }
    std::vector<NodeId> choices;
    __int128 first = low / divisor * divisor;
    if (first < low) first += divisor;
    for (__int128 value = first; value <= high; value += divisor) {
      choices.push_back(tree_->Literal(std::to_string(static_cast<int64_t>(value))));
    }
    return tree_->Choice(std::move(choices));
  }

  // ---- Arrays -----------------------------------------------------------------------------------
  Result<NodeId> ArrayOf(const JsonValue& schema, const std::string& path) {
    DI_ASSIGN_OR_RETURN(Bounds bounds, BoundsOf(schema, "minItems", "maxItems", path));
    const JsonValue* unique = schema.Find("uniqueItems");
    if (unique != nullptr && !(*unique == JsonValue(false)) &&
        (bounds.max == kUnbounded || bounds.max > 1)) {
      return Unsupported(Inside(path, "uniqueItems"), "a grammar cannot compare the items");
    }
    const JsonValue* prefix = schema.Find("prefixItems");
    const JsonValue* items = schema.Find("items");
    std::string prefix_key = "prefixItems";
    std::string items_key = "items";
    if (items != nullptr && items->if_array() != nullptr) {  // the form of old drafts
      if (prefix != nullptr) return Wrong(Inside(path, "items"), "a schema is expected");
      prefix = items;
      prefix_key = "items";
      items = schema.Find("additionalItems");
      items_key = "additionalItems";
    }
    std::vector<NodeId> first;
    if (prefix != nullptr) {
      const JsonValue::Array* list = prefix->if_array();
      if (list == nullptr) return Wrong(Inside(path, prefix_key), "a list is expected");
      for (size_t i = 0; i < list->size(); ++i) {
        if (bounds.max != kUnbounded && static_cast<int64_t>(i) >= bounds.max) break;
        first.push_back(Use((*list)[i], Inside(Inside(path, prefix_key), std::to_string(i))));
      }
    }
    const auto count = static_cast<int64_t>(first.size());
    // Items behind the prefix: those that "items" allows; none where a prefix stands alone.
    std::optional<NodeId> rest;
    if (items != nullptr && !(*items == JsonValue(false))) {
      rest = Use(*items, Inside(path, items_key));
    } else if (items == nullptr && prefix == nullptr &&
               schema.Find("unevaluatedItems") == nullptr) {
      rest = AnyValue();
    }
    if (!rest && bounds.min > count) {
      return Wrong(Inside(path, "minItems"), fmt::format("at most {} items are allowed", count));
    }
    const int64_t rest_min = std::max<int64_t>(bounds.min - count, 0);
    const int64_t rest_max = bounds.max == kUnbounded ? kUnbounded : bounds.max - count;
    NodeId inside = 0;
    if (count == 0) {
      std::vector<NodeId> choices;
      if (rest && rest_max != 0) {
        const NodeId next = tree_->Sequence({Comma(), *rest});
        choices.push_back(tree_->Sequence(
            {*rest, tree_->Repeat(next, std::max<int64_t>(rest_min - 1, 0),
                                  rest_max == kUnbounded ? kUnbounded : rest_max - 1)}));
      }
      if (bounds.min == 0) choices.push_back(tree_->Empty());
      inside = tree_->Choice(std::move(choices));
    } else {
      NodeId tail = rest ? tree_->Repeat(tree_->Sequence({Comma(), *rest}), rest_min, rest_max)
                         : tree_->Empty();
      // Behind item i: what follows, which may be left out once there are enough.
      for (int64_t i = count; i-- > 0;) {
        const bool optional = i + 1 > bounds.min;
        std::vector<NodeId> parts;
        if (i > 0) parts.push_back(Comma());
        parts.push_back(first[static_cast<size_t>(i)]);
        parts.push_back(tail);
        tail = tree_->Sequence(std::move(parts));
        if (optional) tail = tree_->Repeat(tail, 0, 1);
        const RuleId rule = tree_->AddRule(Inside(path, prefix_key));
        tree_->SetBody(rule, tail);
        tail = tree_->Reference(rule);
      }
      inside = tail;
    }
    return Braced("[", inside, "]");
  }

  // ---- Objects ----------------------------------------------------------------------------------
  struct Property {
    NodeId member;
    bool required;
  };

  // With `markup`, in that notation.
  Result<NodeId> ObjectOf(const JsonValue& schema, const std::string& path,
                          const ParameterMarkup* markup = nullptr) {
    DI_ASSIGN_OR_RETURN(const Bounds bounds,
                        BoundsOf(schema, "minProperties", "maxProperties", path));
    const JsonValue* declared = schema.Find("properties");
    const JsonValue* additional = schema.Find("additionalProperties");
    const JsonValue* patterns = schema.Find("patternProperties");
    const JsonValue* names = schema.Find("propertyNames");
    if (const JsonValue* unevaluated = schema.Find("unevaluatedProperties")) {
      if (additional == nullptr || *additional == JsonValue(true)) additional = unevaluated;
    }
    if (declared != nullptr && declared->if_object() == nullptr) {
      return Wrong(Inside(path, "properties"), "\"properties\" must be an object");
    }
    std::vector<std::string> required;
    if (const JsonValue* list = schema.Find("required")) {
      const JsonValue::Array* array = list->if_array();
      if (array == nullptr) return Wrong(Inside(path, "required"), "a list is expected");
      std::set<std::string> seen;
      for (const JsonValue& name : *array) {
        if (name.if_string() == nullptr) {
          return Wrong(Inside(path, "required"), "a list of strings is expected");
        }
        if (seen.insert(*name.if_string()).second) required.push_back(*name.if_string());
      }
    }
    const bool has_declared = declared != nullptr && !declared->if_object()->empty();
    if (markup != nullptr && (patterns != nullptr || names != nullptr)) {
      return Unsupported(Inside(path, patterns != nullptr ? "patternProperties" : "propertyNames"),
                         "the names of parameters have to be listed, or free");
    }
    if (patterns != nullptr) {
      if (has_declared || !required.empty() || names != nullptr) {
        return Unsupported(Inside(path, "patternProperties"),
                           "it stands beside \"properties\", \"required\" or \"propertyNames\"");
      }
      return PatternObject(*patterns, additional, bounds, path);
    }
    if (names != nullptr) {
      if (has_declared || !required.empty()) {
        return Unsupported(Inside(path, "propertyNames"),
                           "it stands beside \"properties\" or \"required\"");
      }
      return NamedObject(*names, additional, bounds, path);
    }
    // Without "additionalProperties", an object that names properties has no others.
    const bool open = additional == nullptr ? markup == nullptr && !has_declared && required.empty()
                                            : !(*additional == JsonValue(false));
    const JsonValue other = additional != nullptr ? *additional : JsonValue(JsonValue::Object{});
    const std::string additional_path =
        additional != nullptr ? Inside(path, "additionalProperties") : path;

    std::vector<Property> properties;
    std::vector<std::string> taken;
    std::set<std::string> required_names(required.begin(), required.end());
    if (declared != nullptr) {
      for (const auto& [name, value] : *declared->if_object()) {
        taken.push_back(name);
        const bool is_required = required_names.erase(name) > 0;
        if (value == JsonValue(false)) {
          if (is_required) {
            return Wrong(Inside(Inside(path, "properties"), name),
                         "it is required, but no value is allowed");
          }
          continue;
        }
        DI_ASSIGN_OR_RETURN(const NodeId member,
                            Member(name, value, Inside(Inside(path, "properties"), name), markup));
        properties.push_back({member, is_required});
      }
    }
    for (const std::string& name : required) {
      if (required_names.count(name) == 0) continue;
      if (additional != nullptr && !open) {
        return Wrong(
            Inside(path, "required"),
            fmt::format("{} is required, but \"additionalProperties\" excludes it", Quoted(name)));
      }
      taken.push_back(name);
      DI_ASSIGN_OR_RETURN(const NodeId member, Member(name, other, additional_path, markup));
      properties.push_back({member, true});
    }
    std::optional<NodeId> extra;
    if (open) {
      DI_ASSIGN_OR_RETURN(const NodeId key, KeyNotAmong(taken, path, markup != nullptr));
      if (markup != nullptr) {
        DI_ASSIGN_OR_RETURN(const NodeId value, TaggedValue(other, additional_path, *markup));
        extra = tree_->Sequence({markup->begin, key, value});
      } else {
        extra = tree_->Sequence({key, Colon(), Use(other, additional_path)});
      }
    }
    if (markup != nullptr) {
      return Members(properties, extra, bounds, path, {tree_->Empty(), markup->none, "", ""});
    }
    return Members(properties, extra, bounds, path, {Comma(), tree_->Empty(), "{", "}"});
  }

  Result<NodeId> Member(const std::string& name, const JsonValue& schema, const std::string& path,
                        const ParameterMarkup* markup) {
    if (markup == nullptr) {
      return tree_->Sequence({tree_->Literal(JsonQuoted(name)), Colon(), Use(schema, path)});
    }
    if (!IsMarkupName(name)) {
      return Unsupported(path,
                         "the name of a parameter cannot contain quotes, control characters "
                         "or the marker of calls");
    }
    DI_ASSIGN_OR_RETURN(const NodeId value, TaggedValue(schema, path, *markup));
    const RuleId rule = tree_->AddRule(path);
    tree_->SetBody(rule, tree_->Sequence({markup->begin, tree_->Literal(name), value}));
    return tree_->Reference(rule);
  }

  // ---- Parameters of calls ----------------------------------------------------------------------
  // What comes behind the name: the type, the value and the end. A string is plain text, so a
  // schema of several types has two forms.
  Result<NodeId> TaggedValue(const JsonValue& schema, const std::string& path,
                             const ParameterMarkup& markup) {
    std::vector<NodeId> texts;
    std::vector<NodeId> jsons;
    DI_RETURN_IF_ERROR(SplitValues(schema, path, 0, &texts, &jsons));
    std::vector<NodeId> forms;
    if (!texts.empty()) {
      forms.push_back(
          tree_->Sequence({markup.text_value, tree_->Choice(std::move(texts)), markup.end}));
    }
    if (!jsons.empty()) {
      forms.push_back(
          tree_->Sequence({markup.json_value, tree_->Choice(std::move(jsons)), markup.end}));
    }
    return tree_->Choice(std::move(forms));
  }

  Status SplitValues(const JsonValue& original, const std::string& path, int depth,
                     std::vector<NodeId>* texts, std::vector<NodeId>* jsons) {
    if (depth > kMaxAlternativeDepth) return TooDeep(path);
    DI_ASSIGN_OR_RETURN(JsonValue schema, Flat(original, path));
    if (schema.if_bool() != nullptr) return {};
    DI_RETURN_IF_ERROR(CheckKeywords(schema, path));
    for (const std::string_view keyword : {"anyOf", "oneOf"}) {
      const JsonValue* options = schema.Find(keyword);
      if (options == nullptr) continue;
      DI_ASSIGN_OR_RETURN(const std::vector<JsonValue> merged,
                          MergedAlternatives(schema, keyword, *options, path));
      for (size_t i = 0; i < merged.size(); ++i) {
        DI_RETURN_IF_ERROR(SplitValues(merged[i], Inside(Inside(path, keyword), std::to_string(i)),
                                       depth + 1, texts, jsons));
      }
      return {};
    }
    DI_ASSIGN_OR_RETURN(const uint32_t types, TypesOf(schema, path));
    if (schema.Find("const") != nullptr || schema.Find("enum") != nullptr) {
      DI_ASSIGN_OR_RETURN(const std::vector<JsonValue> values, ListedValues(schema, types, path));
      for (const JsonValue& value : values) {
        const std::string* text = value.if_string();
        if (text == nullptr) {
          jsons->push_back(ValueText(value));
        } else if (text->find(kDsmlMarker) != std::string::npos) {
          return Unsupported(path, "a listed value contains the marker of calls");
        } else {
          texts->push_back(tree_->Literal(*text));
        }
      }
      return {};
    }
    if (types & kString) {
      DI_ASSIGN_OR_RETURN(const NodeId text, StringOf(schema, path, Spelling::kPlain));
      texts->push_back(text);
    }
    JsonValue::Array others;
    for (const auto& [name, type] : kTypeNames) {
      if (type != kString && (types & type) != 0) others.emplace_back(std::string(name));
    }
    if (others.empty()) return {};
    schema.Set("type", std::move(others));
    jsons->push_back(Use(schema, path));
    return {};
  }

  Result<NodeId> Parameters(const JsonValue& original, const std::string& path, int depth,
                            const ParameterMarkup& markup) {
    if (depth > kMaxAlternativeDepth) return TooDeep(path);
    DI_ASSIGN_OR_RETURN(const JsonValue schema, Flat(original, path));
    if (schema.if_bool() != nullptr) return tree_->Choice({});
    DI_RETURN_IF_ERROR(CheckKeywords(schema, path));
    for (const std::string_view keyword : {"anyOf", "oneOf"}) {
      const JsonValue* options = schema.Find(keyword);
      if (options == nullptr) continue;
      DI_ASSIGN_OR_RETURN(const std::vector<JsonValue> merged,
                          MergedAlternatives(schema, keyword, *options, path));
      std::vector<NodeId> choices;
      for (size_t i = 0; i < merged.size(); ++i) {
        DI_ASSIGN_OR_RETURN(const NodeId choice,
                            Parameters(merged[i], Inside(Inside(path, keyword), std::to_string(i)),
                                       depth + 1, markup));
        choices.push_back(choice);
      }
      return tree_->Choice(std::move(choices));
    }
    for (const char* key : {"const", "enum"}) {
      if (schema.Find(key) != nullptr) {
        return Unsupported(Inside(path, key), "the parameters of a tool cannot be listed values");
      }
    }
    DI_ASSIGN_OR_RETURN(const uint32_t types, TypesOf(schema, path));
    if ((types & kObject) == 0) {
      return Wrong(Inside(path, "type"), "the parameters of a tool must be an object");
    }
    return ObjectOf(schema, path, &markup);
  }

  tl::unexpected<Error> TooDeep(const std::string& path) const {
    return Fail(Code::kResourceExhausted,
                fmt::format("More than {} levels of alternatives are inside each other at {}.",
                            kMaxAlternativeDepth, path),
                path);
  }

  // Any text in which the marker of calls is not spelled. Where the length is bounded from above,
  // the bar that it begins with is left out altogether, since both cannot be counted at once.
  NodeId PlainText(const Bounds& bounds) {
    const auto without_bar = [&] { return tree_->Class(WithoutBar()); };
    if (bounds.max != kUnbounded) return tree_->Repeat(without_bar(), bounds.min, bounds.max);
    if (bounds.min == 0) return plain_text_;
    return tree_->Sequence({tree_->Repeat(without_bar(), bounds.min, bounds.min), plain_text_});
  }

  // ---- Members of objects -----------------------------------------------------------------------
  struct Layout {
    NodeId separator;
    NodeId none;  // instead of any member
    std::string_view open;
    std::string_view close;
  };
  NodeId Framed(const Layout& layout, NodeId inside) {
    return layout.open.empty() ? inside : Braced(layout.open, inside, layout.close);
  }

  Result<NodeId> Members(const std::vector<Property>& properties, std::optional<NodeId> extra,
                         const Bounds& bounds, const std::string& path, const Layout& layout) {
    const size_t count = properties.size();
    const auto must = static_cast<int64_t>(std::count_if(
        properties.begin(), properties.end(), [](const Property& p) { return p.required; }));
    const bool counts_low = bounds.min > must;
    const bool counts_high =
        bounds.max != kUnbounded && (extra || bounds.max < static_cast<int64_t>(count));
    if (bounds.max != kUnbounded && bounds.max < must) {
      return Wrong(Inside(path, "maxProperties"), fmt::format("{} properties are required", must));
    }
    if (!extra && bounds.min > static_cast<int64_t>(count)) {
      return Wrong(Inside(path, "minProperties"),
                   fmt::format("only {} properties are allowed", count));
    }
    if (extra && counts_low && bounds.min > 1) {
      return Unsupported(Inside(path, "minProperties"),
                         "keys that are not named may occur twice, so their count says nothing");
    }
    if (count == 0 && extra) {
      const NodeId next = tree_->Sequence({layout.separator, *extra});
      std::vector<NodeId> choices;
      if (bounds.max != 0) {
        choices.push_back(tree_->Sequence(
            {*extra, tree_->Repeat(next, std::max<int64_t>(bounds.min - 1, 0),
                                   bounds.max == kUnbounded ? kUnbounded : bounds.max - 1)}));
      }
      if (bounds.min == 0) choices.push_back(layout.none);
      return Framed(layout, tree_->Choice(std::move(choices)));
    }
    if (counts_low || counts_high) {
      return CountedMembers(properties, extra, bounds, path, layout);
    }

    // Behind the first member: each of the others with its comma, in order, where it is required
    // or wanted.
    NodeId rest = extra ? tree_->Repeat(tree_->Sequence({layout.separator, *extra}), 0, kUnbounded)
                        : tree_->Empty();
    std::vector<NodeId> choices;
    bool may_be_empty = must == 0;
    std::vector<NodeId> begins(count);
    for (size_t i = count; i-- > 0;) {
      begins[i] = tree_->Sequence({properties[i].member, rest});
      if (i == 0) break;
      NodeId next = tree_->Sequence({layout.separator, properties[i].member});
      if (!properties[i].required) next = tree_->Repeat(next, 0, 1);
      const RuleId rule = tree_->AddRule(path);
      tree_->SetBody(rule, tree_->Sequence({next, rest}));
      rest = tree_->Reference(rule);
    }
    for (size_t i = 0; i < count; ++i) {
      choices.push_back(begins[i]);
      if (properties[i].required) break;
    }
    if (may_be_empty) {
      if (extra) {
        choices.push_back(tree_->Sequence(
            {*extra, tree_->Repeat(tree_->Sequence({layout.separator, *extra}), 0, kUnbounded)}));
      }
      choices.push_back(layout.none);
    }
    return Framed(layout, tree_->Choice(std::move(choices)));
  }

  // The same where the number of members is bounded: a rule for each place and count.
  Result<NodeId> CountedMembers(const std::vector<Property>& properties,
                                std::optional<NodeId> extra, const Bounds& bounds,
                                const std::string& path, const Layout& layout) {
    const auto count = static_cast<int64_t>(properties.size());
    const int64_t highest =
        bounds.max != kUnbounded ? std::min(bounds.max, count) : std::min(bounds.min, count);
    if ((count + 1) * (highest + 1) > kMaxCountedStates) {
      return Unsupported(Inside(path, bounds.max != kUnbounded ? "maxProperties" : "minProperties"),
                         "too many properties would have to be counted");
    }
    // rules[i][n]: from property i on, n members there. -1: cannot be completed.
    const auto columns = static_cast<size_t>(highest) + 1;
    std::vector<std::vector<NodeId>> nodes(static_cast<size_t>(count) + 1,
                                           std::vector<NodeId>(columns, -1));
    for (int64_t n = 0; n <= highest; ++n) {
      std::vector<NodeId> choices;
      const int64_t free = bounds.max == kUnbounded ? kUnbounded : bounds.max - n;
      const int64_t least = std::max<int64_t>(bounds.min - n, 0);
      if (extra) {
        if (n > 0) {
          choices.push_back(
              tree_->Repeat(tree_->Sequence({layout.separator, *extra}), least, free));
        } else if (free != 0) {
          choices.push_back(
              tree_->Sequence({*extra, tree_->Repeat(tree_->Sequence({layout.separator, *extra}),
                                                     std::max<int64_t>(least - 1, 0),
                                                     free == kUnbounded ? kUnbounded : free - 1)}));
          if (least == 0) choices.push_back(layout.none);
        } else {
          choices.push_back(layout.none);
        }
      } else if (least == 0) {
        choices.push_back(n == 0 ? layout.none : tree_->Empty());
      }
      if (!choices.empty()) {
        nodes[static_cast<size_t>(count)][static_cast<size_t>(n)] =
            tree_->Choice(std::move(choices));
      }
    }
    for (int64_t i = count; i-- > 0;) {
      for (int64_t n = 0; n <= highest; ++n) {
        std::vector<NodeId> choices;
        const auto& next = nodes[static_cast<size_t>(i) + 1];
        const Property& property = properties[static_cast<size_t>(i)];
        // Beyond the counted ones all counts are alike when only the lower bound counts.
        const int64_t more = bounds.max == kUnbounded ? std::min(n + 1, highest) : n + 1;
        if (more <= highest && next[static_cast<size_t>(more)] >= 0) {
          std::vector<NodeId> parts;
          if (n > 0) parts.push_back(layout.separator);
          parts.push_back(property.member);
          parts.push_back(next[static_cast<size_t>(more)]);
          choices.push_back(tree_->Sequence(std::move(parts)));
        }
        if (!property.required && next[static_cast<size_t>(n)] >= 0) {
          choices.push_back(next[static_cast<size_t>(n)]);
        }
        if (choices.empty()) continue;
        const RuleId rule = tree_->AddRule(path);
        tree_->SetBody(rule, tree_->Choice(std::move(choices)));
        nodes[static_cast<size_t>(i)][static_cast<size_t>(n)] = tree_->Reference(rule);
      }
    }
    if (nodes[0][0] < 0) return tree_->Choice({});
    return Framed(layout, nodes[0][0]);
  }

  Result<NodeId> PatternObject(const JsonValue& patterns, const JsonValue* additional,
                               const Bounds& bounds, const std::string& path) {
    const std::string place = Inside(path, "patternProperties");
    const JsonValue::Object* object = patterns.if_object();
    if (object == nullptr) return Wrong(place, "an object is expected");
    if (object->size() != 1 || additional == nullptr || !(*additional == JsonValue(false))) {
      return Unsupported(place,
                         "only one pattern with \"additionalProperties\": false is supported");
    }
    const std::string inner = Inside(place, (*object)[0].first);
    DI_ASSIGN_OR_RETURN(const NodeId key, PatternString((*object)[0].first, {}, inner));
    return FreeMap(key, Use((*object)[0].second, inner), bounds, path);
  }

  Result<NodeId> NamedObject(const JsonValue& names, const JsonValue* additional,
                             const Bounds& bounds, const std::string& path) {
    const std::string place = Inside(path, "propertyNames");
    if (additional != nullptr && *additional == JsonValue(false)) {
      return FreeMap(tree_->Choice({}), tree_->Choice({}), bounds, path);
    }
    JsonValue strings = JsonValue::Object{};
    strings.Set("type", "string");
    const JsonValue other = additional == nullptr ? JsonValue(JsonValue::Object{}) : *additional;
    return FreeMap(Use(Conjunction(strings, names), place), Use(other, path), bounds, path);
  }

  Result<NodeId> FreeMap(NodeId key, NodeId value, const Bounds& bounds, const std::string& path) {
    if (bounds.min > 1) {
      return Unsupported(Inside(path, "minProperties"),
                         "keys that are not named may occur twice, so their count says nothing");
    }
    return Map(key, value, bounds.min, bounds.max);
  }

  // A key in JSON's plain spelling that is none of these, so that a named property cannot come
  // again under its own name.
  // `plain`: as it stands in a tag, where readers of free names agree: no quotes, backslashes and
  // white space.
  Result<NodeId> KeyNotAmong(const std::vector<std::string>& taken, const std::string& path,
                             bool plain) {
    const CodePointSet plain_characters =
        Complement({{0, ' '}, {'"', '"'}, {'\\', '\\'}, {0x7F, 0xA0}, {kMarkerBar, kMarkerBar}});
    if (taken.empty()) {
      return plain ? tree_->Repeat(tree_->Class(plain_characters), 1, kUnbounded)
                   : JsonString(FreeCharacter(), 0, kUnbounded);
    }
    const auto characters = [&](const CodePointSet& set) {
      return plain ? tree_->Class(Intersection(set, plain_characters)) : JsonCharacters(set, tree_);
    };
    struct State {
      bool is_key = false;
      std::map<uint32_t, size_t> next;
    };
    std::vector<State> states(1);
    for (const std::string& key : taken) {
      size_t at = 0;
      size_t offset = 0;
      while (offset < key.size()) {
        const int64_t code_point = NextCodePoint(key, &offset);
        if (code_point < 0) return Wrong(path, "a property's name is not UTF-8");
        const auto [entry, is_new] =
            states[at].next.try_emplace(static_cast<uint32_t>(code_point), states.size());
        const size_t to = entry->second;
        if (is_new) states.emplace_back();
        at = to;
      }
      states[at].is_key = true;
    }
    if (static_cast<int64_t>(states.size()) > kMaxCountedStates) {
      return Unsupported(path,
                         "the names of its properties are too long together to keep other "
                         "properties apart from them");
    }
    std::vector<RuleId> rules;
    for (size_t i = 0; i < states.size(); ++i) rules.push_back(tree_->AddRule(path));
    for (size_t i = 0; i < states.size(); ++i) {
      std::vector<NodeId> choices;
      CodePointSet used;
      for (const auto& [code_point, to] : states[i].next) {
        used.push_back({code_point, code_point});
        choices.push_back(
            tree_->Sequence({characters({{code_point, code_point}}), tree_->Reference(rules[to])}));
      }
      // Another character, and then anything.
      const GrammarTree::NodeId rest = tree_->Sequence(
          {characters(Complement(used)), tree_->Repeat(characters(Complement({})), 0, kUnbounded)});
      choices.push_back(plain ? rest : tree_->Automaton(rest));
      if (!states[i].is_key && (!plain || i > 0)) choices.push_back(tree_->Empty());
      tree_->SetBody(rules[i], tree_->Choice(std::move(choices)));
    }
    if (plain) return tree_->Reference(rules[0]);
    return tree_->Sequence(
        {tree_->Literal("\""), tree_->Reference(rules[0]), tree_->Literal("\"")});
  }

  const JsonValue& root_;
  const JsonTextOptions& options_;
  GrammarTree* tree_;
  std::deque<Work> work_;
  std::unordered_map<std::string, RuleId> rule_of_schema_;
  std::unordered_map<std::string, RuleId>* shared_rules_ = nullptr;
  NodeId plain_text_ = -1;  // of a ParameterMarkup
  int64_t spent_ = 0;
};

}  // namespace

Status SchemaToTree(const JsonValue& schema, const JsonTextOptions& options, GrammarTree* tree) {
  return Converter(schema, options, tree).ConvertSchema();
}

Status JsonObjectToTree(const JsonTextOptions& options, GrammarTree* tree) {
  const JsonValue any = JsonValue::Object{};
  return Converter(any, options, tree).ConvertAnyObject();
}

NodeId PlainTextToTree(GrammarTree* tree) {
  // Text without a bar is a loop of one class, in which the library's masks are ready; then a state
  // each for what has been seen of the marker: the bar, and so many characters behind it.
  const RuleId text = tree->AddRule("text");
  std::vector<RuleId> seen;
  for (size_t i = 0; i <= kMarkerRest.size(); ++i) seen.push_back(tree->AddRule("text"));
  const auto bar = [&] {
    return tree->Sequence({tree->Class({{kMarkerBar, kMarkerBar}}), tree->Reference(seen[0])});
  };
  tree->SetBody(text, tree->Sequence({tree->Repeat(tree->Class(WithoutBar()), 0, kUnbounded),
                                      tree->Repeat(bar(), 0, 1)}));
  for (size_t i = 0; i < seen.size(); ++i) {
    CodePointSet others = WithoutBar();
    std::vector<NodeId> choices = {tree->Empty()};
    if (i < kMarkerRest.size()) {
      const auto next = static_cast<uint32_t>(kMarkerRest[i]);
      others = Intersection(others, Complement({{next, next}}));
      choices.push_back(
          tree->Sequence({tree->Class({{next, next}}), tree->Reference(seen[i + 1])}));
      choices.push_back(bar());
    }
    choices.push_back(tree->Sequence({tree->Class(others), tree->Reference(text)}));
    tree->SetBody(seen[i], tree->Choice(std::move(choices)));
  }
  return tree->Reference(text);
}

bool IsMarkupName(std::string_view name) {
  return name.find(kDsmlMarker) == std::string_view::npos &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '"' || static_cast<unsigned char>(c) < ' ' || c == '\x7F';
         });
}

Result<GrammarTree::NodeId> ParametersToTree(const JsonValue& schema,
                                             const JsonTextOptions& options,
                                             const ParameterMarkup& markup, GrammarTree* tree) {
  return Converter(schema, options, tree).ConvertParameters(markup);
}

}  // namespace deepinfer
