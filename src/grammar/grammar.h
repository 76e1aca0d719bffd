// Structured outputs: a description of allowed texts (JSON schema, regular expression, EBNF, a list
// of choices, a structural tag) is compiled against a vocabulary, and a matcher says after each
// token which tokens may follow. docs/structured_output.md has the tables of what is supported.
//
// The only module that knows the grammar library. Vocabulary ids at or above the tokenizer's size
// are never allowed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "deepinfer/chat.h"
#include "sample/token_constraint.h"

namespace deepinfer {

struct GrammarSpec {
  enum class Kind : uint8_t {
    kJsonSchema,     // text: a JSON schema
    kJsonObject,     // any JSON object; text unused
    kRegex,          // text: a pattern that the whole output matches
    kEbnf,           // text: rules, beginning with "root"
    kChoice,         // choices: one of these texts
    kStructuralTag,  // text: JSON description of tags
    kToolCalls,      // text: JSON list of function tools; calls of them in the model's markup
  };
  Kind kind = Kind::kJsonSchema;
  std::string text;
  std::vector<std::string> choices;
  // White space characters between JSON tokens, at most; 0: none (", " and ": " become "," and
  // ":").
  int max_whitespace = 2;

  struct ToolCalls {
    ChatDialect dialect = ChatDialect::kV41;
    // Whether the text begins inside of the block of calls, as behind a prompt that forces a call;
    // else directly behind the first marker that the model has drawn by itself.
    bool inside_block = false;

    friend bool operator==(const ToolCalls&, const ToolCalls&) = default;
  };
  ToolCalls tool_calls;  // of kToolCalls

  friend bool operator==(const GrammarSpec&, const GrammarSpec&) = default;
};

struct GrammarLimits {
  int64_t max_text_bytes = 1 << 20;              // of a description
  double compile_seconds = 20;                   // from the beginning of its compilation
  int64_t max_grammar_bytes = 256 << 20;         // of one compiled grammar
  int64_t cache_bytes = int64_t{1} << 30;        // of compiled grammars
  int64_t mask_cache_bytes = int64_t{64} << 20;  // of masks, for all of them; 0: none are kept
  double kept_mask_microseconds = 8;  // a mask that took less is computed again, not kept
};

// Immutable; shared by the matchers made from it.
class CompiledGrammar {
 public:
  virtual ~CompiledGrammar() = default;
  virtual int64_t memory_bytes() const = 0;
  // Allows one whole text of the grammar, then nothing but an end token. `max_rollback` tokens can
  // be taken back.
  virtual std::unique_ptr<TokenConstraint> NewMatcher(int64_t max_rollback) const = 0;
};

// The vocabulary that grammars are compiled against.
struct GrammarVocabulary {
  std::vector<std::string> token_bytes;  // by id; special tokens empty: they are not text
  std::vector<int32_t> end_ids;          // allowed where the text may end
  int64_t vocab_size = 0;                // rows of the logits, at least token_bytes.size()
  // The special token that the tags of calls are written with; absent: there is no kToolCalls. Only
  // that kind ever allows it.
  std::optional<int32_t> call_marker_id;
};

class GrammarCompiler {
 public:
  GrammarCompiler(GrammarVocabulary vocabulary, GrammarLimits limits);
  ~GrammarCompiler();

  // Compiles, or finds it in the cache; any thread. Errors: kInvalidArgument with a sentence that
  // names what is wrong and where (a schema's JSON path, an offset); kUnsupported for a keyword
  // that cannot be enforced, with its path; kResourceExhausted for a limit, by name.
  Result<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarSpec& spec);

  struct Counters {
    int64_t compiled = 0;
    int64_t cache_hits = 0;
    int64_t failed = 0;
    int64_t cache_bytes = 0;
    int64_t masks_found = 0;  // of those asked for from the kept ones
  };
  Counters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deepinfer
