// One input as a grammar of a kind, against a small vocabulary: what compiles is followed for some
// steps, as far as masks go. Limits are the product's own; the time is that of libFuzzer's
// -timeout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "grammar/grammar.h"

namespace deepinfer {

inline GrammarCompiler& FuzzCompiler() {
  static GrammarCompiler* const compiler = [] {
    GrammarVocabulary vocabulary;
    for (int byte = 0; byte < 256; ++byte) {
      vocabulary.token_bytes.emplace_back(1, static_cast<char>(byte));
    }
    for (const char* token :
         {"{\"", "\":", "\", \"", "true", "12", "ab", "\\u00", "  ", "\xC3\xA9"}) {
      vocabulary.token_bytes.emplace_back(token);
    }
    vocabulary.token_bytes.emplace_back();
    vocabulary.end_ids = {static_cast<int32_t>(vocabulary.token_bytes.size()) - 1};
    vocabulary.vocab_size = 300;
    GrammarLimits limits;
    limits.max_text_bytes = 1 << 16;
    limits.cache_bytes = 1 << 20;
    limits.mask_cache_bytes = 1 << 20;
    limits.kept_mask_microseconds = 0;
    return new GrammarCompiler(std::move(vocabulary), limits);
  }();
  return *compiler;
}

inline void FuzzGrammar(GrammarSpec::Kind kind, const uint8_t* data, size_t size) {
  GrammarSpec spec;
  spec.kind = kind;
  spec.text.assign(reinterpret_cast<const char*>(data), size);
  const auto grammar = FuzzCompiler().Compile(spec);
  if (!grammar.has_value()) return;
  const auto matcher = (*grammar)->NewMatcher(4);
  std::vector<uint32_t> mask(10);
  uint32_t state = static_cast<uint32_t>(size) * 2654435761u + 1;
  for (int step = 0; step < 40; ++step) {
    if (matcher->FillMask(mask) != TokenConstraint::Verdict::kMasked) return;
    state = state * 1664525u + 1013904223u;
    int32_t id = static_cast<int32_t>((state >> 8) % 300);
    for (int tries = 0; (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) == 0; ++tries) {
      if (tries == 300) __builtin_trap();  // a mask without a token is a dead end
      id = (id + 1) % 300;
    }
    if (!matcher->Accept(id).has_value()) __builtin_trap();  // mask and Accept agree
    if (step % 7 == 6) matcher->Rollback(2);
  }
}

}  // namespace deepinfer
