#include "grammar/tool_call_grammar.h"

#include <fmt/core.h>

#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json_value.h"
#include "base/quoted.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

using NodeId = GrammarTree::NodeId;
using RuleId = GrammarTree::RuleId;

class Builder {
 public:
  Builder(const ToolCallGrammarOptions& options, GrammarTree* tree)
      : options_(options), names_(TemplateOf(options.dialect)), tree_(tree) {}

  Status Build(const JsonValue& tools) {
    const JsonValue::Array* list = tools.if_array();
    if (list == nullptr || list->empty()) {
      return Fail(Code::kInvalidArgument, "The tools must be a list with at least one tool.", "#");
    }
    const RuleId root = tree_->AddRule("the block of calls");
    const ParameterMarkup markup = {
        .begin = Shared("the begin of a parameter", Tag("<", names_.parameter_tag, " name=\"")),
        .text_value = Shared("the type of a text", tree_->Literal("\" string=\"true\">")),
        .json_value = Shared("the type of a value", tree_->Literal("\" string=\"false\">")),
        .end = Shared("the end of a parameter", Tag("</", names_.parameter_tag, ">\n")),
        .none = names_.empty_line_for_no_arguments ? tree_->Repeat(tree_->Literal("\n"), 0, 1)
                                                   : tree_->Empty(),
        .plain_text = PlainTextToTree(tree_),
        .shared_rules = &shared_rules_,
    };
    std::vector<NodeId> choices;
    for (size_t i = 0; i < list->size(); ++i) {
      DI_ASSIGN_OR_RETURN(const NodeId choice, ToolOf((*list)[i], i, markup));
      choices.push_back(choice);
    }
    // A tool that cannot be called would only be missing in the grammar.
    const std::vector<bool> with_text = tree_->RulesWithText();
    for (const Declared& tool : declared_) {
      if (with_text[tool.parameters]) continue;
      return Fail(Code::kInvalidArgument,
                  fmt::format("The tool {} cannot be called: its schema allows no parameters, and "
                              "it does not allow to leave them out.",
                              Quoted(tool.name)),
                  tool.path);
    }
    const RuleId call = tree_->AddRule("a call");
    tree_->SetBody(call, tree_->Sequence({Tag("<", names_.invoke_tag, " name=\""),
                                          tree_->Choice(std::move(choices)),
                                          Tag("</", names_.invoke_tag, ">\n")}));
    std::vector<NodeId> parts;
    if (!options_.inside_block) {
      parts.push_back(tree_->Literal(std::string(names_.calls_tag) + ">\n"));
    }
    parts.push_back(tree_->Repeat(tree_->Reference(call), 1, GrammarTree::kUnbounded));
    parts.push_back(Tag("</", names_.calls_tag, ">"));
    tree_->SetBody(root, tree_->Sequence(std::move(parts)));
    return {};
  }

 private:
  struct Declared {
    std::string name;
    std::string path;
    RuleId parameters;
  };

  NodeId Tag(std::string_view opening, std::string_view name, std::string_view rest) {
    return tree_->Sequence({tree_->Literal(opening), tree_->Token(options_.marker_id),
                            tree_->Literal(std::string(name) + std::string(rest))});
  }
  NodeId Shared(std::string name, NodeId body) {
    const RuleId rule = tree_->AddRule(std::move(name));
    tree_->SetBody(rule, body);
    return tree_->Reference(rule);
  }

  static tl::unexpected<Error> Wrong(const std::string& path, std::string_view what) {
    return Fail(Code::kInvalidArgument, fmt::format("The tool at {} is wrong: {}.", path, what),
                path);
  }

  // The name, the end of the opening tag, and the parameters.
  Result<NodeId> ToolOf(const JsonValue& tool, size_t index, const ParameterMarkup& markup) {
    const std::string path = fmt::format("#/{}", index);
    if (tool.if_object() == nullptr) return Wrong(path, "an object is expected");
    const JsonValue* type = tool.Find("type");
    if (type == nullptr || !(*type == JsonValue("function"))) {
      return Wrong(path + "/type", "it must be \"function\"");
    }
    const JsonValue* function = tool.Find("function");
    if (function == nullptr || function->if_object() == nullptr) {
      return Wrong(path + "/function", "an object is expected");
    }
    const JsonValue* name_value = function->Find("name");
    const std::string* name = name_value == nullptr ? nullptr : name_value->if_string();
    const std::string name_path = path + "/function/name";
    if (name == nullptr || name->empty()) {
      return Wrong(name_path, "a string of at least one character is expected");
    }
    if (!IsMarkupName(*name)) {
      return Fail(Code::kUnsupported,
                  fmt::format("The tool {} cannot be called: in the markup of calls a name cannot "
                              "contain quotes, control characters or the marker of calls.",
                              Quoted(*name)),
                  name_path);
    }
    if (!seen_.insert(*name).second) {
      return Wrong(name_path, fmt::format("{} is the name of another tool", Quoted(*name)));
    }
    const JsonValue* given = function->Find("parameters");
    const JsonValue none = JsonValue::Object{};
    const JsonValue& parameters = given == nullptr || given->is_null() ? none : *given;
    const std::string parameters_path = path + "/function/parameters";
    Result<NodeId> node = ParametersToTree(parameters, options_.json, markup, tree_);
    if (!node) {
      Error error = std::move(node.error());
      error.field =
          error.field.starts_with('#') ? parameters_path + error.field.substr(1) : parameters_path;
      return WithContext(std::move(error),
                         fmt::format("The parameters of the tool {}", Quoted(*name)));
    }
    const RuleId rule = tree_->AddRule(fmt::format("the parameters of {}", *name));
    tree_->SetBody(rule, *node);
    declared_.push_back({*name, parameters_path, rule});
    return tree_->Sequence({tree_->Literal(*name + "\">\n"), tree_->Reference(rule)});
  }

  const ToolCallGrammarOptions& options_;
  const ChatTemplate& names_;
  GrammarTree* tree_;
  std::set<std::string> seen_;
  std::unordered_map<std::string, RuleId> shared_rules_;
  std::vector<Declared> declared_;
};

}  // namespace

Status ToolCallsToTree(std::string_view tools, const ToolCallGrammarOptions& options,
                       GrammarTree* tree) {
  const Result<JsonValue> list = JsonValue::Parse(tools);
  if (!list) return WithContext(list.error(), "The list of tools");
  return Builder(options, tree).Build(*list);
}

}  // namespace deepinfer
