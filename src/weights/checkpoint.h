// A checkpoint directory as published: model.safetensors.index.json and its shards (or a single
// model.safetensors), memory-mapped. Knows names, types, shapes and bytes; what they mean is
// src/model. Opening touches the headers only, so it costs neither time nor memory in proportion to
// the weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mapped_file.h"
#include "tensor/tensor_view.h"
#include "weights/safetensors.h"

namespace deepinfer {

// model.safetensors.index.json.
struct CheckpointIndex {
  std::vector<std::pair<std::string, std::string>>
      weight_map;                     // tensor name to shard file, in file order
  std::optional<int64_t> total_size;  // bytes of all tensors, if given
};

// Refuses duplicate names, and shard names that are not plain file names ending in ".safetensors".
Result<CheckpointIndex> ParseCheckpointIndex(std::string_view json);

// One tensor; lives as long as its Checkpoint.
struct TensorEntry : StoredTensor {
  std::span<const std::byte> bytes;  // mapped, read-only, aligned to the element size
  int32_t shard = 0;                 // index into Checkpoint::shards()
  int64_t file_offset = 0;           // of the first byte

  // The same memory as operations take it. kUnsupported for an element type that no operation reads
  // or rank > 4.
  Result<TensorView> View() const;
};

class Checkpoint {
 public:
  struct Shard {
    std::string name;  // file name within the directory
    int64_t bytes = 0;
    int64_t num_tensors = 0;
  };

  // Maps every shard and checks the directory against itself: missing or truncated shards, tensors
  // that the index places in a shard that lacks them, tensors that the index does not mention,
  // tensors in two shards, a wrong total_size. All problems are in one error. One leading "model."
  // is stripped from every name.
  static Result<Checkpoint> Open(const std::string& dir);

  const TensorEntry* Find(std::string_view name) const;
  // Ascending by name.
  std::span<const TensorEntry> tensors() const {
    return tensors_;
  }
  std::span<const Shard> shards() const {
    return shards_;
  }
  const std::string& dir() const {
    return dir_;
  }
  // Bytes of all tensors, without headers.
  int64_t total_bytes() const {
    return total_bytes_;
  }

  // Gives back the memory that reading the tensors has taken; they stay readable.
  void DropResidentPages() const;

 private:
  Checkpoint() = default;

  std::string dir_;
  std::vector<MappedFile> files_;
  std::vector<Shard> shards_;
  std::vector<TensorEntry> tensors_;
  int64_t total_bytes_ = 0;
};

}  // namespace deepinfer
