// Joins the engine to the grammar compiler: which bytes the tokens stand for, and what a structured
// output of the public interface is called there.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/grammar_service.h"
#include "grammar/grammar.h"
#include "text/tokenizer.h"

namespace deepinfer {

// Special and added tokens are not text; `end_ids` may end an output where its grammar may end.
std::unique_ptr<GrammarCompiler> MakeGrammarCompiler(const Tokenizer& tokenizer,
                                                     std::span<const int32_t> end_ids,
                                                     int64_t vocab_size);

// `compiler` must outlive the result and what it makes.
ConstraintCompiler ConstraintCompilerOf(GrammarCompiler& compiler);

}  // namespace deepinfer
