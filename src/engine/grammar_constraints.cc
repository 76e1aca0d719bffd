#include "engine/grammar_constraints.h"

#include <optional>
#include <utility>

namespace deepinfer {
namespace {

// Drafted tokens of a step, and the one that a step launched ahead may have to take back.
constexpr int64_t kMaxRollback = 8;

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

}  // namespace

std::unique_ptr<GrammarCompiler> MakeGrammarCompiler(const Tokenizer& tokenizer,
                                                     std::span<const int32_t> end_ids,
                                                     int64_t vocab_size) {
  GrammarVocabulary vocabulary;
  vocabulary.vocab_size = vocab_size;
  vocabulary.call_marker_id = tokenizer.IdOf("｜DSML｜");
  vocabulary.end_ids.assign(end_ids.begin(), end_ids.end());
  vocabulary.token_bytes.reserve(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.TokenBytes(id);
    // Added tokens are markup whatever they spell.
    const bool is_added = tokenizer.IdOf(bytes) == std::optional<int32_t>(id);
    vocabulary.token_bytes.emplace_back(is_added ? std::string_view() : bytes);
  }
  return std::make_unique<GrammarCompiler>(std::move(vocabulary), GrammarLimits{});
}

ConstraintCompiler ConstraintCompilerOf(GrammarCompiler& compiler) {
  return [&compiler](const StructuredOutput& output) -> Result<ConstraintFactory> {
    Result<std::shared_ptr<const CompiledGrammar>> compiled = compiler.Compile(
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
        [grammar = std::move(*compiled)] { return grammar->NewMatcher(kMaxRollback); });
  };
}

}  // namespace deepinfer
