#include "grammar/structural_tag.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/json_value.h"
#include "base/quoted.h"
#include "grammar/ebnf.h"
#include "grammar/grammar_tree.h"
#include "grammar/pattern.h"

namespace deepinfer {
namespace {

constexpr int kMaxDepth = 40;
constexpr int64_t kMaxFormats = 4'000;
constexpr int64_t kMaxRepeat = 1'000;

class Rewriter {
 public:
  explicit Rewriter(const JsonTextOptions& options) : options_(options) {}

  struct Rewritten {
    JsonValue format;
    int64_t cost = 0;
  };

  Result<Rewritten> Format(const JsonValue& format, int depth, const std::string& path) {
    if (format.if_object() == nullptr) return Wrong(path, "an object is expected");
    if (depth > kMaxDepth || ++formats_ > kMaxFormats) {
      return Fail(
          Code::kResourceExhausted,
          fmt::format("The structural tag is too large at {}: at most {} formats, {} levels "
                      "deep, are allowed.",
                      path, kMaxFormats, kMaxDepth),
          path);
    }
    const JsonValue* type = format.Find("type");
    const std::string* name = type == nullptr ? nullptr : type->if_string();
    if (name == nullptr) return Wrong(path + "/type", "a string is expected");
    if (*name == "json_schema") return Schema(format, path);
    if (*name == "regex") return Pattern(format, path);
    if (*name == "grammar") return Rules(format, path);

    static constexpr std::string_view kKnown[] = {"const_string",
                                                  "any_text",
                                                  "sequence",
                                                  "or",
                                                  "optional",
                                                  "plus",
                                                  "star",
                                                  "repeat",
                                                  "tag",
                                                  "triggered_tags",
                                                  "tags_with_separator",
                                                  "token",
                                                  "exclude_token",
                                                  "any_tokens",
                                                  "token_triggered_tags"};
    if (std::find(std::begin(kKnown), std::end(kKnown), *name) == std::end(kKnown)) {
      return Fail(Code::kUnsupported,
                  fmt::format("The structural tag's format {} at {} is not supported.",
                              Quoted(*name), path),
                  path + "/type");
    }
    Rewritten result{format, 2};
    for (const char* text : {"value", "begin", "end", "separator"}) {
      const JsonValue* value = format.Find(text);
      if (value != nullptr) result.cost += static_cast<int64_t>(value->DumpCompact().size());
    }
    if (const JsonValue* content = format.Find("content")) {
      DI_ASSIGN_OR_RETURN(Rewritten inner, Format(*content, depth + 1, path + "/content"));
      result.cost += inner.cost;
      result.format.Set("content", std::move(inner.format));
    }
    for (const char* key : {"elements", "tags"}) {
      const JsonValue* list = format.Find(key);
      if (list == nullptr) continue;
      if (list->if_array() == nullptr) return Wrong(path + "/" + key, "a list is expected");
      JsonValue::Array rewritten;
      for (size_t i = 0; i < list->if_array()->size(); ++i) {
        DI_ASSIGN_OR_RETURN(Rewritten inner, Format((*list->if_array())[i], depth + 1,
                                                    fmt::format("{}/{}/{}", path, key, i)));
        result.cost += inner.cost;
        rewritten.push_back(std::move(inner.format));
      }
      result.format.Set(key, std::move(rewritten));
    }
    if (*name == "repeat") {
      int64_t most = 1;
      for (const char* key : {"min", "max"}) {
        const JsonValue* count = format.Find(key);
        const int64_t* value = count == nullptr ? nullptr : count->if_int64();
        if (value == nullptr || *value < -1 || *value > kMaxRepeat) {
          return Wrong(fmt::format("{}/{}", path, key),
                       fmt::format("a whole number of at most {} is expected", kMaxRepeat));
        }
        most = std::max(most, *value);
      }
      result.cost *= most;
    }
    if (result.cost > GrammarTree::kMaxCost) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("The structural tag is too large to compile, at {}: its estimated {} "
                              "states are beyond the limit of {}.",
                              path, result.cost, GrammarTree::kMaxCost),
                  path);
    }
    return result;
  }

 private:
  tl::unexpected<Error> Wrong(const std::string& path, std::string_view what) const {
    return Fail(Code::kInvalidArgument,
                fmt::format("The structural tag is wrong at {}: {}.", path, what), path);
  }
  static tl::unexpected<Error> At(const std::string& path, Error error) {
    error.field = error.field.starts_with('#') ? path + error.field.substr(1) : path;
    return WithContext(std::move(error), fmt::format("The structural tag at {}", path));
  }

  static Result<Rewritten> AsRules(GrammarTree* tree, const std::string& path) {
    if (Status status = tree->Check(); !status) return At(path, status.error());
    Rewritten result{JsonValue::Object{}, tree->Cost()};
    result.format.Set("type", "grammar");
    result.format.Set("grammar", tree->ToEbnf());
    return result;
  }

  Result<Rewritten> Schema(const JsonValue& format, const std::string& path) {
    const JsonValue* schema = format.Find("json_schema");
    if (schema == nullptr) return Wrong(path + "/json_schema", "a schema is expected");
    const JsonValue* style = format.Find("style");
    const std::string* name = style == nullptr ? nullptr : style->if_string();
    if (style != nullptr && name == nullptr) return Wrong(path + "/style", "a string is expected");
    for (const auto& [key, value] : *format.if_object()) {
      if (key == "type" || key == "json_schema" || key == "style") continue;
      return Fail(
          Code::kUnsupported,
          fmt::format("The structural tag's key {} at {} is not supported.", Quoted(key), path),
          path);
    }
    GrammarTree tree;
    if (Status status = SchemaToTree(*schema, options_, &tree); !status) {
      return At(path + "/json_schema", status.error());
    }
    DI_ASSIGN_OR_RETURN(Rewritten rewritten, AsRules(&tree, path + "/json_schema"));
    if (name == nullptr || *name == "json") return rewritten;
    if (*name != "deepseek_xml" && *name != "deepseek_v4_1_xml") {
      return Fail(Code::kUnsupported,
                  fmt::format("The structural tag's style {} at {} is not supported; json, "
                              "deepseek_xml and deepseek_v4_1_xml are.",
                              Quoted(*name), path),
                  path + "/style");
    }
    // The parameters' own notation is written by the library; the schema was checked above.
    return Rewritten{format, rewritten.cost};
  }

  Result<Rewritten> Pattern(const JsonValue& format, const std::string& path) {
    const JsonValue* pattern = format.Find("pattern");
    if (pattern == nullptr || pattern->if_string() == nullptr) {
      return Wrong(path + "/pattern", "a string is expected");
    }
    GrammarTree tree;
    const GrammarTree::RuleId root = tree.AddRule("the pattern");
    const auto body = PatternToTree(*pattern->if_string(), PatternUse::kWholeText, &tree);
    if (!body) return At(path + "/pattern", body.error());
    tree.SetBody(root, *body);
    return AsRules(&tree, path + "/pattern");
  }

  Result<Rewritten> Rules(const JsonValue& format, const std::string& path) {
    const JsonValue* rules = format.Find("grammar");
    if (rules == nullptr || rules->if_string() == nullptr) {
      return Wrong(path + "/grammar", "a string is expected");
    }
    GrammarTree tree;
    if (Status status = EbnfToTree(*rules->if_string(), &tree); !status) {
      return At(path + "/grammar", status.error());
    }
    return AsRules(&tree, path + "/grammar");
  }

  const JsonTextOptions& options_;
  int64_t formats_ = 0;
};

}  // namespace

Result<std::string> RewriteStructuralTag(std::string_view text, const JsonTextOptions& options) {
  DI_ASSIGN_OR_RETURN(JsonValue tag, JsonValue::Parse(text));
  const JsonValue* type = tag.Find("type");
  const JsonValue* format = tag.Find("format");
  if (type == nullptr || !(*type == JsonValue("structural_tag")) || format == nullptr) {
    return Fail(Code::kInvalidArgument,
                "A structural tag is an object with \"type\": \"structural_tag\" and a \"format\".",
                "#");
  }
  DI_ASSIGN_OR_RETURN(Rewriter::Rewritten rewritten,
                      Rewriter(options).Format(*format, 0, "#/format"));
  tag.Set("format", std::move(rewritten.format));
  return tag.DumpCompact();
}

}  // namespace deepinfer
