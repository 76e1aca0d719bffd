#include <fmt/core.h>

#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "text/request_protocols.h"
#include "text/request_settings.h"

namespace deepinfer {
namespace {

class MessagesConverter {
 public:
  MessagesConverter(const JsonValue& body, const ConversionOptions& options, RequestReader* reader)
      : body_(body), options_(options), reader_(reader), tools_(reader) {}

  ConvertedRequest Convert() {
    Chat& chat = request_.chat;
    chat.profile = options_.profile;
    ReadModel(body_, options_, reader_, &request_);
    const JsonValue* config = reader_->Object(body_, "", "output_config");
    if (const JsonValue* thinking = reader_->Object(body_, "", "thinking"))
      reader_->Unsigned(*thinking, "thinking", "budget_tokens", kNoLimit);
    SetThinking(
        ReadThinkingSwitch(body_, reader_),
        config == nullptr ? std::nullopt : ReadEffort(*config, "output_config", "effort", reader_),
        options_, &chat);
    ReadSampling(body_, options_, reader_, &request_);
    ReadMaxTokens(body_, "max_tokens", /*lower=*/true, options_, reader_, &request_);
    ReadStop(body_, "stop_sequences", /*may_be_string=*/false, reader_, &request_);
    request_.stream = reader_->Bool(body_, "", "stream").value_or(false);
    if (const JsonValue* metadata = reader_->Object(body_, "", "metadata"))
      reader_->String(*metadata, "metadata", "user_id");
    ReadTools();
    SetTools(&tools_, ReadToolChoice(), "", reader_, &request_);
    ReadSystem();
    ReadMessages();
    CheckReasoningGiven(request_.chat, "messages", options_, reader_);
    return std::move(request_);
  }

 private:
  static constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

  // A tool that is to be shown from here on. The request's tools were chosen from before, so that
  // one that the model may not call is known but not shown.
  void AddLateTool(const std::string& name, const std::string& path, std::vector<Tool>* late) {
    if (!declared_.contains(name)) {
      reader_->Refuse(path, fmt::format("is {}, which is none of the tools", Quoted(name)));
      return;
    }
    const Tool* tool = tools_.visible() ? tools_.Find(name) : nullptr;
    if (tool == nullptr) return;
    repeated_bytes_ += tool->function.size() + tool->recipe_parameters.size();
    if (repeated_bytes_ > kMaxRepeatedBytes) {
      reader_->Refuse(path, fmt::format("shows schemas again, by now more than {} bytes of them",
                                        kMaxRepeatedBytes));
      return;
    }
    late->push_back(*tool);
  }

  void ReadSystem() {
    const JsonValue* system = body_.Find("system");
    if (system == nullptr || system->is_null()) return;
    Message message;
    message.role = Role::kSystem;
    ContentBuilder content(&says_json_);
    if (const std::string* text = system->if_string()) {
      content.AddText(*text);
    } else if (const JsonValue::Array* blocks = system->if_array()) {
      for (size_t i = 0; i < blocks->size() && !reader_->malformed(); ++i) {
        const std::string path = ElementPath("system", i);
        if (!reader_->IsObject((*blocks)[i], path)) return;
        if (reader_->RequiredString((*blocks)[i], path, "type") != "text")
          reader_->Malformed(path + ".type", "must be text");
        content.AddText(reader_->RequiredString((*blocks)[i], path, "text"));
      }
    } else {
      reader_->Malformed("system", "must be a string or a list");
    }
    message.content = content.Take();
    request_.chat.messages.push_back(std::move(message));
  }

  void ReadMessages() {
    const JsonValue::Array* messages = reader_->RequiredArray(body_, "", "messages");
    if (messages == nullptr) return;
    if (messages->empty()) reader_->Refuse("messages", "must not be empty");
    for (size_t i = 0; i < messages->size() && !reader_->malformed(); ++i) {
      path_ = ElementPath("messages", i);
      const JsonValue& message = (*messages)[i];
      if (!reader_->IsObject(message, path_)) return;
      const std::string role = reader_->RequiredString(message, path_, "role");
      const JsonValue* content = reader_->Required(message, path_, "content");
      if (content == nullptr) return;
      content_path_ = path_ + ".content";
      if (content->if_string() == nullptr && content->if_array() == nullptr)
        reader_->Malformed(content_path_, "must be a string or a list");
      if (role == "user") {
        ReadUser(*content);
      } else if (role == "assistant") {
        ReadAssistant(*content);
      } else if (role == "system") {
        ReadSystemMessage(*content);
      } else {
        reader_->Malformed(
            path_ + ".role",
            fmt::format("is {}; it must be user, assistant or system", Quoted(role)));
      }
    }
    CheckAllAnswered();
  }

  // Calls read(block, type, path) for every block.
  template <class Read>
  void ForEachBlock(const JsonValue& content, Read read) {
    const JsonValue::Array& blocks = *content.if_array();
    for (size_t i = 0; i < blocks.size() && !reader_->malformed(); ++i) {
      const std::string path = ElementPath(content_path_, i);
      if (!reader_->IsObject(blocks[i], path)) return;
      read(blocks[i], reader_->RequiredString(blocks[i], path, "type"), path);
    }
  }

  void ReadUser(const JsonValue& content) {
    Message message;
    message.role = Role::kUser;
    ContentBuilder text(&says_json_);
    std::vector<Tool> late;
    bool has_results = false;
    if (content.if_string() != nullptr) {
      CheckAllAnswered();
      text.AddText(*content.if_string());
    } else if (content.if_array() != nullptr) {
      if (content.if_array()->empty()) reader_->Refuse(content_path_, "must not be empty");
      ForEachBlock(
          content, [&](const JsonValue& block, const std::string& type, const std::string& path) {
            if (type == "tool_result") {
              has_results = true;
              ReadToolResult(block, path, &late);
              return;
            }
            CheckAllAnswered();
            if (ReadTextLike(block, type, path, &text)) return;
            if (CheckOtherBlock(block, type, path))
              reader_->Refuse(path, fmt::format("is a {} block, which a user message may not have",
                                                Quoted(type)));
          });
    }
    CheckAllAnswered();
    if (!text.empty() || !has_results) {
      message.content = text.Take();
      request_.chat.messages.push_back(std::move(message));
    }
    if (!late.empty()) {
      Message update;
      update.role = Role::kSystem;
      update.tools = std::move(late);
      request_.chat.messages.push_back(std::move(update));
    }
  }

  void ReadToolResult(const JsonValue& block, const std::string& path, std::vector<Tool>* late) {
    Message message;
    message.role = Role::kTool;
    message.tool_call_id = reader_->RequiredString(block, path, "tool_use_id");
    reader_->Bool(block, path, "is_error");
    if (unanswered_.erase(*message.tool_call_id) == 0)
      reader_->Refuse(path + ".tool_use_id",
                      fmt::format("is {}, which is no call of the message before that is still to "
                                  "be answered",
                                  Quoted(*message.tool_call_id)));
    ContentBuilder content(&says_json_);
    const JsonValue* value = block.Find("content");
    const std::string content_path = path + ".content";
    if (value == nullptr || value->is_null()) {
      // An empty result.
    } else if (const std::string* text = value->if_string()) {
      content.AddText(*text);
    } else if (const JsonValue::Array* parts = value->if_array()) {
      for (size_t i = 0; i < parts->size() && !reader_->malformed(); ++i) {
        const std::string part_path = ElementPath(content_path, i);
        const JsonValue& part = (*parts)[i];
        if (!reader_->IsObject(part, part_path)) return;
        const std::string type = reader_->RequiredString(part, part_path, "type");
        if (ReadTextLike(part, type, part_path, &content)) continue;
        if (type == "tool_reference") {
          const std::string name = reader_->RequiredString(part, part_path, "tool_name");
          content.AddText(name);
          AddLateTool(name, part_path + ".tool_name", late);
        } else {
          reader_->Malformed(part_path + ".type",
                             fmt::format("is {}; it must be text, image, document or "
                                         "tool_reference",
                                         Quoted(type)));
        }
      }
    } else {
      reader_->Malformed(content_path, "must be a string or a list");
    }
    message.content = content.Take();
    request_.chat.messages.push_back(std::move(message));
  }

  void ReadAssistant(const JsonValue& content) {
    CheckAllAnswered();
    Message message;
    message.role = Role::kAssistant;
    ContentBuilder text(&says_json_, /*skip_leading_empty=*/true);
    std::optional<std::string> reasoning;
    if (content.if_string() != nullptr) {
      text.AddText(*content.if_string());
    } else if (content.if_array() != nullptr) {
      if (content.if_array()->empty()) reader_->Refuse(content_path_, "must not be empty");
      ForEachBlock(content, [&](const JsonValue& block, const std::string& type,
                                const std::string& path) {
        if (type == "tool_use") {
          ReadToolUse(block, path, &message);
        } else if (type == "thinking") {
          if (reasoning.has_value()) {
            *reasoning += "\n\n";
          } else {
            reasoning.emplace();
          }
          *reasoning += ReadThought(block, path);
        } else if (ReadTextLike(block, type, path, &text)) {
          if (!message.tool_calls.empty())
            reader_->Refuse(path, "comes after a tool_use block, where only results may follow");
          if (type == "image")
            reader_->Refuse(path, "is an image, which an assistant message may not have");
        } else if (CheckOtherBlock(block, type, path)) {
          const bool web_search = type == "server_tool_use" || type == "web_search_tool_result";
          if (!web_search || options_.messages_web_search_refused)
            reader_->Refuse(
                path, fmt::format("is a {} block, which is not supported here", Quoted(type)));
        }
      });
    }
    message.content = text.Take();
    message.reasoning_content = std::move(reasoning);
    request_.chat.messages.push_back(std::move(message));
  }

  std::string ReadThought(const JsonValue& block, const std::string& path) {
    reader_->String(block, path, "signature");
    return reader_->RequiredString(block, path, "thinking");
  }

  void ReadToolUse(const JsonValue& block, const std::string& path, Message* message) {
    ToolCall call;
    call.id = reader_->RequiredString(block, path, "id");
    call.name = reader_->RequiredString(block, path, "name");
    const JsonValue* input = reader_->Required(block, path, "input");
    if (input != nullptr) call.arguments = input->DumpCompact();
    if (!unanswered_.insert(call.id).second)
      reader_->Refuse(path + ".id", fmt::format("is {}, the id of another call", Quoted(call.id)));
    message->tool_calls.push_back(std::move(call));
  }

  void ReadSystemMessage(const JsonValue& content) {
    CheckAllAnswered();
    Message message;
    message.role = Role::kSystem;
    ContentBuilder text(&says_json_);
    bool adds_tools = false;
    if (content.if_string() != nullptr) {
      text.AddText(*content.if_string());
    } else if (content.if_array() != nullptr) {
      ForEachBlock(content, [&](const JsonValue& block, const std::string& type,
                                const std::string& path) {
        if (ReadTextLike(block, type, path, &text)) return;
        if (!CheckOtherBlock(block, type, path)) return;
        if (type == "tool_addition") {
          adds_tools = true;
          AddLateTool(*block.Find("tool")->Find("name")->if_string(), path + ".tool.name",
                      &message.tools);
        } else {
          reader_->Refuse(path, fmt::format("is a {} block, which a system message may not have",
                                            Quoted(type)));
        }
      });
    }
    message.content = text.Take();
    // Nothing is left of it when its tools are hidden.
    if (adds_tools && message.tools.empty() && message.content.text.empty() &&
        message.content.images.empty()) {
      return;
    }
    request_.chat.messages.push_back(std::move(message));
  }

  // Text, images and (as a note) documents. False for other types.
  bool ReadTextLike(const JsonValue& block, const std::string& type, const std::string& path,
                    ContentBuilder* content) {
    if (type == "text") {
      content->AddText(reader_->RequiredString(block, path, "text"));
    } else if (type == "image") {
      ReadImage(block, path, content);
    } else if (type == "document") {
      const JsonValue* source = reader_->RequiredObject(block, path, "source");
      if (source == nullptr) return true;
      content->AddText(fmt::format(
          "[Unsupported document type: {}]",
          reader_->String(*source, path + ".source", "media_type").value_or("unknown")));
    } else {
      return false;
    }
    return true;
  }

  void ReadImage(const JsonValue& block, const std::string& path, ContentBuilder* content) {
    const JsonValue* source = reader_->RequiredObject(block, path, "source");
    if (source == nullptr) return;
    const std::string source_path = path + ".source";
    const std::string type = reader_->RequiredString(*source, source_path, "type");
    ImageSource image;
    image.path = path;
    if (type == "base64") {
      std::string media_type = reader_->RequiredString(*source, source_path, "media_type");
      const std::string data = reader_->RequiredString(*source, source_path, "data");
      if (media_type == "image/jpg") media_type = "image/jpeg";
      if (media_type != "image/jpeg" && media_type != "image/png" && media_type != "image/gif" &&
          media_type != "image/webp") {
        reader_->Malformed(source_path + ".media_type",
                           "must be image/jpeg, image/png, image/gif or image/webp");
      }
      if (!IsStrictBase64(data)) reader_->Refuse(source_path + ".data", "is not valid base64");
      image.url = fmt::format("data:{};base64,{}", media_type, data);
    } else if (type == "url") {
      image.url = reader_->RequiredString(*source, source_path, "url");
      CheckHttpUrl(image.url, source_path + ".url", reader_);
    } else if (type == "file") {
      reader_->RequiredString(*source, source_path, "file_id");
      reader_->Refuse(source_path + ".file_id", "is not supported; pass the image as base64");
    } else {
      reader_->Malformed(source_path + ".type",
                         fmt::format("is {}; it must be base64, url or file", Quoted(type)));
    }
    content->AddImage(std::move(image));
  }

  // The shape of a block that this kind of message has no use for, so that a wrong shape is told
  // from a block in the wrong place. False if it is wrong.
  bool CheckOtherBlock(const JsonValue& block, const std::string& type, const std::string& path) {
    if (type == "thinking") {
      ReadThought(block, path);
    } else if (type == "tool_use" || type == "server_tool_use") {
      reader_->RequiredString(block, path, "id");
      reader_->RequiredString(block, path, "name");
      reader_->Required(block, path, "input");
    } else if (type == "tool_result" || type == "web_search_tool_result") {
      reader_->RequiredString(block, path, "tool_use_id");
    } else if (type == "tool_addition") {
      if (const JsonValue* tool = reader_->RequiredObject(block, path, "tool")) {
        if (reader_->RequiredString(*tool, path + ".tool", "type") != "tool_reference")
          reader_->Malformed(path + ".tool.type", "must be tool_reference");
        reader_->RequiredString(*tool, path + ".tool", "name");
      }
    } else {
      reader_->Malformed(path + ".type",
                         fmt::format("is {}, which is no type of a block", Quoted(type)));
    }
    return !reader_->malformed();
  }

  void CheckAllAnswered() {
    if (unanswered_.empty()) return;
    reader_->Refuse(path_, fmt::format("comes before the tool_result block that answers the call "
                                       "{}",
                                       Quoted(*unanswered_.begin())));
    unanswered_.clear();
  }

  void ReadTools() {
    const JsonValue::Array* tools = reader_->Array(body_, "", "tools");
    if (tools == nullptr) return;
    bool all_deferred = true;
    for (size_t i = 0; i < tools->size() && !reader_->malformed(); ++i) {
      const std::string path = ElementPath("tools", i);
      const JsonValue& tool = (*tools)[i];
      if (!reader_->IsObject(tool, path)) return;
      if (tool.Find("type") != nullptr) {
        ReadServerTool(tool, path);
        continue;
      }
      DeclaredTool declared;
      declared.path = path;
      declared.name = reader_->RequiredString(tool, path, "name");
      declared.description = reader_->String(tool, path, "description");
      declared.parameters_key = "input_schema";
      declared.parameters = tool.Find("input_schema");
      declared.defer_loading = reader_->Bool(tool, path, "defer_loading").value_or(false);
      all_deferred = all_deferred && declared.defer_loading;
      declared.parameters_required = true;
      declared_.insert(declared.name);
      if (!reader_->malformed()) tools_.Add(declared);
    }
    if (!tools_.empty() && all_deferred)
      reader_->Refuse("tools", "must have one without defer_loading");
  }

  void ReadServerTool(const JsonValue& tool, const std::string& path) {
    const std::string type = reader_->RequiredString(tool, path, "type");
    if (type.starts_with("web_search") && !options_.messages_web_search_refused) {
      dropped_.insert(reader_->String(tool, path, "name").value_or(""));
      return;
    }
    reader_->Refuse(
        path + ".type",
        fmt::format("is {}; tools that run on the server are not supported", Quoted(type)));
  }

  RequestedChoice ReadToolChoice() {
    using Kind = RequestedChoice::Kind;
    RequestedChoice choice;
    choice.path = "tool_choice";
    const JsonValue* value = reader_->Object(body_, "", "tool_choice");
    if (value == nullptr) return choice;
    const std::string type = reader_->RequiredString(*value, "tool_choice", "type");
    reader_->Bool(*value, "tool_choice", "disable_parallel_tool_use");
    if (type == "none") {
      choice.kind = Kind::kNone;
    } else if (type == "tool") {
      choice.name = reader_->RequiredString(*value, "tool_choice", "name");
      choice.path = "tool_choice.name";
      if (!dropped_.contains(choice.name)) choice.kind = Kind::kNamed;
      const JsonValue* tools = body_.Find("tools");
      if (choice.kind == Kind::kNamed && tools_.empty() && tools != nullptr &&
          tools->if_array() != nullptr && !tools->if_array()->empty()) {
        reader_->Refuse(choice.path,
                        fmt::format("names {}, which is none of the tools", Quoted(choice.name)));
      }
    } else if (type != "auto" && type != "any") {
      reader_->Malformed("tool_choice.type",
                         fmt::format("is {}; it must be auto, any, tool or none", Quoted(type)));
    }
    return choice;
  }

  const JsonValue& body_;
  const ConversionOptions& options_;
  RequestReader* reader_;
  RequestTools tools_;
  ConvertedRequest request_;
  std::string path_;          // of the message that is being read
  std::string content_path_;  // of its content
  size_t repeated_bytes_ = 0;
  bool says_json_ = false;            // this protocol has no JSON mode
  std::set<std::string> unanswered_;  // ids of calls of the message before
  std::set<std::string> declared_;    // names of all tools, chosen or not
  std::set<std::string> dropped_;     // names of web search tools
};

}  // namespace

ConvertedRequest ConvertMessages(const JsonValue& body, const ConversionOptions& options,
                                 RequestReader* reader) {
  return MessagesConverter(body, options, reader).Convert();
}

}  // namespace deepinfer
