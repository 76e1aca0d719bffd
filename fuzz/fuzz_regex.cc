#include "fuzz_grammar_common.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  deepinfer::FuzzGrammar(deepinfer::GrammarSpec::Kind::kRegex, data, size);
  return 0;
}
