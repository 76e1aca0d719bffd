// Rows and draws of every kind for the tests of SampleRows, and the law as plainly as it can be
// said: sort everything, add up, compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "ops/op_test_util.h"
#include "ops/sample_rows/row_draw.h"
#include "ops/sample_rows/sample_row.h"
#include "ops/sample_rows/sample_rows.h"

namespace deepinfer::testing {

// A batch of draws on the host. Draw i is from logits row i % rows.
struct SampleBatch {
  int64_t vocab = 0;
  int64_t slots = 0;
  std::vector<std::vector<float>> logits;
  std::vector<RowDraw> draws;
  std::vector<std::string> names;
  std::vector<RowEdit> edits;
  std::vector<int32_t> tokens;
  std::vector<std::vector<uint32_t>> masks;

  RowLists ListsOf(const RowDraw& draw) const {
    RowLists lists;
    if (draw.mask >= 0) lists.mask = masks[static_cast<size_t>(draw.mask)];
    const auto part = [](const auto& all, int32_t begin, int32_t end) {
      return std::span(all).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    };
    lists.edits = part(edits, draw.edits_begin, draw.edits_end);
    lists.excluded = part(tokens, draw.excluded_begin, draw.excluded_end);
    lists.ends = part(tokens, draw.ends_begin, draw.ends_end);
    return lists;
  }
};

inline SampledRow ReferenceSampleRow(std::span<const float> raw, const RowDraw& draw,
                                     const RowLists& lists) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const size_t vocab = raw.size();
  SampledRow result;
  for (size_t i = 0; i < vocab; ++i) {
    if (raw[i] < kInfinity) continue;
    result.status = RowStatus::kBadLogit;
    result.token = static_cast<int32_t>(i);
    result.logit = raw[i];
    return result;
  }
  std::vector<float> y(raw.begin(), raw.end());
  for (size_t i = 0; i < vocab && !lists.mask.empty(); ++i) {
    if (((lists.mask[i / 32] >> (i % 32)) & 1u) == 0) y[i] = -kInfinity;
  }
  for (const RowEdit& edit : lists.edits) {
    float& logit = y[static_cast<size_t>(edit.token)];
    logit += edit.bias;
    logit = logit > 0 ? logit / edit.repetition : logit * edit.repetition;
    logit -= edit.penalty;
  }
  for (const int32_t token : lists.excluded) y[static_cast<size_t>(token)] = -kInfinity;

  std::vector<size_t> order(vocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return y[a] > y[b]; });
  const float largest = y[order[0]];
  if (largest == -kInfinity) {
    result.status = RowStatus::kNothingLeft;
    return result;
  }
  std::vector<uint64_t> kept(vocab, 0);
  uint64_t total = 0;
  if (draw.given_token >= 0) {
    result.token = draw.given_token;
  } else if (draw.greedy != 0) {
    result.token = static_cast<int32_t>(order[0]);
  } else {
    std::vector<uint64_t> mass(vocab);
    uint64_t sum = 0;
    for (size_t i = 0; i < vocab; ++i) {
      const double x = (double{y[i]} - double{largest}) * draw.inverse_temperature;
      mass[i] = static_cast<uint64_t>(std::floor(ExpNonPositive(x) * 0x1p40));
      sum += mass[i];
    }
    uint64_t before = 0;
    for (size_t place = 0; place < vocab; ++place) {
      const size_t id = order[place];
      const bool in_top_k = draw.top_k == 0 || place < static_cast<size_t>(draw.top_k);
      const bool in_nucleus =
          draw.top_p >= 1.0 ||
          before <= static_cast<uint64_t>(draw.top_p * static_cast<double>(sum));
      if (in_top_k && in_nucleus && mass[id] >= draw.min_mass) kept[id] = mass[id];
      before += mass[id];
    }
    total = std::accumulate(kept.begin(), kept.end(), uint64_t{0});
    const auto target =
        static_cast<uint64_t>((static_cast<__uint128_t>(draw.random) * total) >> 64);
    uint64_t behind = 0;
    for (size_t i = 0; i < vocab && result.token < 0; ++i) {
      behind += kept[i];
      if (target < behind) result.token = static_cast<int32_t>(i);
    }
  }
  for (const int32_t token : lists.ends) result.ends |= token == result.token ? 1 : 0;
  if (draw.report == RowReport::kNothing) return result;
  const std::vector<float> reported =
      draw.report == RowReport::kRaw ? std::vector<float>(raw.begin(), raw.end()) : y;
  result.logit = reported[static_cast<size_t>(result.token)];
  result.largest = *std::max_element(reported.begin(), reported.end());
  result.rank = 1;
  for (const float x : reported) {
    result.rank += x > result.logit ? 1 : 0;
    if (draw.report != RowReport::kDrawn) {
      result.sum += static_cast<uint64_t>(
          std::floor(ExpNonPositive(double{x} - double{result.largest}) * 0x1p43 + 0.5));
    }
  }
  if (draw.report == RowReport::kDrawn) {
    result.sum = total;
    result.mass = kept[static_cast<size_t>(result.token)];
  }
  return result;
}

// What differs, or nothing. -0 and +0 are the same logit.
inline std::string DifferenceOf(const SampledRow& a, const SampledRow& b) {
  const auto same = [](float x, float y) { return x == y || (x != x && y != y); };
  if (a.token == b.token && a.status == b.status && a.ends == b.ends && a.rank == b.rank &&
      same(a.logit, b.logit) && same(a.largest, b.largest) && a.sum == b.sum && a.mass == b.mass)
    return {};
  const auto text = [](const SampledRow& row) {
    return fmt::format("token {} status {} ends {} rank {} logit {} largest {} sum {} mass {}",
                       row.token, static_cast<int>(row.status), row.ends, row.rank, row.logit,
                       row.largest, row.sum, row.mass);
  };
  return text(a) + " instead of " + text(b);
}

// Every kind of draw on every kind of row, `rounds` random numbers each.
inline SampleBatch MakeSampleBatch(int64_t vocab, int rounds, uint64_t seed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  SampleBatch batch;
  batch.vocab = vocab;
  Random random(seed, static_cast<uint64_t>(vocab));
  const auto uniform = [&] { return static_cast<float>(random.Next() >> 40) * 0x1p-24f; };
  const auto normal = [&] {  // near enough: the sum of twelve
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  };
  std::vector<std::string> row_names;
  const auto add_row = [&](const char* name, auto&& logit_of) {
    std::vector<float> row(static_cast<size_t>(vocab));
    for (size_t i = 0; i < row.size(); ++i) row[i] = logit_of(i);
    batch.logits.push_back(std::move(row));
    row_names.push_back(name);
  };
  add_row("normal", [&](size_t) { return 2.5f * normal(); });
  add_row("peaked",
          [&](size_t i) { return i == static_cast<size_t>(vocab) / 3 ? 25.0f : normal(); });
  add_row("ties", [&](size_t) { return std::floor(2.0f * normal()) * 0.5f; });
  add_row("equal", [&](size_t) { return -3.25f; });
  add_row("zeros", [&](size_t i) { return i % 3 == 0 ? 0.0f : -0.0f; });
  add_row("holes", [&](size_t i) { return i % 4 != 1 ? -kInfinity : normal(); });
  add_row("wide", [&](size_t) { return 1e30f * normal(); });
  add_row("close", [&](size_t i) { return 1.0f + static_cast<float>(i % 7) * 0x1p-23f; });
  const size_t good_rows = batch.logits.size();
  add_row("not a number",
          [&](size_t i) { return i == static_cast<size_t>(vocab) / 2 ? std::nanf("") : normal(); });
  add_row("infinite",
          [&](size_t i) { return i + 1 == static_cast<size_t>(vocab) ? kInfinity : 1; });
  add_row("nothing", [&](size_t) { return -kInfinity; });

  struct Kind {
    const char* name;
    RowDraw draw;
  };
  const auto sampled = [&](double temperature, int32_t top_k, double top_p, double min_p) {
    RowDraw draw;
    draw.inverse_temperature = 1.0 / temperature;
    draw.top_k = top_k;
    draw.top_p = top_p;
    draw.min_mass = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(min_p * kUnitMass)));
    return draw;
  };
  RowDraw greedy;
  greedy.greedy = 1;
  RowDraw given;
  given.given_token = static_cast<int32_t>(vocab - 1);
  const auto half = static_cast<int32_t>(std::max<int64_t>(1, vocab / 2));
  const std::vector<Kind> kinds = {
      {"greedy", greedy},
      {"given", given},
      {"plain", sampled(1, 0, 1, 0)},
      {"hot", sampled(2.5, 0, 1, 0)},
      {"cold", sampled(1e-5, 0, 1, 0)},
      {"top-k 1", sampled(1, 1, 1, 0)},
      {"top-k 7", sampled(0.7, 7, 1, 0)},
      {"top-k half", sampled(1, half, 1, 0)},
      {"top-p 0.9", sampled(1, 0, 0.9, 0)},
      {"top-p 0.3, hot", sampled(3, 0, 0.3, 0)},
      {"top-p tiny", sampled(1, 0, 1e-300, 0)},
      {"top-p almost 1", sampled(1, 0, 1.0 - 1e-15, 0)},
      {"min-p 0.1", sampled(1, 0, 1, 0.1)},
      {"min-p 1", sampled(1, 0, 1, 1)},
      {"all filters", sampled(0.8, 20, 0.8, 0.01)},
  };
  // With edits of its own for every draw.
  const auto edit = [&](RowDraw* draw, int what) {
    const auto token = [&] {
      return static_cast<int32_t>(random.Next() % static_cast<uint64_t>(vocab));
    };
    if ((what & 1) != 0) {
      draw->edits_begin = static_cast<int32_t>(batch.edits.size());
      std::vector<int32_t> ids;
      for (int i = 0; i < 9; ++i) ids.push_back(token());
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
      for (const int32_t id : ids) {
        batch.edits.push_back({.token = id,
                               .bias = 4.0f * normal(),
                               .repetition = 0.5f + uniform(),
                               .penalty = normal()});
      }
      draw->edits_end = static_cast<int32_t>(batch.edits.size());
    }
    if ((what & 2) != 0) {
      draw->excluded_begin = static_cast<int32_t>(batch.tokens.size());
      for (int i = 0; i < 5; ++i) batch.tokens.push_back(token());
      draw->excluded_end = static_cast<int32_t>(batch.tokens.size());
    }
    if ((what & 4) != 0) {
      draw->mask = static_cast<int32_t>(batch.masks.size());
      std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32));
      for (uint32_t& word : mask) word = static_cast<uint32_t>(random.Next());
      batch.masks.push_back(std::move(mask));
    }
  };
  for (size_t r = 0; r < batch.logits.size(); ++r) {
    for (size_t k = 0; k < kinds.size(); ++k) {
      const bool good = r < good_rows;
      for (int round = 0; round < (good ? rounds : 1); ++round) {
        RowDraw draw = kinds[k].draw;
        draw.logit_row = static_cast<int32_t>(r);
        draw.random = round == 0 ? 0 : round == 1 ? ~uint64_t{0} : random.Next();
        draw.slot = round % 3 == 0 ? static_cast<int32_t>(batch.slots++) : -1;
        const bool plain = draw.given_token >= 0;
        switch (round % 4) {
          case 0:
            draw.report = RowReport::kRaw;
            break;
          case 1:
            draw.report = plain              ? RowReport::kRaw
                          : draw.greedy != 0 ? RowReport::kEdited
                                             : RowReport::kDrawn;
            break;
          case 2:
            draw.report = plain ? RowReport::kRaw : RowReport::kEdited;
            break;
          default:
            break;
        }
        if (!plain && round > 0) edit(&draw, round % 8);
        draw.ends_begin = static_cast<int32_t>(batch.tokens.size());
        for (int i = 0; i < 3; ++i)
          batch.tokens.push_back(static_cast<int32_t>((static_cast<int64_t>(k) * 5 + i) % vocab));
        draw.ends_end = static_cast<int32_t>(batch.tokens.size());
        batch.draws.push_back(draw);
        batch.names.push_back(
            fmt::format("{} from {} of {}, round {}", kinds[k].name, row_names[r], vocab, round));
      }
    }
  }
  return batch;
}

// The batch as host tensors of the operation.
class SampleTensors {
 public:
  explicit SampleTensors(const SampleBatch& batch)
      : logits(DType::kF32, {std::ssize(batch.logits), batch.vocab}),
        draws(Bytes(batch.draws)),
        edits(Bytes(batch.edits)),
        tokens(DType::kI32, {std::ssize(batch.tokens)}),
        masks(DType::kI32, {std::ssize(batch.masks), (batch.vocab + 31) / 32}),
        sampled(DType::kI32, {batch.slots}),
        out(DType::kU8, {std::ssize(batch.draws), sizeof(SampledRow)}) {
    for (int64_t r = 0; r < std::ssize(batch.logits); ++r)
      std::copy(batch.logits[static_cast<size_t>(r)].begin(),
                batch.logits[static_cast<size_t>(r)].end(), logits.Row<float>(r));
    std::copy(batch.tokens.begin(), batch.tokens.end(), tokens.Row<int32_t>(0));
    for (int64_t r = 0; r < std::ssize(batch.masks); ++r)
      std::memcpy(masks.Row<int32_t>(r), batch.masks[static_cast<size_t>(r)].data(),
                  batch.masks[static_cast<size_t>(r)].size() * 4);
    std::fill_n(sampled.Row<int32_t>(0), batch.slots, -7);
  }

  OwnedTensor logits, draws, edits, tokens, masks, sampled, out;

 private:
  template <class T>
  static OwnedTensor Bytes(const std::vector<T>& values) {
    OwnedTensor bytes(DType::kU8, {std::ssize(values), sizeof(T)});
    if (!values.empty()) std::memcpy(bytes.view().data(), values.data(), values.size() * sizeof(T));
    return bytes;
  }
};

}  // namespace deepinfer::testing
