// Moves of cache bytes that a step carries out before its rows run, in order. The book-keeping
// (SequenceState, PrefixCache) decides them without touching memory; CacheMemory executes them on
// the device's stream, so that an id may be reused by a later step as soon as it is released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace deepinfer {

// A sequence's state as bytes that can be kept on the host, stored or sent. Filled when the step
// with its export command has run.
struct StateImage {
  bool lost = false;  // the step that should have filled it failed; set by the host
  int64_t num_tokens = 0;
  // The first positions whose window record and whose compressor remainder are in the image;
  // num_tokens: none.
  int64_t window_begin = 0;
  int64_t remainder_begin = 0;
  std::vector<std::byte> bytes;  // layout: docs/state.md, "State images"
};

struct StateCommand {
  enum class Kind : uint8_t {
    kCopyBlock,       // cache block `source` to `target`, all of it
    kCopyWindowPage,  // window page `source` to `target`
    kExport,          // the sequence below to `image`
    kImport,          // `image` to the sequence below
  };
  Kind kind = Kind::kCopyBlock;
  int32_t source = -1;
  int32_t target = -1;
  // kExport and kImport.
  std::shared_ptr<StateImage> image = nullptr;
  int64_t num_tokens = 0;
  int32_t slot = -1;
  std::vector<int32_t> blocks = {};
  std::vector<int32_t> window_pages = {};
  int64_t first_window_page = 0;
};

}  // namespace deepinfer
