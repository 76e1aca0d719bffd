// The generated tokenizer of random checkpoints (model/random_checkpoint.h).
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "model/random_checkpoint.h"

namespace deepinfer {
namespace {

// Markers of the published chat format at the top of the vocabulary, in id order, with their
// "special" flag unset as in the published file.
constexpr const char* kChatMarkers[] = {
    "<｜System｜>", "<｜User｜>",  "<｜Assistant｜>",       "<think>",
    "</think>",     "｜DSML｜",    "<｜latest_reminder｜>", "<｜deepseek_image｜>",
    "<｜action｜>", "<｜query｜>", "<｜title｜>",           "<｜read_url｜>"};
constexpr const char* kFirstTokens[] = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
                                        "<｜▁pad▁｜>"};
constexpr int64_t kNumMarkers = 12;
constexpr int64_t kNumPlaceholders = 20;
constexpr int64_t kMinVocab = 320;
constexpr int64_t kMaxVocab = 262144;

std::string Utf8(uint32_t code_point) {
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xc0 | (code_point >> 6)),
          static_cast<char>(0x80 | (code_point & 0x3f))};
}

// The printable character of every byte, ascending by character: the order of the published
// vocabulary.
std::vector<std::string> ByteTokens() {
  std::vector<std::string> tokens;
  for (uint32_t c = 0x21; c <= 0x7e; ++c) tokens.push_back(Utf8(c));
  for (uint32_t c = 0xa1; c <= 0xff; ++c) {
    if (c != 0xad) tokens.push_back(Utf8(c));
  }
  for (uint32_t c = 0x100; c < 0x144; ++c) tokens.push_back(Utf8(c));
  return tokens;
}

// Merged pieces in rank order: frequent English pairs, the same capitalised and after a space (Ġ),
// then all lower-case strings of two, three and four letters until there are enough.
std::vector<std::pair<std::string, std::string>> Merges(size_t count) {
  const std::string space = "\xc4\xa0";
  std::vector<std::pair<std::string, std::string>> merges;
  std::unordered_set<std::string> known;
  const auto add = [&](const std::string& left, const std::string& right) {
    if (merges.size() < count && known.insert(left + right).second)
      merges.emplace_back(left, right);
  };
  const std::vector<std::string> frequent = {
      "th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te",
      "of", "ed", "is", "it", "al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou"};
  for (const std::string& pair : frequent) add(pair.substr(0, 1), pair.substr(1));
  add("th", "e");
  add("in", "g");
  add("an", "d");
  for (const std::string& pair : frequent) add(space, pair);
  for (const std::string& pair : frequent) {
    add(std::string(1, static_cast<char>(pair[0] - 'a' + 'A')), pair.substr(1));
  }
  add(space, "the");
  add(space, "and");
  add(space, space);
  add("\xc4\x8a", "\xc4\x8a");  // two line feeds
  std::vector<std::string> words = {""};
  for (size_t begin = 0, length = 1; merges.size() < count && length <= 4; ++length) {
    const size_t end = words.size();
    for (; begin < end && merges.size() < count; ++begin) {
      const std::string prefix = words[begin];
      for (char letter = 'a'; letter <= 'z'; ++letter) {
        if (length > 1) add(prefix, std::string(1, letter));
        words.push_back(prefix + letter);
      }
    }
  }
  return merges;
}

}  // namespace

Result<std::string> SmallTokenizerJson(int64_t vocab) {
  if (vocab < kMinVocab || vocab > kMaxVocab) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The vocabulary size is {}; generated tokenizers have {} to {} tokens.",
                            vocab, kMinVocab, kMaxVocab),
                "vocab");
  }
  nlohmann::json tokens = nlohmann::json::object();
  nlohmann::json added = nlohmann::json::array();
  const auto add_special = [&](const std::string& content, bool special) {
    const int64_t id = added.size() < 3 ? static_cast<int64_t>(added.size())
                                        : vocab - kNumMarkers - kNumPlaceholders +
                                              static_cast<int64_t>(added.size()) - 3;
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", !special},
                     {"special", special}});
  };
  int64_t next = 0;
  for (const char* token : kFirstTokens) {
    tokens[token] = next++;
    add_special(token, true);
  }
  for (const std::string& token : ByteTokens()) tokens[token] = next++;
  nlohmann::json merge_list = nlohmann::json::array();
  for (const auto& [left, right] :
       Merges(static_cast<size_t>(vocab - kNumMarkers - kNumPlaceholders - next))) {
    tokens[left + right] = next++;
    merge_list.push_back(left + " " + right);
  }
  for (int64_t i = 0; i < kNumPlaceholders; ++i)
    add_special(fmt::format("<｜place▁holder▁no▁{}｜>", i), true);
  for (const char* marker : kChatMarkers) add_special(marker, false);

  const auto split = [](const char* regex) {
    return nlohmann::json{{"type", "Split"},
                          {"pattern", {{"Regex", regex}}},
                          {"behavior", "Isolated"},
                          {"invert", false}};
  };
  const auto byte_level = [](bool prefix_space, bool trim_offsets, bool use_regex) {
    return nlohmann::json{{"type", "ByteLevel"},
                          {"add_prefix_space", prefix_space},
                          {"trim_offsets", trim_offsets},
                          {"use_regex", use_regex}};
  };
  const nlohmann::json root = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", std::move(added)},
      {"normalizer", {{"type", "Sequence"}, {"normalizers", nlohmann::json::array()}}},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         nlohmann::json::array(
             {split("\\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"),
              split("[!\"#$%&'()*+,\\-./"
                    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
                    "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
              byte_level(false, true, false)})}}},
      {"post_processor", byte_level(true, false, true)},
      {"decoder", byte_level(true, true, true)},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", std::move(tokens)},
        {"merges", std::move(merge_list)}}}};
  return root.dump(1);
}

}  // namespace deepinfer
