#include <vector>

#include "ops/quantize/group_quantize.h"
#include "ops/rope/rope_impl.h"
#include "ops/rope/rotate.h"
#include "ops/row_access.h"

namespace deepinfer::reference {

void Rope(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t heads = args.x.dim(1);
  const int64_t channels = args.x.dim(2);
  const int64_t pairs = args.table.dim(1);
  const int64_t first = args.quantize_q4p ? 0 : channels - 2 * pairs;
  std::vector<float> head(static_cast<size_t>(channels));
  std::vector<uint8_t> record(static_cast<size_t>(Q4PRecordBytes(channels)));
  for (int64_t i = begin; i < end; ++i) {
    Bf16* x = args.x.Row<Bf16>(i / heads) + i % heads * channels;
    LoadBf16(x + first, channels - first, head.data() + first);
    float* rotated = head.data() + channels - 2 * pairs;
    RotatePairs(rotated, args.table.Row<float>(i / heads), pairs);
    for (int64_t j = 0; j < 2 * pairs; ++j) rotated[j] = RoundToBf16(rotated[j]);
    if (args.quantize_q4p) {
      EncodeQ4PRecord(head.data(), channels, record.data());
      DecodeQ4PRecord(record.data(), channels, head.data());
    }
    StoreRowBf16(head.data() + first, channels - first, x + first);
  }
}

}  // namespace deepinfer::reference
