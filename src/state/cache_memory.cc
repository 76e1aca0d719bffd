#include "state/cache_memory.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/ceil_div.h"
#include "base/check.h"
#include "tensor/copy.h"

namespace deepinfer {
namespace {

// At the beginning of every image, in the byte order of the machine (little endian).
struct ImageHeader {
  char magic[8];
  uint64_t geometry;        // fingerprint of everything that decides the sizes of the records
  int64_t num_tokens;       // of the sequence
  int64_t window_begin;     // first position whose window record is here
  int64_t remainder_begin;  // first position whose compressor remainder is here
};
constexpr char kMagic[8] = {'D', 'I', 'S', 'T', 'A', 'T', 'E', '1'};

uint64_t Fingerprint(const CacheGeometry& geometry) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  const auto add = [&hash](int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash ^= static_cast<uint64_t>(value) >> shift & 0xff;
      hash *= 0x100000001b3ull;
    }
  };
  add(kBlockTokens);
  add(geometry.num_layers);
  add(geometry.window_record_bytes);
  add(geometry.remainder_rows);
  for (const CacheGeometry::Producer& producer : geometry.producers) {
    add(producer.ratio);
    add(producer.kv_record_bytes);
    add(producer.index_record_bytes);
    add(producer.remainder_floats);
  }
  return hash;
}

int64_t ViewBytes(const TensorView& view) {
  return view.num_elements() * DTypeBytes(view.dtype());
}

// Elements [begin, end) of the second axis of row `row` of a rank-3 view.
TensorView Part(const TensorView& view, int64_t row, int64_t begin, int64_t end) {
  return view.Rows(row, row + 1).Reshape({view.dim(1), view.dim(2)}).Rows(begin, end);
}

Status CheckIds(const std::vector<int32_t>& ids, int64_t count, const char* what) {
  for (const int32_t id : ids) {
    if (id >= 0 && id < count) continue;
    return Fail(
        Code::kInvalidArgument,
        fmt::format("A state command names {} {}; allowed are 0 to {}.", what, id, count - 1),
        "commands");
  }
  return {};
}

}  // namespace

int64_t CacheGeometry::BytesPerBlock() const {
  int64_t bytes = 0;
  for (const Producer& producer : producers) {
    bytes +=
        kBlockTokens / producer.ratio * (producer.kv_record_bytes + producer.index_record_bytes);
  }
  return bytes;
}

int64_t CacheGeometry::BytesPerWindowPage() const {
  return num_layers * kBlockTokens * window_record_bytes;
}

int64_t CacheGeometry::BytesPerSlot() const {
  int64_t bytes = 0;
  for (const Producer& producer : producers)
    bytes += remainder_rows * producer.remainder_floats * 4;
  return bytes;
}

Result<CacheMemory> CacheMemory::Create(const CacheGeometry& geometry, Device device,
                                        int64_t num_blocks, int64_t num_window_pages,
                                        int64_t num_slots, bool padding_unit) {
  DI_CHECK(num_blocks > 0 && num_window_pages > 0 && num_slots > 0);
  DI_CHECK(geometry.remainder_rows > 0);
  CacheMemory memory;
  memory.geometry_ = geometry;
  memory.num_blocks_ = num_blocks;
  memory.num_window_pages_ = num_window_pages;
  memory.num_slots_ = num_slots;
  memory.padding_units_ = padding_unit ? 1 : 0;
  num_blocks += memory.padding_units_;
  num_window_pages += memory.padding_units_;
  num_slots += memory.padding_units_;
  for (const CacheGeometry::Producer& producer : geometry.producers) {
    DI_CHECK_EQ(kBlockTokens % producer.ratio, 0);
    const int64_t entries = num_blocks * (kBlockTokens / producer.ratio);
    DI_ASSIGN_OR_RETURN(Buffer kv, Buffer::Allocate(device, entries * producer.kv_record_bytes));
    DI_ASSIGN_OR_RETURN(Buffer index,
                        Buffer::Allocate(device, entries * producer.index_record_bytes));
    DI_ASSIGN_OR_RETURN(Buffer remainders,
                        Buffer::Allocate(device, num_slots * geometry.remainder_rows *
                                                     producer.remainder_floats * 4));
    memory.kv_.push_back(std::move(kv));
    memory.index_.push_back(std::move(index));
    memory.remainders_.push_back(std::move(remainders));
  }
  for (int64_t layer = 0; layer < geometry.num_layers; ++layer) {
    DI_ASSIGN_OR_RETURN(Buffer pages, Buffer::Allocate(device, num_window_pages * kBlockTokens *
                                                                   geometry.window_record_bytes));
    memory.window_.push_back(std::move(pages));
  }
  return memory;
}

TensorView CacheMemory::KvBlocks(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const CacheGeometry::Producer& g = geometry_.producers[p];
  return kv_[p].View(DType::kU8,
                     {num_blocks_ + padding_units_, kBlockTokens / g.ratio, g.kv_record_bytes});
}

TensorView CacheMemory::IndexBlocks(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const CacheGeometry::Producer& g = geometry_.producers[p];
  return index_[p].View(
      DType::kU8, {num_blocks_ + padding_units_, kBlockTokens / g.ratio, g.index_record_bytes});
}

TensorView CacheMemory::WindowPages(int64_t layer) const {
  return window_[static_cast<size_t>(layer)].View(
      DType::kU8,
      {num_window_pages_ + padding_units_, kBlockTokens, geometry_.window_record_bytes});
}

TensorView CacheMemory::Remainders(int64_t producer) const {
  const auto p = static_cast<size_t>(producer);
  const int64_t floats = geometry_.producers[p].remainder_floats;
  if (floats == 0) return {};
  return remainders_[p].View(DType::kF32,
                             {num_slots_ + padding_units_, geometry_.remainder_rows, floats});
}

int64_t CacheMemory::ImageBytes(const StateImage& image) const {
  const int64_t num_tokens = image.num_tokens;
  const int64_t window_begin = image.window_begin;
  int64_t bytes = static_cast<int64_t>(sizeof(ImageHeader));
  const int64_t remainder_rows = num_tokens - image.remainder_begin;
  for (const CacheGeometry::Producer& producer : geometry_.producers) {
    bytes += num_tokens / producer.ratio * (producer.kv_record_bytes + producer.index_record_bytes);
    bytes += remainder_rows * producer.remainder_floats * 4;
  }
  return bytes + (num_tokens - window_begin) * geometry_.num_layers * geometry_.window_record_bytes;
}

Status CacheMemory::CheckCommands(const std::vector<StateCommand>& commands) const {
  std::unordered_map<const StateImage*, const StateCommand*> exported;
  for (const StateCommand& command : commands) {
    if (command.kind == StateCommand::Kind::kCopyBlock ||
        command.kind == StateCommand::Kind::kCopyWindowPage) {
      const bool block = command.kind == StateCommand::Kind::kCopyBlock;
      DI_RETURN_IF_ERROR(CheckIds({command.source, command.target},
                                  block ? num_blocks_ : num_window_pages_,
                                  block ? "cache block" : "window page"));
      continue;
    }
    DI_RETURN_IF_ERROR(CheckIds(command.blocks, num_blocks_, "cache block"));
    DI_RETURN_IF_ERROR(CheckIds(command.window_pages, num_window_pages_, "window page"));
    DI_RETURN_IF_ERROR(CheckIds({command.slot}, num_slots_, "slot"));
    const int64_t units = CeilDiv(command.num_tokens, kBlockTokens);
    const int64_t pages = std::ssize(command.window_pages);
    if (command.image == nullptr || command.num_tokens < 0 || std::ssize(command.blocks) < units ||
        command.first_window_page < 0 || (pages > 0 && command.first_window_page + pages < units)) {
      return Fail(
          Code::kInvalidArgument,
          fmt::format("A state command for {} tokens has {} cache blocks and window pages {} "
                      "to {}; it needs an image, {} blocks and the pages up to number {}.",
                      command.num_tokens, command.blocks.size(), command.first_window_page,
                      command.first_window_page + std::ssize(command.window_pages) - 1, units,
                      units - 1),
          "commands");
    }
    if (command.kind == StateCommand::Kind::kExport) {
      exported[command.image.get()] = &command;
      continue;
    }
    // An image that is filled by an earlier command of the same list has the right form.
    if (const auto it = exported.find(command.image.get()); it != exported.end()) {
      if (it->second->num_tokens == command.num_tokens) continue;
      return Fail(Code::kInvalidArgument,
                  fmt::format("A state of {} tokens is exported and imported with {}.",
                              it->second->num_tokens, command.num_tokens),
                  "commands");
    }
    const std::vector<std::byte>& bytes = command.image->bytes;
    ImageHeader header;
    if (bytes.size() < sizeof(header)) {
      return Fail(Code::kDataLoss,
                  fmt::format("A saved state has {} bytes; its header alone takes {}.",
                              bytes.size(), sizeof(header)));
    }
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0)
      return Fail(Code::kDataLoss, "A saved state does not begin as one.");
    if (header.geometry != Fingerprint(geometry_)) {
      return Fail(Code::kDataLoss,
                  "A saved state was written by a model or with settings whose caches have another "
                  "geometry.");
    }
    const StateImage& image = *command.image;
    const int64_t tokens = command.num_tokens;
    if (header.num_tokens != tokens || image.num_tokens != tokens ||
        header.window_begin != image.window_begin ||
        header.remainder_begin != image.remainder_begin || image.window_begin < 0 ||
        image.window_begin > tokens ||
        image.remainder_begin < std::max<int64_t>(0, tokens - geometry_.remainder_rows) ||
        image.remainder_begin > tokens || std::ssize(bytes) != ImageBytes(image)) {
      return Fail(
          Code::kDataLoss,
          fmt::format("A saved state of {} bytes says that it holds {} tokens, window records "
                      "from {} and compressor remainders from {} on; expected are {}, {} "
                      "and {}.",
                      bytes.size(), header.num_tokens, header.window_begin, header.remainder_begin,
                      tokens, image.window_begin, image.remainder_begin));
    }
  }
  return {};
}

template <class Visit>
Status CacheMemory::VisitSequence(const StateCommand& command, const Visit& visit) const {
  const auto visit_blocks = [&](const TensorView& blocks, int64_t entries) -> Status {
    const int64_t per_block = blocks.dim(1);
    for (int64_t begin = 0; begin < entries; begin += per_block) {
      const int32_t block = command.blocks[static_cast<size_t>(begin / per_block)];
      DI_RETURN_IF_ERROR(visit(Part(blocks, block, 0, std::min(per_block, entries - begin))));
    }
    return {};
  };
  for (int64_t p = 0; p < std::ssize(geometry_.producers); ++p) {
    const CacheGeometry::Producer& producer = geometry_.producers[static_cast<size_t>(p)];
    DI_RETURN_IF_ERROR(visit_blocks(KvBlocks(p), command.num_tokens / producer.ratio));
    DI_RETURN_IF_ERROR(visit_blocks(IndexBlocks(p), command.num_tokens / producer.ratio));
    if (producer.remainder_floats == 0) continue;
    const int64_t rows = geometry_.remainder_rows;
    for (int64_t t = command.image->remainder_begin; t < command.num_tokens; ++t)
      DI_RETURN_IF_ERROR(visit(Part(Remainders(p), command.slot, t % rows, t % rows + 1)));
  }
  for (int64_t layer = 0; layer < geometry_.num_layers; ++layer) {
    int64_t begin = command.image->window_begin;
    while (begin < command.num_tokens) {
      const int64_t page = begin / kBlockTokens - command.first_window_page;
      const int64_t first = begin % kBlockTokens;
      const int64_t end = std::min(kBlockTokens, first + command.num_tokens - begin);
      // An image may hold more than the pages that wait for it.
      const TensorView pages = WindowPages(layer);
      DI_RETURN_IF_ERROR(visit(
          page < 0 || command.window_pages.empty()
              ? TensorView(static_cast<void*>(nullptr), DType::kU8, {end - first, pages.dim(2)})
              : Part(pages, command.window_pages[static_cast<size_t>(page)], first, end)));
      begin += end - first;
    }
  }
  return {};
}

Status CacheMemory::Export(const StateCommand& command, Stream& stream) const {
  StateImage& image = *command.image;
  const int64_t tokens = command.num_tokens;
  // Where the image says nothing, everything that the sequence has. An image of SequenceState::Save
  // says all of it, and is only read here: the host may be reading it on another thread.
  const auto fill = [](int64_t& field, int64_t value) {
    if (field != value) field = value;
  };
  fill(image.num_tokens, tokens);
  fill(image.window_begin,
       command.window_pages.empty()
           ? tokens
           : std::min(tokens,
                      std::max(image.window_begin, command.first_window_page * kBlockTokens)));
  fill(image.remainder_begin,
       std::min(tokens, std::max(image.remainder_begin,
                                 std::max<int64_t>(0, tokens - geometry_.remainder_rows))));
  ImageHeader header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.geometry = Fingerprint(geometry_);
  header.num_tokens = tokens;
  header.window_begin = image.window_begin;
  header.remainder_begin = image.remainder_begin;
  image.bytes.resize(static_cast<size_t>(ImageBytes(image)));
  std::memcpy(image.bytes.data(), &header, sizeof(header));
  std::byte* to = image.bytes.data() + sizeof(header);
  return VisitSequence(command, [&](const TensorView& piece) {
    std::byte* target = std::exchange(to, to + ViewBytes(piece));
    return CopyToHost(piece, target, stream);
  });
}

Status CacheMemory::Import(const StateCommand& command, Stream& stream) const {
  const std::vector<std::byte>& bytes = command.image->bytes;
  const std::byte* from = bytes.data() + sizeof(ImageHeader);
  return VisitSequence(command, [&](const TensorView& piece) -> Status {
    const std::byte* source = std::exchange(from, from + ViewBytes(piece));
    if (piece.empty()) return {};
    return CopyToDevice(source, piece, stream);
  });
}

Status CacheMemory::Execute(const std::vector<StateCommand>& commands, Stream& stream) {
  DI_RETURN_IF_ERROR(CheckCommands(commands));
  const auto copy = [&](const TensorView& units, const StateCommand& command) {
    return CopyOnDevice(units.Rows(command.source, command.source + 1),
                        units.Rows(command.target, command.target + 1), stream);
  };
  for (const StateCommand& command : commands) {
    switch (command.kind) {
      case StateCommand::Kind::kCopyBlock:
        for (int64_t p = 0; p < std::ssize(geometry_.producers); ++p) {
          DI_RETURN_IF_ERROR(copy(KvBlocks(p), command));
          DI_RETURN_IF_ERROR(copy(IndexBlocks(p), command));
        }
        break;
      case StateCommand::Kind::kCopyWindowPage:
        for (int64_t layer = 0; layer < geometry_.num_layers; ++layer)
          DI_RETURN_IF_ERROR(copy(WindowPages(layer), command));
        break;
      case StateCommand::Kind::kExport:
        DI_RETURN_IF_ERROR(Export(command, stream));
        break;
      case StateCommand::Kind::kImport:
        DI_RETURN_IF_ERROR(Import(command, stream));
        break;
    }
  }
  return {};
}

}  // namespace deepinfer
