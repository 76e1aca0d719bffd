#include "apps/option_names.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

namespace deepinfer {
namespace {

struct OptionName {
  std::string_view field;
  std::string_view option;
};
// Of LLMOptions, SelfcheckOptions, PlanOptions and the memory plan.
constexpr OptionName kOptionNames[] = {
    {"approximate_hit_tokens", "--approximate-hit-tokens"},
    {"cache_tokens", "--cache-tokens"},
    {"decoder_replay", "--replay"},
    {"device", "--device"},
    {"draft_tokens", "--draft-tokens"},
    {"force_draft_tokens", "--force-draft-tokens"},
    {"max_chunk_tokens", "--max-chunk-tokens"},
    {"max_model_len", "--max-model-len"},
    {"max_num_batched_tokens", "--max-num-batched-tokens"},
    {"max_num_seqs", "--max-num-seqs"},
    {"max_output_tokens", "--max-output-tokens"},
    {"max_prompt_tokens", "--max-prompt-tokens"},
    {"model_dir", "--model"},
    {"num_requests", "--requests"},
    {"num_threads", "--threads"},
    {"prefix_caching", "the prefix cache (--no-prefix-cache)"},
    {"ranks", "--ranks"},
    {"replay_keep_tokens", "--replay-keep-tokens"},
};

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

}  // namespace

Error WithOptionNames(Error error) {
  std::string text;
  const std::string& from = error.message;
  for (size_t i = 0; i < from.size();) {
    size_t end = i;
    while (end < from.size() && IsNameCharacter(from[end])) ++end;
    if (end == i) {
      text += from[i++];
      continue;
    }
    const std::string_view word = std::string_view(from).substr(i, end - i);
    const auto* name = std::find_if(std::begin(kOptionNames), std::end(kOptionNames),
                                    [&](const OptionName& entry) { return entry.field == word; });
    // Parts of paths, quoted texts and options stay as they are.
    const bool stands_alone = i == 0 || from[i - 1] == ' ' || from[i - 1] == '(';
    text += name != std::end(kOptionNames) && stands_alone ? name->option : word;
    i = end;
  }
  error.message = std::move(text);
  return error;
}

}  // namespace deepinfer
