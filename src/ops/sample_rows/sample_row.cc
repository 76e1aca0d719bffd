#include "ops/sample_rows/sample_row.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace deepinfer {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Orders tokens by logit descending, then id ascending, as one ascending integer.
uint64_t SortKey(float logit, uint32_t id) {
  return (uint64_t{~OrderedBits(logit)} << 32) | id;
}

uint32_t KeyId(uint64_t key) {
  return static_cast<uint32_t>(key);
}

// Index of the largest element, the lowest among equals.
int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

int32_t RankOf(std::span<const float> logits, float own) {
  return static_cast<int32_t>(
      1 + std::count_if(logits.begin(), logits.end(), [own](float x) { return x > own; }));
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

// Sums of integers may be taken in any order; four that do not wait for each other.
uint64_t SoftmaxSum(std::span<const float> logits, float largest) {
  uint64_t sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= logits.size(); i += 4) {
    for (size_t lane = 0; lane < 4; ++lane)
      sums[lane] += SoftmaxMass(ExpNonPositive(double{logits[i + lane]} - double{largest}));
  }
  for (; i < logits.size(); ++i)
    sums[0] += SoftmaxMass(ExpNonPositive(double{logits[i]} - double{largest}));
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

std::span<uint64_t> RowScratch::FillKeys(std::span<const float> logits) {
  keys_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i)
    keys_[i] = SortKey(logits[i], static_cast<uint32_t>(i));
  return keys_;
}

uint64_t RowScratch::KeptMass(int32_t token) const {
  const auto i = static_cast<size_t>(token);
  return set_.Keeps(SortKey(edited_[i], static_cast<uint32_t>(token)), masses_[i]) ? masses_[i] : 0;
}

// Top-k and nucleus are prefixes of one order over one unfiltered distribution, hence their
// intersection is the shorter one.
void RowScratch::SelectTokens(const RowDraw& draw, float largest) {
  const std::span<const float> logits = edited_;
  masses_.resize(logits.size());
  uint64_t total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double difference = (double{logits[i]} - double{largest}) * draw.inverse_temperature;
    masses_[i] = DrawMass(ExpNonPositive(difference));
    total += masses_[i];
  }

  set_ = {};
  set_.min_mass = draw.min_mass;
  const int64_t vocab = std::ssize(logits);
  const bool use_top_k = draw.top_k > 0 && draw.top_k < vocab;
  if (use_top_k || draw.top_p < 1.0) {
    std::span<uint64_t> keys = FillKeys(logits);
    if (use_top_k) {
      std::nth_element(keys.begin(), keys.begin() + (draw.top_k - 1), keys.end());
      keys = keys.first(static_cast<size_t>(draw.top_k));
      set_.last_key = keys.back();
    }
    if (draw.top_p < 1.0) {
      const uint64_t limit = NucleusLimit(draw.top_p, total);
      SortedPrefix prefix(keys);
      uint64_t before = 0;
      for (int64_t i = 0; i < prefix.size() && before <= limit; ++i) {
        set_.last_key = prefix[i];
        before += masses_[KeyId(set_.last_key)];
      }
    }
  }
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool kept = set_.Keeps(SortKey(logits[i], static_cast<uint32_t>(i)), masses_[i]);
    set_.total += kept ? masses_[i] : 0;
  }
}

// Scaling by a multiplication moves no probability by more than 2^-63.
int32_t RowScratch::DrawToken(uint64_t random) const {
  const uint64_t target =
      static_cast<uint64_t>((static_cast<__uint128_t>(random) * set_.total) >> 64);
  uint64_t before = 0;
  for (size_t i = 0; i < edited_.size(); ++i) {
    if (!set_.Keeps(SortKey(edited_[i], static_cast<uint32_t>(i)), masses_[i])) continue;
    before += masses_[i];
    if (target < before) return static_cast<int32_t>(i);
  }
  DI_CHECK(false);  // target < total = the sum of the kept masses
}

SampledRow SampleRow(std::span<const float> raw, const RowDraw& draw, const RowLists& lists,
                     RowScratch& scratch) {
  DI_CHECK_LE(std::ssize(raw), kMaxSampledVocab);
  SampledRow row;
  // NaN is not below infinity either: one comparison per element finds both.
  const auto bad = std::find_if(raw.begin(), raw.end(), [](float x) { return !(x < INFINITY); });
  if (bad != raw.end()) {
    row.status = RowStatus::kBadLogit;
    row.token = static_cast<int32_t>(bad - raw.begin());
    row.logit = *bad;
    return row;
  }
  scratch.edited_ = raw;
  if (!lists.mask.empty() || !lists.edits.empty() || !lists.excluded.empty()) {
    scratch.logits_.assign(raw.begin(), raw.end());
    const std::span<float> edited = scratch.logits_;
    if (!lists.mask.empty()) KeepMasked(lists.mask, edited);
    for (const RowEdit& edit : lists.edits) {
      float& logit = edited[static_cast<size_t>(edit.token)];
      logit = EditLogit(logit, edit);
    }
    for (const int32_t token : lists.excluded) edited[static_cast<size_t>(token)] = kMinusInfinity;
    scratch.edited_ = edited;
  }
  const std::span<const float> logits = scratch.edited_;
  const int32_t best = ArgMax(logits);
  const float largest = logits[static_cast<size_t>(best)];
  if (largest == kMinusInfinity) {
    row.status = RowStatus::kNothingLeft;
    return row;
  }

  if (draw.given_token >= 0) {
    row.token = draw.given_token;
  } else if (draw.greedy != 0) {
    row.token = best;
  } else {
    scratch.SelectTokens(draw, largest);
    row.token = scratch.DrawToken(draw.random);
  }
  row.ends = std::find(lists.ends.begin(), lists.ends.end(), row.token) != lists.ends.end() ? 1 : 0;

  if (draw.report == RowReport::kNothing) return row;
  const std::span<const float> reported = draw.report == RowReport::kRaw ? raw : logits;
  row.logit = reported[static_cast<size_t>(row.token)];
  row.rank = RankOf(reported, row.logit);
  row.largest = draw.report == RowReport::kRaw ? raw[static_cast<size_t>(ArgMax(raw))] : largest;
  if (draw.report == RowReport::kDrawn) {
    row.sum = scratch.set_.total;
    row.mass = scratch.masses_[static_cast<size_t>(row.token)];
  } else {
    row.sum = SoftmaxSum(reported, row.largest);
  }
  return row;
}

std::span<const uint64_t> BestKeys(std::span<const float> logits, int64_t count,
                                   RowScratch& scratch) {
  SortedPrefix prefix(scratch.FillKeys(logits));
  const int64_t found = std::min(count, prefix.size());
  if (found > 0) prefix[found - 1];
  return std::span<const uint64_t>(scratch.keys_)
      .first(static_cast<size_t>(std::max<int64_t>(0, found)));
}

}  // namespace deepinfer
