#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/indexer/indexer_impl.h"

namespace deepinfer {

void SelectTopK(std::span<const float> scores, std::span<int32_t> out) {
  const size_t n = scores.size();
  const size_t k = std::min(out.size(), n);
  if (k == n) {
    std::iota(out.begin(), out.begin() + static_cast<ptrdiff_t>(n), 0);
  } else if (k > 0) {
    // The k-th best value by radix selection would do; nth_element on indices keeps the tie rule in one comparison.
    thread_local std::vector<int32_t> order;
    order.resize(n);
    std::iota(order.begin(), order.end(), 0);
    const auto better = [&](int32_t a, int32_t b) {
      const float x = scores[static_cast<size_t>(a)];
      const float y = scores[static_cast<size_t>(b)];
      const float fx = std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
      const float fy = std::isnan(y) ? -std::numeric_limits<float>::infinity() : y;
      return fx != fy ? fx > fy : a < b;
    };
    std::nth_element(order.begin(), order.begin() + static_cast<ptrdiff_t>(k - 1), order.end(), better);
    std::sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(k));
    std::copy_n(order.begin(), k, out.begin());
  }
  std::fill(out.begin() + static_cast<ptrdiff_t>(k), out.end(), -1);
}

void SelectCandidateBlocks(std::span<const float> scores, int64_t block_size, std::span<int32_t> out) {
  const int64_t n = static_cast<int64_t>(scores.size());
  const int64_t num_blocks = (n + block_size - 1) / block_size;
  thread_local std::vector<float> best;
  best.assign(static_cast<size_t>(num_blocks), -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; ++j) {
    float& block = best[static_cast<size_t>(j / block_size)];
    block = std::max(block, scores[static_cast<size_t>(j)]);
  }
  if (num_blocks > 0) best.back() = std::numeric_limits<float>::infinity();
  SelectTopK(best, out);
}

void IndexerSelectRow(const IndexerArgs& args, int64_t row, int64_t n_vis, const float* scores) {
  const std::span<const float> visible(scores, static_cast<size_t>(n_vis));
  if (!args.candidates_out.empty()) {
    SelectCandidateBlocks(visible, args.candidate_block_size,
                          {args.candidates_out.Row<int32_t>(row), static_cast<size_t>(args.candidates_out.dim(1))});
  }
  const std::span<int32_t> selected(args.selected.Row<int32_t>(row), static_cast<size_t>(args.selected.dim(1)));
  if (args.candidates_in.empty()) {
    SelectTopK(visible, selected);
    return;
  }
  // Compact the entries of the candidate blocks, choose among them, and map back. Both steps keep ascending order.
  thread_local std::vector<float> compact;
  thread_local std::vector<int32_t> entry;
  compact.clear();
  entry.clear();
  const int32_t* blocks = args.candidates_in.Row<int32_t>(row);
  for (int64_t c = 0; c < args.candidates_in.dim(1) && blocks[c] >= 0; ++c) {
    const int64_t first = blocks[c] * args.candidate_block_size;
    for (int64_t j = first; j < std::min(first + args.candidate_block_size, n_vis); ++j) {
      compact.push_back(scores[j]);
      entry.push_back(static_cast<int32_t>(j));
    }
  }
  SelectTopK(compact, selected);
  for (int32_t& choice : selected) {
    if (choice >= 0) choice = entry[static_cast<size_t>(choice)];
  }
}

}  // namespace deepinfer
