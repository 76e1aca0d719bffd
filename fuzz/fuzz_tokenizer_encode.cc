// Arbitrary bytes are refused as text or survive encoding and decoding; arbitrary ids decode the
// same at once and one by one.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "text/incremental_decoder.h"
#include "text/tokenizer.h"

namespace {

const deepinfer::Tokenizer& TheTokenizer() {
  static const auto tokenizer =
      deepinfer::Tokenizer::Load(DI_TEST_DATA_DIR "/tokenizer/small_tokenizer.json").value();
  return tokenizer;
}

void CheckDecoding(const std::vector<int32_t>& ids) {
  deepinfer::IncrementalDecoder decoder(TheTokenizer());
  std::string text;
  for (const int32_t id : ids) text += decoder.Push(id);
  text += decoder.Flush();
  if (text != TheTokenizer().Decode(ids)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy of exactly this size, so that a read beyond the text is a read beyond an allocation.
  const std::vector<char> copy(data, data + size);
  const std::string_view text(copy.data(), copy.size());
  for (const bool parse_special : {false, true}) {
    const auto ids = TheTokenizer().Encode(text, {.parse_special = parse_special});
    if (!ids.has_value()) continue;
    if (TheTokenizer().Decode(*ids) != text) std::abort();
    CheckDecoding(*ids);
  }
  // Two bytes an id, around the vocabulary of 512.
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < size; i += 2) ids.push_back((data[i] << 8 | data[i + 1]) % 520 - 4);
  CheckDecoding(ids);
  return 0;
}
