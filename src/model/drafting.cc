#include "model/drafting.h"

#include <string>

namespace deepinfer {

Status CheckDrafting(const ModelConfig& config, int64_t draft_tokens, bool force) {
  const auto refuse = [](std::string message) -> Status {
    return Fail(Code::kInvalidArgument, std::move(message), "draft_tokens");
  };
  if (draft_tokens < 0 || draft_tokens > kMaxDraftTokens) {
    return refuse(fmt::format("draft_tokens is {}; allowed are 0 (no drafting) to {}.",
                              draft_tokens, kMaxDraftTokens));
  }
  if (draft_tokens == 0) return {};
  if (config.num_nextn_predict_layers == 0) {
    return refuse(
        fmt::format("draft_tokens is {}, but this checkpoint has no draft layers "
                    "(num_nextn_predict_layers is 0); allowed is 0, which is no drafting.",
                    draft_tokens));
  }
  if (draft_tokens != config.dspark_block_size && !force) {
    return refuse(fmt::format(
        "draft_tokens is {}, but the draft layers of this checkpoint were trained on "
        "blocks of {} (dspark_block_size), and drafts of other blocks are worse or "
        "useless; allowed are {} and 0 (no drafting), and with force_draft_tokens any "
        "up to {}.",
        draft_tokens, config.dspark_block_size, config.dspark_block_size, kMaxDraftTokens));
  }
  return {};
}

}  // namespace deepinfer
