#include "grammar/core_matcher.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <queue>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>

#include "compiled_grammar_impl.h"
#include "earley_parser.h"
#include "grammar_impl.h"
#include "support/dynamic_bitset.h"
#include "support/encoding.h"
#include "support/int_set.h"
#include "support/logging.h"
#include "support/thread_pool.h"
#include "testing.h"
#include "tokenizer_info_impl.h"

// This file takes the place of the library's grammar_matcher.cc, whose classes are not declared
// elsewhere. All headers are above, so the next line opens the classes of that file only.
#define private public
#include "grammar_matcher.cc"
#undef private

namespace deepinfer {
namespace {

using xgrammar::AdaptiveTokenMask;
using xgrammar::ParserState;

constexpr size_t kMaxOccurrences = 128;  // of rules, in one state
constexpr size_t kMaxKey = 8192;

// The protected members of the parser below each matcher, by the rule that a derived class may name
// them.
struct Parser : xgrammar::EarleyParser {
  static auto& Scanable(const EarleyParser& parser) {
    return parser.*(&Parser::scanable_state_history_);
  }
  static auto& Waiting(const EarleyParser& parser) {
    return parser.*(&Parser::rule_id_to_completable_states_);
  }
  static bool HasTokenBudgets(const EarleyParser& parser) {
    return parser.*(&Parser::has_budget_rules_);
  }
  static bool HasCharacterBudgets(const EarleyParser& parser) {
    return parser.*(&Parser::has_char_budget_rules_);
  }
  static const xgrammar::Grammar& GrammarOf(const EarleyParser& parser) {
    return parser.*(&Parser::grammar_);
  }
  static bool RuleMayEnd(EarleyParser* parser, const ParserState& state) {
    return (parser->*(&Parser::GetFsmStateFlags))(state.rule_id, state.element_id) & kFsmStateEnd;
  }
};

}  // namespace

bool StateKey(const xgrammar::GrammarMatcher& matcher, std::vector<int32_t>* key) {
  const xgrammar::GrammarMatcher::Impl& impl = *matcher.ImplPtr();
  if (Parser::HasTokenBudgets(impl) || impl.has_budget_marker_rules_) return false;
  const int32_t at = impl.GetCurrentCharIndex();
  // A token has no more characters, so limits beyond it are all alike.
  const int32_t far = impl.tokenizer_info_.ImplPtr()->GetMaxTokenChars() + 1;
  key->clear();
  key->push_back(impl.IsCompleted());
  key->push_back(impl.HasEnteredCharBudget());

  // Occurrences of rules, by their number: where each began matters only through the states that
  // wait for its end.
  struct Occurrence {
    int32_t rule;
    int32_t position;
  };
  Occurrence occurrences[kMaxOccurrences];
  size_t count = 0;
  const auto append = [&](const ParserState& state) {
    int32_t number = -1;
    if (state.rule_start_pos != ParserState::kNoPrevInputPos) {
      size_t i = 0;
      while (i < count && (occurrences[i].rule != state.rule_id ||
                           occurrences[i].position != state.rule_start_pos)) {
        ++i;
      }
      if (i == kMaxOccurrences) return false;
      if (i == count) occurrences[count++] = {state.rule_id, state.rule_start_pos};
      number = static_cast<int32_t>(i);
    }
    const int32_t limit =
        state.char_budget_deadline < 0 ? -1 : std::clamp(state.char_budget_deadline - at, 0, far);
    key->insert(key->end(),
                {state.rule_id, state.sequence_id, state.element_id, number, state.sub_element_id,
                 state.repeat_count, state.partial_codepoint, limit});
    return key->size() <= kMaxKey;
  };
  const auto& rows = Parser::Scanable(impl);
  for (const ParserState& state : rows[rows.size() - 1]) {
    if (!append(state)) return false;
  }
  const auto& waiting = Parser::Waiting(impl);
  for (size_t i = 0; i < count; ++i) {
    const Occurrence occurrence = occurrences[i];
    key->push_back(-2);  // the next occurrence
    for (const auto& [rule, state] : waiting[occurrence.position]) {
      if (rule == occurrence.rule && !append(state)) return false;
    }
  }
  return true;
}

TokenLengths::TokenLengths(const xgrammar::TokenizerInfo& vocabulary)
    : characters_(vocabulary.ImplPtr()->GetTokenCharCounts()) {
  const auto& sorted = vocabulary.GetSortedDecodedVocab();
  int32_t longest = 0;
  for (const int32_t characters : characters_) longest = std::max(longest, characters);
  std::vector<std::vector<int32_t>> places(static_cast<size_t>(longest) + 1);
  for (size_t place = 0; place < sorted.size(); ++place) {
    places[static_cast<size_t>(characters_[place])].push_back(static_cast<int32_t>(place));
    if (sorted[place].second.find('\\') != std::string::npos) {
      with_backslash_.push_back(static_cast<int32_t>(place));
    }
  }
  up_to_.emplace_back(static_cast<size_t>(vocabulary.GetVocabSize() + 31) / 32);
  for (const std::vector<int32_t>& of_length : places) {
    if (!of_length.empty()) up_to_.push_back(up_to_.back());
    for (const int32_t place : of_length) {
      const int32_t id = sorted[static_cast<size_t>(place)].first;
      up_to_.back()[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
    }
    set_of_.push_back(up_to_.size() - 1);
  }
  num_longer_.resize(places.size());
  for (size_t i = places.size(); i-- > 0;) {
    num_longer_[i] = longest_first_.size();
    longest_first_.insert(longest_first_.end(), places[i].begin(), places[i].end());
  }
}

std::span<const uint32_t> TokenLengths::UpTo(int64_t characters) const {
  return up_to_[set_of_[static_cast<size_t>(std::min(characters, longest()))]];
}

std::span<const int32_t> TokenLengths::LongerThan(int64_t characters) const {
  const auto length = static_cast<size_t>(std::min(characters, longest()));
  return std::span(longest_first_).first(num_longer_[length]);
}

bool FillNearLimit(xgrammar::GrammarMatcher* matcher, const TokenLengths& lengths,
                   std::span<uint32_t> mask) {
  xgrammar::GrammarMatcher::Impl& impl = *matcher->ImplPtr();
  if (!Parser::HasCharacterBudgets(impl) || Parser::HasTokenBudgets(impl) ||
      impl.has_token_edges_ || impl.has_budget_marker_rules_) {
    return false;
  }
  const std::vector<ParserState> states = impl.GetLatestScanableStates();
  const auto left = [&](const ParserState& state) -> int64_t {
    if (state.char_budget_deadline < 0) return std::numeric_limits<int32_t>::max();
    return std::max(0, state.char_budget_deadline - impl.GetCurrentCharIndex());
  };
  if (std::none_of(states.begin(), states.end(),
                   [&](const ParserState& state) { return left(state) <= lengths.longest(); })) {
    return false;
  }

  const auto& sorted = impl.tokenizer_info_.GetSortedDecodedVocab();
  const auto& subtree_end = impl.tokenizer_info_.GetTrieSubtreeNodesRange();
  const auto& masks = impl.compiled_grammar_->adaptive_token_mask_cache;
  const xgrammar::Grammar& grammar = Parser::GrammarOf(impl);
  const auto has = [](std::span<const uint32_t> bits, int32_t id) {
    return (bits[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
  };
  std::fill(mask.begin(), mask.end(), 0);
  std::vector<uint32_t> alone(mask.size());  // tokens that a state allows wherever it stands
  std::vector<int32_t> unsure;
  for (const ParserState& state : states) {
    const auto found = masks.find(state);
    if (found == masks.end()) return false;
    const AdaptiveTokenMask& known = found->second;
    unsure.insert(unsure.end(), known.uncertain_indices.begin(), known.uncertain_indices.end());
    const int64_t limit = left(state);
    if (known.store_type == AdaptiveTokenMask::StoreType::kAccepted) {
      for (const int32_t place : known.accepted_indices) {
        if (lengths.characters(place) <= limit) {
          const int32_t id = sorted[static_cast<size_t>(place)].first;
          mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
        } else {
          unsure.push_back(place);
        }
      }
      continue;
    }
    if (known.store_type == AdaptiveTokenMask::StoreType::kAcceptedBitset) {
      xgrammar::DynamicBitset bits(impl.tokenizer_info_.GetVocabSize(), alone.data());
      bits.Reset();
      bits |= known.accepted_bitset;
    } else {
      const std::span<const uint32_t> all = lengths.UpTo(lengths.longest());
      std::copy(all.begin(), all.end(), alone.begin());
      for (const std::vector<int32_t>* places :
           {&known.rejected_indices, &known.uncertain_indices}) {
        for (const int32_t place : *places) {
          const int32_t id = sorted[static_cast<size_t>(place)].first;
          alone[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
        }
      }
    }
    const std::span<const uint32_t> short_enough = lengths.UpTo(limit);
    for (size_t word = 0; word < mask.size(); ++word)
      mask[word] |= alone[word] & short_enough[word];
    if (limit >= lengths.longest()) continue;
    // A longer token can only go on beyond the limit where the text may not end, and a text of
    // ours that may end now may end behind each character that is no part of an escape.
    const bool ends = grammar->GetRule(state.rule_id).max_chars >= 0 &&
                      grammar->per_rule_fsms[state.rule_id].has_value() &&
                      Parser::RuleMayEnd(&impl, state);
    for (const int32_t place : ends ? lengths.with_backslash() : lengths.LongerThan(limit)) {
      if (lengths.characters(place) > limit &&
          has(alone, sorted[static_cast<size_t>(place)].first)) {
        unsure.push_back(place);
      }
    }
  }
  std::sort(unsure.begin(), unsure.end());
  unsure.erase(std::unique(unsure.begin(), unsure.end()), unsure.end());

  // The others are tried byte by byte, each from where it differs from the last.
  impl.PushStatesToCheck(states, impl.IsCompleted());
  std::string_view last;
  int32_t matched = 0;
  int32_t refused_to = 0;
  for (const int32_t place : unsure) {
    const auto& [id, text] = sorted[static_cast<size_t>(place)];
    if (place < refused_to || has(mask, id)) continue;
    const std::string_view token = text;
    const auto common = static_cast<int32_t>(
        std::mismatch(token.begin(), token.end(), last.begin(), last.end()).first - token.begin());
    last = token;
    if (common > matched) {  // with the byte that was refused
      refused_to = subtree_end[static_cast<size_t>(place)];
      continue;
    }
    if (common < matched) impl.PopLastStates(matched - common);
    matched = common;
    while (matched < static_cast<int32_t>(token.size()) &&
           impl.AdvanceWithCharacterBudget(
               static_cast<uint8_t>(token[static_cast<size_t>(matched)]))) {
      ++matched;
    }
    if (matched < static_cast<int32_t>(token.size())) {
      refused_to = subtree_end[static_cast<size_t>(place)];
    } else if (!token.empty()) {
      mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
    }
  }
  impl.PopLastStates(matched + 1);

  for (const int32_t id : impl.stop_token_ids_) {
    mask[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
    if (impl.IsCompleted()) mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
  }
  return true;
}

}  // namespace deepinfer
