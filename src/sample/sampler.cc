#include "sample/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "sample/exponential.h"
#include "sample/philox.h"

namespace deepinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Mass of the most likely token. Probabilities become integers so that their sums do not depend on
// the order of addition; 2^20 tokens of 2^40 each stay below 2^63. Tokens less likely than the best
// by more than 2^40 are never drawn.
constexpr double kUnitMass = 0x1p40;

// Orders tokens by logit descending, then id ascending, as one ascending integer. -0 counts as +0.
uint64_t SortKey(float logit, uint32_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit == 0.0f ? 0.0f : logit);
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{~ascending} << 32) | id;
}

uint32_t KeyId(uint64_t key) {
  return static_cast<uint32_t>(key);
}

Status CheckRow(std::span<const float> logits) {
  // NaN is not below infinity either: one comparison per element finds both.
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](float x) { return !(x < INFINITY); });
  if (bad == logits.end()) return {};
  return Fail(
      Code::kInternal,
      fmt::format(
          "no token can be sampled because the model's logit of token {} is {}; logits must be "
          "numbers below infinity",
          bad - logits.begin(), *bad));
}

// Index of the largest element, the lowest among equals.
int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

float Reported(double logprob) {
  return logprob < double{kLogprobFloor} ? kLogprobFloor : static_cast<float>(logprob);
}

int64_t RankOf(std::span<const float> logits, int32_t token_id) {
  const float own = logits[static_cast<size_t>(token_id)];
  return 1 + std::count_if(logits.begin(), logits.end(), [own](float x) { return x > own; });
}

// Excludes every token whose bit is not set.
void KeepMasked(std::span<const uint32_t> bits, std::span<float> logits) {
  for (size_t word = 0; word * 32 < logits.size(); ++word) {
    const uint32_t allowed = bits[word];
    if (allowed == ~uint32_t{0}) continue;
    const std::span<float> part =
        logits.subspan(word * 32, std::min<size_t>(32, logits.size() - word * 32));
    if (allowed == 0) {
      std::fill(part.begin(), part.end(), kMinusInfinity);
      continue;
    }
    for (size_t i = 0; i < part.size(); ++i) {
      if (((allowed >> i) & 1u) == 0) part[i] = kMinusInfinity;
    }
  }
}

// The first tokens in key order, extended on demand: a selection of a few out of the vocabulary,
// without sorting it all.
class SortedPrefix {
 public:
  explicit SortedPrefix(std::span<uint64_t> keys) : keys_(keys) {}

  int64_t size() const {
    return static_cast<int64_t>(keys_.size());
  }

  uint64_t operator[](int64_t index) {
    while (index >= sorted_) Extend();
    return keys_[static_cast<size_t>(index)];
  }

 private:
  void Extend() {
    const int64_t count = std::min(size() - sorted_, std::max<int64_t>(64, 4 * sorted_));
    const auto begin = keys_.begin() + sorted_;
    if (sorted_ + count < size()) std::nth_element(begin, begin + count - 1, keys_.end());
    std::sort(begin, begin + count);
    sorted_ += count;
  }

  std::span<uint64_t> keys_;
  int64_t sorted_ = 0;
};

std::span<uint64_t> FillKeys(std::span<const float> logits, SamplerScratch& scratch) {
  scratch.keys.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    scratch.keys[i] = SortKey(logits[i], static_cast<uint32_t>(i));
  return scratch.keys;
}

// The `num_top` best tokens, fewer when fewer have a finite logit.
template <class LogprobOf>
std::vector<TokenLogprob> TopTokens(std::span<const float> logits, int64_t num_top,
                                    SamplerScratch& scratch, LogprobOf logprob_of) {
  std::vector<TokenLogprob> top;
  if (num_top <= 0) return top;
  SortedPrefix prefix(FillKeys(logits, scratch));
  const int64_t count = std::min(num_top, prefix.size());
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t id = KeyId(prefix[i]);
    const double logprob = logprob_of(id);
    if (logprob == -std::numeric_limits<double>::infinity()) break;
    top.push_back({static_cast<int32_t>(id), Reported(logprob)});
  }
  return top;
}

// What a row of logits becomes before a token is drawn: the kept tokens are those whose key does
// not exceed `last_key` and whose mass is at least `min_mass`.
struct DrawSet {
  uint64_t last_key = std::numeric_limits<uint64_t>::max();
  uint64_t min_mass = 1;
  uint64_t total = 0;

  bool Keeps(uint64_t key, uint64_t mass) const {
    return mass >= min_mass && key <= last_key;
  }
};

// Top-k and nucleus are prefixes of one order over one unfiltered distribution, hence their
// intersection is the shorter one.
DrawSet SelectTokens(std::span<const float> logits, const SamplingParams& params,
                     SamplerScratch& scratch) {
  const float largest = logits[static_cast<size_t>(ArgMax(logits))];
  scratch.masses.resize(logits.size());
  uint64_t total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double x = (double{logits[i]} - double{largest}) / params.temperature;
    scratch.masses[i] = static_cast<uint64_t>(static_cast<int64_t>(ExpNonPositive(x) * kUnitMass));
    total += scratch.masses[i];
  }

  DrawSet set;
  set.min_mass = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(params.min_p * kUnitMass)));
  const int64_t vocab = static_cast<int64_t>(logits.size());
  const bool use_top_k = params.top_k > 0 && params.top_k < vocab;
  if (use_top_k || params.top_p < 1.0) {
    std::span<uint64_t> keys = FillKeys(logits, scratch);
    if (use_top_k) {
      std::nth_element(keys.begin(), keys.begin() + (params.top_k - 1), keys.end());
      keys = keys.first(static_cast<size_t>(params.top_k));
      set.last_key = keys.back();
    }
    if (params.top_p < 1.0) {
      // A token stays while the mass before it is at most top_p of the whole.
      const uint64_t limit = static_cast<uint64_t>(params.top_p * static_cast<double>(total));
      SortedPrefix prefix(keys);
      uint64_t before = 0;
      for (int64_t i = 0; i < prefix.size() && before <= limit; ++i) {
        set.last_key = prefix[i];
        before += scratch.masses[KeyId(set.last_key)];
      }
    }
  }
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool kept = set.Keeps(SortKey(logits[i], static_cast<uint32_t>(i)), scratch.masses[i]);
    set.total += kept ? scratch.masses[i] : 0;
  }
  return set;
}

// `bits` are uniform over 64 bits. Kept tokens own consecutive intervals of [0, total) in id order;
// scaling by a multiplication moves no probability by more than 2^-63.
int32_t DrawToken(std::span<const float> logits, const DrawSet& set, const SamplerScratch& scratch,
                  uint64_t bits) {
  const uint64_t target = static_cast<uint64_t>((static_cast<__uint128_t>(bits) * set.total) >> 64);
  uint64_t before = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!set.Keeps(SortKey(logits[i], static_cast<uint32_t>(i)), scratch.masses[i])) continue;
    before += scratch.masses[i];
    if (target < before) return static_cast<int32_t>(i);
  }
  DI_CHECK(false);  // target < total = the sum of the kept masses
}

// The distribution that a token was drawn from. `logits` are the processed ones.
TokenLogprobs DrawnLogprobs(std::span<const float> logits, const DrawSet& set, int32_t token_id,
                            int64_t num_top, SamplerScratch& scratch) {
  const double log_total = std::log(static_cast<double>(set.total));
  const auto logprob_of = [&](uint32_t id) {
    if (!set.Keeps(SortKey(logits[id], id), scratch.masses[id]))
      return -std::numeric_limits<double>::infinity();
    return std::log(static_cast<double>(scratch.masses[id])) - log_total;
  };
  TokenLogprobs result;
  result.logprob = Reported(logprob_of(static_cast<uint32_t>(token_id)));
  result.rank = RankOf(logits, token_id);
  result.top = TopTokens(logits, num_top, scratch, logprob_of);
  return result;
}

TokenLogprobs FiniteRowLogprobs(std::span<const float> logits, int32_t token_id, int64_t num_top,
                                SamplerScratch& scratch) {
  const double largest = double{logits[static_cast<size_t>(ArgMax(logits))]};
  // Four sums that do not wait for each other, always combined in the same way.
  std::array<double, 4> sums = {};
  size_t i = 0;
  for (; i + 4 <= logits.size(); i += 4) {
    for (size_t lane = 0; lane < 4; ++lane)
      sums[lane] += ExpNonPositive(double{logits[i + lane]} - largest);
  }
  for (; i < logits.size(); ++i) sums[i % 4] += ExpNonPositive(double{logits[i]} - largest);
  const double log_sum = largest + std::log((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const auto logprob_of = [&](uint32_t id) { return double{logits[id]} - log_sum; };
  TokenLogprobs result;
  result.logprob = Reported(logprob_of(static_cast<uint32_t>(token_id)));
  result.rank = RankOf(logits, token_id);
  result.top = TopTokens(logits, num_top, scratch, logprob_of);
  return result;
}

}  // namespace

Result<TokenLogprobs> RowLogprobs(std::span<const float> logits, int32_t token_id, int64_t num_top,
                                  SamplerScratch& scratch) {
  DI_RETURN_IF_ERROR(CheckRow(logits));
  if (logits[static_cast<size_t>(ArgMax(logits))] == kMinusInfinity) {
    return Fail(Code::kInternal,
                "the model's logits are all minus infinity; there are no log-probabilities");
  }
  return FiniteRowLogprobs(logits, token_id, num_top, scratch);
}

SequenceSampler::SequenceSampler(const SamplingParams& params, uint64_t seed,
                                 std::span<const int32_t> prompt,
                                 std::vector<std::vector<int32_t>> bad_words,
                                 std::vector<int32_t> end_ids)
    : params_(params),
      seed_(seed),
      prompt_tokens_(static_cast<int64_t>(prompt.size())),
      bad_words_(std::move(bad_words)),
      end_ids_(std::move(end_ids)) {
  if (params.repetition_penalty != 1.0) prompt_ids_.insert(prompt.begin(), prompt.end());
  counts_outputs_ = params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 ||
                    params.frequency_penalty != 0.0;
}

void SequenceSampler::ReserveOutput(int64_t tokens) {
  output_.reserve(static_cast<size_t>(tokens));
}

void SequenceSampler::set_constraint(std::unique_ptr<TokenConstraint> constraint) {
  DI_CHECK(output_.empty());
  constraint_ = std::move(constraint);
}

DrawMask SequenceSampler::FillMask(std::span<uint32_t> buffer) {
  DrawMask mask;
  mask.verdict = constraint_->FillMask(buffer);
  if (mask.verdict == TokenConstraint::Verdict::kMasked) mask.bits = buffer;
  return mask;
}

Status SequenceSampler::Accept(int32_t token_id) {
  if (constraint_ != nullptr) {
    if (constraint_->num_accepted() != std::ssize(output_)) {
      return Fail(Code::kInternal,
                  fmt::format("the structured output's state has followed {} tokens, but the "
                              "output has {}.",
                              constraint_->num_accepted(), output_.size()),
                  "structured_output");
    }
    DI_RETURN_IF_ERROR(constraint_->Accept(token_id));
  }
  output_.push_back(token_id);
  if (counts_outputs_) ++output_counts_[token_id];
  return {};
}

bool SequenceSampler::ChangesLogits(const DrawMask& mask) const {
  return mask.verdict == TokenConstraint::Verdict::kMasked ||
         params_.allowed_token_ids.has_value() || !bad_words_.empty() ||
         static_cast<int64_t>(output_.size()) < params_.min_tokens || !params_.logit_bias.empty() ||
         params_.presence_penalty != 0.0 || params_.frequency_penalty != 0.0 ||
         params_.repetition_penalty != 1.0;
}

void SequenceSampler::ApplyMasks(std::span<float> logits, const DrawMask& mask) const {
  if (mask.verdict == TokenConstraint::Verdict::kMasked) KeepMasked(mask.bits, logits);
  if (params_.allowed_token_ids.has_value()) {
    std::vector<std::pair<size_t, float>> allowed;
    for (const int64_t id : *params_.allowed_token_ids) {
      allowed.emplace_back(static_cast<size_t>(id), logits[static_cast<size_t>(id)]);
    }
    std::fill(logits.begin(), logits.end(), kMinusInfinity);
    for (const auto& [id, logit] : allowed) logits[id] = logit;
  }
  for (const std::vector<int32_t>& word : bad_words_) {
    const size_t before = word.size() - 1;
    if (before <= output_.size() &&
        std::equal(word.begin(), word.end() - 1, output_.end() - static_cast<int64_t>(before))) {
      logits[static_cast<size_t>(word.back())] = kMinusInfinity;
    }
  }
  if (static_cast<int64_t>(output_.size()) < params_.min_tokens) {
    for (const int32_t id : end_ids_) logits[static_cast<size_t>(id)] = kMinusInfinity;
  }
}

void SequenceSampler::ApplyPenalties(std::span<float> logits) const {
  for (const auto& [id, bias] : params_.logit_bias)
    logits[static_cast<size_t>(id)] += static_cast<float>(bias);
  const auto repeat = [&](int32_t id) {
    float& logit = logits[static_cast<size_t>(id)];
    const float penalty = static_cast<float>(params_.repetition_penalty);
    logit = logit > 0.0f ? logit / penalty : logit * penalty;
  };
  if (params_.repetition_penalty != 1.0) {
    for (const int32_t id : prompt_ids_) repeat(id);
    for (const auto& [id, count] : output_counts_) {
      if (!prompt_ids_.contains(id)) repeat(id);
    }
  }
  if (params_.presence_penalty != 0.0 || params_.frequency_penalty != 0.0) {
    for (const auto& [id, count] : output_counts_) {
      const double penalty =
          params_.presence_penalty + params_.frequency_penalty * static_cast<double>(count);
      logits[static_cast<size_t>(id)] -= static_cast<float>(penalty);
    }
  }
}

Error SequenceSampler::NothingLeft(size_t vocab_size, const DrawMask& mask) const {
  using Verdict = TokenConstraint::Verdict;
  Error error;
  error.code = Code::kInvalidArgument;
  if (mask.verdict == Verdict::kDeadEnd) {
    error.message = fmt::format(
        "no token can be sampled because structured_output allows none after the first {} tokens "
        "of the output: a dead end.",
        output_.size());
    error.field = "structured_output";
  } else if (mask.verdict == Verdict::kMasked) {
    int64_t allowed = 0;
    for (size_t id = 0; id < vocab_size; ++id) allowed += (mask.bits[id / 32] >> (id % 32)) & 1u;
    error.message = fmt::format(
        "no token can be sampled after the first {} tokens of the output because all {} that "
        "structured_output allows there are excluded by allowed_token_ids, bad_words, min_tokens "
        "(which keeps end tokens out) or the model's own logits.",
        output_.size(), allowed);
    error.field = "structured_output";
  } else {
    error.message = fmt::format(
        "no token can be sampled because all {} tokens are excluded; allowed_token_ids, bad_words, "
        "min_tokens and the model's own logits leave none",
        vocab_size);
  }
  return error;
}

Result<SampledToken> SequenceSampler::Sample(std::span<const float> raw, SamplerScratch& scratch,
                                             const DrawMask& mask) const {
  DI_RETURN_IF_ERROR(CheckRow(raw));
  if (mask.verdict == TokenConstraint::Verdict::kDeadEnd)
    return tl::unexpected<Error>(NothingLeft(raw.size(), mask));
  std::span<const float> logits = raw;
  if (ChangesLogits(mask)) {
    scratch.logits.assign(raw.begin(), raw.end());
    ApplyMasks(scratch.logits, mask);
    ApplyPenalties(scratch.logits);
    logits = scratch.logits;
  }
  const int32_t best = ArgMax(logits);
  if (logits[static_cast<size_t>(best)] == kMinusInfinity) {
    return tl::unexpected<Error>(NothingLeft(raw.size(), mask));
  }

  const bool want_logprobs = params_.logprobs.has_value();
  const bool processed = params_.logprobs_mode == LogprobsMode::kProcessed;
  const int64_t num_top = params_.logprobs.value_or(0);
  SampledToken token;
  if (params_.greedy()) {
    token.token_id = best;
    if (want_logprobs)
      token.logprobs = FiniteRowLogprobs(processed ? logits : raw, best, num_top, scratch);
    return token;
  }
  const DrawSet set = SelectTokens(logits, params_, scratch);
  const int64_t position = prompt_tokens_ + static_cast<int64_t>(output_.size());
  const auto words = RandomWords(seed_, position, RandomStream::kSample);
  token.token_id = DrawToken(logits, set, scratch, (uint64_t{words[0]} << 32) | words[1]);
  if (want_logprobs) {
    token.logprobs = processed ? DrawnLogprobs(logits, set, token.token_id, num_top, scratch)
                               : FiniteRowLogprobs(raw, token.token_id, num_top, scratch);
  }
  return token;
}

}  // namespace deepinfer
