// What constrained output costs the host: compiling schemas and computing masks over the whole
// vocabulary, along documents that the schemas allow.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/bench.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/json_value.h"
#include "grammar/grammar.h"
#include "text/tokenizer.h"

namespace deepinfer {
namespace {

// The processor's time, which says what something costs even where other programs share the
// machine: of the calling thread, which works on masks and tokens alone, and of the process, for
// compilations, which have a thread of their own while nothing else runs here.
double Microseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}
double ThreadMicroseconds() {
  return Microseconds(CLOCK_THREAD_CPUTIME_ID);
}
double ProcessMicroseconds() {
  return Microseconds(CLOCK_PROCESS_CPUTIME_ID);
}

struct SchemaCase {
  std::string name;
  std::string kind;
  std::string schema;
  std::vector<std::string> documents;
};

Result<std::vector<SchemaCase>> ReadCases(const std::string& path) {
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(path));
  std::vector<SchemaCase> cases;
  while (true) {
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, reader.Next());
    if (!line) return cases;
    DI_ASSIGN_OR_RETURN(const JsonValue value, JsonValue::Parse(line->text));
    const JsonValue* name = value.Find("name");
    const JsonValue* kind = value.Find("kind");
    const JsonValue* schema = value.Find("schema");
    const JsonValue* documents = value.Find("documents");
    if (name == nullptr || name->if_string() == nullptr || kind == nullptr ||
        kind->if_string() == nullptr || schema == nullptr || documents == nullptr ||
        documents->if_array() == nullptr) {
      return Fail(
          Code::kInvalidArgument,
          fmt::format("Line {} of {} needs name, kind, schema and documents.", line->number, path));
    }
    SchemaCase schema_case{*name->if_string(), *kind->if_string(), schema->DumpCompact(), {}};
    for (const JsonValue& document : *documents->if_array()) {
      if (document.if_string() == nullptr) {
        return Fail(Code::kInvalidArgument,
                    fmt::format("A document in line {} of {} is no string.", line->number, path));
      }
      schema_case.documents.push_back(*document.if_string());
    }
    cases.push_back(std::move(schema_case));
  }
}

struct Times {
  std::vector<double> values;  // microseconds

  double At(double share) const {
    if (values.empty()) return 0;
    std::vector<double> sorted = values;
    const auto at = static_cast<size_t>(share * static_cast<double>(sorted.size() - 1));
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(at), sorted.end());
    return sorted[at];
  }
  nlohmann::ordered_json Json() const {
    return {{"count", values.size()}, {"p50_us", At(0.5)}, {"p99_us", At(0.99)}, {"max_us", At(1)}};
  }
  void Add(const Times& other) {
    values.insert(values.end(), other.values.begin(), other.values.end());
  }
};

struct CaseResult {
  double compile_us = 0;
  int64_t memory_bytes = 0;
  Times mask;
  Times accept;
};

GrammarVocabulary VocabularyOf(const Tokenizer& tokenizer, int32_t end_id) {
  GrammarVocabulary vocabulary;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    vocabulary.token_bytes.emplace_back(tokenizer.is_special(id) ? "" : tokenizer.TokenBytes(id));
  }
  vocabulary.end_ids = {end_id};
  vocabulary.vocab_size = (tokenizer.vocab_size() + 127) / 128 * 128;
  return vocabulary;
}

Result<CaseResult> Measure(GrammarCompiler& compiler, const Tokenizer& tokenizer, int32_t end_id,
                           const SchemaCase& schema_case, int64_t rounds) {
  CaseResult result;
  GrammarSpec spec;
  spec.text = schema_case.schema;
  const double begin = ProcessMicroseconds();
  const auto grammar = compiler.Compile(spec);
  result.compile_us = ProcessMicroseconds() - begin;
  if (!grammar) return WithContext(grammar.error(), schema_case.name);
  result.memory_bytes = (*grammar)->memory_bytes();
  std::vector<uint32_t> mask(
      static_cast<size_t>(((tokenizer.vocab_size() + 127) / 128 * 128 + 31) / 32));
  for (int64_t round = 0; round < rounds; ++round) {
    for (const std::string& document : schema_case.documents) {
      DI_ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer.Encode(document));
      ids.push_back(end_id);
      const auto matcher = (*grammar)->NewMatcher(0);
      for (const int32_t id : ids) {
        const double fill = ThreadMicroseconds();
        const TokenConstraint::Verdict verdict = matcher->FillMask(mask);
        result.mask.values.push_back(ThreadMicroseconds() - fill);
        const bool allowed = verdict == TokenConstraint::Verdict::kMasked &&
                             (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
        const double accept = ThreadMicroseconds();
        const Status accepted = matcher->Accept(id);
        result.accept.values.push_back(ThreadMicroseconds() - accept);
        if (!allowed || !accepted) {
          return Fail(Code::kInternal,
                      fmt::format("{}: the token {} of the document {} is not allowed at position "
                                  "{}.",
                                  schema_case.name, id, document, matcher->num_accepted()));
        }
      }
    }
  }
  return result;
}

}  // namespace

int RunBenchGrammar(const BenchGrammarOptions& options) {
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  const Result<std::vector<SchemaCase>> cases = ReadCases(options.schemas);
  if (!cases.has_value()) return PrintError(cases.error());
  const Result<Tokenizer> tokenizer = Tokenizer::Load(options.tokenizer);
  if (!tokenizer.has_value()) return PrintError(tokenizer.error());
  const int32_t end_id = tokenizer->eos_id().value_or(tokenizer->vocab_size() - 1);

  GrammarCompiler compiler(VocabularyOf(*tokenizer, end_id), GrammarLimits{});
  GrammarSpec first;
  first.kind = GrammarSpec::Kind::kRegex;
  first.text = "a";
  const double begin = ProcessMicroseconds();
  const auto prepared = compiler.Compile(first);
  const double prepare_us = ProcessMicroseconds() - begin;
  if (!prepared.has_value()) return PrintError(prepared.error());

  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Times masks;
  Times accepts;
  Times compiles;
  Times simple_compiles;
  int64_t memory_bytes = 0;
  for (const SchemaCase& schema_case : *cases) {
    const Result<CaseResult> result =
        Measure(compiler, *tokenizer, end_id, schema_case, options.rounds);
    if (!result.has_value()) return PrintError(result.error());
    masks.Add(result->mask);
    accepts.Add(result->accept);
    compiles.values.push_back(result->compile_us);
    if (schema_case.kind == "simple") simple_compiles.values.push_back(result->compile_us);
    memory_bytes += result->memory_bytes;
    const Status printed = Print(
        "{:22} compile {:9.1f} ms, {:8.1f} KiB; mask us p50 {:6.1f} p99 {:8.1f} max {:8.1f}; "
        "accept us p50 {:5.1f} max {:7.1f}\n",
        schema_case.name, result->compile_us / 1e3,
        static_cast<double>(result->memory_bytes) / 1024, result->mask.At(0.5),
        result->mask.At(0.99), result->mask.At(1), result->accept.At(0.5), result->accept.At(1));
    if (!printed.has_value()) return ExitStatus(printed);
    rows.push_back({{"name", schema_case.name},
                    {"kind", schema_case.kind},
                    {"compile_us", result->compile_us},
                    {"memory_bytes", result->memory_bytes},
                    {"mask", result->mask.Json()},
                    {"accept", result->accept.Json()}});
  }
  const Status printed = Print(
      "all: {} masks over {} ids: p50 {:.1f} us, p99 {:.1f}, max {:.1f} (targets 20, 400, 5000)\n"
      "accept p50 {:.1f} us, p99 {:.1f}, max {:.1f}\n"
      "compile p50 {:.1f} ms, p99 {:.1f}, max {:.1f}; simple schemas p50 {:.1f} (target 10), max "
      "{:.1f}; {:.1f} MiB together\n"
      "the vocabulary once, at the first compilation: {:.0f} ms\n",
      masks.values.size(), tokenizer->vocab_size(), masks.At(0.5), masks.At(0.99), masks.At(1),
      accepts.At(0.5), accepts.At(0.99), accepts.At(1), compiles.At(0.5) / 1e3,
      compiles.At(0.99) / 1e3, compiles.At(1) / 1e3, simple_compiles.At(0.5) / 1e3,
      simple_compiles.At(1) / 1e3, static_cast<double>(memory_bytes) / (1 << 20), prepare_us / 1e3);
  if (!printed.has_value()) return ExitStatus(printed);
  if (!(*file).has_value()) return kExitOk;
  const nlohmann::ordered_json summary = {{"bench", "grammar"},
                                          {"vocabulary", tokenizer->vocab_size()},
                                          {"prepare_us", prepare_us},
                                          {"mask", masks.Json()},
                                          {"accept", accepts.Json()},
                                          {"compile", compiles.Json()},
                                          {"simple_compile", simple_compiles.Json()},
                                          {"memory_bytes", memory_bytes},
                                          {"schemas", rows}};
  return ExitStatus((*file)->Write(summary.dump(2) + "\n"));
}

}  // namespace deepinfer
