// Joins the engine to the grammar compiler: which bytes the tokens stand for, and what a structured
// output of the public interface is called there.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/grammar_service.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Special and added tokens are not text; `end_ids` may end an output where its grammar may end. The
// vocabulary is read with the first description, so that who needs none pays for none. `tokenizer`
// must outlive the result; what it makes keeps the rest alive.
ConstraintCompiler MakeConstraintCompiler(const Tokenizer& tokenizer, std::vector<int32_t> end_ids,
                                          int64_t vocab_size);

}  // namespace deepinfer
