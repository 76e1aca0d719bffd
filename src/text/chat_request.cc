#include "text/chat_request.h"

#include <utility>

#include "text/request_fields.h"
#include "text/request_protocols.h"

namespace deepinfer {

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

}  // namespace deepinfer
