// A request of the public interface becomes what the engine takes: a prompt of any kind becomes
// token ids, conversations are rendered and their formats become constraints, and every field is
// checked. Pure functions; called before a request is handed in.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "deepinfer/llm.h"
#include "engine/engine.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Tokens that end a turn: end of sentence, and those that can only begin another turn. `eos_id`
// comes from the model's configuration; ids that the model does not have are left out.
std::vector<int32_t> EndOfTurnIds(const Tokenizer& tokenizer, int64_t eos_id, int64_t vocab_size);

// Turns a request into what the engine takes. Errors: kInvalidArgument with the field at fault.
Result<EngineRequest> ResolveRequest(const Request& request, const Tokenizer& tokenizer,
                                     int64_t vocab_size,
                                     const std::function<uint64_t()>& fresh_seed);

}  // namespace deepinfer
