// A tokenizer file from anywhere is refused or gives a tokenizer that works. Seed the corpus with
// tests/data/tokenizer/small_tokenizer.json.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto tokenizer = deepinfer::Tokenizer::Parse({reinterpret_cast<const char*>(data), size});
  if (!tokenizer.has_value()) return 0;
  const std::string_view text = "there, 12345 你好 <｜User｜> é\n\n  x";
  const auto ids = tokenizer->Encode(text);
  if (!ids.has_value() || tokenizer->Decode(*ids) != text) std::abort();
  for (int32_t id = -1; id <= tokenizer->vocab_size(); ++id) (void)tokenizer->TokenBytes(id);
  return 0;
}
