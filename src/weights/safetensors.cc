#include "weights/safetensors.h"

#include <fcntl.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <tuple>
#include <unordered_set>

#include "base/check.h"
#include "base/file_kind.h"
#include "base/quoted.h"

namespace deepinfer {
namespace {

struct DTypeInfo {
  StoredDType dtype;
  std::string_view name;
  int64_t bytes;
};

// In the order of the enumeration.
constexpr DTypeInfo kDTypes[] = {
    {StoredDType::kBool, "BOOL", 1},      {StoredDType::kU8, "U8", 1},
    {StoredDType::kI8, "I8", 1},          {StoredDType::kF8E4M3, "F8_E4M3", 1},
    {StoredDType::kF8E5M2, "F8_E5M2", 1}, {StoredDType::kF8E8M0, "F8_E8M0", 1},
    {StoredDType::kU16, "U16", 2},        {StoredDType::kI16, "I16", 2},
    {StoredDType::kF16, "F16", 2},        {StoredDType::kBf16, "BF16", 2},
    {StoredDType::kU32, "U32", 4},        {StoredDType::kI32, "I32", 4},
    {StoredDType::kF32, "F32", 4},        {StoredDType::kU64, "U64", 8},
    {StoredDType::kI64, "I64", 8},        {StoredDType::kF64, "F64", 8},
};

// The limit of the format's own library: a larger header is an attack or a broken length.
constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRankInFile = 16;
constexpr size_t kMaxNameBytes = 4096;

tl::unexpected<Error> Malformed(std::string message) {
  return Fail(Code::kInvalidArgument, std::move(message));
}

// shape x element size, or nullopt on overflow or a negative dimension.
std::optional<int64_t> CheckedBytes(StoredDType dtype, std::span<const int64_t> shape) {
  int64_t bytes = StoredDTypeBytes(dtype);
  bool zero = false;
  for (const int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    zero = zero || dim == 0;
  }
  if (zero) return 0;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return std::nullopt;
  }
  return bytes;
}

Status AppendJsonString(std::string_view text, std::string& out) {
  if (!simdjson::validate_utf8(text.data(), text.size())) {
    return Malformed(fmt::format("{} is not valid UTF-8.", Quoted(text)));
  }
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  out += '"';
  return {};
}

Status ParseEntry(std::string_view name, simdjson::dom::element value,
                  SafetensorsHeader::Entry& entry) {
  entry.name = std::string(name);
  simdjson::dom::object object;
  if (value.get_object().get(object) != simdjson::SUCCESS) {
    return Malformed(fmt::format("The entry of tensor {} is not a JSON object.", Quoted(name)));
  }
  bool has_dtype = false;
  bool has_shape = false;
  bool has_offsets = false;
  for (const auto [key, field] : object) {
    if (key == "dtype" && !has_dtype) {
      has_dtype = true;
      std::string_view text;
      if (field.get_string().get(text) != simdjson::SUCCESS) {
        return Malformed(fmt::format("The dtype of tensor {} is not a string.", Quoted(name)));
      }
      const std::optional<StoredDType> dtype = ParseStoredDType(text);
      if (!dtype) {
        return Malformed(
            fmt::format("Tensor {} has the dtype {}, which this format does not define.",
                        Quoted(name), Quoted(text)));
      }
      entry.dtype = *dtype;
    } else if (key == "shape" && !has_shape) {
      has_shape = true;
      simdjson::dom::array dims;
      if (field.get_array().get(dims) != simdjson::SUCCESS) {
        return Malformed(fmt::format("The shape of tensor {} is not a list.", Quoted(name)));
      }
      for (const auto dim : dims) {
        int64_t size = 0;
        if (dim.get_int64().get(size) != simdjson::SUCCESS || size < 0) {
          return Malformed(fmt::format(
              "The shape of tensor {} has the entry {}; dimensions are integers from 0 to 2^63-1.",
              Quoted(name), simdjson::minify(dim)));
        }
        if (entry.shape.size() == kMaxRankInFile) {
          return Malformed(
              fmt::format("Tensor {} has more than {} dimensions.", Quoted(name), kMaxRankInFile));
        }
        entry.shape.push_back(size);
      }
    } else if (key == "data_offsets" && !has_offsets) {
      has_offsets = true;
      simdjson::dom::array offsets;
      int64_t values[2] = {-1, -1};
      size_t count = 0;
      if (field.get_array().get(offsets) == simdjson::SUCCESS) {
        for (const auto offset : offsets) {
          if (count < 2 && offset.get_int64().get(values[count]) != simdjson::SUCCESS)
            values[count] = -1;
          ++count;
        }
      }
      if (count != 2 || values[0] < 0 || values[1] < values[0]) {
        return Malformed(fmt::format(
            "The data_offsets of tensor {} are {}; they are two integers 0 <= begin <= end.",
            Quoted(name), simdjson::minify(field).substr(0, 100)));
      }
      entry.begin = values[0];
      entry.end = values[1];
    } else {
      return Malformed(fmt::format("The entry of tensor {} has an unknown or repeated key {}.",
                                   Quoted(name), Quoted(key)));
    }
  }
  if (!has_dtype || !has_shape || !has_offsets) {
    return Malformed(fmt::format("The entry of tensor {} lacks {}.", Quoted(name),
                                 !has_dtype ? "dtype" : (!has_shape ? "shape" : "data_offsets")));
  }
  const std::optional<int64_t> bytes = CheckedBytes(entry.dtype, entry.shape);
  if (!bytes) {
    return Malformed(fmt::format("The size of tensor {}, {}, overflows 64 bits.", Quoted(name),
                                 ToString(entry.dtype, entry.shape)));
  }
  if (entry.end - entry.begin != *bytes) {
    return Malformed(
        fmt::format("Tensor {} is {}, i.e. {} bytes, but its data_offsets [{}, {}) span {} bytes.",
                    Quoted(name), ToString(entry.dtype, entry.shape), *bytes, entry.begin,
                    entry.end, entry.end - entry.begin));
  }
  return {};
}

Status ParseMetadata(simdjson::dom::element value, SafetensorsHeader& header) {
  simdjson::dom::object object;
  if (value.get_object().get(object) != simdjson::SUCCESS)
    return Malformed("The entry __metadata__ is not a JSON object.");
  for (const auto [key, field] : object) {
    std::string_view text;
    if (field.get_string().get(text) != simdjson::SUCCESS) {
      return Malformed(fmt::format("The __metadata__ entry {} is not a string.", Quoted(key)));
    }
    header.metadata.emplace_back(std::string(key), std::string(text));
  }
  return {};
}

// Every byte of the data section belongs to exactly one tensor.
Status CheckLayout(const SafetensorsHeader& header, int64_t file_size) {
  int64_t position = 0;
  const std::string* previous = nullptr;
  for (const SafetensorsHeader::Entry& entry : header.entries) {
    if (entry.begin < position) {
      return Malformed(
          fmt::format("Tensors {} and {} overlap: the second starts at byte {} of the data, the "
                      "first ends at {}.",
                      Quoted(*previous), Quoted(entry.name), entry.begin, position));
    }
    if (entry.begin > position) {
      return Malformed(
          fmt::format("Bytes {} to {} of the data, before tensor {}, belong to no tensor.",
                      position, entry.begin, Quoted(entry.name)));
    }
    if ((header.data_begin + entry.begin) % StoredDTypeBytes(entry.dtype) != 0) {
      return Malformed(fmt::format(
          "Tensor {} starts at file offset {}, which is not a multiple of its element size {}.",
          Quoted(entry.name), header.data_begin + entry.begin, StoredDTypeBytes(entry.dtype)));
    }
    position = entry.end;
    previous = &entry.name;
  }
  // No overflow: both terms are below 2^63 and the sum is compared by subtraction.
  const int64_t available = file_size - header.data_begin;
  if (position > available) {
    return Fail(Code::kDataLoss,
                fmt::format("The file is truncated: its header describes {} bytes of tensors after "
                            "a header of {} bytes, "
                            "but the file has only {} bytes in total ({} bytes are missing).",
                            position, header.data_begin, file_size, position - available));
  }
  if (position < available) {
    return Malformed(
        fmt::format("The file has {} bytes after its last tensor; its header describes {} bytes, "
                    "the file has {}.",
                    available - position, header.data_begin + position, file_size));
  }
  return {};
}

// The file that a writer of `path` may replace: `path` with its symbolic links followed, so that
// the file behind a link is replaced and not the link. Must be absent or a regular file.
Result<std::string> ReplaceableFile(const std::string& path) {
  constexpr int kMaxLinks = 40;  // as the kernel
  std::filesystem::path target = path;
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(target, error); ++links) {
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error || links == kMaxLinks) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("Cannot write '{}': {}.", path,
                              error ? error.message() : "too many levels of symbolic links"));
    }
    target = target.parent_path() / next;  // an absolute `next` stands alone
  }
  struct stat info {};
  if (::lstat(target.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("Cannot write '{}': it is a {}; give the path of a regular file or of one that "
                    "does not exist yet.",
                    path, FileKind(info.st_mode)));
  }
  return target.string();
}

}  // namespace

int64_t StoredDTypeBytes(StoredDType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].bytes;
}

std::string_view StoredDTypeName(StoredDType dtype) {
  return kDTypes[static_cast<size_t>(dtype)].name;
}

std::optional<StoredDType> ParseStoredDType(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

std::optional<DType> ToDType(StoredDType dtype) {
  switch (dtype) {
    case StoredDType::kF32:
      return DType::kF32;
    case StoredDType::kBf16:
      return DType::kBf16;
    case StoredDType::kF8E4M3:
      return DType::kFp8E4M3;
    case StoredDType::kF8E8M0:
      return DType::kE8M0;
    case StoredDType::kI8:
      return DType::kFp4x2;
    case StoredDType::kI32:
      return DType::kI32;
    case StoredDType::kI64:
      return DType::kI64;
    case StoredDType::kU8:
      return DType::kU8;
    default:
      return std::nullopt;
  }
}

int64_t StoredBytes(const StoredTensor& tensor) {
  const std::optional<int64_t> bytes = CheckedBytes(tensor.dtype, tensor.shape);
  DI_CHECK(bytes.has_value());
  return *bytes;
}

std::string ToString(StoredDType dtype, std::span<const int64_t> shape) {
  std::string text = fmt::format("{} [", StoredDTypeName(dtype));
  for (size_t i = 0; i < shape.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> prefix,
                                                 int64_t file_size) {
  constexpr int64_t kLengthBytes = 8;
  if (file_size < kLengthBytes || prefix.size() < kLengthBytes) {
    return Fail(
        Code::kDataLoss,
        fmt::format("The file is truncated: it has {} bytes, a safetensors file has at least 8.",
                    file_size));
  }
  const std::string_view text(reinterpret_cast<const char*>(prefix.data()), prefix.size());
  if (text.starts_with("version https://git-lfs")) {
    return Malformed(
        "The file is a Git LFS pointer, not the tensors themselves; fetch the real file (git lfs "
        "pull).");
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  if (length < 2 || length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return Malformed(fmt::format(
        "The header length is {}; allowed are 2 to {} bytes. This is not a safetensors file.",
        length, kMaxHeaderBytes));
  }
  SafetensorsHeader header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(length);
  if (header.data_begin > file_size || static_cast<size_t>(header.data_begin) > prefix.size()) {
    return Fail(Code::kDataLoss,
                fmt::format("The file is truncated: its header needs {} bytes, the file has {}.",
                            header.data_begin, file_size));
  }
  const std::string_view json = text.substr(kLengthBytes, length);
  if (json.front() != '{')
    return Malformed("The header does not start with '{'. This is not a safetensors file.");

  simdjson::dom::parser parser;
  simdjson::dom::element root;
  if (const auto error = parser.parse(json.data(), json.size()).get(root);
      error != simdjson::SUCCESS) {
    return Malformed(fmt::format("The header is not valid JSON: {}.",
                                 WithoutFullStop(simdjson::error_message(error))));
  }
  simdjson::dom::object object;
  if (root.get_object().get(object) != simdjson::SUCCESS)
    return Malformed("The header is not a JSON object.");

  std::unordered_set<std::string_view> names;
  for (const auto [name, value] : object) {
    if (!names.insert(name).second)
      return Malformed(fmt::format("The name {} occurs twice.", Quoted(name)));
    if (name == "__metadata__") {
      DI_RETURN_IF_ERROR(ParseMetadata(value, header));
      continue;
    }
    if (name.empty() || name.size() > kMaxNameBytes) {
      return Malformed(fmt::format("A tensor name has {} bytes; allowed are 1 to {}.", name.size(),
                                   kMaxNameBytes));
    }
    header.entries.emplace_back();
    DI_RETURN_IF_ERROR(ParseEntry(name, value, header.entries.back()));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  DI_RETURN_IF_ERROR(CheckLayout(header, file_size));
  return header;
}

Result<std::string> BuildSafetensorsHeader(
    std::span<const StoredTensor> tensors,
    std::span<const std::pair<std::string, std::string>> metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (size_t i = 0; i < metadata.size(); ++i) {
      if (i > 0) json += ",";
      DI_RETURN_IF_ERROR(AppendJsonString(metadata[i].first, json));
      json += ":";
      DI_RETURN_IF_ERROR(AppendJsonString(metadata[i].second, json));
    }
    json += "}";
  }
  std::unordered_set<std::string_view> names;
  int64_t position = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__" ||
        tensor.name.size() > kMaxNameBytes) {
      return Malformed(fmt::format("{} cannot be the name of a tensor.", Quoted(tensor.name)));
    }
    if (!names.insert(tensor.name).second)
      return Malformed(fmt::format("The name {} occurs twice.", Quoted(tensor.name)));
    const std::optional<int64_t> bytes = CheckedBytes(tensor.dtype, tensor.shape);
    const int64_t begin = position;
    if (!bytes || __builtin_add_overflow(position, *bytes, &position) ||
        tensor.shape.size() > kMaxRankInFile) {
      return Malformed(fmt::format("The shape of tensor {}, {}, is negative or overflows 64 bits.",
                                   Quoted(tensor.name), ToString(tensor.dtype, tensor.shape)));
    }
    if (json.size() > 1) json += ",";
    DI_RETURN_IF_ERROR(AppendJsonString(tensor.name, json));
    json += fmt::format(":{{\"dtype\":\"{}\",\"shape\":[", StoredDTypeName(tensor.dtype));
    for (size_t i = 0; i < tensor.shape.size(); ++i)
      json += fmt::format("{}{}", i == 0 ? "" : ",", tensor.shape[i]);
    json += fmt::format("],\"data_offsets\":[{},{}]}}", begin, position);
  }
  json += "}";
  // Data that starts at a multiple of 8 keeps every element type aligned.
  json.append((8 - json.size() % 8) % 8, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxHeaderBytes) {
    return Malformed(fmt::format("The header of {} tensors has {} bytes; the format allows {}.",
                                 tensors.size(), json.size(), kMaxHeaderBytes));
  }
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return out + json;
}

Result<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, std::span<const StoredTensor> tensors,
    std::span<const std::pair<std::string, std::string>> metadata) {
  DI_ASSIGN_OR_RETURN(const std::string header, BuildSafetensorsHeader(tensors, metadata));
  int64_t data_bytes = 0;
  for (const StoredTensor& tensor : tensors) data_bytes += StoredBytes(tensor);
  DI_ASSIGN_OR_RETURN(const std::string target, ReplaceableFile(path));
  const std::string partial = target + ".partial";
  // What an interrupted writer left behind is overwritten; a link or a FIFO of that name is not.
  const int fd = ::open(partial.c_str(),
                        O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
  if (fd < 0)
    return Fail(Code::kUnavailable,
                fmt::format("Cannot create '{}': {}.", partial, std::strerror(errno)));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return Fail(Code::kInvalidArgument,
                fmt::format("Cannot write '{}': it is a {}, not a regular file.", partial,
                            FileKind(info.st_mode)));
  }
  SafetensorsWriter writer(fd, target, data_bytes);
  DI_RETURN_IF_ERROR(writer.WriteRaw(std::as_bytes(std::span(header))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      data_bytes_(other.data_bytes_),
      written_(other.written_) {}

SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(data_bytes_, other.data_bytes_);
  std::swap(written_, other.written_);
  return *this;
}

SafetensorsWriter::~SafetensorsWriter() {
  Discard();
}

void SafetensorsWriter::Discard() {
  if (fd_ < 0) return;
  ::close(fd_);
  fd_ = -1;
  ::unlink((path_ + ".partial").c_str());
}

Status SafetensorsWriter::WriteRaw(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
      return Fail(full ? Code::kResourceExhausted : Code::kUnavailable,
                  fmt::format("Cannot write to '{}.partial' after {} of {} data bytes: {}.", path_,
                              written_, data_bytes_, std::strerror(errno)));
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return {};
}

Status SafetensorsWriter::Write(std::span<const std::byte> bytes) {
  DI_CHECK(fd_ >= 0);
  DI_CHECK_LE(static_cast<int64_t>(bytes.size()), data_bytes_ - written_);
  DI_RETURN_IF_ERROR(WriteRaw(bytes));
  written_ += static_cast<int64_t>(bytes.size());
  return {};
}

Status SafetensorsWriter::Finish() {
  DI_CHECK(fd_ >= 0);
  DI_CHECK_EQ(written_, data_bytes_);
  const std::string partial = path_ + ".partial";
  // Some file systems report a full disk only here.
  const int closed = ::close(std::exchange(fd_, -1));
  if (closed != 0 || ::rename(partial.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(partial.c_str());
    return Fail(error == ENOSPC || error == EDQUOT ? Code::kResourceExhausted : Code::kUnavailable,
                fmt::format("Cannot complete '{}': {}.", path_, std::strerror(error)));
  }
  return {};
}

}  // namespace deepinfer
