// Arbitrary bytes are refused or become a conversation in all three protocols and both profiles,
// and a conversation a prompt.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "base/json_value.h"
#include "text/chat_render.h"
#include "text/chat_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using deepinfer::ChatApi;
  using deepinfer::EncodingProfile;
  const std::vector<char> copy(data, data + size);
  const std::string_view text(copy.data(), copy.size());
  deepinfer::ConversionOptions options;
  options.model_names.clear();
  options.messages_web_search_refused = size % 2 == 0;
  for (const ChatApi api : {ChatApi::kChatCompletions, ChatApi::kMessages, ChatApi::kResponses}) {
    for (const EncodingProfile profile : {EncodingProfile::kRecipe, EncodingProfile::kCheckpoint}) {
      options.profile = profile;
      const auto request = deepinfer::ConvertRequestText(api, text, options);
      if (!request.has_value()) {
        if (request.error().message.empty()) std::abort();
        continue;
      }
      const auto prompt = deepinfer::RenderChat(request->chat, deepinfer::ChatDialect::kV41);
      if (prompt.has_value() && prompt->text.empty()) std::abort();
      if (!prompt.has_value() && prompt.error().message.empty()) std::abort();
    }
  }
  return 0;
}
