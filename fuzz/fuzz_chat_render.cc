// Arbitrary bytes as the JSON of a conversation, of both kinds: refused, or rendered to a prompt
// whose special tokens are the template's, whose text without them is valid UTF-8, and which
// encodes and decodes again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_value.h"
#include "base/utf8.h"
#include "text/chat_render.h"
#include "text/conversation_json.h"
#include "text/prompt_json.h"
#include "text/tokenizer.h"

namespace {

using deepinfer::ChatDialect;

const deepinfer::Tokenizer& TheTokenizer() {
  static const auto tokenizer =
      deepinfer::Tokenizer::Load(DI_TEST_DATA_DIR "/tokenizer/small_tokenizer.json").value();
  return tokenizer;
}

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckPrompt(const deepinfer::ChatPrompt& prompt) {
  Require(!deepinfer::FindInvalidUtf8(prompt.text).has_value());
  size_t at = 0;
  for (const auto& range : prompt.specials) {
    Require(range.begin >= at && range.end > range.begin && range.end <= prompt.text.size());
    at = range.end;
  }
  const auto ids = deepinfer::EncodeChatPrompt(TheTokenizer(), prompt);
  if (!ids.has_value()) return;  // the small tokenizer has not every marker
  Require(TheTokenizer().Decode(*ids) == prompt.text);
  size_t num_added = 0;
  for (const int32_t id : *ids) {
    num_added += TheTokenizer().IdOf(TheTokenizer().TokenBytes(id)) == id;
  }
  Require(num_added == prompt.specials.size());
}

void CheckChat(const deepinfer::Chat& chat) {
  for (const ChatDialect dialect : {ChatDialect::kV41, ChatDialect::kV4}) {
    const auto prompt = deepinfer::RenderChat(chat, dialect);
    if (prompt.has_value()) {
      CheckPrompt(*prompt);
    } else {
      Require(!prompt.error().message.empty());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy of exactly this size, so that a read beyond the text is a read beyond an allocation.
  const std::vector<char> copy(data, data + size);
  const std::string_view text(copy.data(), copy.size());
  const auto python = deepinfer::PythonJson(text);
  if (python.has_value()) Require(deepinfer::PythonJson(*python).value() == *python);
  if (const auto chat = deepinfer::ChatFromCheckpointLine(text)) CheckChat(*chat);
  const auto value = deepinfer::JsonValue::Parse(text);
  if (!value.has_value()) return 0;
  // Whatever one reader takes, the other takes too.
  Require(python.has_value());
  if (const auto chat = deepinfer::ChatFromConversation(*value)) CheckChat(*chat);
  return 0;
}
