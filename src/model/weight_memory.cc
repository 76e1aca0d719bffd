#include "model/weight_memory.h"

#include <algorithm>
#include <numeric>

#include "base/ceil_div.h"
#include "ops/linear/linear.h"

namespace deepinfer {
namespace {

// A linear of [n, k] in tiles (ops/linear/linear_pack.h); its scales are among them.
int64_t PackedBytes(StoredDType dtype, int64_t n, int64_t k) {
  constexpr int64_t kHeaderBytes = 512;  // of the object and the allocation
  const WeightFormat format = dtype == StoredDType::kF8E4M3 ? WeightFormat::kFp8Block
                              : dtype == StoredDType::kI8   ? WeightFormat::kFp4Group
                                                            : WeightFormat::kBf16;
  return LinearTiledBytes(format, n, k) + kHeaderBytes;
}

bool IsDraft(TensorGroup group) {
  return group == TensorGroup::kDraftExperts || group == TensorGroup::kDraft;
}

}  // namespace

int64_t WeightMemory::resident_bytes() const {
  return std::accumulate(resident.begin(), resident.end(), int64_t{0});
}

int64_t WeightMemory::mapped_bytes() const {
  return std::accumulate(mapped.begin(), mapped.end(), int64_t{0});
}

WeightMemory CpuWeightMemory(const ModelConfig& config, bool drafting) {
  WeightMemory memory;
  for (const TensorSpec& tensor : ExpectedTensors(config)) {
    if (tensor.group == TensorGroup::kVision || (IsDraft(tensor.group) && !drafting)) continue;
    const auto group = static_cast<size_t>(tensor.group);
    int64_t& resident = memory.resident[group];
    const int64_t bytes = StoredBytes(tensor);
    if (tensor.group == TensorGroup::kEngramTable || tensor.name.ends_with("embed.weight")) {
      memory.mapped[group] += bytes;
    } else if (tensor.shape.size() != 2 || tensor.dtype == StoredDType::kF32 ||
               tensor.name.ends_with("confidence_head.proj.weight")) {
      resident += bytes;
    } else if (tensor.name.ends_with("attn.wo_a.weight")) {
      resident += config.o_groups *
                  PackedBytes(tensor.dtype, tensor.shape[0] / config.o_groups, tensor.shape[1]);
    } else if (tensor.dtype == StoredDType::kI8) {  // two codes a byte
      resident += PackedBytes(tensor.dtype, tensor.shape[0], 2 * tensor.shape[1]);
    } else if (tensor.dtype != StoredDType::kF8E8M0) {
      resident += PackedBytes(tensor.dtype, tensor.shape[0], tensor.shape[1]);
    }
  }
  return memory;
}

bool IsSplitOverRanks(TensorGroup group) {
  return group == TensorGroup::kRoutedExperts || group == TensorGroup::kDraftExperts ||
         group == TensorGroup::kEngramTable;
}

WeightMemory GpuWeightMemory(const ModelConfig& config, int64_t ranks, bool drafting) {
  WeightMemory memory;
  const std::array<GroupSize, kNumTensorGroups> groups = SizesByGroup(ExpectedTensors(config));
  for (size_t i = 0; i < kNumTensorGroups; ++i) {
    if (IsDraft(static_cast<TensorGroup>(i)) && !drafting) continue;
    memory.resident[i] = IsSplitOverRanks(static_cast<TensorGroup>(i))
                             ? CeilDiv(groups[i].bytes, ranks)
                             : groups[i].bytes;
  }
  return memory;
}

}  // namespace deepinfer
