#include <fmt/core.h>

#include <limits>
#include <set>
#include <utility>

#include "base/quoted.h"
#include "text/request_protocols.h"
#include "text/request_settings.h"

namespace deepinfer {
namespace {

class ChatCompletionsConverter {
 public:
  ChatCompletionsConverter(const JsonValue& body, const ConversionOptions& options,
                           RequestReader* reader)
      : body_(body), options_(options), reader_(reader), tools_(reader) {}

  ConvertedRequest Convert() {
    Chat& chat = request_.chat;
    chat.profile = options_.profile;
    ReadModel(body_, options_, reader_, &request_);
    SetThinking(ReadThinkingSwitch(body_, reader_),
                ReadEffort(body_, "", "reasoning_effort", reader_), options_, &chat);
    ReadSampling(body_, options_, reader_, &request_);
    ReadMaxTokens(body_, "max_tokens", /*lower=*/false, options_, reader_, &request_);
    ReadStop(body_, "stop", /*may_be_string=*/true, reader_, &request_);
    ReadOtherSettings();
    ReadResponseFormat();
    ReadMessages();
    ReadTools();
    const bool json_object = chat.response_format.kind == ResponseFormat::Kind::kJsonObject;
    if (!chat.messages.empty() && chat.messages.back().prefix) CheckPrefix(json_object);
    const bool has_format = reader_->Object(body_, "", "response_format") != nullptr;
    SetTools(&tools_, ReadToolChoice(), has_format ? "response_format" : "", reader_, &request_);
    if (json_object && !says_json_)
      reader_->Refuse("response_format",
                      "asks for a JSON object, but no message has the word json");
    CheckReasoningGiven(request_.chat, "messages", options_, reader_);
    return std::move(request_);
  }

 private:
  void ReadOtherSettings() {
    request_.stream = reader_->Bool(body_, "", "stream").value_or(false);
    if (const JsonValue* options = reader_->Object(body_, "", "stream_options")) {
      reader_->Bool(*options, "stream_options", "include_usage");
      if (!request_.stream) reader_->Refuse("stream_options", "is only allowed with stream true");
    }
    const std::optional<uint64_t> n =
        reader_->Unsigned(body_, "", "n", std::numeric_limits<uint8_t>::max());
    if (n.has_value() && *n != 1) reader_->Refuse("n", fmt::format("is {}; only 1 is allowed", *n));
    const std::optional<uint64_t> seed =
        reader_->Unsigned(body_, "", "seed", std::numeric_limits<uint64_t>::max());
    if (seed.has_value()) {
      if (*seed > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        reader_->Refuse("seed", fmt::format("is {}; it must be 0 ... 2^63-1", *seed));
      request_.seed = static_cast<int64_t>(*seed);
    }
    request_.logprobs = reader_->Bool(body_, "", "logprobs").value_or(false);
    ReadTopLogprobs(body_, reader_, &request_);
    if (request_.top_logprobs.has_value() && !request_.logprobs)
      reader_->Refuse("top_logprobs", "is only allowed with logprobs true");
    for (const std::string key : {"frequency_penalty", "presence_penalty"}) {
      const float penalty = reader_->Float(body_, "", key).value_or(0);
      if (!(penalty >= -2 && penalty <= 2))
        reader_->Refuse(key, fmt::format("is {}; it must be -2 ... 2", penalty));
    }
    reader_->Bool(body_, "", "parallel_tool_calls");
  }

  void ReadResponseFormat() {
    const JsonValue* format = reader_->Object(body_, "", "response_format");
    if (format == nullptr) return;
    const std::string type = reader_->RequiredString(*format, "response_format", "type");
    if (type == "json_object") {
      request_.chat.response_format.kind = ResponseFormat::Kind::kJsonObject;
      request_.constraint = OutputConstraint();
    } else if (type == "json_schema") {
      const JsonValue* schema = reader_->RequiredObject(*format, "response_format", "json_schema");
      if (schema == nullptr) return;
      const std::string path = "response_format.json_schema";
      reader_->String(*schema, path, "name");
      ReadResponseSchema(*schema, path, reader_, &request_);
    } else if (type == "regex") {
      std::string pattern = reader_->RequiredString(*format, "response_format", "regex");
      request_.constraint = OutputConstraint{OutputConstraint::Kind::kRegex, pattern};
      request_.chat.response_format = {ResponseFormat::Kind::kRegex, std::move(pattern)};
    } else if (type != "text") {
      reader_->Malformed(
          "response_format.type",
          fmt::format("is {}; it must be text, json_object, json_schema or regex", Quoted(type)));
    }
  }

  void ReadMessages() {
    const JsonValue::Array* messages = reader_->RequiredArray(body_, "", "messages");
    if (messages == nullptr) return;
    if (messages->empty()) reader_->Refuse("messages", "must not be empty");
    for (size_t i = 0; i < messages->size() && !reader_->malformed(); ++i) {
      path_ = ElementPath("messages", i);
      const JsonValue& message = (*messages)[i];
      if (!reader_->IsObject(message, path_)) return;
      ReadMessage(message, i + 1 == messages->size());
    }
    CheckAllAnswered();
  }

  void ReadMessage(const JsonValue& message, bool is_last) {
    const std::string role = reader_->RequiredString(message, path_, "role");
    in_user_message_ = role == "user";
    if (role != "tool") CheckAllAnswered();
    if (role == "assistant") {
      ReadAssistant(message, is_last);
      return;
    }
    Message out;
    if (role == "latest_reminder") {
      out.role = Role::kLatestReminder;
      ContentBuilder content(&says_json_);
      content.AddText(reader_->RequiredString(message, path_, "content"));
      out.content = content.Take();
    } else if (role == "tool") {
      out.role = Role::kTool;
      out.tool_call_id = reader_->RequiredString(message, path_, "tool_call_id");
      if (unanswered_.erase(*out.tool_call_id) == 0)
        reader_->Refuse(path_ + ".tool_call_id",
                        fmt::format("is {}, which is no call of the assistant message before that "
                                    "is still to be answered",
                                    Quoted(*out.tool_call_id)));
      out.content = ReadContent(message);
    } else if (role == "user" || role == "system") {
      out.role = role == "user" ? Role::kUser : Role::kSystem;
      out.content = ReadContent(message);
      const bool empty = out.content.text.empty() && out.content.images.empty();
      if (empty && role == "system" && options_.profile == EncodingProfile::kRecipe) return;
    } else {
      reader_->Malformed(path_ + ".role", fmt::format("is {}; it must be system, user, assistant, "
                                                      "tool or latest_reminder",
                                                      Quoted(role)));
    }
    if (role != "tool") reader_->String(message, path_, "name");
    request_.chat.messages.push_back(std::move(out));
  }

  void ReadAssistant(const JsonValue& message, bool is_last) {
    Message out;
    out.role = Role::kAssistant;
    const JsonValue* content = message.Find("content");
    const bool has_content = content != nullptr && !content->is_null();
    if (has_content) out.content = ReadContent(message);
    if (!out.content.images.empty())
      reader_->Refuse(path_ + ".content", "has an image, which an assistant message may not have");
    out.reasoning_content = reader_->String(message, path_, "reasoning_content");
    reader_->String(message, path_, "name");
    const JsonValue::Array* calls = reader_->Array(message, path_, "tool_calls");
    if (calls != nullptr) {
      if (calls->empty()) reader_->Refuse(path_ + ".tool_calls", "must not be empty");
      for (size_t i = 0; i < calls->size() && !reader_->malformed(); ++i) {
        ReadCall((*calls)[i], ElementPath(path_ + ".tool_calls", i), &out);
      }
    }
    if (!has_content && calls == nullptr) reader_->Refuse(path_, "needs content or tool_calls");
    out.prefix = reader_->Bool(message, path_, "prefix").value_or(false);
    if (out.prefix && !is_last)
      reader_->Refuse(path_ + ".prefix", "is only allowed in the last message");
    request_.chat.messages.push_back(std::move(out));
  }

  void ReadCall(const JsonValue& call, const std::string& path, Message* message) {
    if (!reader_->IsObject(call, path)) return;
    ToolCall out;
    out.id = reader_->RequiredString(call, path, "id");
    const std::string type = reader_->RequiredString(call, path, "type");
    if (type != "function")
      reader_->Malformed(path + ".type", fmt::format("is {}; it must be function", Quoted(type)));
    if (const JsonValue* function = reader_->RequiredObject(call, path, "function")) {
      out.name = reader_->RequiredString(*function, path + ".function", "name");
      out.arguments = reader_->RequiredString(*function, path + ".function", "arguments");
    }
    if (!unanswered_.insert(out.id).second)
      reader_->Refuse(path + ".id", fmt::format("is {}, the id of another call", Quoted(out.id)));
    message->tool_calls.push_back(std::move(out));
  }

  void CheckAllAnswered() {
    if (unanswered_.empty()) return;
    reader_->Refuse(path_, fmt::format("comes before the tool message that answers the call {}",
                                       Quoted(*unanswered_.begin())));
    unanswered_.clear();
  }

  Content ReadContent(const JsonValue& message) {
    ContentBuilder content(&says_json_);
    const JsonValue* value = reader_->Required(message, path_, "content");
    if (value == nullptr) return {};
    const std::string path = path_ + ".content";
    if (const std::string* text = value->if_string()) {
      content.AddText(*text);
    } else if (const JsonValue::Array* blocks = value->if_array()) {
      for (size_t i = 0; i < blocks->size() && !reader_->malformed(); ++i) {
        ReadBlock((*blocks)[i], ElementPath(path, i), &content);
      }
    } else {
      reader_->Malformed(path, "must be a string or a list");
    }
    return content.Take();
  }

  void ReadBlock(const JsonValue& block, const std::string& path, ContentBuilder* content) {
    if (!reader_->IsObject(block, path)) return;
    const std::string type = reader_->RequiredString(block, path, "type");
    if (type == "text") {
      content->AddText(reader_->RequiredString(block, path, "text"));
    } else if (type == "image_url") {
      const JsonValue* image = reader_->RequiredObject(block, path, "image_url");
      if (image == nullptr) return;
      const std::string image_path = path + ".image_url";
      ImageSource source;
      source.url = reader_->RequiredString(*image, image_path, "url");
      source.detail = ImageDetail(*image, image_path, reader_);
      source.path = path;
      CheckImageUrl(source.url, image_path + ".url", reader_);
      content->AddImage(std::move(source));
    } else if (type == "file") {
      const std::optional<std::string> data = reader_->String(block, path, "file_data");
      const std::optional<std::string> id = reader_->String(block, path, "file_id");
      if (id.has_value()) {
        reader_->Refuse(path + ".file_id", "is not supported; pass the image as file_data");
      } else if (!data.has_value()) {
        reader_->Refuse(path, "needs file_data");
      } else {
        CheckFileData(*data, path + ".file_data", reader_);
        if (options_.profile == EncodingProfile::kRecipe) {
          content->AddImage({*data, "high", path});
        } else if (in_user_message_) {
          // The checkpoint's encoder knows no files, and leaves them out elsewhere.
          content->AddText("[Unsupported file]");
        }
      }
    } else {
      reader_->Malformed(path + ".type",
                         fmt::format("is {}; it must be text, image_url or file", Quoted(type)));
    }
  }

  void ReadTools() {
    const JsonValue::Array* tools = reader_->Array(body_, "", "tools");
    if (tools == nullptr) return;
    for (size_t i = 0; i < tools->size() && !reader_->malformed(); ++i) {
      const std::string path = ElementPath("tools", i);
      const JsonValue& tool = (*tools)[i];
      if (!reader_->IsObject(tool, path)) return;
      const std::string type = reader_->RequiredString(tool, path, "type");
      if (type != "function")
        reader_->Malformed(path + ".type", fmt::format("is {}; it must be function", Quoted(type)));
      const JsonValue* function = reader_->RequiredObject(tool, path, "function");
      if (function == nullptr) return;
      DeclaredTool declared;
      declared.path = path + ".function";
      declared.name = reader_->RequiredString(*function, declared.path, "name");
      declared.description = reader_->String(*function, declared.path, "description");
      declared.strict = reader_->Bool(*function, declared.path, "strict");
      declared.parameters_key = "parameters";
      declared.parameters = function->Find("parameters");
      if (declared.parameters != nullptr && declared.parameters->is_null())
        declared.parameters = nullptr;
      declared.function = function;
      if (!reader_->malformed()) tools_.Add(declared);
    }
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
      choice.kind = Kind::kNamed;
      if (reader_->RequiredString(*value, "tool_choice", "type") != "function")
        reader_->Malformed("tool_choice.type", "must be function");
      const JsonValue* function = reader_->RequiredObject(*value, "tool_choice", "function");
      choice.path = "tool_choice.function.name";
      if (function != nullptr)
        choice.name = reader_->RequiredString(*function, "tool_choice.function", "name");
    } else if (word == nullptr || *word != "auto") {
      reader_->Malformed("tool_choice", "must be none, auto, required or a function");
    }
    return choice;
  }

  void CheckPrefix(bool json_object) {
    if (!tools_.empty()) reader_->Refuse("tools", "cannot be combined with a prefix");
    for (const Message& message : request_.chat.messages) {
      if (!message.tool_calls.empty())
        reader_->Refuse("messages", "cannot have calls together with a prefix");
    }
    if (json_object)
      reader_->Refuse("response_format", "json_object cannot be combined with a prefix");
  }

  const JsonValue& body_;
  const ConversionOptions& options_;
  RequestReader* reader_;
  RequestTools tools_;
  ConvertedRequest request_;
  std::string path_;  // of the message that is being read
  bool in_user_message_ = false;
  bool says_json_ = false;
  std::set<std::string> unanswered_;  // ids of calls of the assistant message before
};

}  // namespace

ConvertedRequest ConvertChatCompletions(const JsonValue& body, const ConversionOptions& options,
                                        RequestReader* reader) {
  return ChatCompletionsConverter(body, options, reader).Convert();
}

}  // namespace deepinfer
