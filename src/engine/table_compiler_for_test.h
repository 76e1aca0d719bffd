// A compiler of structured outputs for tests, without a grammar library. The description names an
// automaton over token ids; any text that names none is the seed of a random one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/grammar_service.h"
#include "sample/table_constraint_for_test.h"

namespace deepinfer {

// "ids 5 6 7": these tokens. "some 5 6": some of these, then the end token. "bad": an error.
inline ConstraintCompiler TableCompiler(int64_t vocab, int32_t end_id) {
  return [vocab, end_id](const StructuredOutput& output) -> Result<ConstraintFactory> {
    std::istringstream words(output.schema);
    std::string kind;
    words >> kind;
    if (kind == "bad")
      return Fail(Code::kInvalidArgument, "the description is bad.", "structured_output");
    std::vector<int32_t> ids;
    std::shared_ptr<const TokenTable> table;
    if (kind == "ids" || kind == "some") {
      for (int32_t id = 0; words >> id;) ids.push_back(id);
      table = kind == "ids" ? FixedTokens(vocab, ids) : AnyOfThenEnd(vocab, ids, end_id);
    } else {
      uint64_t seed = static_cast<uint64_t>(output.kind);
      for (const char c : output.schema) seed = seed * 131 + static_cast<unsigned char>(c);
      for (const std::string& choice : output.choices) {
        for (const char c : choice) seed = seed * 131 + static_cast<unsigned char>(c);
      }
      table = RandomTable(vocab, seed, end_id);
    }
    return ConstraintFactory([table] { return std::make_unique<TableConstraint>(table); });
  };
}

}  // namespace deepinfer
