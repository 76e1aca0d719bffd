#include "engine/grammar_constraints.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/llm_options.h"
#include "grammar/grammar.h"
#include "text/chat_template.h"

namespace deepinfer {
namespace {

GrammarSpec::Kind KindOf(StructuredOutput::Kind kind) {
  switch (kind) {
    case StructuredOutput::Kind::kJsonSchema:
      return GrammarSpec::Kind::kJsonSchema;
    case StructuredOutput::Kind::kJsonObject:
      return GrammarSpec::Kind::kJsonObject;
    case StructuredOutput::Kind::kRegex:
      return GrammarSpec::Kind::kRegex;
    case StructuredOutput::Kind::kEbnf:
      return GrammarSpec::Kind::kEbnf;
    case StructuredOutput::Kind::kChoice:
      return GrammarSpec::Kind::kChoice;
    case StructuredOutput::Kind::kToolCalls:
      return GrammarSpec::Kind::kToolCalls;
    case StructuredOutput::Kind::kStructuralTag:
      break;
  }
  return GrammarSpec::Kind::kStructuralTag;
}

GrammarVocabulary VocabularyOf(const Tokenizer& tokenizer, const std::vector<int32_t>& end_ids,
                               int64_t vocab_size) {
  GrammarVocabulary vocabulary;
  vocabulary.vocab_size = vocab_size;
  vocabulary.call_marker_id = tokenizer.IdOf(kDsmlMarker);
  vocabulary.end_ids = end_ids;
  vocabulary.token_bytes.reserve(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.TokenBytes(id);
    // Added tokens are markup whatever they spell.
    const bool is_added = tokenizer.IdOf(bytes) == std::optional<int32_t>(id);
    vocabulary.token_bytes.emplace_back(is_added ? std::string_view() : bytes);
  }
  return vocabulary;
}

}  // namespace

ConstraintCompiler MakeConstraintCompiler(const Tokenizer& tokenizer, std::vector<int32_t> end_ids,
                                          int64_t vocab_size) {
  struct Lazy {
    std::once_flag made;
    std::unique_ptr<GrammarCompiler> compiler;
  };
  return [&tokenizer, end_ids = std::move(end_ids), vocab_size, lazy = std::make_shared<Lazy>()](
             const StructuredOutput& output) -> Result<ConstraintFactory> {
    std::call_once(lazy->made, [&] {
      lazy->compiler = std::make_unique<GrammarCompiler>(
          VocabularyOf(tokenizer, end_ids, vocab_size), GrammarLimits{});
    });
    Result<std::shared_ptr<const CompiledGrammar>> compiled = lazy->compiler->Compile(
        {.kind = KindOf(output.kind),
         .text = output.schema,
         .choices = output.choices,
         .max_whitespace = output.max_whitespace,
         .tool_calls = {.dialect = output.dialect, .inside_block = output.inside_block}});
    if (!compiled.has_value()) {
      // Places in a description begin with '#'.
      Error error = std::move(compiled.error());
      error.field = "structured_output" + error.field;
      return tl::unexpected<Error>(std::move(error));
    }
    return ConstraintFactory(
        [grammar = std::move(*compiled)] { return grammar->NewMatcher(kRollbackTokens); });
  };
}

}  // namespace deepinfer
