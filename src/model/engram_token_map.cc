#include "model/engram_token_map.h"

#include <simdjson.h>
#include <utf8proc.h>

#include <array>
#include <cstdlib>
#include <unordered_map>

#include "base/mapped_file.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 22;
constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;
// Marks a string that is one space while both ends are stripped; from the private use area.
constexpr char32_t kSpaceMark = 0xe000;

// Byte-level vocabularies write each byte as one printable character: printable Latin-1 bytes as
// themselves, the others, in ascending order, as U+0100 onwards. Indexed by code point; -1 is no
// byte.
std::array<int16_t, 0x144> MakeByteOfCharacter() {
  std::array<int16_t, 0x144> table;
  table.fill(-1);
  size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    table[printable ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
  }
  return table;
}

// Code points of `text`; false if it is not valid UTF-8.
bool DecodeUtf8(std::string_view text, std::u32string& out) {
  out.clear();
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  auto left = static_cast<utf8proc_ssize_t>(text.size());
  while (left > 0) {
    utf8proc_int32_t code_point = 0;
    const utf8proc_ssize_t used = utf8proc_iterate(bytes, left, &code_point);
    if (used <= 0) return false;
    out.push_back(static_cast<char32_t>(code_point));
    bytes += used;
    left -= used;
  }
  return true;
}

std::string EncodeUtf8(const std::u32string& text) {
  std::string out;
  for (const char32_t code_point : text) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t count =
        utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes);
    out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
  }
  return out;
}

// NFKC, then NFD.
Result<std::u32string> Decompose(const std::string& text) {
  std::string current = text;
  for (const int step : {UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                         UTF8PROC_STABLE | UTF8PROC_DECOMPOSE}) {
    utf8proc_uint8_t* mapped = nullptr;
    const utf8proc_ssize_t size =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(current.data()),
                     static_cast<utf8proc_ssize_t>(current.size()), &mapped,
                     static_cast<utf8proc_option_t>(step));
    if (size < 0) {
      return Fail(Code::kInternal,
                  fmt::format("Cannot normalise {}: {}.", Quoted(text), utf8proc_errmsg(size)));
    }
    current.assign(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
    std::free(mapped);
  }
  std::u32string out;
  DecodeUtf8(current, out);
  return out;
}

bool IsMark(char32_t c) {
  const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
         category == UTF8PROC_CATEGORY_ME;
}

// The Unicode property White_Space.
bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

// What makes two tokens the same; empty if nothing is left.
Result<std::string> Normalised(const std::string& text) {
  DI_ASSIGN_OR_RETURN(const std::u32string decomposed, Decompose(text));
  std::u32string out;
  bool in_run = false;
  for (const char32_t c : decomposed) {
    if (IsMark(c)) continue;
    const auto lower = static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
    const bool blank = lower == ' ' || lower == '\t' || lower == '\r' || lower == '\n';
    if (!blank) out.push_back(lower);
    if (blank && !in_run) out.push_back(' ');
    in_run = blank;
  }
  if (out == U" ") out[0] = kSpaceMark;
  size_t begin = 0;
  size_t end = out.size();
  while (begin < end && IsWhiteSpace(out[begin])) ++begin;
  while (end > begin && IsWhiteSpace(out[end - 1])) --end;
  out = out.substr(begin, end - begin);
  for (char32_t& c : out) {
    if (c == kSpaceMark) c = ' ';
  }
  return EncodeUtf8(out);
}

// The key of a token as the vocabulary spells it.
Result<std::string> KeyOf(const std::string& token) {
  static const std::array<int16_t, 0x144> byte_of_character = MakeByteOfCharacter();
  std::u32string characters;
  if (!DecodeUtf8(token, characters)) return token;
  std::string text;
  for (const char32_t c : characters) {
    if (c >= byte_of_character.size() || byte_of_character[c] < 0) {
      text = token;  // not in byte-level spelling, as most special tokens: the text itself
      break;
    }
    text += static_cast<char>(byte_of_character[c]);
  }
  if (!DecodeUtf8(text, characters) || characters.find(char32_t{0xfffd}) != std::u32string::npos)
    return token;
  DI_ASSIGN_OR_RETURN(std::string key, Normalised(text));
  return key.empty() ? text : key;
}

Status Place(std::string_view token, int64_t id, std::vector<std::string>& tokens,
             std::vector<bool>& known, bool added) {
  if (id < 0 || id >= kMaxTokens) {
    return Fail(Code::kInvalidArgument, fmt::format("Token {} has the id {}; allowed are 0 to {}.",
                                                    Quoted(token), id, kMaxTokens - 1));
  }
  const auto index = static_cast<size_t>(id);
  if (index >= tokens.size()) {
    tokens.resize(index + 1);
    known.resize(index + 1, false);
  }
  // Added tokens usually repeat entries of the vocabulary.
  if (known[index] && !(added && tokens[index] == token)) {
    return Fail(Code::kInvalidArgument, fmt::format("Tokens {} and {} share the id {}.",
                                                    Quoted(tokens[index]), Quoted(token), id));
  }
  known[index] = true;
  tokens[index] = std::string(token);
  return {};
}

}  // namespace

Result<TokenCompression> CompressVocabulary(std::string_view tokenizer_json) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  if (const auto error = parser.parse(tokenizer_json.data(), tokenizer_json.size()).get(root);
      error != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The tokenizer is not valid JSON: {}.",
                            WithoutFullStop(simdjson::error_message(error))));
  }
  simdjson::dom::object vocabulary;
  if (root["model"]["vocab"].get_object().get(vocabulary) != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument, "The tokenizer has no object model.vocab.", "model.vocab");
  }
  std::vector<std::string> tokens;
  std::vector<bool> known;
  for (const auto [token, value] : vocabulary) {
    int64_t id = -1;
    if (value.get_int64().get(id) != simdjson::SUCCESS) id = -1;
    DI_RETURN_IF_ERROR(Place(token, id, tokens, known, false));
  }
  simdjson::dom::array added;
  if (root["added_tokens"].get_array().get(added) == simdjson::SUCCESS) {
    for (const simdjson::dom::element item : added) {
      int64_t id = -1;
      std::string_view content;
      if (item["id"].get_int64().get(id) != simdjson::SUCCESS ||
          item["content"].get_string().get(content) != simdjson::SUCCESS) {
        return Fail(Code::kInvalidArgument, "An entry of added_tokens lacks 'id' or 'content'.",
                    "added_tokens");
      }
      DI_RETURN_IF_ERROR(Place(content, id, tokens, known, true));
    }
  }
  TokenCompression compression;
  std::unordered_map<std::string, int32_t> ids;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!known[id])
      return Fail(Code::kInvalidArgument,
                  fmt::format("The tokenizer has no token with the id {}.", id));
    DI_ASSIGN_OR_RETURN(std::string key, KeyOf(tokens[id]));
    const auto [it, inserted] = ids.emplace(std::move(key), static_cast<int32_t>(ids.size()));
    compression.map.push_back(it->second);
  }
  compression.num_keys = static_cast<int64_t>(ids.size());
  return compression;
}

Result<std::vector<int32_t>> EngramTokenMap(const ModelConfig& config,
                                            std::string_view tokenizer_json) {
  DI_ASSIGN_OR_RETURN(TokenCompression compression, CompressVocabulary(tokenizer_json));
  const int64_t size = config.engram_compressed_vocab_size;
  const auto tokens = static_cast<int64_t>(compression.map.size());
  if (compression.num_keys == size && tokens == config.vocab_size)
    return std::move(compression.map);
  return Fail(Code::kInvalidArgument,
              fmt::format("The tokenizer does not belong to this model: its {} tokens compress to "
                          "{} keys, but the configuration says "
                          "vocab_size = {} and engram_compressed_vocab_size = {}.",
                          tokens, compression.num_keys, config.vocab_size, size),
              "text_config.engram_compressed_vocab_size");
}

Result<std::vector<int32_t>> LoadEngramTokenMap(const ModelConfig& config,
                                                const std::string& tokenizer_path) {
  DI_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(tokenizer_path));
  if (static_cast<int64_t>(file.bytes().size()) > kMaxTokenizerBytes) {
    return Fail(Code::kInvalidArgument,
                fmt::format("'{}' has {} bytes; a tokenizer has at most {}.", tokenizer_path,
                            file.bytes().size(), kMaxTokenizerBytes));
  }
  Result<std::vector<int32_t>> map = EngramTokenMap(
      config, {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()});
  if (!map) return WithContext(std::move(map.error()), tokenizer_path);
  return map;
}

}  // namespace deepinfer
