#include "support/golden_model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

namespace deepinfer::testing_support {

Result<GoldenModel> GoldenModel::Open(const std::string& dir, const std::string& profile) {
  GoldenModel golden;
  std::ifstream lines(dir + "/tokens.jsonl");
  if (!lines) return Fail(Code::kNotFound, fmt::format("No recorded tokens in '{}'.", dir));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    golden.sequences_.push_back({json.at("id"), json.at("token_ids"), json.at("chunks")});
  }
  DI_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(dir + "/" + profile + ".safetensors"));
  DI_ASSIGN_OR_RETURN(golden.header_, ParseSafetensorsHeader(
                                          file.bytes(), static_cast<int64_t>(file.bytes().size())));
  golden.file_.push_back(std::move(file));
  const auto floor = nlohmann::json::parse(std::ifstream(dir + "/floor.json")).at(profile);
  for (const auto& [run, value] : floor.items()) {
    golden.floors_.emplace_back(
        run, Divergence{value.at("rows"), value.at("kl_med"), value.at("kl_mean"),
                        value.at("kl_p90"), value.at("beyond_1e-3"), value.at("argmax_miss")});
  }
  return golden;
}

Result<TensorView> GoldenModel::Find(const std::string& name) const {
  for (const auto& entry : header_.entries) {
    if (entry.name != name) continue;
    const void* data = file_[0].bytes().data() + header_.data_begin + entry.begin;
    const DType dtype = *ToDType(entry.dtype);
    switch (entry.shape.size()) {
      case 1:
        return TensorView(data, dtype, {entry.shape[0]});
      case 2:
        return TensorView(data, dtype, {entry.shape[0], entry.shape[1]});
      case 3:
        return TensorView(data, dtype, {entry.shape[0], entry.shape[1], entry.shape[2]});
      default:
        break;
    }
  }
  return Fail(Code::kNotFound, fmt::format("No recorded tensor '{}'.", name));
}

const Divergence& GoldenModel::floor(const std::string& run) const {
  for (const auto& [name, value] : floors_) {
    if (name == run) return value;
  }
  CheckFailed(__FILE__, __LINE__, "floor.json holds the run", run);
}

double GoldenModel::RowDivergence(const std::string& id, int64_t row, const float* logits,
                                  int64_t vocab, bool* argmax_miss) const {
  const TensorView top_id = *Find(id + "/top_id");
  const TensorView top_logit = *Find(id + "/top_logit");
  const double recorded_lse = Find(id + "/lse")->Row<float>(row)[0];
  const float largest = *std::max_element(logits, logits + vocab);
  double sum = 0.0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(logits[v]) - largest);
  const double lse = largest + std::log(sum);
  double kl = 0.0;
  double p_mass = 0.0;
  double q_mass = 0.0;
  for (int64_t i = 0; i < top_id.dim(1); ++i) {
    const double log_p = top_logit.Row<float>(row)[i] - recorded_lse;
    const double log_q = logits[top_id.Row<int32_t>(row)[i]] - lse;
    kl += std::exp(log_p) * (log_p - log_q);
    p_mass += std::exp(log_p);
    q_mass += std::exp(log_q);
  }
  // Everything outside the recorded entries counts as one more outcome.
  const double p_rest = std::max(1.0 - p_mass, 1e-12);
  const double q_rest = std::max(1.0 - q_mass, 1e-12);
  kl += p_rest * std::log(p_rest / q_rest);
  *argmax_miss = std::max_element(logits, logits + vocab) - logits != top_id.Row<int32_t>(row)[0];
  return std::max(kl, 0.0);
}

Divergence Summarise(std::vector<double> kl, int64_t argmax_misses) {
  Divergence result;
  result.rows = static_cast<int64_t>(kl.size());
  std::sort(kl.begin(), kl.end());
  const auto n = static_cast<double>(kl.size());
  for (double value : kl) {
    result.kl_mean += value / n;
    if (value > 1e-3) result.beyond_1e3 += 1.0 / n;
  }
  result.kl_med = kl[kl.size() / 2];
  result.kl_p90 = kl[static_cast<size_t>(0.9 * (n - 1))];
  result.argmax_miss = static_cast<double>(argmax_misses) / n;
  return result;
}

}  // namespace deepinfer::testing_support
