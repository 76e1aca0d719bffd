// Text from a file or a client, made safe to print inside a message: quoted, control bytes escaped,
// long text cut.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace deepinfer {

inline std::string Quoted(std::string_view text, size_t max_bytes = 160) {
  std::string out = "'";
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == max_bytes) return out + fmt::format("'... ({} bytes)", text.size());
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += static_cast<char>(byte);
    }
  }
  return out + "'";
}

// Another library's message, to be put into a sentence: some end with a full stop, some do not.
inline std::string_view WithoutFullStop(std::string_view text) {
  while (text.ends_with('.') || text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

}  // namespace deepinfer
