// Counts heap allocations of the whole process while sequences decode: the step loop must not
// allocate once it is in its steady state.
#include <gtest/gtest.h>

#include <thread>

#include "engine/engine.h"
#include "engine/null_backend.h"
#include "engine/table_compiler_for_test.h"
#include "state/allocation_count_for_test.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

// Of the requests, every `constrained_every`-th has a structured output; 0: none.
int64_t AllocationsInSteadyState(bool async, int64_t num_sequences, int64_t constrained_every) {
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
  options.compile_constraint = TableCompiler(tokenizer.vocab_size(), /*end_id=*/304);
  EngineEvents events;
  int64_t tokens = 0;
  events.on_delta = [&tokens](const EngineDelta& delta) {
    tokens += static_cast<int64_t>(delta.token_ids.size());
  };
  Engine engine(backend, tokenizer, options, std::move(events));
  int64_t num_constrained = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    EngineRequest request;
    request.prompt = {1, 2, static_cast<int32_t>(3 + i % 200)};
    request.params.max_tokens = 120;
    request.params.ignore_eos = true;
    request.params.temperature = i % 2 == 0 ? 0.0 : 1.0;
    request.seed = static_cast<uint64_t>(i);
    if (constrained_every > 0 && i % constrained_every == 0) {
      ++num_constrained;
      StructuredOutput& output = request.params.structured_output.emplace();
      output.schema = "some 300 301 302 303";
      if (i % 3 == 1) {
        output.trigger_token_ids = {305, 306};
        output.bound_token_id = 305;
        request.params.logit_bias = {{305, 1.0}};
      }
      request.params.temperature = 0;  // the first of them, again and again
    }
    EXPECT_TRUE(engine.Submit(std::move(request)).has_value());
  }
  // All begin together.
  while (engine.counters().grammars_compiled < num_constrained) std::this_thread::yield();
  for (int step = 0; step < 16; ++step) EXPECT_TRUE(engine.Step());
  const int64_t tokens_before = tokens;
  const int64_t before = AllocationCount();
  for (int step = 0; step < 64; ++step) engine.Step();
  const int64_t during = AllocationCount() - before;
  EXPECT_EQ(tokens - tokens_before, 64 * num_sequences);
  while (engine.Step()) {
  }
  EXPECT_EQ(tokens, 120 * num_sequences);
  return during;
}

TEST(Allocations, TheStepLoopMakesNoneInItsSteadyState) {
  for (const bool async : {false, true}) {
    for (const int64_t num_sequences : {1, 64}) {
      for (const int64_t constrained_every : {0, 1, 2}) {
        EXPECT_EQ(AllocationsInSteadyState(async, num_sequences, constrained_every), 0)
            << (async ? "asynchronous" : "synchronous") << ", " << num_sequences
            << " sequences, every " << constrained_every << " constrained";
      }
    }
  }
}

TEST(Allocations, AreCounted) {
  const int64_t before = AllocationCount();
  // Not a new-expression, which a compiler may leave out.
  ::operator delete(::operator new(8));
  EXPECT_EQ(AllocationCount() - before, 1);
}

}  // namespace
}  // namespace deepinfer
