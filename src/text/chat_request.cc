#include "text/chat_request.h"

#include <utility>

#include "base/check.h"
#include "text/prompt_json.h"
#include "text/request_fields.h"
#include "text/request_protocols.h"

namespace deepinfer {
namespace {

Result<std::string> MemberText(std::string_view object, std::string_view key) {
  DI_ASSIGN_OR_RETURN(std::vector<JsonMemberText> members, PythonJsonMembers(object));
  for (JsonMemberText& member : members) {
    if (member.key == key) return std::move(member.value);
  }
  return std::string();
}

// The checkpoint profile shows functions as they were sent. `tools` may be a part of the body's.
Status KeepDigitsOfTools(std::string_view body, std::vector<Tool>* tools) {
  if (tools->empty()) return {};
  DI_ASSIGN_OR_RETURN(const std::string list, MemberText(body, "tools"));
  DI_ASSIGN_OR_RETURN(const std::vector<std::string> texts, PythonJsonElements(list));
  std::map<std::string, std::string> by_name;
  for (const std::string& text : texts) {
    DI_ASSIGN_OR_RETURN(std::string function, MemberText(text, "function"));
    DI_ASSIGN_OR_RETURN(std::string name, MemberText(function, "name"));
    by_name[std::move(name)] = std::move(function);
  }
  for (Tool& tool : *tools) tool.function = by_name[tool.name];
  return {};
}

}  // namespace

tl::expected<ConvertedRequest, RequestProblem> ConvertRequest(ChatApi api, const JsonValue& body,
                                                              const ConversionOptions& options) {
  RequestReader reader;
  ConvertedRequest request;
  if (reader.IsObject(body, "")) {
    switch (api) {
      case ChatApi::kChatCompletions:
        request = ConvertChatCompletions(body, options, &reader);
        break;
      case ChatApi::kMessages:
        request = ConvertMessages(body, options, &reader);
        break;
      case ChatApi::kResponses:
        request = ConvertResponses(body, options, &reader);
        break;
    }
  }
  if (reader.problem().has_value()) return tl::unexpected<RequestProblem>(*reader.problem());
  return request;
}

tl::expected<ConvertedRequest, RequestProblem> ConvertRequestText(
    ChatApi api, std::string_view body, const ConversionOptions& options) {
  const Result<JsonValue> value = JsonValue::Parse(body);
  if (!value.has_value())
    return tl::unexpected<RequestProblem>(RequestProblem{true, "", value.error().message});
  auto request = ConvertRequest(api, *value, options);
  if (request.has_value() && api == ChatApi::kChatCompletions &&
      options.profile == EncodingProfile::kCheckpoint) {
    const Status kept = KeepDigitsOfTools(body, &request->chat.tools);
    // What JsonValue has read, the other reader does too.
    DI_CHECK(kept.has_value());
  }
  return request;
}

}  // namespace deepinfer
