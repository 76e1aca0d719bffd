#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "sample/philox.h"

namespace deepinfer {
namespace {

float Reported(double logprob) {
  return logprob < double{kLogprobFloor} ? kLogprobFloor : static_cast<float>(logprob);
}

Error BadLogit(const SampledRow& row) {
  Error error;
  error.code = Code::kInternal;
  error.message = fmt::format(
      "no token can be sampled because the model's logit of token {} is {}; logits must be numbers "
      "below infinity",
      row.token, row.logit);
  return error;
}

// The logarithm of the sum of exponentials of the row that was reported on.
double LogSum(const SampledRow& row) {
  return double{row.largest} + std::log(static_cast<double>(row.sum) / kUnitSoftmaxMass);
}

// What a row says about its token.
TokenLogprobs LogprobsOf(RowReport report, const SampledRow& row) {
  TokenLogprobs result;
  result.logprob = Reported(report == RowReport::kDrawn ? std::log(static_cast<double>(row.mass)) -
                                                              std::log(static_cast<double>(row.sum))
                                                        : double{row.logit} - LogSum(row));
  result.rank = row.rank;
  return result;
}

// The `num_top` best tokens, fewer when fewer have a finite logit.
std::vector<TokenLogprob> TopTokens(std::span<const float> logits, RowReport report,
                                    const SampledRow& row, int64_t num_top, RowScratch& scratch) {
  std::vector<TokenLogprob> top;
  if (num_top <= 0) return top;
  const double log_sum =
      report == RowReport::kDrawn ? std::log(static_cast<double>(row.sum)) : LogSum(row);
  for (const uint64_t key : BestKeys(logits, num_top, scratch)) {
    const auto id = static_cast<uint32_t>(key);
    if (report == RowReport::kDrawn) {
      const uint64_t mass = scratch.KeptMass(static_cast<int32_t>(id));
      if (mass == 0) break;
      top.push_back(
          {static_cast<int32_t>(id), Reported(std::log(static_cast<double>(mass)) - log_sum)});
    } else {
      if (logits[id] == -std::numeric_limits<float>::infinity()) break;
      top.push_back({static_cast<int32_t>(id), Reported(double{logits[id]} - log_sum)});
    }
  }
  return top;
}

// The smallest mass that min_p lets stay.
uint64_t MinMass(double min_p) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(min_p * kUnitMass)));
}

}  // namespace

RowDraw GivenTokenDraw(int32_t token_id) {
  RowDraw draw;
  draw.given_token = token_id;
  draw.report = RowReport::kRaw;
  return draw;
}

Result<TokenLogprobs> GivenTokenLogprobs(const SampledRow& row) {
  if (row.status == RowStatus::kBadLogit) return tl::unexpected<Error>(BadLogit(row));
  if (row.status == RowStatus::kNothingLeft) {
    return Fail(Code::kInternal,
                "the model's logits are all minus infinity; there are no log-probabilities");
  }
  return LogprobsOf(RowReport::kRaw, row);
}

Result<TokenLogprobs> RowLogprobs(std::span<const float> logits, int32_t token_id, int64_t num_top,
                                  SamplerScratch& scratch) {
  const SampledRow row = SampleRow(logits, GivenTokenDraw(token_id), {}, scratch.row);
  DI_ASSIGN_OR_RETURN(TokenLogprobs result, GivenTokenLogprobs(row));
  result.top = TopTokens(logits, RowReport::kRaw, row, num_top, scratch.row);
  return result;
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
  for (const auto& [id, bias] : params.logit_bias)
    EditOf(static_cast<int32_t>(id)).bias = static_cast<float>(bias);
  if (params.repetition_penalty != 1.0) {
    for (const int32_t id : prompt)
      EditOf(id).repetition = static_cast<float>(params.repetition_penalty);
  }
  if (params.allowed_token_ids.has_value()) {
    for (const int64_t id : *params.allowed_token_ids) {
      const auto word = static_cast<size_t>(id / 32);
      if (word >= allowed_bits_.size()) allowed_bits_.resize(word + 1, 0);
      allowed_bits_[word] |= uint32_t{1} << (id % 32);
    }
  }
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
  if (counts_outputs_) {
    const int64_t count = ++output_counts_[token_id];
    RowEdit& edit = EditOf(token_id);
    edit.repetition = static_cast<float>(params_.repetition_penalty);
    edit.penalty = static_cast<float>(params_.presence_penalty +
                                      params_.frequency_penalty * static_cast<double>(count));
  }
  return {};
}

RowEdit& SequenceSampler::EditOf(int32_t token_id) {
  const auto [found, is_new] = edit_of_.try_emplace(token_id, edits_.size());
  if (is_new) edits_.push_back({.token = token_id});
  return edits_[found->second];
}

void SequenceSampler::ListExcluded(std::vector<int32_t>* excluded) const {
  excluded->clear();
  for (const std::vector<int32_t>& word : bad_words_) {
    const size_t before = word.size() - 1;
    if (before <= output_.size() &&
        std::equal(word.begin(), word.end() - 1, output_.end() - static_cast<int64_t>(before))) {
      excluded->push_back(word.back());
    }
  }
  if (static_cast<int64_t>(output_.size()) < params_.min_tokens)
    excluded->insert(excluded->end(), end_ids_.begin(), end_ids_.end());
}

Error SequenceSampler::NothingLeft(const PreparedDraw& prepared) const {
  using Verdict = TokenConstraint::Verdict;
  Error error;
  error.code = Code::kInvalidArgument;
  if (prepared.constraint.verdict == Verdict::kDeadEnd) {
    error.message = fmt::format(
        "no token can be sampled because structured_output allows none after the first {} tokens "
        "of the output: a dead end.",
        output_.size());
    error.field = "structured_output";
  } else if (prepared.constraint.verdict == Verdict::kMasked) {
    int64_t allowed = 0;
    for (int64_t id = 0; id < prepared.vocab_size; ++id) {
      allowed += (prepared.constraint.bits[static_cast<size_t>(id / 32)] >> (id % 32)) & 1u;
    }
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
        prepared.vocab_size);
  }
  return error;
}

Status SequenceSampler::Prepare(int64_t vocab_size, const DrawMask& mask,
                                PreparedDraw* prepared) const {
  prepared->vocab_size = vocab_size;
  prepared->constraint = mask;
  if (mask.verdict == TokenConstraint::Verdict::kDeadEnd)
    return tl::unexpected<Error>(NothingLeft(*prepared));
  ListExcluded(&prepared->excluded);
  RowLists& lists = prepared->lists;
  lists = {.mask = {}, .edits = edits_, .excluded = prepared->excluded, .ends = end_ids_};
  if (mask.verdict == TokenConstraint::Verdict::kMasked) lists.mask = mask.bits;
  if (!allowed_bits_.empty()) {
    // Words behind the last allowed token are zero.
    prepared->mask.assign(static_cast<size_t>((vocab_size + 31) / 32), 0);
    for (size_t i = 0; i < allowed_bits_.size(); ++i)
      prepared->mask[i] = allowed_bits_[i] & (lists.mask.empty() ? ~uint32_t{0} : lists.mask[i]);
    lists.mask = prepared->mask;
  }

  RowDraw& draw = prepared->draw;
  draw = {};
  draw.greedy = params_.greedy() ? 1 : 0;
  prepared->num_top = params_.logprobs.value_or(0);
  if (params_.logprobs.has_value()) {
    draw.report = params_.logprobs_mode == LogprobsMode::kRaw ? RowReport::kRaw
                  : params_.greedy()                          ? RowReport::kEdited
                                                              : RowReport::kDrawn;
  }
  if (params_.greedy()) return {};
  draw.top_k = params_.top_k > 0 ? static_cast<int32_t>(params_.top_k) : 0;
  draw.inverse_temperature = 1.0 / params_.temperature;
  draw.top_p = params_.top_p;
  draw.min_mass = MinMass(params_.min_p);
  const int64_t position = prompt_tokens_ + static_cast<int64_t>(output_.size());
  const auto words = RandomWords(seed_, position, RandomStream::kSample);
  draw.random = (uint64_t{words[0]} << 32) | words[1];
  return {};
}

Result<SampledToken> SequenceSampler::Complete(const PreparedDraw& prepared,
                                               const SampledRow& row) const {
  if (row.status == RowStatus::kBadLogit) return tl::unexpected<Error>(BadLogit(row));
  if (row.status == RowStatus::kNothingLeft) return tl::unexpected<Error>(NothingLeft(prepared));
  SampledToken token;
  token.token_id = row.token;
  token.ends = row.ends != 0;
  const RowReport report = prepared.draw.report;
  if (report != RowReport::kNothing) token.logprobs = LogprobsOf(report, row);
  return token;
}

Result<SampledToken> SequenceSampler::Sample(std::span<const float> raw, SamplerScratch& scratch,
                                             const DrawMask& mask) const {
  PreparedDraw& prepared = scratch.prepared;
  DI_RETURN_IF_ERROR(Prepare(std::ssize(raw), mask, &prepared));
  const SampledRow row = SampleRow(raw, prepared.draw, prepared.lists, scratch.row);
  DI_ASSIGN_OR_RETURN(SampledToken token, Complete(prepared, row));
  const RowReport report = prepared.draw.report;
  if (report != RowReport::kNothing) {
    const std::span<const float> logits = report == RowReport::kRaw ? raw : scratch.row.edited();
    token.logprobs.top = TopTokens(logits, report, row, prepared.num_top, scratch.row);
  }
  return token;
}

}  // namespace deepinfer
