#include <vector>

#include "ops/quantize/group_quantize.h"
#include "ops/quantize/quantize_impl.h"
#include "ops/row_access.h"

namespace deepinfer::reference {

void QuantizeFp8(const QuantizeFp8Args& args, int64_t row_begin, int64_t row_end) {
  const int64_t channels = args.x.row_size();
  std::vector<float> row(static_cast<size_t>(channels));
  for (int64_t r = row_begin; r < row_end; ++r) {
    LoadRow(args.x, r, row.data());
    Q8InPlace(row.data(), channels);
    StoreRowBf16(row.data(), channels, args.y.Row<Bf16>(r));
  }
}

}  // namespace deepinfer::reference
