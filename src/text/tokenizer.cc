#include "text/tokenizer.h"

#include <utility>

#include "base/mapped_file.h"
#include "base/utf8.h"
#include "text/tokenizer_file.h"

namespace deepinfer {

Tokenizer::Tokenizer(TokenizerFile file)
    : added_tokens_(file.added_tokens),
      pieces_(Bpe(file.merges, file.byte_ids), file.tokens, file.is_base),
      special_(file.tokens.size(), false),
      bos_id_(added_tokens_.IdOf("<｜begin▁of▁sentence｜>")),
      eos_id_(added_tokens_.IdOf("<｜end▁of▁sentence｜>")),
      pad_id_(added_tokens_.IdOf("<｜▁pad▁｜>")) {
  offsets_.reserve(file.tokens.size() + 1);
  offsets_.push_back(0);
  for (const std::string& token : file.tokens) {
    bytes_ += token;
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  for (const AddedToken& token : file.added_tokens)
    special_[static_cast<size_t>(token.id)] = token.special;
}

Result<Tokenizer> Tokenizer::Load(const std::string& path) {
  DI_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  const auto bytes = file.bytes();
  auto tokenizer = Parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!tokenizer.has_value()) return WithContext(std::move(tokenizer.error()), path);
  return tokenizer;
}

Result<Tokenizer> Tokenizer::Parse(std::string_view json) {
  DI_ASSIGN_OR_RETURN(TokenizerFile file, ParseTokenizerFile(json));
  return Tokenizer(std::move(file));
}

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                               const EncodeOptions& options) const {
  std::vector<int32_t> ids;
  DI_RETURN_IF_ERROR(EncodeTo(text, options, &ids));
  return ids;
}

Status Tokenizer::EncodeTo(std::string_view text, const EncodeOptions& options,
                           std::vector<int32_t>* ids) const {
  if (text.size() > kMaxTextBytes) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("The text has {} bytes; at most {} are allowed.", text.size(), kMaxTextBytes));
  }
  if (const std::optional<size_t> offset = FindInvalidUtf8(text)) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format(
            "The text is not valid UTF-8: the byte 0x{:02X} at offset {} does not belong to a "
            "character.",
            static_cast<uint8_t>(text[*offset]), *offset));
  }
  if (options.add_bos) {
    if (!bos_id_.has_value()) {
      return Fail(Code::kUnsupported,
                  "The tokenizer has no token '<｜begin▁of▁sentence｜>' to put in front.");
    }
    ids->push_back(*bos_id_);
  }
  const char* text_end = text.data() + text.size();
  size_t at = 0;
  if (options.parse_special) {
    while (const auto match = added_tokens_.Find(text, at)) {
      pieces_.Encode(text.substr(at, match->begin - at), text_end, ids);
      ids->push_back(match->id);
      at = match->end;
    }
  }
  pieces_.Encode(text.substr(at), text_end, ids);
  return {};
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (skip_special && is_special(id)) continue;
    bytes += TokenBytes(id);
  }
  if (!FindInvalidUtf8(bytes).has_value()) return bytes;
  std::string text;
  AppendLossyUtf8(bytes, &text);
  return text;
}

}  // namespace deepinfer
