#include <algorithm>
#include <vector>

#include "ops/indexer/indexer_impl.h"
#include "ops/quantize/group_quantize.h"
#include "ops/row_access.h"

namespace deepinfer::reference {

void IndexerScores(const IndexerArgs& args, int64_t row, int64_t n_vis, float* scores) {
  const int64_t heads = args.q.dim(1);
  const int64_t channels = args.q.dim(2);
  const int64_t entries_per_block = args.blocks.dim(1);
  const int64_t record_bytes = args.blocks.dim(2);
  const int32_t sequence = args.layout.row_sequence.Row<int32_t>(0)[row];
  const int32_t* block_table = args.layout.block_table.Row<int32_t>(sequence);
  std::vector<float> q(static_cast<size_t>(heads * channels));
  LoadBf16(args.q.Row<Bf16>(row), heads * channels, q.data());
  const Bf16* w = args.weights.Row<Bf16>(row);
  std::vector<float> key(static_cast<size_t>(channels));
  const bool rounded = args.numerics == Numerics::kReference;
  for (int64_t j = 0; j < n_vis; ++j) {
    const uint8_t* record = args.blocks.Row<uint8_t>(block_table[j / entries_per_block]) +
                            (j % entries_per_block) * record_bytes;
    if (record_bytes == Bf16RecordBytes(channels)) {
      DecodeBf16Record(record, channels, key.data());
    } else {
      DecodeQ4PRecord(record, channels, key.data());
    }
    float score = 0.0f;
    for (int64_t h = 0; h < heads; ++h) {
      float dot = 0.0f;
      for (int64_t d = 0; d < channels; ++d)
        dot += q[static_cast<size_t>(h * channels + d)] * key[static_cast<size_t>(d)];
      if (rounded) dot = RoundToBf16(dot);
      const float term = std::max(dot, 0.0f) * Bf16ToF32(w[h]);
      score += rounded ? RoundToBf16(term) : term;
    }
    scores[j] = rounded ? RoundToBf16(score) : score;
  }
}

}  // namespace deepinfer::reference
