#include <algorithm>
#include <cmath>

#include "ops/quantize/group_quantize.h"
#include "ops/rope/rotate.h"
#include "ops/row_access.h"
#include "ops/sparse_attention/sparse_attention_impl.h"

namespace deepinfer {

void CollectKeys(const SparseAttentionArgs& args, int64_t row, KeyList* keys) {
  keys->records.clear();
  const int64_t bf16_bytes = Bf16RecordBytes(args.q.dim(2));
  keys->window_bf16 = args.window_pages.dim(2) == bf16_bytes;
  keys->compressed_bf16 = !args.kv_blocks.empty() && args.kv_blocks.dim(2) == bf16_bytes;
  const BatchLayout& layout = args.layout;
  const int64_t sequence = layout.row_sequence.Row<int32_t>(0)[row];
  const int64_t first_row = layout.sequence_start.Row<int32_t>(0)[sequence];
  const int32_t* positions = layout.positions.Row<int32_t>(0);
  const int64_t step_start = positions[first_row];  // first position of this step
  int64_t first = positions[row] - args.window + 1;
  int64_t last = positions[row];
  if (args.block_rows > 0) {
    first = step_start - args.window;
    last = positions[layout.sequence_start.Row<int32_t>(0)[sequence + 1] - 1];
  }
  const int64_t page_rows = args.window_pages.dim(1);
  const int64_t window_bytes = args.window_pages.dim(2);
  const int32_t* pages = layout.window_table.Row<int32_t>(sequence);
  const int64_t first_page = layout.window_first_page.Row<int32_t>(0)[sequence];
  const int64_t window_begin = layout.window_begin.Row<int32_t>(0)[sequence];
  for (int64_t p = std::max({int64_t{0}, first, window_begin}); p <= last; ++p) {
    keys->records.push_back(
        p < step_start ? args.window_pages.Row<uint8_t>(pages[p / page_rows - first_page]) +
                             p % page_rows * window_bytes
                       : args.window_records.Row<uint8_t>(first_row + p - step_start));
  }
  keys->num_window = static_cast<int64_t>(keys->records.size());
  if (args.kv_blocks.empty()) return;
  const int64_t entries_per_block = args.kv_blocks.dim(1);
  const int64_t kv_bytes = args.kv_blocks.dim(2);
  const int32_t* block_table = layout.block_table.Row<int32_t>(sequence);
  const int32_t* selected = args.selected.Row<int32_t>(row);
  for (int64_t i = 0; i < args.selected.dim(1) && selected[i] >= 0; ++i) {
    const int64_t j = selected[i];
    keys->records.push_back(args.kv_blocks.Row<uint8_t>(block_table[j / entries_per_block]) +
                            (j % entries_per_block) * kv_bytes);
  }
}

namespace reference {

void SparseAttention(const SparseAttentionArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  const int64_t pairs = args.table.dim(1);
  KeyList keys;
  std::vector<float> kv;
  std::vector<float> q(static_cast<size_t>(dim));
  std::vector<float> out(static_cast<size_t>(dim));
  for (int64_t row = row_begin; row < row_end; ++row) {
    CollectKeys(args, row, &keys);
    const auto count = static_cast<int64_t>(keys.records.size());
    kv.resize(static_cast<size_t>(count * dim));
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* record = keys.records[static_cast<size_t>(i)];
      const bool window = i < keys.num_window;
      if (window ? keys.window_bf16 : keys.compressed_bf16) {
        DecodeBf16Record(record, dim, kv.data() + i * dim);
      } else if (window) {
        DecodeQ8Record(record, dim, kv.data() + i * dim);
      } else {
        DecodeQ4ERecord(record, dim, kv.data() + i * dim);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      LoadBf16(args.q.Row<Bf16>(row) + h * dim, dim, q.data());
      float maximum = -1e30f;
      float denominator = 0.0f;
      std::fill(out.begin(), out.end(), 0.0f);
      for (int64_t begin = 0; begin < count; begin += kAttentionBlock) {
        const int64_t size = std::min(kAttentionBlock, count - begin);
        float score[kAttentionBlock];
        float block_maximum = maximum;
        for (int64_t i = 0; i < size; ++i) {
          const float* key = kv.data() + (begin + i) * dim;
          double dot = 0.0;
          for (int64_t d = 0; d < dim; ++d)
            dot += static_cast<double>(q[static_cast<size_t>(d)]) * key[d];
          score[i] = static_cast<float>(dot) * args.scale;
          block_maximum = std::max(block_maximum, score[i]);
        }
        const float rescale = std::exp(maximum - block_maximum);
        maximum = block_maximum;
        denominator *= rescale;
        for (float& value : out) value *= rescale;
        for (int64_t i = 0; i < size; ++i) {
          const float p = std::exp(score[i] - maximum);
          denominator += p;
          const float rounded = RoundToBf16(p);
          const float* value = kv.data() + (begin + i) * dim;
          for (int64_t d = 0; d < dim; ++d) out[static_cast<size_t>(d)] += rounded * value[d];
        }
      }
      if (count > 0) {
        denominator += std::exp(args.sink.Row<float>(h)[0] - maximum);
        for (float& value : out) value /= denominator;
      }
      float* rotated = out.data() + dim - 2 * pairs;
      if (args.numerics == Numerics::kReference) {
        for (float& value : out) value = RoundToBf16(value);
        RotatePairsBack(rotated, args.table.Row<float>(row), pairs);
      } else {
        RotatePairsBack(rotated, args.table.Row<float>(row), pairs);
        Q8InPlace(out.data(), dim);
      }
      StoreRowBf16(out.data(), dim, args.out.Row<Bf16>(row) + h * dim);
    }
  }
}

}  // namespace reference
}  // namespace deepinfer
