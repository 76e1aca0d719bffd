#include "text/tokenizer_file.h"

#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/quoted.h"
#include "base/utf8.h"
#include "text/pre_tokenizer.h"

namespace deepinfer {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

// A value as it appears in messages: one line of readable length.
std::string Show(std::string_view text) {
  constexpr size_t kMaxShown = 200;
  std::string valid;
  AppendLossyUtf8(text.substr(0, kMaxShown), &valid);
  std::string shown;
  for (const char c : valid) {
    if (static_cast<uint8_t>(c) < 0x20) {
      shown += fmt::format("\\x{:02X}", static_cast<uint8_t>(c));
    } else {
      shown += c;
    }
  }
  if (text.size() > kMaxShown) shown += "...";
  return shown;
}

std::string Show(const element& value) {
  switch (value.type()) {
    case simdjson::dom::element_type::ARRAY:
      return "an array";
    case simdjson::dom::element_type::OBJECT: {
      std::string_view type;
      if (value["type"].get(type) == simdjson::SUCCESS)
        return fmt::format("an object of type '{}'", Show(type));
      return "an object";
    }
    case simdjson::dom::element_type::STRING:
      return fmt::format("'{}'", Show(value.get_string().value_unsafe()));
    default:
      return simdjson::minify(value);
  }
}

tl::unexpected<Error> Wrong(std::string field, std::string_view what) {
  std::string message = fmt::format("{} {}.", field, what);
  return Fail(Code::kInvalidArgument, std::move(message), std::move(field));
}

tl::unexpected<Error> Unsupported(std::string field, std::string_view what) {
  std::string message = fmt::format("{} {}.", field, what);
  return Fail(Code::kUnsupported, std::move(message), std::move(field));
}

// The member `key`, or nullopt if it is missing or null.
std::optional<element> Member(const object& parent, std::string_view key) {
  element value;
  if (parent[key].get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return value;
}

Result<object> ObjectMember(const object& parent, std::string_view key, std::string_view path) {
  element value;
  if (parent[key].get(value) != simdjson::SUCCESS)
    return Wrong(std::string(path), "is missing; it must be an object");
  object result;
  if (value.get(result) != simdjson::SUCCESS) {
    return Wrong(std::string(path), fmt::format("is {}; it must be an object", Show(value)));
  }
  return result;
}

Result<array> ArrayMember(const object& parent, std::string_view key, std::string_view path) {
  element value;
  if (parent[key].get(value) != simdjson::SUCCESS)
    return Wrong(std::string(path), "is missing; it must be an array");
  array result;
  if (value.get(result) != simdjson::SUCCESS) {
    return Wrong(std::string(path), fmt::format("is {}; it must be an array", Show(value)));
  }
  return result;
}

Status RequireType(const object& value, std::string_view path, std::string_view type) {
  element found;
  std::string_view name;
  if (value["type"].get(found) != simdjson::SUCCESS || found.get(name) != simdjson::SUCCESS) {
    return Wrong(fmt::format("{}.type", path),
                 fmt::format("is missing or not a string; it must be '{}'", type));
  }
  if (name != type) {
    return Unsupported(
        fmt::format("{}.type", path),
        fmt::format("is '{}', which is not supported; only '{}' is", Show(name), type));
  }
  return {};
}

// `key` must have the value `expected`; `if_missing` is what a missing member means.
Status RequireBool(const object& parent, std::string_view key, std::string_view path, bool expected,
                   bool if_missing) {
  bool found = if_missing;
  element value;
  if (parent[key].get(value) == simdjson::SUCCESS && value.get(found) != simdjson::SUCCESS) {
    return Wrong(fmt::format("{}.{}", path, key),
                 fmt::format("is {}; it must be true or false", Show(value)));
  }
  if (found != expected) {
    return Unsupported(
        fmt::format("{}.{}", path, key),
        fmt::format("is {}, which is not supported; it must be {}", found, expected));
  }
  return {};
}

// Duplicate keys would make the meaning depend on the reader.
Status RequireDistinctKeys(const object& value, std::string_view path) {
  std::unordered_set<std::string_view> keys;
  for (const auto& field : value) {
    if (!keys.insert(field.key).second) {
      return Wrong(std::string(path), fmt::format("holds the key '{}' twice", Show(field.key)));
    }
  }
  return {};
}

// ---- Byte alphabet ---------------------------------------------------------------------------

// The vocabulary is spelt with one printable character per byte: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF
// stand for themselves, the other bytes in increasing order for U+0100, U+0101, ...
struct ByteAlphabet {
  std::array<int16_t, 324> byte_of;  // by code point; -1: not in the alphabet

  ByteAlphabet() {
    byte_of.fill(-1);
    size_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool itself =
          (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      byte_of[itself ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
    }
  }

  // Replaces `bytes` by what `spelling` (valid UTF-8) stands for; false if a character is outside
  // of the alphabet.
  bool Decode(std::string_view spelling, std::string* bytes) const {
    bytes->clear();
    const char* p = spelling.data();
    const char* end = p + spelling.size();
    while (p < end) {
      const uint32_t code_point = DecodeValidUtf8(p, &p);
      if (code_point >= byte_of.size() || byte_of[code_point] < 0) return false;
      bytes->push_back(static_cast<char>(byte_of[code_point]));
    }
    return true;
  }
};

const ByteAlphabet& Alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

// ---- Sections --------------------------------------------------------------------------------

Status CheckNormalizer(const object& root) {
  const std::optional<element> normalizer = Member(root, "normalizer");
  if (!normalizer.has_value()) return {};
  object value;
  array members;
  if (normalizer->get(value) != simdjson::SUCCESS) {
    return Wrong("normalizer",
                 fmt::format("is {}; it must be null or an object", Show(*normalizer)));
  }
  DI_RETURN_IF_ERROR(RequireType(value, "normalizer", "Sequence"));
  DI_ASSIGN_OR_RETURN(members, ArrayMember(value, "normalizers", "normalizer.normalizers"));
  if (members.begin() != members.end()) {
    return Unsupported("normalizer.normalizers[0]",
                       fmt::format("is {}; normalisation of text is not supported, the "
                                   "list must be empty",
                                   Show(*members.begin())));
  }
  return {};
}

Status CheckSplit(const object& split, const std::string& path, std::string_view expected) {
  DI_RETURN_IF_ERROR(RequireType(split, path, "Split"));
  DI_ASSIGN_OR_RETURN(const object pattern, ObjectMember(split, "pattern", path + ".pattern"));
  std::string_view regex;
  element value;
  if (pattern["Regex"].get(value) != simdjson::SUCCESS || value.get(regex) != simdjson::SUCCESS) {
    return Unsupported(path + ".pattern",
                       "has no string 'Regex'; other kinds of pattern are not supported");
  }
  if (regex != expected) {
    return Unsupported(
        path + ".pattern.Regex",
        fmt::format("is '{}', which is not supported; only '{}' is", Show(regex), Show(expected)));
  }
  std::string_view behavior;
  if (split["behavior"].get(behavior) != simdjson::SUCCESS || behavior != "Isolated") {
    return Unsupported(
        path + ".behavior",
        fmt::format("is '{}', which is not supported; only 'Isolated' is", Show(behavior)));
  }
  return RequireBool(split, "invert", path, false, false);
}

Status CheckPreTokenizer(const object& root) {
  DI_ASSIGN_OR_RETURN(const object value, ObjectMember(root, "pre_tokenizer", "pre_tokenizer"));
  DI_RETURN_IF_ERROR(RequireType(value, "pre_tokenizer", "Sequence"));
  DI_ASSIGN_OR_RETURN(const array members,
                      ArrayMember(value, "pretokenizers", "pre_tokenizer.pretokenizers"));
  constexpr size_t kSplits = std::size(kPreTokenizerPatterns);
  size_t index = 0;
  for (const element& member : members) {
    const std::string path = fmt::format("pre_tokenizer.pretokenizers[{}]", index);
    object step;
    if (member.get(step) != simdjson::SUCCESS) {
      return Wrong(path, fmt::format("is {}; it must be an object", Show(member)));
    }
    if (index < kSplits) {
      DI_RETURN_IF_ERROR(CheckSplit(step, path, kPreTokenizerPatterns[index]));
    } else if (index == kSplits) {
      DI_RETURN_IF_ERROR(RequireType(step, path, "ByteLevel"));
      DI_RETURN_IF_ERROR(RequireBool(step, "add_prefix_space", path, false, true));
      DI_RETURN_IF_ERROR(RequireBool(step, "use_regex", path, false, true));
    }
    ++index;
  }
  if (index != kSplits + 1) {
    return Unsupported(
        "pre_tokenizer.pretokenizers",
        fmt::format(
            "has {} steps; only the published sequence of {} splits and a byte-level step is "
            "supported",
            index, kSplits));
  }
  return {};
}

Status CheckModelOptions(const object& model) {
  DI_RETURN_IF_ERROR(RequireType(model, "model", "BPE"));
  for (const std::string_view key :
       {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const std::optional<element> value = Member(model, key);
    std::string_view text;
    if (value.has_value() && !(value->get(text) == simdjson::SUCCESS && text.empty())) {
      return Unsupported(
          fmt::format("model.{}", key),
          fmt::format("is {}, which is not supported; it must be null", Show(*value)));
    }
  }
  DI_RETURN_IF_ERROR(RequireBool(model, "byte_fallback", "model", false, false));
  return RequireBool(model, "ignore_merges", "model", false, false);
}

// Sections beside the model that would change the result.
Status CheckSections(const object& root) {
  for (const std::string_view key : {"truncation", "padding"}) {
    const std::optional<element> value = Member(root, key);
    if (value.has_value()) {
      return Unsupported(
          std::string(key),
          fmt::format("is {}, which is not supported; it must be null", Show(*value)));
    }
  }
  DI_RETURN_IF_ERROR(CheckNormalizer(root));
  DI_RETURN_IF_ERROR(CheckPreTokenizer(root));
  DI_ASSIGN_OR_RETURN(const object decoder, ObjectMember(root, "decoder", "decoder"));
  DI_RETURN_IF_ERROR(RequireType(decoder, "decoder", "ByteLevel"));
  if (Member(root, "post_processor").has_value()) {
    DI_ASSIGN_OR_RETURN(const object post_processor,
                        ObjectMember(root, "post_processor", "post_processor"));
    DI_RETURN_IF_ERROR(RequireType(post_processor, "post_processor", "ByteLevel"));
  }
  return {};
}

Result<AddedToken> ParseAddedToken(const element& value, const std::string& path) {
  object members;
  if (value.get(members) != simdjson::SUCCESS) {
    return Wrong(path, fmt::format("is {}; it must be an object", Show(value)));
  }
  AddedToken token;
  std::string_view content;
  if (members["content"].get(content) != simdjson::SUCCESS || content.empty() ||
      content.size() > kMaxAddedTokenBytes || FindInvalidUtf8(content).has_value()) {
    return Wrong(path + ".content",
                 fmt::format("must be a string of 1 to {} bytes", kMaxAddedTokenBytes));
  }
  token.content = content;
  int64_t id = 0;
  if (members["id"].get(id) != simdjson::SUCCESS || id < 0 || id > INT32_MAX) {
    return Wrong(path + ".id", fmt::format("must be an integer from 0 to {}", INT32_MAX));
  }
  token.id = static_cast<int32_t>(id);
  element special;
  if (members["special"].get(special) == simdjson::SUCCESS &&
      special.get(token.special) != simdjson::SUCCESS) {
    return Wrong(path + ".special", fmt::format("is {}; it must be true or false", Show(special)));
  }
  for (const std::string_view key : {"single_word", "lstrip", "rstrip"}) {
    DI_RETURN_IF_ERROR(RequireBool(members, key, path, false, false));
  }
  return token;
}

Status ParseAddedTokens(const object& root, TokenizerFile* file) {
  if (!Member(root, "added_tokens").has_value()) return {};
  DI_ASSIGN_OR_RETURN(const array values, ArrayMember(root, "added_tokens", "added_tokens"));
  std::unordered_set<std::string_view> contents;
  std::unordered_set<int32_t> ids;
  size_t index = 0;
  for (const element& value : values) {
    const std::string path = fmt::format("added_tokens[{}]", index);
    DI_ASSIGN_OR_RETURN(AddedToken token, ParseAddedToken(value, path));
    if (!ids.insert(token.id).second) {
      return Wrong(path + ".id",
                   fmt::format("is {}, like that of an earlier added token", token.id));
    }
    file->added_tokens.push_back(std::move(token));
    ++index;
  }
  for (size_t i = 0; i < file->added_tokens.size(); ++i) {
    const std::string& content = file->added_tokens[i].content;
    if (!contents.insert(content).second) {
      return Wrong(fmt::format("added_tokens[{}].content", i),
                   fmt::format("is '{}', like that of an earlier added token", Show(content)));
    }
  }
  return {};
}

// ---- Vocabulary and merges -------------------------------------------------------------------

// Base tokens by their bytes. Open addressing over the strings of TokenizerFile::tokens: nearly all
// of the time to load a file goes into these look-ups, three per merge.
class BaseVocabulary {
 public:
  // `tokens` must outlive the vocabulary and keep its place.
  BaseVocabulary(const std::vector<std::string>& tokens, size_t max_entries)
      : tokens_(&tokens), slots_(std::bit_ceil(max_entries * 2 + 1), Slot{0, -1}) {}

  std::optional<int32_t> Find(std::string_view bytes) const {
    const Slot& slot = slots_[SlotOf(bytes)];
    return slot.id >= 0 ? std::optional<int32_t>(slot.id) : std::nullopt;
  }

  // False if there is an entry of the same bytes.
  bool Insert(int32_t id) {
    const std::string& bytes = (*tokens_)[static_cast<size_t>(id)];
    Slot& slot = slots_[SlotOf(bytes)];
    if (slot.id >= 0) return false;
    slot = Slot{TagOf(std::hash<std::string_view>()(bytes)), id};
    return true;
  }

 private:
  struct Slot {
    uint32_t tag;
    int32_t id;  // negative: the slot is empty
  };

  static uint32_t TagOf(uint64_t hash) {
    return static_cast<uint32_t>(hash >> 32);
  }

  // The slot that holds `bytes`, or the empty one where they belong.
  size_t SlotOf(std::string_view bytes) const {
    const uint64_t hash = std::hash<std::string_view>()(bytes);
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at].id >= 0 && (slots_[at].tag != TagOf(hash) ||
                                  (*tokens_)[static_cast<size_t>(slots_[at].id)] != bytes)) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return at;
  }

  const std::vector<std::string>* tokens_;
  std::vector<Slot> slots_;
};

Result<BaseVocabulary> ParseVocabulary(const object& model, TokenizerFile* file) {
  DI_ASSIGN_OR_RETURN(const object vocab, ObjectMember(model, "vocab", "model.vocab"));
  std::unordered_map<int32_t, const AddedToken*> added_by_id;
  for (const AddedToken& token : file->added_tokens) added_by_id.emplace(token.id, &token);

  // Count first: with no holes, every id is below the number of tokens.
  size_t num_base = 0;
  size_t num_shared = 0;  // added tokens that are in the vocabulary too
  for (const auto& field : vocab) {
    ++num_base;
    int64_t id = 0;
    if (field.value.get(id) != simdjson::SUCCESS || id < 0 || id > INT32_MAX) {
      return Wrong("model.vocab",
                   fmt::format("gives '{}' the id {}; ids must be integers from 0 to {}",
                               Show(field.key), Show(field.value), INT32_MAX));
    }
    const auto added = added_by_id.find(static_cast<int32_t>(id));
    if (added == added_by_id.end()) continue;
    if (added->second->content != field.key) {
      return Wrong("model.vocab",
                   fmt::format("gives '{}' the id {}, which belongs to the added token '{}'",
                               Show(field.key), id, Show(added->second->content)));
    }
    ++num_shared;
  }
  const size_t num_tokens =
      num_base + file->added_tokens.size() - std::min(num_shared, file->added_tokens.size());
  if (num_tokens > kMaxBpeTokens) {
    return Unsupported("model.vocab",
                       fmt::format("and added_tokens hold {} tokens; at most {} are supported",
                                   num_tokens, kMaxBpeTokens));
  }
  file->tokens.resize(num_tokens);
  file->is_base.assign(num_tokens, false);
  std::vector<bool> seen(num_tokens, false);
  const auto claim = [&](const std::string& path, std::string_view name, int64_t id) -> Status {
    if (static_cast<size_t>(id) >= num_tokens) {
      return Wrong(
          path,
          fmt::format("gives '{}' the id {}, but there are only {} tokens; ids must have no holes",
                      Show(name), id, num_tokens));
    }
    if (seen[static_cast<size_t>(id)]) {
      return Wrong(path,
                   fmt::format("gives '{}' the id {}, which another token has", Show(name), id));
    }
    seen[static_cast<size_t>(id)] = true;
    return {};
  };

  BaseVocabulary vocabulary(file->tokens, num_base);
  std::string bytes;
  for (const auto& field : vocab) {
    const int64_t id = field.value.get_int64().value_unsafe();
    DI_RETURN_IF_ERROR(claim("model.vocab", field.key, id));
    const bool is_added = added_by_id.contains(static_cast<int32_t>(id));
    const bool spelt_in_bytes = !field.key.empty() && Alphabet().Decode(field.key, &bytes);
    if (!spelt_in_bytes || (is_added && bytes != field.key)) {
      if (is_added && !spelt_in_bytes) continue;  // filled below
      return Wrong("model.vocab", fmt::format("has the entry '{}' (id {}), which is neither spelt "
                                              "in the byte-level alphabet nor an "
                                              "added token outside of it",
                                              Show(field.key), id));
    }
    std::string& token = file->tokens[static_cast<size_t>(id)];
    token = bytes;
    file->is_base[static_cast<size_t>(id)] = true;
    if (!vocabulary.Insert(static_cast<int32_t>(id))) {
      return Wrong("model.vocab", fmt::format("has the entry '{}' twice", Show(field.key)));
    }
  }
  for (const AddedToken& token : file->added_tokens) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= num_tokens || !seen[id])
      DI_RETURN_IF_ERROR(claim("added_tokens", token.content, token.id));
    file->tokens[id] = token.content;
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    const char symbol = static_cast<char>(byte);
    const std::optional<int32_t> id = vocabulary.Find(std::string_view(&symbol, 1));
    if (!id.has_value()) {
      return Wrong(
          "model.vocab",
          fmt::format("has no token for the byte 0x{:02X}; a byte-level vocabulary needs all "
                      "256 bytes",
                      byte));
    }
    file->byte_ids[byte] = *id;
  }
  return vocabulary;
}

// A merge is written "left right" or ["left", "right"].
bool SplitMerge(const element& value, std::string_view* left, std::string_view* right) {
  std::string_view both;
  if (value.get(both) == simdjson::SUCCESS) {
    const size_t space = both.find(' ');
    if (space == std::string_view::npos || both.find(' ', space + 1) != std::string_view::npos)
      return false;
    *left = both.substr(0, space);
    *right = both.substr(space + 1);
    return true;
  }
  array pair;
  if (value.get(pair) != simdjson::SUCCESS || pair.size() != 2) return false;
  return pair.at(0).get(*left) == simdjson::SUCCESS && pair.at(1).get(*right) == simdjson::SUCCESS;
}

Status ParseMerges(const object& model, const BaseVocabulary& vocabulary, TokenizerFile* file) {
  DI_ASSIGN_OR_RETURN(const array merges, ArrayMember(model, "merges", "model.merges"));
  std::unordered_set<uint64_t> pairs;
  pairs.reserve(std::min<size_t>(merges.size(), kMaxBpeTokens));
  size_t rank = 0;
  std::string left_bytes;
  std::string right_bytes;
  std::string result_bytes;
  for (const element& value : merges) {
    if (rank == kMaxMerges) {
      return Unsupported(
          "model.merges",
          fmt::format("holds more than {} merges, which is not supported", kMaxMerges));
    }
    const auto path = [&] { return fmt::format("model.merges[{}]", rank); };
    std::string_view left;
    std::string_view right;
    if (!SplitMerge(value, &left, &right)) {
      return Wrong(path(),
                   fmt::format("is {}; it must be 'left right' or [left, right]", Show(value)));
    }
    std::optional<int32_t> left_id;
    std::optional<int32_t> right_id;
    if (Alphabet().Decode(left, &left_bytes)) left_id = vocabulary.Find(left_bytes);
    if (Alphabet().Decode(right, &right_bytes)) right_id = vocabulary.Find(right_bytes);
    if (!left_id.has_value() || !right_id.has_value()) {
      return Wrong(path(),
                   fmt::format("merges '{}' and '{}', but '{}' is not in model.vocab", Show(left),
                               Show(right), Show(left_id.has_value() ? right : left)));
    }
    result_bytes.assign(left_bytes).append(right_bytes);
    const std::optional<int32_t> result_id = vocabulary.Find(result_bytes);
    if (!result_id.has_value()) {
      return Wrong(path(), fmt::format("merges '{}' and '{}', but the result is not in model.vocab",
                                       Show(left), Show(right)));
    }
    if (!pairs
             .insert(uint64_t{static_cast<uint32_t>(*left_id)} << 32 |
                     static_cast<uint32_t>(*right_id))
             .second) {
      return Wrong(path(), fmt::format("merges '{}' and '{}', like an earlier merge", Show(left),
                                       Show(right)));
    }
    file->merges.push_back(Merge{*left_id, *right_id, *result_id});
    ++rank;
  }
  return {};
}

}  // namespace

Result<TokenizerFile> ParseTokenizerFile(std::string_view json) {
  if (json.size() > kMaxTokenizerFileBytes) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The tokenizer file has {} bytes; at most {} are allowed.", json.size(),
                            kMaxTokenizerFileBytes));
  }
  simdjson::dom::parser parser;
  element document;
  const simdjson::error_code error = parser.parse(json.data(), json.size()).get(document);
  if (error != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The tokenizer file is not valid JSON: {}.",
                            WithoutFullStop(simdjson::error_message(error))));
  }
  object root;
  if (document.get(root) != simdjson::SUCCESS) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("The tokenizer file holds {}; it must hold an object.", Show(document)));
  }
  DI_RETURN_IF_ERROR(RequireDistinctKeys(root, "The tokenizer file"));
  DI_ASSIGN_OR_RETURN(const object model, ObjectMember(root, "model", "model"));
  DI_RETURN_IF_ERROR(RequireDistinctKeys(model, "model"));
  DI_RETURN_IF_ERROR(CheckModelOptions(model));
  DI_RETURN_IF_ERROR(CheckSections(root));
  TokenizerFile file;
  DI_RETURN_IF_ERROR(ParseAddedTokens(root, &file));
  DI_ASSIGN_OR_RETURN(const BaseVocabulary vocabulary, ParseVocabulary(model, &file));
  DI_RETURN_IF_ERROR(ParseMerges(model, vocabulary, &file));
  return file;
}

}  // namespace deepinfer
