// The content of a message of a request: blocks of text and images, joined by blank lines.
#pragma once

#include <string>
#include <string_view>

#include "deepinfer/chat.h"
#include "text/request_fields.h"

namespace deepinfer {

class ContentBuilder {
 public:
  // `says_json` is set when a block of text contains the word "json" in any case.
  // `skip_leading_empty`: empty texts before the first one that is not leave no blank lines.
  explicit ContentBuilder(bool* says_json, bool skip_leading_empty = false)
      : says_json_(says_json), skip_leading_empty_(skip_leading_empty) {}

  void AddText(std::string_view text);
  void AddImage(ImageSource image);
  bool empty() const {
    return num_blocks_ == 0;
  }
  Content Take();

 private:
  void Separate();

  bool* says_json_;
  bool skip_leading_empty_;
  size_t num_blocks_ = 0;
  Content content_;
};

// http(s), or a base64 data URL of an image. A refusal names `path`.
void CheckImageUrl(const std::string& url, const std::string& path, RequestReader* reader);
// A data URL of an image; the rest of what a file may be is refused.
void CheckFileData(const std::string& data, const std::string& path, RequestReader* reader);
// An http(s) URL that is not too long.
void CheckHttpUrl(const std::string& url, const std::string& path, RequestReader* reader);
// Base64 with padding and without white space.
bool IsStrictBase64(std::string_view text);

// The member "detail": low, high (also when it is absent), original or auto.
std::string ImageDetail(const JsonValue& object, const std::string& path, RequestReader* reader);

}  // namespace deepinfer
