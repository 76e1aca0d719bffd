// Counts heap allocations of the whole process while sequences decode: the step loop must not
// allocate once it is in its steady state.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "engine/engine.h"
#include "engine/null_backend.h"
#include "text/tokenizer.h"

namespace {

std::atomic<int64_t> allocations{0};

void* Allocate(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* AllocateAligned(std::size_t size, std::align_val_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = nullptr;
  if (::posix_memalign(&memory, static_cast<std::size_t>(alignment), size == 0 ? 1 : size) != 0)
    throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) {
  return Allocate(size);
}
void* operator new[](std::size_t size) {
  return Allocate(size);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return AllocateAligned(size, alignment);
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return AllocateAligned(size, alignment);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace deepinfer {
namespace {

int64_t AllocationsInSteadyState(bool async, int64_t num_sequences) {
  const Tokenizer tokenizer =
      *Tokenizer::Load(DI_TEST_DATA_DIR "/model/two/checkpoint/tokenizer.json");
  NullBackend backend(tokenizer.vocab_size(), num_sequences,
                      {.num_blocks = 2 * num_sequences,
                       .num_window_pages = 2 * num_sequences,
                       .num_slots = num_sequences,
                       .window_tokens = 128,
                       .rollback_tokens = 6});
  EngineOptions options;
  options.max_model_len = 256;
  options.scheduler.max_num_seqs = num_sequences;
  options.scheduler.max_num_batched_tokens = 4 * num_sequences;
  options.async_scheduling = async;
  EngineEvents events;
  int64_t tokens = 0;
  events.on_delta = [&tokens](int64_t, int64_t, std::string_view, std::span<const int32_t> ids,
                              FinishReason) { tokens += static_cast<int64_t>(ids.size()); };
  Engine engine(backend, tokenizer, options, std::move(events));
  for (int64_t i = 0; i < num_sequences; ++i) {
    EngineRequest request;
    request.prompt = {1, 2, static_cast<int32_t>(3 + i % 200)};
    request.params.max_tokens = 120;
    request.params.ignore_eos = true;
    request.params.temperature = i % 2 == 0 ? 0.0 : 1.0;
    request.seed = static_cast<uint64_t>(i);
    EXPECT_TRUE(engine.Submit(std::move(request)).has_value());
  }
  for (int step = 0; step < 16; ++step) EXPECT_TRUE(engine.Step());
  const int64_t tokens_before = tokens;
  const int64_t before = allocations.load();
  for (int step = 0; step < 64; ++step) engine.Step();
  const int64_t during = allocations.load() - before;
  EXPECT_EQ(tokens - tokens_before, 64 * num_sequences);
  while (engine.Step()) {
  }
  EXPECT_EQ(tokens, 120 * num_sequences);
  return during;
}

TEST(Allocations, TheStepLoopMakesNoneInItsSteadyState) {
  for (const bool async : {false, true}) {
    for (const int64_t num_sequences : {1, 64}) {
      EXPECT_EQ(AllocationsInSteadyState(async, num_sequences), 0)
          << (async ? "asynchronous" : "synchronous") << ", " << num_sequences << " sequences";
    }
  }
}

TEST(Allocations, AreCounted) {
  const int64_t before = allocations.load();
  delete new int64_t(1);
  EXPECT_EQ(allocations.load() - before, 1);
}

}  // namespace
}  // namespace deepinfer
