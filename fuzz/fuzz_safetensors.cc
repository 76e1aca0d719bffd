// The header of a shard from anywhere is refused or describes tensors that lie inside the file, in
// order and disjoint, with sizes that follow from their shapes. What it accepts can be written
// again. Seed the corpus with the shards of tests/data/model/two/checkpoint.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "weights/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace deepinfer;
  const auto file_size = static_cast<int64_t>(size);
  const auto header = ParseSafetensorsHeader(std::as_bytes(std::span(data, size)), file_size);
  if (!header.has_value()) {
    if (header.error().message.empty()) std::abort();
    return 0;
  }
  int64_t position = header->data_begin;
  std::vector<StoredTensor> tensors;
  for (const SafetensorsHeader::Entry& entry : header->entries) {
    if (header->data_begin + entry.begin != position ||
        entry.end - entry.begin != StoredBytes(entry))
      std::abort();
    position = header->data_begin + entry.end;
    tensors.push_back(entry);
  }
  if (position != file_size) std::abort();
  const auto rebuilt = BuildSafetensorsHeader(tensors, header->metadata);
  if (!rebuilt.has_value()) std::abort();
  const auto again =
      ParseSafetensorsHeader(std::as_bytes(std::span(*rebuilt)),
                             static_cast<int64_t>(rebuilt->size()) + position - header->data_begin);
  // Alignment may differ: the rebuilt header is padded, the original need not be.
  if (again.has_value() && again->entries.size() != header->entries.size()) std::abort();
  return 0;
}
