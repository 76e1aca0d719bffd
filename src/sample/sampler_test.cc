#include "sample/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "sample/philox.h"
#include "sample/sampler_reference.h"
#include "sample/table_constraint_for_test.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();

SequenceSampler Plain(const SamplingParams& params, uint64_t seed = 1,
                      std::vector<int32_t> prompt = {0}) {
  return SequenceSampler(params, seed, prompt, {}, {});
}

int32_t SampleId(const SequenceSampler& sampler, std::span<const float> logits) {
  SamplerScratch scratch;
  const Result<SampledToken> token = sampler.Sample(logits, scratch);
  EXPECT_TRUE(token.has_value()) << token.error().message;
  return token.has_value() ? token->token_id : -1;
}

SamplingParams Greedy() {
  SamplingParams params;
  params.temperature = 0;
  return params;
}

TEST(Sampler, GreedyTakesTheLowestOfEqualLogits) {
  const SamplingParams params = Greedy();
  EXPECT_EQ(SampleId(Plain(params), std::vector<float>{1, 3, -2, 3, 3}), 1);
  EXPECT_EQ(SampleId(Plain(params), std::vector<float>{-0.0f, 0.0f}), 0);
  EXPECT_EQ(SampleId(Plain(params), std::vector<float>{-kInf, -5}), 1);
}

TEST(Sampler, TinyTemperatureIsGreedyAndTheNextLargerOneIsNot) {
  SamplingParams params;
  params.temperature = 9e-6;
  EXPECT_TRUE(params.greedy());
  params.temperature = 1e-5;
  EXPECT_FALSE(params.greedy());
}

// Draws with every seed below `draws` and compares with the law by Pearson's statistic.
double ChiSquare(std::span<const float> logits, const SamplingParams& params, int draws,
                 int* degrees) {
  std::vector<int> counts(logits.size(), 0);
  SamplerScratch scratch;
  for (int seed = 0; seed < draws; ++seed) {
    const std::vector<int32_t> prompt = {0, 1, 2};
    const SequenceSampler sampler(params, static_cast<uint64_t>(seed), prompt, {}, {});
    ++counts[static_cast<size_t>(sampler.Sample(logits, scratch)->token_id)];
  }
  const std::vector<uint64_t> masses = ReferenceMasses(logits, params);
  double total = 0;
  for (const uint64_t mass : masses) total += static_cast<double>(mass);
  double statistic = 0;
  *degrees = -1;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double expected = static_cast<double>(masses[i]) / total * draws;
    if (masses[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " was excluded";
      continue;
    }
    ++*degrees;
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  return statistic;
}

TEST(Sampler, DrawsFollowTheSoftmax) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f, -0.5f, 1.5f, 0.25f};
  SamplingParams params;
  int degrees = 0;
  // 24.3 is the 0.999 quantile of chi-square with 7 degrees of freedom; the draws are fixed, so the
  // test is not flaky.
  EXPECT_LT(ChiSquare(logits, params, 20'000, &degrees), 24.3);
  EXPECT_EQ(degrees, 7);
  params.temperature = 0.5;
  EXPECT_LT(ChiSquare(logits, params, 20'000, &degrees), 24.3);
  params.temperature = 3;
  params.top_k = 5;
  EXPECT_LT(ChiSquare(logits, params, 20'000, &degrees), 18.5);  // 4 degrees
  EXPECT_EQ(degrees, 4);
}

TEST(Sampler, DrawsAtConsecutivePositionsFollowTheSoftmaxToo) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f};
  const SamplingParams params;
  SequenceSampler sampler = Plain(params, 99);
  std::vector<double> counts(4, 0);
  SamplerScratch scratch;
  for (int i = 0; i < 20'000; ++i) {
    const int32_t id = sampler.Sample(logits, scratch)->token_id;
    sampler.Accept(id);
    ++counts[static_cast<size_t>(id)];
  }
  double z = 0;
  for (const float x : logits) z += std::exp(double{x});
  double statistic = 0;
  for (size_t i = 0; i < 4; ++i) {
    const double expected = std::exp(double{logits[i]}) / z * 20'000;
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  EXPECT_LT(statistic, 16.3);  // 0.999 quantile, 3 degrees of freedom
}

TEST(Sampler, NucleusKeepsATokenWhoseMassBeforeEqualsTopP) {
  // Four equal tokens: the masses before them are 0, 1/4, 1/2 and 3/4 exactly. Ties are ordered by
  // id.
  const std::vector<float> logits = {-kInf, 2, 2, 2, 2};
  SamplingParams params;
  const auto kept = [&](double top_p) {
    params.top_p = top_p;
    std::vector<bool> seen(5, false);
    SamplerScratch scratch;
    for (uint64_t seed = 0; seed < 400; ++seed) {
      seen[static_cast<size_t>(Plain(params, seed).Sample(logits, scratch)->token_id)] = true;
    }
    return seen;
  };
  EXPECT_EQ(kept(0.5), (std::vector<bool>{false, true, true, true, false}));
  EXPECT_EQ(kept(0.49), (std::vector<bool>{false, true, true, false, false}));
  EXPECT_EQ(kept(1e-300), (std::vector<bool>{false, true, false, false, false}));
}

TEST(Sampler, TopKAndMinPCutTiesById) {
  const std::vector<float> logits = {1, 5, 5, 5, 4};
  SamplingParams params;
  params.top_k = 2;
  const std::vector<uint64_t> masses = ReferenceMasses(logits, params);
  EXPECT_EQ(masses[1], masses[2]);
  EXPECT_EQ(masses[3], 0u);
  int degrees = 0;
  EXPECT_LT(ChiSquare(logits, params, 2'000, &degrees), 10.9);
  params.top_k = -1;
  params.min_p = 0.9;
  EXPECT_LT(ChiSquare(logits, params, 2'000, &degrees), 13.9);
  EXPECT_EQ(degrees, 2);
}

// The token that the law assigns to the random word, by the plain reference.
int32_t ReferenceToken(std::span<const float> logits, const SamplingParams& params, uint64_t seed,
                       int64_t position) {
  const std::vector<uint64_t> masses = ReferenceMasses(logits, params);
  uint64_t total = 0;
  for (const uint64_t mass : masses) total += mass;
  const auto words = RandomWords(seed, position, RandomStream::kSample);
  const uint64_t bits = (uint64_t{words[0]} << 32) | words[1];
  uint64_t target = static_cast<uint64_t>((static_cast<__uint128_t>(bits) * total) >> 64);
  for (size_t i = 0; i < masses.size(); ++i) {
    if (target < masses[i]) return static_cast<int32_t>(i);
    target -= masses[i];
  }
  return -1;
}

RC_GTEST_PROP(Sampler, SelectionAgreesWithAFullSort, ()) {
  const int64_t vocab = *rc::gen::inRange<int64_t>(1, 3000);
  const int levels = *rc::gen::inRange(1, 60);  // few levels make many ties
  std::mt19937_64 rng(*rc::gen::arbitrary<uint64_t>());
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& x : logits) {
    x = static_cast<float>(rng() % static_cast<uint64_t>(levels)) * 0.37f - 5.0f;
    if (rng() % 50 == 0) x = -kInf;
  }
  logits[rng() % logits.size()] = 1.0f;
  SamplingParams params;
  params.temperature = *rc::gen::element(0.1, 0.7, 1.0, 5.0, 100.0);
  params.top_k = *rc::gen::element<int64_t>(-1, 1, 2, 7, 64, 65, 500, 4000);
  params.top_p = *rc::gen::element(1.0, 0.999, 0.9, 0.5, 0.25, 0.01);
  params.min_p = *rc::gen::element(0.0, 0.001, 0.1, 0.5, 1.0);
  const std::vector<int32_t> prompt(3, 0);
  SamplerScratch scratch;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const SequenceSampler sampler(params, seed, prompt, {}, {});
    RC_ASSERT(sampler.Sample(logits, scratch)->token_id == ReferenceToken(logits, params, seed, 3));
  }
}

TEST(Sampler, LogprobsAreTheRawLogSoftmax) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f), -kInf};
  SamplingParams params = Greedy();
  params.logprobs = 3;
  SamplerScratch scratch;
  const Result<SampledToken> token = Plain(params).Sample(logits, scratch);
  ASSERT_TRUE(token.has_value());
  EXPECT_EQ(token->token_id, 2);
  EXPECT_NEAR(token->logprobs.logprob, std::log(5.0 / 8.0), 1e-6);
  EXPECT_EQ(token->logprobs.rank, 1);
  ASSERT_EQ(token->logprobs.top.size(), 3u);
  EXPECT_EQ(token->logprobs.top[1].token_id, 1);
  EXPECT_NEAR(token->logprobs.top[1].logprob, std::log(2.0 / 8.0), 1e-6);
  EXPECT_NEAR(token->logprobs.top[2].logprob, std::log(1.0 / 8.0), 1e-6);

  // Raw ones do not notice a bias that changes the choice; processed ones do.
  params.logit_bias = {{0, 3.0}};
  EXPECT_NEAR(Plain(params).Sample(logits, scratch)->logprobs.logprob, std::log(1.0 / 8.0), 1e-6);
  params.logprobs_mode = LogprobsMode::kProcessed;
  const double boosted = std::exp(3.0);
  EXPECT_NEAR(Plain(params).Sample(logits, scratch)->logprobs.logprob,
              std::log(boosted / (boosted + 7.0)), 1e-6);
}

TEST(Sampler, ProcessedLogprobsDescribeTheDistributionDrawnFrom) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f), std::log(3.0f)};
  SamplingParams params;
  params.top_k = 2;
  params.logprobs = 4;
  params.logprobs_mode = LogprobsMode::kProcessed;
  SamplerScratch scratch;
  const Result<SampledToken> token = Plain(params, 5).Sample(logits, scratch);
  ASSERT_EQ(token->logprobs.top.size(), 2u);  // only two can be drawn
  EXPECT_NEAR(token->logprobs.top[0].logprob, std::log(5.0 / 8.0), 1e-6);
  EXPECT_NEAR(token->logprobs.top[1].logprob, std::log(3.0 / 8.0), 1e-6);
}

TEST(Sampler, TiedTokensShareTheirRank) {
  SamplerScratch scratch;
  const std::vector<float> logits = {1, 4, 4, 7, 1};
  EXPECT_EQ(RowLogprobs(logits, 3, 0, scratch)->rank, 1);
  EXPECT_EQ(RowLogprobs(logits, 1, 0, scratch)->rank, 2);
  EXPECT_EQ(RowLogprobs(logits, 2, 0, scratch)->rank, 2);
  EXPECT_EQ(RowLogprobs(logits, 4, 0, scratch)->rank, 4);
  const Result<TokenLogprobs> row = RowLogprobs(logits, 4, 3, scratch);
  EXPECT_EQ(row->top[1].token_id, 1);
  EXPECT_EQ(row->top[2].token_id, 2);
}

TEST(Sampler, ImpossibleTokensHaveTheFloorAsLogprob) {
  SamplerScratch scratch;
  EXPECT_EQ(RowLogprobs(std::vector<float>{0, -kInf}, 1, 2, scratch)->logprob, kLogprobFloor);
  EXPECT_EQ(RowLogprobs(std::vector<float>{0, -kInf}, 1, 2, scratch)->top.size(), 1u);
}

TEST(Sampler, PenaltiesMatchHandComputedLogits) {
  // Prompt holds token 1, output holds 2 twice and 3 once.
  SamplingParams params;
  params.temperature = 0;
  params.repetition_penalty = 2.0;
  params.presence_penalty = 0.5;
  params.frequency_penalty = 0.25;
  params.logit_bias = {{3, 1.0}};
  params.logprobs = 5;
  params.logprobs_mode = LogprobsMode::kProcessed;
  SequenceSampler sampler = Plain(params, 1, {1});
  for (const int32_t id : {2, 3, 2}) sampler.Accept(id);
  const std::vector<float> logits = {0.9f, 2.0f, -0.5f, 3.0f, -4.0f};
  // 0: 0.9; 1: 2/2 = 1; 2: -0.5*2 - 0.5 - 2*0.25 = -2; 3: (3+1)/2 - 0.5 - 0.25 = 1.25; 4: -4.
  const double expected[] = {0.9, 1.0, -2.0, 1.25, -4.0};
  double z = 0;
  for (const double x : expected) z += std::exp(x);
  SamplerScratch scratch;
  const Result<SampledToken> token = sampler.Sample(logits, scratch);
  ASSERT_EQ(token->token_id, 3);
  ASSERT_EQ(token->logprobs.top.size(), 5u);
  for (const TokenLogprob& entry : token->logprobs.top) {
    EXPECT_NEAR(entry.logprob, expected[entry.token_id] - std::log(z), 1e-6) << entry.token_id;
  }
}

TEST(Sampler, OnlyAllowedTokensAreDrawn) {
  SamplingParams params;
  params.allowed_token_ids = {2, 4, 4};
  const std::vector<float> logits = {9, 9, 0, 9, 0};
  SamplerScratch scratch;
  std::vector<int> counts(5, 0);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    ++counts[static_cast<size_t>(Plain(params, seed).Sample(logits, scratch)->token_id)];
  }
  EXPECT_EQ(counts[2] + counts[4], 200);
  EXPECT_GT(counts[2], 60);
  EXPECT_GT(counts[4], 60);
}

TEST(Sampler, ABadWordIsForbiddenOnlyAfterItsBeginning) {
  const SamplingParams params = Greedy();
  const std::vector<float> logits = {0, 1, 2, 3};
  SequenceSampler sampler(params, 1, std::vector<int32_t>{1, 2}, {{1, 2, 3}, {0}}, {});
  EXPECT_EQ(SampleId(sampler, logits), 3);  // the prompt's tokens are not part of the output
  sampler.Accept(1);
  EXPECT_EQ(SampleId(sampler, logits), 3);
  sampler.Accept(2);
  EXPECT_EQ(SampleId(sampler, logits), 2);
  EXPECT_EQ(SampleId(sampler, std::vector<float>{9, 1, 1, 1}), 1);  // one-token words always
}

TEST(Sampler, EndTokensAreOutOfReachBeforeMinTokens) {
  SamplingParams params = Greedy();
  params.min_tokens = 2;
  SequenceSampler sampler(params, 1, std::vector<int32_t>{0}, {}, {1, 3});
  const std::vector<float> logits = {0, 5, 1, 6};
  EXPECT_EQ(SampleId(sampler, logits), 2);
  sampler.Accept(2);
  EXPECT_EQ(SampleId(sampler, logits), 2);
  sampler.Accept(2);
  EXPECT_EQ(SampleId(sampler, logits), 3);
}

TEST(Sampler, RowsWithoutAUsableTokenAreErrorsThatSayWhy) {
  SamplerScratch scratch;
  const SamplingParams params;
  const auto message = [&](const SamplingParams& p, std::vector<float> logits) {
    const Result<SampledToken> token = Plain(p).Sample(logits, scratch);
    return token.has_value() ? std::string("drew a token") : token.error().message;
  };
  EXPECT_THAT(message(params, {0, NAN, 1}), HasSubstr("logit of token 1 is nan"));
  EXPECT_THAT(message(params, {0, 1, kInf}), HasSubstr("logit of token 2 is inf"));
  EXPECT_THAT(message(Greedy(), {-kInf, -kInf}), HasSubstr("all 2 tokens are excluded"));
  SamplingParams narrow;
  narrow.allowed_token_ids = {1};
  EXPECT_THAT(message(narrow, {0, -kInf, 0}), HasSubstr("no token can be sampled because"));
  EXPECT_FALSE(RowLogprobs(std::vector<float>{-kInf, -kInf}, 0, 0, scratch).has_value());
}

// A sampler whose constraint wants these tokens in this order.
SequenceSampler Constrained(const SamplingParams& params, int64_t vocab, std::vector<int32_t> ids,
                            std::vector<int32_t> end_ids = {}) {
  SequenceSampler sampler(params, 1, std::vector<int32_t>{0}, {}, std::move(end_ids));
  sampler.set_constraint(std::make_unique<TableConstraint>(FixedTokens(vocab, ids)));
  return sampler;
}

Result<SampledToken> SampleMasked(SequenceSampler& sampler, std::span<const float> logits) {
  SamplerScratch scratch;
  std::vector<uint32_t> mask((logits.size() + 31) / 32, 0xA5A5A5A5u);
  return sampler.Sample(logits, scratch, sampler.FillMask(mask));
}

TEST(Sampler, AMaskKeepsExactlyTheTokensWhoseBitsAreSet) {
  std::mt19937 rng(9);
  for (const size_t vocab : {1u, 31u, 32u, 33u, 64u, 1000u}) {
    std::vector<float> logits(vocab);
    for (float& x : logits) x = static_cast<float>(rng() % 1000);
    for (int round = 0; round < 30; ++round) {
      std::vector<uint32_t> mask((vocab + 31) / 32);
      // Whole words of both kinds too, and bits beyond the vocabulary, which mean nothing.
      for (uint32_t& word : mask)
        word = rng() % 3 == 0 ? 0u : rng() % 2 == 0 ? ~0u : static_cast<uint32_t>(rng());
      const size_t one = rng() % vocab;
      mask[one / 32] |= 1u << (one % 32);
      SamplingParams params = Greedy();
      params.logprobs = static_cast<int64_t>(vocab);
      params.logprobs_mode = LogprobsMode::kProcessed;
      SamplerScratch scratch;
      const SequenceSampler sampler = Plain(params);
      const Result<SampledToken> token =
          sampler.Sample(logits, scratch, {TokenConstraint::Verdict::kMasked, mask});
      ASSERT_TRUE(token.has_value());
      std::set<int32_t> expected;
      for (size_t id = 0; id < vocab; ++id) {
        if (((mask[id / 32] >> (id % 32)) & 1u) != 0) expected.insert(static_cast<int32_t>(id));
      }
      std::set<int32_t> kept;
      for (const TokenLogprob& entry : token->logprobs.top) kept.insert(entry.token_id);
      EXPECT_EQ(kept, expected);
      EXPECT_TRUE(kept.contains(token->token_id));
    }
  }
}

TEST(Sampler, AMaskComesBeforeBiasPenaltiesAndFilters) {
  // What the mask excludes, no bias brings back, and it has no part in top-k.
  SamplingParams params = Greedy();
  params.logit_bias = {{0, 100.0}, {2, -50.0}};
  const std::vector<float> logits = {9, 8, 7, 6};
  const std::vector<uint32_t> mask = {0b1100u};
  SamplerScratch scratch;
  EXPECT_EQ(
      Plain(params).Sample(logits, scratch, {TokenConstraint::Verdict::kMasked, mask})->token_id,
      3);
  SamplingParams top;
  top.top_k = 1;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(Plain(top, seed)
                  .Sample(logits, scratch, {TokenConstraint::Verdict::kMasked, mask})
                  ->token_id,
              2);
  }
  SamplingParams raw = Greedy();
  raw.logprobs = 0;
  const Result<SampledToken> token =
      Plain(raw).Sample(logits, scratch, {TokenConstraint::Verdict::kMasked, mask});
  EXPECT_EQ(token->logprobs.rank, 3);  // of the model's own distribution
}

TEST(Sampler, AConstraintMovesOnWithTheAcceptedTokens) {
  const SamplingParams params = Greedy();
  SequenceSampler sampler = Constrained(params, 5, {3, 1, 3});
  const std::vector<float> logits = {9, 1, 9, 2, 9};
  for (const int32_t id : {3, 1, 3}) {
    const Result<SampledToken> token = SampleMasked(sampler, logits);
    ASSERT_TRUE(token.has_value()) << token.error().message;
    EXPECT_EQ(token->token_id, id);
    EXPECT_EQ(SampleMasked(sampler, logits)->token_id, id);  // a draw moves nothing
    EXPECT_TRUE(sampler.Accept(id).has_value());
  }
  const Result<SampledToken> dead = SampleMasked(sampler, logits);
  ASSERT_FALSE(dead.has_value());
  EXPECT_THAT(dead.error().message,
              HasSubstr("after the first 3 tokens of the output: a dead end"));
  EXPECT_EQ(dead.error().field, "structured_output");
}

TEST(Sampler, ATokenThatTheConstraintRefusesIsNotAppended) {
  const SamplingParams params = Greedy();
  SequenceSampler sampler = Constrained(params, 5, {3, 1});
  EXPECT_FALSE(sampler.Accept(4).has_value());
  EXPECT_EQ(SampleMasked(sampler, std::vector<float>(5, 0.0f))->token_id, 3);
  EXPECT_TRUE(sampler.Accept(3).has_value());
  EXPECT_EQ(SampleMasked(sampler, std::vector<float>(5, 0.0f))->token_id, 1);
}

TEST(Sampler, WhatOtherMasksTakeFromAConstraintIsANamedError) {
  const std::vector<float> logits = {0, 1, 2, 3};
  SamplingParams narrow = Greedy();
  narrow.allowed_token_ids = {1, 2};
  SequenceSampler sampler = Constrained(narrow, 4, {3});
  const Result<SampledToken> token = SampleMasked(sampler, logits);
  ASSERT_FALSE(token.has_value());
  EXPECT_EQ(token.error().field, "structured_output");
  EXPECT_THAT(token.error().message, HasSubstr("all 1 that structured_output allows"));
  SamplingParams longer = Greedy();
  longer.min_tokens = 1;
  SequenceSampler ends = Constrained(longer, 4, {3}, {3});
  EXPECT_THAT(SampleMasked(ends, logits).error().message, HasSubstr("min_tokens"));
}

TEST(Sampler, ADrawDependsOnSeedAndPositionOnly) {
  std::vector<float> logits(1000);
  std::mt19937 rng(3);
  for (float& x : logits) x = std::normal_distribution<float>(0, 2)(rng);
  const SamplingParams params;
  const int32_t first = SampleId(Plain(params, 7), logits);
  SamplerScratch used;
  (void)Plain(params, 8).Sample(std::vector<float>(5000, 1.0f),
                                used);  // scratch of another vocabulary and sequence
  EXPECT_EQ(Plain(params, 7).Sample(logits, used)->token_id, first);
  // Same position reached through the prompt or through the output.
  SequenceSampler later = Plain(params, 7, {0});
  later.Accept(5);
  EXPECT_EQ(SampleId(later, logits), SampleId(Plain(params, 7, {0, 5}), logits));
  std::set<int32_t> distinct;
  for (uint64_t seed = 0; seed < 50; ++seed) distinct.insert(SampleId(Plain(params, seed), logits));
  EXPECT_GT(distinct.size(), 20u);
}

}  // namespace
}  // namespace deepinfer
