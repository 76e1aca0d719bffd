#include "weights/checkpoint.h"

#include <simdjson.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>
#include <unordered_map>
#include <unordered_set>

#include "base/problem_list.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
// The released index has 9 MB.
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

std::string_view StripPrefix(std::string_view name) {
  constexpr std::string_view kPrefix = "model.";
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() ? name.substr(kPrefix.size())
                                                                   : name;
}

bool IsPlainShardName(std::string_view name) {
  return name.size() <= 255 && name.ends_with(".safetensors") &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos &&
         name.front() != '.';
}

// kNotFound when there is no index.
Result<MappedFile> OpenIndex(const std::string& dir) {
  const std::string path = (std::filesystem::path(dir) / kIndexName).string();
  DI_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  if (static_cast<int64_t>(file.bytes().size()) > kMaxIndexBytes) {
    return Fail(Code::kInvalidArgument, fmt::format("'{}' has {} bytes; an index has at most {}.",
                                                    path, file.bytes().size(), kMaxIndexBytes));
  }
  return file;
}

// A shard that should exist, with what the index expects of it.
struct ShardPlan {
  std::string name;
  int64_t indexed_tensors = 0;
};

}  // namespace

Result<CheckpointIndex> ParseCheckpointIndex(std::string_view json) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  if (const auto error = parser.parse(json.data(), json.size()).get(root);
      error != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument,
                fmt::format("The index is not valid JSON: {}.",
                            WithoutFullStop(simdjson::error_message(error))));
  }
  simdjson::dom::object object;
  simdjson::dom::object map;
  if (root.get_object().get(object) != simdjson::SUCCESS ||
      object["weight_map"].get_object().get(map) != simdjson::SUCCESS) {
    return Fail(Code::kInvalidArgument,
                "The index has no object 'weight_map' that maps tensor names to shard files.",
                "weight_map");
  }
  CheckpointIndex index;
  std::unordered_set<std::string_view> names;
  for (const auto [name, value] : map) {
    std::string_view shard;
    if (value.get_string().get(shard) != simdjson::SUCCESS || shard.empty() ||
        !IsPlainShardName(shard)) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("The index places tensor {} in {}; a shard is the name of a file in "
                              "the same directory that "
                              "ends in .safetensors.",
                              Quoted(name), Quoted(simdjson::minify(value))),
                  "weight_map");
    }
    if (name.empty() || !names.insert(StripPrefix(name)).second) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("The index names tensor {} twice.", Quoted(name)), "weight_map");
    }
    index.weight_map.emplace_back(std::string(StripPrefix(name)), std::string(shard));
  }
  simdjson::dom::element total;
  if (object["metadata"]["total_size"].get(total) == simdjson::SUCCESS) {
    // Some writers store the size as a float with an integral value.
    int64_t size = 0;
    double real = 0;
    if (total.get_int64().get(size) == simdjson::SUCCESS && size >= 0) {
      index.total_size = size;
    } else if (total.is_double() && total.get_double().get(real) == simdjson::SUCCESS &&
               real >= 0 && real < 0x1p53 &&
               real == static_cast<double>(static_cast<int64_t>(real))) {
      index.total_size = static_cast<int64_t>(real);
    } else {
      return Fail(Code::kInvalidArgument,
                  fmt::format("metadata.total_size of the index is {}; it is a number of bytes.",
                              simdjson::minify(total)),
                  "metadata.total_size");
    }
  }
  return index;
}

Result<TensorView> TensorEntry::View() const {
  const std::optional<DType> type = ToDType(dtype);
  if (!type || shape.size() > kMaxRank) {
    return Fail(Code::kUnsupported, fmt::format("Tensor {} is {}, which no operation reads.",
                                                Quoted(name), ToString(dtype, shape)));
  }
  const void* data = bytes.data();
  switch (shape.size()) {
    case 0:
      return TensorView(data, *type, {1});
    case 1:
      return TensorView(data, *type, {shape[0]});
    case 2:
      return TensorView(data, *type, {shape[0], shape[1]});
    case 3:
      return TensorView(data, *type, {shape[0], shape[1], shape[2]});
    default:
      return TensorView(data, *type, {shape[0], shape[1], shape[2], shape[3]});
  }
}

Result<Checkpoint> Checkpoint::Open(const std::string& dir) {
  std::error_code fs_error;
  if (!std::filesystem::is_directory(dir, fs_error)) {
    // Also set for a directory that is merely missing, which the sentence below says better.
    if (fs_error && fs_error != std::errc::no_such_file_or_directory &&
        fs_error != std::errc::not_a_directory) {
      return Fail(Code::kUnavailable, fmt::format("Cannot open the checkpoint directory {}: {}.",
                                                  Quoted(dir), fs_error.message()));
    }
    return Fail(Code::kNotFound,
                fmt::format("The checkpoint directory {} does not exist or is not a directory.",
                            Quoted(dir)));
  }
  Checkpoint checkpoint;
  checkpoint.dir_ = dir;

  // Without an index there is one file, which speaks for itself.
  CheckpointIndex index;
  Result<MappedFile> index_file = OpenIndex(dir);
  const bool has_index = index_file || index_file.error().code != Code::kNotFound;
  std::vector<ShardPlan> plans;
  std::unordered_map<std::string_view, int32_t> shard_of_tensor;
  if (has_index) {
    if (!index_file) return tl::unexpected<Error>(std::move(index_file.error()));
    const std::span<const std::byte> bytes = index_file->bytes();
    Result<CheckpointIndex> parsed =
        ParseCheckpointIndex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    if (!parsed) return WithContext(std::move(parsed.error()), index_file->path());
    index = std::move(*parsed);
    std::unordered_map<std::string_view, int32_t> shard_ids;
    for (const auto& [tensor, shard] : index.weight_map) shard_ids.emplace(shard, 0);
    for (const auto& [shard, id] : shard_ids) plans.push_back({std::string(shard)});
    std::sort(plans.begin(), plans.end(),
              [](const ShardPlan& a, const ShardPlan& b) { return a.name < b.name; });
    for (size_t i = 0; i < plans.size(); ++i) shard_ids[plans[i].name] = static_cast<int32_t>(i);
    shard_of_tensor.reserve(index.weight_map.size());
    for (const auto& [tensor, shard] : index.weight_map) {
      const int32_t id = shard_ids[shard];
      shard_of_tensor.emplace(tensor, id);
      ++plans[static_cast<size_t>(id)].indexed_tensors;
    }
  } else if (std::filesystem::exists(std::filesystem::path(dir) / kSingleName, fs_error) ||
             fs_error) {  // opening it will say what is wrong
    plans.push_back({std::string(kSingleName)});
  } else {
    return Fail(Code::kNotFound,
                fmt::format("The directory {} holds neither {} nor {}: it is not a checkpoint.",
                            Quoted(dir), kIndexName, kSingleName));
  }

  ProblemList problems;
  Code code = Code::kInvalidArgument;
  std::vector<bool> readable(plans.size(), false);
  for (size_t i = 0; i < plans.size(); ++i) {
    const ShardPlan& plan = plans[i];
    checkpoint.shards_.push_back({plan.name, 0, 0});
    Result<MappedFile> file = MappedFile::Open((std::filesystem::path(dir) / plan.name).string());
    if (!file) {
      code = file.error().code;
      problems.Add(
          file.error().code == Code::kNotFound
              ? fmt::format("Shard {} is missing; the index places {} tensors in it.", plan.name,
                            plan.indexed_tensors)
              : fmt::format("Shard {} cannot be read. {}", plan.name, file.error().message));
      continue;
    }
    const int64_t size = static_cast<int64_t>(file->bytes().size());
    Result<SafetensorsHeader> header = ParseSafetensorsHeader(file->bytes(), size);
    if (!header) {
      code = header.error().code;
      problems.Add(fmt::format("Shard {}: {}", plan.name, header.error().message));
      continue;
    }
    readable[i] = true;
    checkpoint.shards_[i].bytes = size;
    checkpoint.shards_[i].num_tensors = static_cast<int64_t>(header->entries.size());
    for (SafetensorsHeader::Entry& entry : header->entries) {
      TensorEntry tensor;
      tensor.name = StripPrefix(entry.name);
      tensor.dtype = entry.dtype;
      tensor.shape = std::move(entry.shape);
      tensor.shard = static_cast<int32_t>(i);
      tensor.file_offset = header->data_begin + entry.begin;
      tensor.bytes = file->bytes().subspan(static_cast<size_t>(tensor.file_offset),
                                           static_cast<size_t>(entry.end - entry.begin));
      checkpoint.tensors_.push_back(std::move(tensor));
    }
    checkpoint.files_.push_back(std::move(*file));
  }

  std::vector<TensorEntry>& tensors = checkpoint.tensors_;
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.name, a.shard) < std::tie(b.name, b.shard);
  });
  const auto shard_name = [&](int32_t shard) {
    return checkpoint.shards_[static_cast<size_t>(shard)].name;
  };
  // A shard with none of its tensors is another model's: one sentence instead of one per tensor.
  std::vector<bool> foreign(plans.size(), false);
  if (has_index) {
    std::vector<int64_t> placed_right(plans.size(), 0);
    for (const TensorEntry& tensor : tensors) {
      const auto indexed = shard_of_tensor.find(tensor.name);
      if (indexed != shard_of_tensor.end() && indexed->second == tensor.shard)
        ++placed_right[static_cast<size_t>(tensor.shard)];
    }
    for (size_t i = 0; i < plans.size(); ++i) {
      if (!readable[i] || placed_right[i] > 0) continue;
      foreign[i] = true;
      problems.Add(
          fmt::format("Shard {} does not belong to this checkpoint: it holds none of the {} "
                      "tensors that the index places "
                      "in it, but {} others.",
                      plans[i].name, plans[i].indexed_tensors, checkpoint.shards_[i].num_tensors));
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorEntry& tensor = tensors[i];
    checkpoint.total_bytes_ += static_cast<int64_t>(tensor.bytes.size());
    if (i > 0 && tensors[i - 1].name == tensor.name) {
      problems.Add(fmt::format("Tensor {} is stored twice, in {} and in {}.", Quoted(tensor.name),
                               shard_name(tensors[i - 1].shard), shard_name(tensor.shard)));
      continue;
    }
    if (!has_index || foreign[static_cast<size_t>(tensor.shard)]) continue;
    const auto indexed = shard_of_tensor.find(tensor.name);
    if (indexed == shard_of_tensor.end()) {
      problems.Add(fmt::format("Tensor {} ({}) is stored in shard {} but missing from the index.",
                               Quoted(tensor.name), ToString(tensor.dtype, tensor.shape),
                               shard_name(tensor.shard)));
    }
  }
  if (has_index) {
    for (const auto& [name, shard] : index.weight_map) {
      const int32_t expected = shard_of_tensor[name];
      const auto at = static_cast<size_t>(expected);
      if (!readable[at] || foreign[at]) continue;  // reported with its shard
      // The first of equal names has the lowest shard; a second one is already reported.
      const TensorEntry* found = checkpoint.Find(name);
      if (found == nullptr) {
        problems.Add(fmt::format("The index places tensor {} in shard {}, which does not hold it.",
                                 Quoted(name), shard));
      } else if (found->shard != expected) {
        problems.Add(fmt::format("The index places tensor {} in shard {}, but it is stored in {}.",
                                 Quoted(name), shard, shard_name(found->shard)));
      }
    }
    if (problems.empty() && index.total_size && *index.total_size != checkpoint.total_bytes_) {
      problems.Add(fmt::format(
          "metadata.total_size of the index is {} bytes, but the shards hold {} bytes of tensors.",
          *index.total_size, checkpoint.total_bytes_));
    }
  }
  if (tensors.empty() && problems.empty()) problems.Add("It holds no tensors.");
  if (!problems.empty()) {
    return problems.ToError(
        code, fmt::format("The checkpoint {} is not usable ({} problem{})", Quoted(dir),
                          problems.size(), problems.size() == 1 ? "" : "s"));
  }
  return checkpoint;
}

const TensorEntry* Checkpoint::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

void Checkpoint::DropResidentPages() const {
  for (const MappedFile& file : files_) file.DropResidentPages();
}

}  // namespace deepinfer
