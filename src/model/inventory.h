// Which tensors a checkpoint of a given configuration holds, and the comparison of a directory with
// that list. Model description, section 4.2.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "weights/checkpoint.h"
#include "weights/safetensors.h"

namespace deepinfer {

// What a tensor belongs to, for reports and for deciding how ranks share it.
enum class TensorGroup : uint8_t {
  kEmbedding,          // embed, head and the final norm
  kAttention,          // projections, norms and sinks of the backbone
  kHyperConnections,   // hc_* of the backbone
  kCompressorIndexer,  // compressor and indexer
  kRouter,             // gates and their biases
  kSharedExperts,
  kRoutedExperts,
  kEngramTable,  // the hashed rows and their scales
  kEngram,       // the rest of the Engram layers
  kDraftExperts,
  kDraft,   // the rest of mtp.*
  kVision,  // vision, aligner and image_*
};
inline constexpr size_t kNumTensorGroups = 12;

std::string_view TensorGroupName(TensorGroup group);

struct TensorSpec : StoredTensor {
  TensorGroup group = TensorGroup::kEmbedding;
};

// Every tensor of a checkpoint, in the order in which the published shards hold them.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

// The published division into shards: embeddings; vision; one per layer; head and norm; one per
// draft layer; one per Engram layer. Shards count from 0; the order of the list above is the order
// inside each.
size_t NumPublishedShards(const ModelConfig& config);
size_t PublishedShard(const TensorSpec& tensor, const ModelConfig& config);

// Compares names, element types and shapes. The error lists everything missing, unexpected or
// different, with what was expected, what was found, and in which shard at which offset; the
// printed lines are capped, the totals are not.
Status CheckInventory(const Checkpoint& checkpoint, const ModelConfig& config);

struct GroupSize {
  int64_t tensors = 0;
  int64_t bytes = 0;
};
// Totals of a list of tensors, indexed by TensorGroup.
std::array<GroupSize, kNumTensorGroups> SizesByGroup(const std::vector<TensorSpec>& tensors);

}  // namespace deepinfer
