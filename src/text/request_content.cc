#include "text/request_content.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "base/quoted.h"

namespace deepinfer {
namespace {

constexpr size_t kMaxUrlBytes = 8192;

char Lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool StartsWithIgnoringCase(std::string_view text, std::string_view lower_case_prefix) {
  return text.size() >= lower_case_prefix.size() &&
         std::equal(lower_case_prefix.begin(), lower_case_prefix.end(), text.begin(),
                    [](char a, char b) { return a == Lower(b); });
}

bool ContainsJson(std::string_view text) {
  constexpr std::string_view kWord = "json";
  return std::search(text.begin(), text.end(), kWord.begin(), kWord.end(),
                     [](char a, char b) { return Lower(a) == b; }) != text.end();
}

bool IsHttpUrl(std::string_view url) {
  return StartsWithIgnoringCase(url, "http://") || StartsWithIgnoringCase(url, "https://");
}

// The value of a base64 digit, -1 for other characters.
constexpr std::array<int8_t, 256> kDigitValues = [] {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kDigits.size(); ++i)
    values[static_cast<uint8_t>(kDigits[i])] = static_cast<int8_t>(i);
  return values;
}();

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c = Lower(c);
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// As browsers read the body of a data URL: percent escapes, white space anywhere, padding optional.
bool IsForgivingBase64(std::string_view text) {
  size_t digits = 0;
  size_t padding = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%' && i + 2 < text.size() && HexValue(text[i + 1]) >= 0 &&
        HexValue(text[i + 2]) >= 0) {
      c = static_cast<char>(HexValue(text[i + 1]) << 4 | HexValue(text[i + 2]));
      i += 2;
    }
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f') continue;
    if (c == '=') {
      ++padding;
    } else if (kDigitValues[static_cast<uint8_t>(c)] < 0 || padding > 0) {
      return false;
    } else {
      ++digits;
    }
  }
  if (padding > 0 && (padding > 2 || (digits + padding) % 4 != 0)) return false;
  return digits % 4 != 1;
}

struct DataUrl {
  std::string media_type;  // in lower case
  std::string_view body;
};

// Nullopt unless it is a data URL in base64.
std::optional<DataUrl> ParseDataUrl(std::string_view url) {
  if (!StartsWithIgnoringCase(url, "data:")) return std::nullopt;
  const size_t comma = url.find(',');
  if (comma == url.npos) return std::nullopt;
  std::string_view header = url.substr(5, comma - 5);
  constexpr std::string_view kBase64 = ";base64";
  if (header.size() < kBase64.size() ||
      !StartsWithIgnoringCase(header.substr(header.size() - kBase64.size()), kBase64)) {
    return std::nullopt;
  }
  header.remove_suffix(kBase64.size());
  DataUrl data;
  for (const char c : header.substr(0, header.find(';'))) data.media_type += Lower(c);
  data.body = url.substr(comma + 1);
  return data;
}

void CheckDataUrl(const DataUrl& data, const std::string& path, RequestReader* reader) {
  constexpr std::array<std::string_view, 5> kTypes = {"image/png", "image/jpeg", "image/jpg",
                                                      "image/webp", "image/gif"};
  if (std::find(kTypes.begin(), kTypes.end(), data.media_type) == kTypes.end()) {
    reader->Refuse(path, fmt::format("has the type {}; images are png, jpeg, webp or gif",
                                     Quoted(data.media_type)));
  } else if (!IsForgivingBase64(data.body)) {
    reader->Refuse(path, "is not valid base64");
  }
}

}  // namespace

void ContentBuilder::Separate() {
  const bool skip = skip_leading_empty_ && content_.text.empty();
  if (num_blocks_ > 0 && !skip) content_.text += "\n\n";
  ++num_blocks_;
}

void ContentBuilder::AddText(std::string_view text) {
  Separate();
  content_.text += text;
  if (!*says_json_) *says_json_ = ContainsJson(text);
}

void ContentBuilder::AddImage(ImageSource image) {
  Separate();
  content_.image_offsets.push_back(content_.text.size());
  content_.images.push_back(std::move(image));
}

Content ContentBuilder::Take() {
  num_blocks_ = 0;
  return std::exchange(content_, {});
}

void CheckHttpUrl(const std::string& url, const std::string& path, RequestReader* reader) {
  if (!IsHttpUrl(url)) {
    reader->Refuse(path, fmt::format("is {}; it must begin with http:// or https://", Quoted(url)));
  } else if (url.size() > kMaxUrlBytes) {
    reader->Refuse(path, fmt::format("is a link of {} bytes; at most {} are allowed", url.size(),
                                     kMaxUrlBytes));
  }
}

void CheckImageUrl(const std::string& url, const std::string& path, RequestReader* reader) {
  if (IsHttpUrl(url)) {
    CheckHttpUrl(url, path, reader);
  } else if (const std::optional<DataUrl> data = ParseDataUrl(url)) {
    CheckDataUrl(*data, path, reader);
  } else {
    reader->Refuse(path, fmt::format("is {}; an image is an http(s) URL or a data URL in base64",
                                     Quoted(url)));
  }
}

void CheckFileData(const std::string& data, const std::string& path, RequestReader* reader) {
  if (const std::optional<DataUrl> parsed = ParseDataUrl(data)) {
    CheckDataUrl(*parsed, path, reader);
  } else {
    reader->Refuse(path, "must be a data URL in base64");
  }
}

bool IsStrictBase64(std::string_view text) {
  if (text.size() % 4 != 0) return false;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  const std::string_view digits = text.substr(0, text.size() - padding);
  for (const char c : digits) {
    if (kDigitValues[static_cast<uint8_t>(c)] < 0) return false;
  }
  // The bits of the last digit that belong to no byte.
  const int unused_bits = padding == 2 ? 15 : padding == 1 ? 3 : 0;
  return digits.empty() || (kDigitValues[static_cast<uint8_t>(digits.back())] & unused_bits) == 0;
}

std::string ImageDetail(const JsonValue& object, const std::string& path, RequestReader* reader) {
  const std::optional<std::string> detail = reader->String(object, path, "detail");
  if (!detail.has_value()) return "high";
  if (*detail != "low" && *detail != "high" && *detail != "original" && *detail != "auto") {
    reader->Malformed(
        FieldPath(path, "detail"),
        fmt::format("is {}; it must be low, high, original or auto", Quoted(*detail)));
  }
  return *detail;
}

}  // namespace deepinfer
