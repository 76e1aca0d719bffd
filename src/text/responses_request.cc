#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "text/request_protocols.h"
#include "text/request_settings.h"

namespace deepinfer {
namespace {

// The toolkit describes this tool with a long text of its own, which is not reproduced here.
constexpr char kApplyPatchDescription[] =
    "Edits files by a patch. The input begins with the line '*** Begin Patch' and ends with the "
    "line '*** End Patch'. Between them, '*** Add File: PATH' is followed by the lines of a new "
    "file, each after a '+'; '*** Delete File: PATH' removes a file; '*** Update File: PATH' "
    "(after it '*** Move to: PATH' to rename the file) is followed by changes. A change begins "
    "with "
    "a line '@@', which may name the class or function it is in, and has lines that begin with ' ' "
    "(unchanged), '-' (removed) or '+' (added). Paths are relative.";

bool IsWebSearch(std::string_view type) {
  return type == "web_search" || type == "web_search_2025_08_26";
}

class ResponsesConverter {
 public:
  ResponsesConverter(const JsonValue& body, const ConversionOptions& options, RequestReader* reader)
      : body_(body), options_(options), reader_(reader), tools_(reader) {}

  ConvertedRequest Convert() {
    Chat& chat = request_.chat;
    chat.profile = options_.profile;
    ReadModel(body_, options_, reader_, &request_);
    std::optional<int> effort;
    if (const JsonValue* reasoning = reader_->Object(body_, "", "reasoning")) {
      effort = ReadEffort(*reasoning, "reasoning", "effort", reader_);
      ReadName(*reasoning, "reasoning", "summary", {"auto", "concise", "detailed"});
    }
    SetThinking(std::nullopt, effort, options_, &chat);
    ReadSampling(body_, options_, reader_, &request_);
    ReadMaxTokens(body_, "max_output_tokens", /*lower=*/false, options_, reader_, &request_);
    ReadTopLogprobs(body_, reader_, &request_);
    request_.logprobs = request_.top_logprobs.has_value();
    request_.stream = reader_->Bool(body_, "", "stream").value_or(false);
    reader_->String(body_, "", "user");
    ReadTextFormat();
    ReadTools();
    ReadInput();
    const bool has_format = chat.response_format.kind != ResponseFormat::Kind::kText;
    SetTools(&tools_, ReadToolChoice(), has_format ? "text.format" : "", reader_, &request_);
    FillUpdates();
    if (chat.response_format.kind == ResponseFormat::Kind::kJsonObject && !says_json_)
      reader_->Refuse("text.format", "asks for a JSON object, but no message has the word json");
    CheckReasoningGiven(request_.chat, "input", options_, reader_);
    return std::move(request_);
  }

 private:
  // The items of one turn of the assistant, which stand side by side.
  struct Turn {
    std::string text;
    std::string reasoning;
    std::vector<ToolCall> calls;
  };

  // An optional member that has one of a few names.
  std::optional<std::string> ReadName(const JsonValue& object, const std::string& path,
                                      std::string_view key,
                                      std::initializer_list<std::string_view> names) {
    std::optional<std::string> name = reader_->String(object, path, key);
    if (!name.has_value() || std::find(names.begin(), names.end(), *name) != names.end())
      return name;
    std::string allowed;
    for (const std::string_view one : names) {
      if (!allowed.empty()) allowed += ", ";
      allowed += one;
    }
    reader_->Malformed(FieldPath(path, key),
                       fmt::format("is {}; it must be one of {}", Quoted(*name), allowed));
    return std::nullopt;
  }

  void ReadTextFormat() {
    const JsonValue* text = reader_->Object(body_, "", "text");
    if (text == nullptr) return;
    ReadName(*text, "text", "verbosity", {"low", "medium", "high"});
    if (text->Find("format") == nullptr) return;
    const JsonValue* format = reader_->RequiredObject(*text, "text", "format");
    if (format == nullptr) return;
    const std::string type = reader_->RequiredString(*format, "text.format", "type");
    if (type == "json_object") {
      request_.chat.response_format.kind = ResponseFormat::Kind::kJsonObject;
      request_.constraint = OutputConstraint();
    } else if (type == "json_schema") {
      reader_->RequiredString(*format, "text.format", "name");
      ReadResponseSchema(*format, "text.format", reader_, &request_);
    } else if (type != "text") {
      reader_->Malformed(
          "text.format.type",
          fmt::format("is {}; it must be text, json_object or json_schema", Quoted(type)));
    }
  }

  void ReadInput() {
    const std::optional<std::string> instructions = reader_->String(body_, "", "instructions");
    if (instructions.has_value() && !instructions->empty())
      AddMessage(Role::kSystem, TextContent(*instructions));
    const JsonValue* input = body_.Find("input");
    if (input == nullptr || input->is_null()) {
      if (request_.chat.messages.empty()) reader_->Refuse("input", "or instructions must be given");
    } else if (input->if_string() != nullptr) {
      AddMessage(Role::kUser, TextContent(*input->if_string()));
    } else if (const JsonValue::Array* items = input->if_array()) {
      if (items->empty()) reader_->Refuse("input", "must not be empty");
      for (size_t i = 0; i < items->size() && !reader_->malformed(); ++i) {
        path_ = ElementPath("input", i);
        ReadItem((*items)[i]);
      }
      CheckAllAnswered();
      FinishTurn();
    } else {
      reader_->Malformed("input", "must be a string or a list");
    }
  }

  void ReadItem(const JsonValue& item) {
    if (!reader_->IsObject(item, path_)) return;
    std::string type = "message";
    if (item.Find("type") != nullptr) {
      type = reader_->RequiredString(item, path_, "type");
    } else if (item.Find("role") == nullptr) {
      reader_->Malformed(path_, "has neither a type nor a role");
      return;
    }
    if (type == "message") {
      ReadMessage(item);
    } else if (type == "reasoning") {
      ReadReasoning(item);
    } else if (type == "function_call") {
      ToolCall call = ReadCall(item);
      const std::string name = reader_->RequiredString(item, path_, "name");
      const std::optional<std::string> scope = reader_->String(item, path_, "namespace");
      call.name = scope.has_value() ? fmt::format("{}::{}", *scope, name) : name;
      call.arguments = reader_->RequiredString(item, path_, "arguments");
      AddCall(std::move(call));
    } else if (type == "custom_tool_call") {
      ToolCall call = ReadCall(item);
      call.name = reader_->RequiredString(item, path_, "name");
      JsonValue arguments;
      arguments.Set("input", reader_->RequiredString(item, path_, "input"));
      call.arguments = arguments.DumpCompact();
      AddCall(std::move(call));
    } else if (type == "tool_search_call") {
      ToolCall call = ReadCall(item);
      call.name = "tool_search";
      ReadName(item, path_, "execution", {"client", "server"});
      const JsonValue* arguments = reader_->RequiredObject(item, path_, "arguments");
      if (arguments != nullptr) call.arguments = arguments->DumpCompact();
      AddCall(std::move(call));
    } else if (type == "function_call_output" || type == "custom_tool_call_output") {
      const std::string id = reader_->RequiredString(item, path_, "call_id");
      AddOutput(id, ReadContent(item, "output", /*is_output=*/true));
    } else if (type == "tool_search_output") {
      ReadToolSearchOutput(item);
    } else if (type == "web_search_call") {
      CheckAllAnswered();
    }
    // Items of other types are skipped.
  }

  void ReadMessage(const JsonValue& item) {
    const std::string role = reader_->RequiredString(item, path_, "role");
    CheckAllAnswered();
    Content content = ReadContent(item, "content", /*is_output=*/false);
    if (role == "assistant") {
      if (!content.images.empty())
        reader_->Refuse(path_ + ".content",
                        "has an image, which an assistant message may not have");
      AppendUnlessEmpty(content.text, "\n\n", &CurrentTurn().text);
      return;
    }
    FinishTurn();
    if (role == "user") {
      AddMessage(Role::kUser, std::move(content));
    } else if (role == "system" || role == "developer") {
      AddMessage(Role::kSystem, std::move(content));
    } else {
      reader_->Malformed(
          path_ + ".role",
          fmt::format("is {}; it must be user, assistant, system or developer", Quoted(role)));
    }
  }

  void ReadReasoning(const JsonValue& item) {
    CheckAllAnswered();
    std::string text;
    if (const JsonValue::Array* parts = reader_->Array(item, path_, "content")) {
      for (size_t i = 0; i < parts->size() && !reader_->malformed(); ++i) {
        const std::string path = ElementPath(path_ + ".content", i);
        if (!reader_->IsObject((*parts)[i], path)) return;
        if (i > 0) text += '\n';
        text += reader_->RequiredString((*parts)[i], path, "text");
      }
    }
    if (text.empty()) return;
    if (turn_.has_value() && (!turn_->text.empty() || !turn_->calls.empty())) FinishTurn();
    AppendUnlessEmpty(text, "\n", &CurrentTurn().reasoning);
  }

  ToolCall ReadCall(const JsonValue& item) {
    ToolCall call;
    call.id = reader_->RequiredString(item, path_, "call_id");
    if (!seen_calls_.insert(call.id).second)
      reader_->Refuse(path_ + ".call_id",
                      fmt::format("is {}, the id of another call", Quoted(call.id)));
    return call;
  }

  void AddCall(ToolCall call) {
    unanswered_.insert(call.id);
    CurrentTurn().calls.push_back(std::move(call));
  }

  void AddOutput(const std::string& id, Content content) {
    FinishTurn();
    if (unanswered_.erase(id) == 0)
      reader_->Refuse(
          path_ + ".call_id",
          fmt::format("is {}, which is no call before that is still to be answered", Quoted(id)));
    Message message;
    message.role = Role::kTool;
    message.content = std::move(content);
    message.tool_call_id = id;
    request_.chat.messages.push_back(std::move(message));
    if (!late_.empty()) waiting_.push_back(std::exchange(late_, {}));
    if (!unanswered_.empty()) return;
    for (std::vector<std::string>& names : std::exchange(waiting_, {})) {
      updates_.emplace_back(request_.chat.messages.size(), std::move(names));
      AddMessage(Role::kSystem, {});
    }
  }

  void CheckAllAnswered() {
    if (unanswered_.empty()) return;
    reader_->Refuse(
        path_, fmt::format("comes before the output of the call {}", Quoted(*unanswered_.begin())));
    unanswered_.clear();
  }

  Turn& CurrentTurn() {
    if (!turn_.has_value()) turn_.emplace();
    return *turn_;
  }

  void FinishTurn() {
    if (!turn_.has_value()) return;
    Message message;
    message.role = Role::kAssistant;
    message.content.text = std::move(turn_->text);
    if (!turn_->reasoning.empty()) message.reasoning_content = std::move(turn_->reasoning);
    message.tool_calls = std::move(turn_->calls);
    request_.chat.messages.push_back(std::move(message));
    turn_.reset();
  }

  static void AppendUnlessEmpty(const std::string& text, std::string_view separator,
                                std::string* out) {
    if (text.empty()) return;
    if (!out->empty()) *out += separator;
    *out += text;
  }

  void AddMessage(Role role, Content content) {
    Message message;
    message.role = role;
    message.content = std::move(content);
    request_.chat.messages.push_back(std::move(message));
  }

  Content TextContent(const std::string& text) {
    ContentBuilder content(&says_json_);
    content.AddText(text);
    return content.Take();
  }

  Content ReadContent(const JsonValue& item, std::string_view key, bool is_output) {
    const JsonValue* value = reader_->Required(item, path_, key);
    if (value == nullptr) return {};
    if (value->if_string() != nullptr) return TextContent(*value->if_string());
    const std::string path = FieldPath(path_, key);
    const JsonValue::Array* blocks = value->if_array();
    if (blocks == nullptr) {
      reader_->Malformed(path, "must be a string or a list");
      return {};
    }
    ContentBuilder content(&says_json_);
    for (size_t i = 0; i < blocks->size() && !reader_->malformed(); ++i) {
      ReadBlock((*blocks)[i], ElementPath(path, i), is_output, &content);
    }
    return content.Take();
  }

  void ReadBlock(const JsonValue& block, const std::string& path, bool is_output,
                 ContentBuilder* content) {
    if (!reader_->IsObject(block, path)) return;
    const std::string type = reader_->RequiredString(block, path, "type");
    if (type == "input_text" || (type == "output_text" && !is_output)) {
      content->AddText(reader_->RequiredString(block, path, "text"));
    } else if (type == "input_image") {
      ReadImage(block, path, content);
    } else if (type == "input_file") {
      content->AddText("[Unsupported Document]");
    } else {
      reader_->Malformed(path + ".type",
                         fmt::format("is {}; it must be input_text, {}input_image or input_file",
                                     Quoted(type), is_output ? "" : "output_text, "));
    }
  }

  void ReadImage(const JsonValue& block, const std::string& path, ContentBuilder* content) {
    const std::optional<std::string> url = reader_->String(block, path, "image_url");
    const std::optional<std::string> id = reader_->String(block, path, "file_id");
    ImageSource image;
    image.detail = ImageDetail(block, path, reader_);
    image.path = path;
    if (id.has_value()) {
      reader_->Refuse(path + ".file_id", "is not supported; pass the image as image_url");
    } else if (!url.has_value()) {
      reader_->Refuse(path, "needs image_url");
    } else {
      CheckImageUrl(*url, path + ".image_url", reader_);
      image.url = *url;
    }
    content->AddImage(std::move(image));
  }

  void ReadTools() {
    const JsonValue::Array* tools = reader_->Array(body_, "", "tools");
    if (tools == nullptr) return;
    for (size_t i = 0; i < tools->size() && !reader_->malformed(); ++i) {
      ReadTool((*tools)[i], ElementPath("tools", i), nullptr);
    }
  }

  // The result of a search for tools is the tools that were found, which the model may call from
  // here on.
  void ReadToolSearchOutput(const JsonValue& item) {
    const std::string id = reader_->RequiredString(item, path_, "call_id");
    ReadName(item, path_, "execution", {"client", "server"});
    JsonValue::Array found;
    if (const JsonValue::Array* tools = reader_->RequiredArray(item, path_, "tools")) {
      for (size_t i = 0; i < tools->size() && !reader_->malformed(); ++i) {
        ReadTool((*tools)[i], ElementPath(path_ + ".tools", i), &found);
      }
    }
    AddOutput(id, TextContent(JsonValue(std::move(found)).DumpCompact()));
  }

  // `found`: the tool arrives late, and this is the list in which the model reads about it.
  void ReadTool(const JsonValue& tool, const std::string& path, JsonValue::Array* found) {
    if (!reader_->IsObject(tool, path)) return;
    const std::string type = reader_->RequiredString(tool, path, "type");
    if (type == "function") {
      ReadFunction(tool, path, nullptr, found);
    } else if (type == "namespace") {
      ReadNamespace(tool, path, found);
    } else if (type == "custom") {
      ReadCustomTool(tool, path, found);
    } else if (type == "tool_search") {
      ReadToolSearch(tool, path, found);
    } else if (IsWebSearch(type)) {
      ReadWebSearch(tool, type, path, found);
    } else if (found != nullptr) {
      reader_->Refuse(path + ".type",
                      fmt::format("is {}, which is not supported here", Quoted(type)));
    }
    // Declared tools of other types are skipped.
  }

  struct Namespace {
    std::string name;
    std::string description;
  };

  void ReadFunction(const JsonValue& tool, const std::string& path, const Namespace* scope,
                    JsonValue::Array* found) {
    DeclaredTool declared;
    declared.path = path;
    const std::string name = reader_->RequiredString(tool, path, "name");
    declared.name = name;
    const std::optional<std::string> description = reader_->String(tool, path, "description");
    declared.description = description;
    declared.strict = reader_->Bool(tool, path, "strict");
    reader_->Bool(tool, path, "defer_loading");
    declared.parameters_key = "parameters";
    declared.parameters = tool.Find("parameters");
    if (declared.parameters != nullptr && declared.parameters->is_null())
      declared.parameters = nullptr;
    if (scope != nullptr) {
      CheckToolName(name, path + ".name", reader_);
      repeated_bytes_ += scope->description.size();
      if (repeated_bytes_ > kMaxRepeatedBytes) {
        reader_->Refuse(path, fmt::format("repeats its namespace's description, by now more than "
                                          "{} bytes",
                                          kMaxRepeatedBytes));
        return;
      }
      declared.name_checked = true;
      declared.name = fmt::format("{}::{}", scope->name, name);
      if (!scope->description.empty())
        declared.description = fmt::format("{}\n{}", scope->description, description.value_or(""));
      request_.namespaces[declared.name] = {scope->name, name};
    }
    Add(std::move(declared), found);
    if (found == nullptr) return;
    JsonValue echo;
    echo.Set("type", "function");
    echo.Set("name", name);
    echo.Set("description", description.has_value() ? JsonValue(*description) : JsonValue());
    const JsonValue* parameters = tool.Find("parameters");
    echo.Set("parameters", parameters != nullptr ? *parameters : JsonValue());
    const std::optional<bool> strict = reader_->Bool(tool, path, "strict");
    echo.Set("strict", strict.has_value() ? JsonValue(*strict) : JsonValue());
    if (scope != nullptr) {
      JsonValue named;
      named.Set("name", scope->name);
      named.Set("description", scope->description);
      echo.Set("namespace", std::move(named));
    }
    found->push_back(std::move(echo));
  }

  void ReadNamespace(const JsonValue& tool, const std::string& path, JsonValue::Array* found) {
    const Namespace scope = {reader_->RequiredString(tool, path, "name"),
                             reader_->String(tool, path, "description").value_or("")};
    CheckToolName(scope.name, path + ".name", reader_);
    const JsonValue::Array* functions = reader_->RequiredArray(tool, path, "tools");
    if (functions == nullptr) return;
    for (size_t i = 0; i < functions->size() && !reader_->malformed(); ++i) {
      const std::string function_path = ElementPath(path + ".tools", i);
      const JsonValue& function = (*functions)[i];
      if (!reader_->IsObject(function, function_path)) return;
      const std::string type = reader_->RequiredString(function, function_path, "type");
      if (type == "function") {
        ReadFunction(function, function_path, &scope, found);
      } else if (type == "custom") {
        reader_->RequiredString(function, function_path, "name");
        reader_->Refuse(function_path, "is a custom tool, which a namespace may not have");
      } else {
        reader_->Malformed(function_path + ".type", "must be function or custom");
      }
    }
  }

  void ReadCustomTool(const JsonValue& tool, const std::string& path, JsonValue::Array* found) {
    const std::string name = reader_->RequiredString(tool, path, "name");
    if (name != "apply_patch") {
      reader_->Refuse(path + ".name",
                      fmt::format("is {}; the only custom tool is apply_patch", Quoted(name)));
      return;
    }
    static const JsonValue parameters = *JsonValue::Parse(
        R"({"type": "object", "additionalProperties": false, "properties": {"input": {"type": )"
        R"("string", "description": "The whole patch, from its first line to its last."}}, )"
        R"("required": ["input"]})");
    DeclaredTool declared;
    declared.path = path;
    declared.name = name;
    declared.description = kApplyPatchDescription;
    declared.parameters = &parameters;
    declared.parameters_key = "parameters";
    Add(std::move(declared), found);
    if (found == nullptr) return;
    JsonValue echo;
    echo.Set("type", "custom");
    echo.Set("name", name);
    found->push_back(std::move(echo));
  }

  // Only a search that the client runs is a tool of the model.
  void ReadToolSearch(const JsonValue& tool, const std::string& path, JsonValue::Array* found) {
    const std::optional<std::string> execution =
        ReadName(tool, path, "execution", {"client", "server"});
    const std::optional<std::string> description = reader_->String(tool, path, "description");
    const JsonValue* parameters = tool.Find("parameters");
    if (execution == "client") {
      DeclaredTool declared;
      declared.path = path;
      declared.name = "tool_search";
      declared.description = description;
      declared.parameters = parameters != nullptr && !parameters->is_null() ? parameters : nullptr;
      declared.parameters_key = "parameters";
      Add(std::move(declared), found);
    }
    if (found == nullptr) return;
    JsonValue echo;
    echo.Set("type", "tool_search");
    echo.Set("execution", execution.has_value() ? JsonValue(*execution) : JsonValue());
    echo.Set("description", description.has_value() ? JsonValue(*description) : JsonValue());
    echo.Set("parameters", parameters != nullptr ? *parameters : JsonValue());
    found->push_back(std::move(echo));
  }

  void ReadWebSearch(const JsonValue& tool, const std::string& type, const std::string& path,
                     JsonValue::Array* found) {
    const std::optional<std::string> size =
        ReadName(tool, path, "search_context_size", {"low", "medium", "high"});
    const JsonValue* location = reader_->Object(tool, path, "user_location");
    if (options_.responses_web_search_refused)
      reader_->Refuse(path + ".type", "is a tool that runs on the server, which is not supported");
    if (found == nullptr) return;
    JsonValue echo;
    echo.Set("type", type);
    echo.Set("search_context_size", size.has_value() ? JsonValue(*size) : JsonValue());
    echo.Set("user_location", location != nullptr ? *location : JsonValue());
    found->push_back(std::move(echo));
  }

  void Add(DeclaredTool declared, const JsonValue::Array* found) {
    if (reader_->malformed()) return;
    declared.defer_loading = found != nullptr;
    if (found != nullptr) late_.push_back(declared.name);
    tools_.Add(declared);
  }

  // The messages that show late tools, as far as the choice has left them.
  void FillUpdates() {
    std::vector<Message>& messages = request_.chat.messages;
    size_t kept = 0;
    size_t next = 0;
    for (size_t i = 0; i < messages.size(); ++i) {
      if (next < updates_.size() && updates_[next].first == i) {
        for (const std::string& name : updates_[next++].second) {
          const Tool* tool = tools_.visible() ? tools_.Find(name) : nullptr;
          if (tool != nullptr) messages[i].tools.push_back(*tool);
        }
        if (messages[i].tools.empty()) continue;
      }
      if (kept != i) messages[kept] = std::move(messages[i]);
      ++kept;
    }
    messages.resize(kept);
  }

  RequestedChoice ReadToolChoice() {
    using Kind = RequestedChoice::Kind;
    RequestedChoice choice;
    choice.path = "tool_choice";
    const JsonValue* value = body_.Find("tool_choice");
    if (value == nullptr || value->is_null()) return choice;
    const std::string* word = value->if_string();
    if (word != nullptr && *word == "none") {
      choice.kind = Kind::kNone;
    } else if (word != nullptr && *word == "required") {
      choice.kind = Kind::kRequired;
    } else if (value->if_object() != nullptr) {
      const std::string type = reader_->RequiredString(*value, "tool_choice", "type");
      if (type == "function" || type == "custom") {
        choice.kind = Kind::kNamed;
        choice.name = reader_->RequiredString(*value, "tool_choice", "name");
        choice.path = "tool_choice.name";
      } else if (!IsWebSearch(type)) {
        reader_->Malformed(
            "tool_choice.type",
            fmt::format("is {}; it must be function, custom or web_search", Quoted(type)));
      } else if (options_.responses_web_search_refused) {
        reader_->Refuse("tool_choice.type",
                        "is a tool that runs on the server, which is not supported");
      }
    } else if (word == nullptr || *word != "auto") {
      reader_->Malformed("tool_choice", "must be none, auto, required or a tool");
    }
    return choice;
  }

  const JsonValue& body_;
  const ConversionOptions& options_;
  RequestReader* reader_;
  RequestTools tools_;
  ConvertedRequest request_;
  std::string path_;  // of the item that is being read
  size_t repeated_bytes_ = 0;
  bool says_json_ = false;
  std::optional<Turn> turn_;
  std::set<std::string> seen_calls_;
  std::set<std::string> unanswered_;
  std::vector<std::string> late_;  // tools of the output that is being read
  // Of outputs before it, until the last one of the turn is there.
  std::vector<std::vector<std::string>> waiting_;
  // Places in the messages and the tools to be shown there.
  std::vector<std::pair<size_t, std::vector<std::string>>> updates_;
};

}  // namespace

ConvertedRequest ConvertResponses(const JsonValue& body, const ConversionOptions& options,
                                  RequestReader* reader) {
  return ResponsesConverter(body, options, reader).Convert();
}

}  // namespace deepinfer
