#include "model/draft_reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "model/rope_frequencies.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/linear/linear.h"
#include "ops/quantize/group_quantize.h"
#include "tensor/float_formats.h"

namespace deepinfer::testing_support {
namespace {

using Vector = std::vector<float>;

Vector FromBf16(const Bf16* x, int64_t count) {
  Vector out;
  for (int64_t i = 0; i < count; ++i) out.push_back(Bf16ToF32(x[i]));
  return out;
}

std::vector<Bf16> ToBf16(const Vector& x) {
  std::vector<Bf16> out;
  for (const float value : x) out.push_back(F32ToBf16(value));
  return out;
}

void Round(Vector* x) {
  for (float& value : *x) value = RoundToBf16(value);
}

Vector OnGrid(Vector x) {
  Q8InPlace(x.data(), std::ssize(x));
  return x;
}

Vector Slice(const Vector& x, int64_t begin, int64_t end) {
  return {x.begin() + begin, x.begin() + end};
}

// sum_s weights[s] * streams[s], rounded.
Vector Collapse(const Vector& streams, const float* weights) {
  const int64_t hidden = std::ssize(streams) / kHcStreams;
  Vector out;
  for (int64_t d = 0; d < hidden; ++d) {
    float sum = 0.0f;
    for (int64_t s = 0; s < kHcStreams; ++s)
      sum = std::fma(weights[s], streams[static_cast<size_t>(s * hidden + d)], sum);
    out.push_back(RoundToBf16(sum));
  }
  return out;
}

}  // namespace

DraftReference::DraftReference(const std::string& checkpoint_dir, const ModelConfig& config)
    : config_(config), checkpoint_(Checkpoint::Open(checkpoint_dir).value()) {
  keys_.resize(static_cast<size_t>(config_.num_nextn_predict_layers));
}

TensorView DraftReference::Tensor(const std::string& name) const {
  const TensorEntry* entry = checkpoint_.Find(name);
  DI_CHECK(entry != nullptr);
  return entry->View().value();
}

DraftReference::Vector DraftReference::Linear(const std::string& name, const Vector& x,
                                              int64_t begin, int64_t count, bool round) const {
  LinearSource source;
  source.weight = Tensor(name + ".weight");
  if (count < 0) count = source.weight.dim(0);
  source.weight = source.weight.Rows(begin, begin + count);
  source.n = count;
  source.k = source.weight.dim(1);
  if (source.weight.dtype() != DType::kBf16) {
    const bool fp4 = source.weight.dtype() == DType::kFp4x2;
    source.format = fp4 ? WeightFormat::kFp4Group : WeightFormat::kFp8Block;
    if (fp4) source.k *= 2;
    const int64_t rows = fp4 ? 1 : 32;
    source.scale = Tensor(name + ".scale").Rows(begin / rows, (begin + count) / rows);
  }
  const std::vector<Bf16> input = ToBf16(x);
  Vector out(static_cast<size_t>(count));
  LinearReference(source, TensorView(input.data(), DType::kBf16, {1, source.k}),
                  TensorView(out.data(), DType::kF32, {1, count}));
  if (round) Round(&out);
  return out;
}

DraftReference::Vector DraftReference::Norm(const std::string& name, const Vector& x) const {
  const TensorView weight = Tensor(name);
  double squares = 0.0;
  for (const float value : x) squares += static_cast<double>(value) * value;
  const auto mean = static_cast<float>(squares / static_cast<double>(x.size()));
  const float scale = 1.0f / std::sqrt(mean + config_.rms_norm_eps);
  Vector out;
  for (size_t i = 0; i < x.size(); ++i)
    out.push_back(RoundToBf16(Bf16ToF32(weight.Row<Bf16>(0)[i]) * (x[i] * scale)));
  return out;
}

void DraftReference::Rotate(Vector* x, int64_t position, bool back, bool round) const {
  const std::vector<float> frequencies = WindowRopeFrequencies(config_);
  const size_t first = x->size() - 2 * frequencies.size();
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    const float cos = std::cos(angle);
    const float sin = back ? -std::sin(angle) : std::sin(angle);
    float& x0 = (*x)[first + 2 * i];
    float& x1 = (*x)[first + 2 * i + 1];
    const float y0 = std::fma(x0, cos, -(x1 * sin));
    x1 = std::fma(x0, sin, x1 * cos);
    x0 = y0;
  }
  if (round) Round(x);
}

DraftReference::Vector DraftReference::Key(const std::string& prefix, const Vector& x,
                                           int64_t position) const {
  Vector key = Norm(prefix + "attn.kv_norm.weight", Linear(prefix + "attn.wkv", OnGrid(x)));
  Rotate(&key, position, false, true);
  return OnGrid(key);
}

void DraftReference::AddPosition(const std::vector<std::vector<float>>& streams) {
  const int64_t position = std::ssize(keys_[0]);
  const float quarters[] = {0.25f, 0.25f, 0.25f, 0.25f};
  Vector targets;
  for (const Vector& layer : streams) {
    const Vector mean = Collapse(layer, quarters);
    targets.insert(targets.end(), mean.begin(), mean.end());
  }
  const Vector main = Norm("mtp.0.main_norm.weight", Linear("mtp.0.main_proj", OnGrid(targets)));
  for (size_t stage = 0; stage < keys_.size(); ++stage)
    keys_[stage].push_back(Key("mtp." + std::to_string(stage) + ".", main, position));
}

DraftReference::Vector DraftReference::Attention(const std::string& prefix, const Vector& x,
                                                 int64_t position,
                                                 const std::vector<const Vector*>& keys) const {
  const int64_t dim = config_.head_dim;
  const int64_t heads = config_.num_attention_heads;
  const Vector low = Norm(prefix + "attn.q_norm.weight", Linear(prefix + "attn.wq_a", OnGrid(x)));
  const Vector queries = Linear(prefix + "attn.wq_b", OnGrid(low));
  const float* sinks = Tensor(prefix + "attn.attn_sink").Row<float>(0);
  Vector result;
  for (int64_t h = 0; h < heads; ++h) {
    Vector q = Slice(queries, h * dim, (h + 1) * dim);
    Rotate(&q, position, false, true);
    std::vector<double> scores;
    double maximum = -1e30;
    for (const Vector* key : keys) {
      const double dot = std::inner_product(q.begin(), q.end(), key->begin(), 0.0);
      scores.push_back(dot / std::sqrt(static_cast<double>(dim)));
      maximum = std::max(maximum, scores.back());
    }
    double denominator = std::exp(sinks[h] - maximum);
    std::vector<double> sum(static_cast<size_t>(dim), 0.0);
    for (size_t i = 0; i < keys.size(); ++i) {
      const double p = std::exp(scores[i] - maximum);
      denominator += p;
      const double rounded = RoundToBf16(static_cast<float>(p));
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += rounded * (*keys[i])[d];
    }
    Vector out;
    for (const double value : sum) out.push_back(static_cast<float>(value / denominator));
    Rotate(&out, position, true, false);
    out = OnGrid(out);
    result.insert(result.end(), out.begin(), out.end());
  }
  Vector low_rank;
  const int64_t width = heads * dim / config_.o_groups;
  for (int64_t g = 0; g < config_.o_groups; ++g) {
    const Vector part = Linear(prefix + "attn.wo_a", Slice(result, g * width, (g + 1) * width),
                               g * config_.o_lora_rank, config_.o_lora_rank);
    low_rank.insert(low_rank.end(), part.begin(), part.end());
  }
  return Linear(prefix + "attn.wo_b", OnGrid(low_rank));
}

DraftReference::Vector DraftReference::Expert(const std::string& prefix, const Vector& x,
                                              float weight) const {
  const Vector gate = Linear(prefix + "w1", OnGrid(x));
  const Vector up = Linear(prefix + "w3", OnGrid(x));
  const float limit = config_.swiglu_limit;
  Vector inner;
  for (size_t i = 0; i < gate.size(); ++i) {
    const float g = std::min(gate[i], limit);
    const float u = std::clamp(up[i], -limit, limit);
    inner.push_back(weight * (g / (1.0f + std::exp(-g)) * u));
  }
  return Linear(prefix + "w2", OnGrid(inner));
}

DraftReference::Vector DraftReference::MixtureOfExperts(const std::string& prefix,
                                                        const Vector& x) const {
  const Vector logits = Linear(prefix + "ffn.gate", x, 0, -1, false);
  const float* bias = Tensor(prefix + "ffn.gate.bias").Row<float>(0);
  Vector scores;
  for (const float logit : logits)
    scores.push_back(std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit))));
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] + bias[a] > scores[b] + bias[b]; });
  order.resize(static_cast<size_t>(config_.dspark_num_experts_per_tok));
  float sum = 1e-20f;
  for (const size_t expert : order) sum += scores[expert];
  Vector out = Expert(prefix + "ffn.shared_experts.", x, 1.0f);
  for (const size_t expert : order) {
    const Vector part = Expert(prefix + "ffn.experts." + std::to_string(expert) + ".", x,
                               scores[expert] / sum * config_.routed_scaling_factor);
    for (size_t d = 0; d < out.size(); ++d) out[d] += part[d];
  }
  Round(&out);
  return out;
}

DraftReference::Block DraftReference::Draft(int64_t length, int32_t anchor, int64_t slots) const {
  const int64_t hidden = config_.hidden_size;
  const TensorView embed = Tensor("embed.weight");
  std::vector<Vector> streams;
  std::vector<Vector> pre(static_cast<size_t>(slots), Vector{1, 0, 0, 0});
  for (int64_t s = 0; s < slots; ++s) {
    const Vector row =
        FromBf16(embed.Row<Bf16>(s == 0 ? anchor : config_.dspark_noise_token_id), hidden);
    Vector& copies = streams.emplace_back();
    for (int64_t i = 0; i < kHcStreams; ++i) copies.insert(copies.end(), row.begin(), row.end());
  }
  for (size_t stage = 0; stage < keys_.size(); ++stage) {
    const std::string prefix = "mtp." + std::to_string(stage) + ".";
    for (const bool attention : {true, false}) {
      const std::string name = attention ? "attn" : "ffn";
      std::vector<Vector> inputs, posts, combs;
      for (size_t s = 0; s < streams.size(); ++s) {
        const Vector& v = streams[s];
        const TensorView fn = Tensor(prefix + "hc_" + name + "_fn");
        double squares = 0.0;
        for (const float value : v) squares += static_cast<double>(value) * value;
        const auto mean = static_cast<float>(squares / static_cast<double>(v.size()));
        const float r = 1.0f / std::sqrt(mean + config_.rms_norm_eps);
        float m[kHcCoefficients];
        for (int64_t k = 0; k < kHcCoefficients; ++k) {
          double sum = 0.0;
          for (size_t i = 0; i < v.size(); ++i)
            sum += static_cast<double>(v[i]) * fn.Row<float>(k)[i];
          m[k] = static_cast<float>(sum) * r;
        }
        Vector next(4), post(4), comb(16);
        HcCoefficients(m, Tensor(prefix + "hc_" + name + "_base").Row<float>(0),
                       Tensor(prefix + "hc_" + name + "_scale").Row<float>(0),
                       config_.hc_sinkhorn_iters, config_.hc_eps, next.data(), post.data(),
                       comb.data());
        inputs.push_back(Norm(prefix + name + "_norm.weight", Collapse(v, pre[s].data())));
        pre[s] = next;
        posts.push_back(post);
        combs.push_back(comb);
      }
      std::vector<Vector> block_keys;
      std::vector<const Vector*> keys;
      if (attention) {
        for (int64_t p = std::max<int64_t>(0, length - config_.sliding_window); p < length; ++p)
          keys.push_back(&keys_[stage][static_cast<size_t>(p)]);
        for (size_t s = 0; s < inputs.size(); ++s)
          block_keys.push_back(Key(prefix, inputs[s], length + static_cast<int64_t>(s)));
        for (const Vector& key : block_keys) keys.push_back(&key);
      }
      for (size_t s = 0; s < streams.size(); ++s) {
        const Vector y = attention
                             ? Attention(prefix, inputs[s], length + static_cast<int64_t>(s), keys)
                             : MixtureOfExperts(prefix, inputs[s]);
        Vector expanded(streams[s].size());
        for (int64_t j = 0; j < kHcStreams; ++j) {
          for (int64_t d = 0; d < hidden; ++d) {
            float sum = posts[s][static_cast<size_t>(j)] * y[static_cast<size_t>(d)];
            for (int64_t i = 0; i < kHcStreams; ++i)
              sum = std::fma(combs[s][static_cast<size_t>(4 * i + j)],
                             streams[s][static_cast<size_t>(i * hidden + d)], sum);
            expanded[static_cast<size_t>(j * hidden + d)] = RoundToBf16(sum);
          }
        }
        streams[s] = expanded;
      }
    }
  }

  const std::string last = "mtp." + std::to_string(keys_.size() - 1) + ".";
  const TensorView markov = Tensor(last + "markov_head.embed.weight");
  const TensorView confidence = Tensor(last + "confidence_head.proj.weight");
  Block block;
  int32_t previous = anchor;
  for (size_t s = 0; s < streams.size(); ++s) {
    const Vector vector = Collapse(streams[s], pre[s].data());
    Vector logits = Linear("head", Norm(last + "norm.weight", vector), 0, -1, false);
    const Vector embedding = FromBf16(markov.Row<Bf16>(previous), markov.dim(1));
    const Vector bias = Linear(last + "markov_head.head", embedding, 0, -1, false);
    for (size_t i = 0; i < logits.size(); ++i) logits[i] += bias[i];
    Vector features = vector;
    features.insert(features.end(), embedding.begin(), embedding.end());
    double score = 0.0;
    for (size_t i = 0; i < features.size(); ++i)
      score += static_cast<double>(features[i]) * Bf16ToF32(confidence.Row<Bf16>(0)[i]);
    previous =
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    block.scores.push_back(static_cast<float>(score));
    block.tokens.push_back(previous);
    block.logits.push_back(std::move(logits));
  }
  return block;
}

}  // namespace deepinfer::testing_support
