// Chooses the next token of a sequence from a row of logits. A choice is a pure function of the
// row, the parameters, the sequence's own tokens, its seed and the position: nothing that shares
// the batch, no thread count and no earlier call matters. Order of operations: docs/sampling.md.
// Called by the engine, one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "deepinfer/request_output.h"
#include "deepinfer/sampling_params.h"
#include "ops/sample_rows/sample_row.h"
#include "sample/token_constraint.h"

namespace deepinfer {

struct SampledToken {
  int32_t token_id = 0;
  bool ends = false;       // among the tokens that end the sequence
  TokenLogprobs logprobs;  // empty unless params.logprobs
};

// What a constraint allows in the next draw. The default allows everything.
struct DrawMask {
  TokenConstraint::Verdict verdict = TokenConstraint::Verdict::kFree;
  std::span<const uint32_t> bits;  // of kMasked; as TokenConstraint::FillMask writes them
};

// One draw of one sequence in the form that devices take, with the lists that `lists` points to.
// Reused from draw to draw.
struct PreparedDraw {
  RowDraw draw;  // without ranges, row and slot
  RowLists lists;
  int64_t num_top = 0;  // best tokens to report beside the drawn one
  int64_t vocab_size = 0;
  DrawMask constraint;
  std::vector<int32_t> excluded;
  std::vector<uint32_t> mask;  // where two masks meet
};

// Work space shared by all sequences that one thread samples; holds no state between calls.
struct SamplerScratch {
  RowScratch row;
  PreparedDraw prepared;
};

// Log-probability, rank and the `num_top` best tokens of a row, in double precision. `token_id`
// must be in range. A row with NaN or +infinity gives kInternal.
Result<TokenLogprobs> RowLogprobs(std::span<const float> logits, int32_t token_id, int64_t num_top,
                                  SamplerScratch& scratch);
// The same without best tokens where a device draws: what it must be asked, and what its answer
// means.
RowDraw GivenTokenDraw(int32_t token_id);
Result<TokenLogprobs> GivenTokenLogprobs(const SampledRow& row);

class SequenceSampler {
 public:
  // `params` have passed Validate(vocab_size) and outlive the sampler. `bad_words` are token
  // sequences (params.bad_words_token_ids and the resolved params.bad_words). `end_ids` end the
  // sequence and are out of reach before min_tokens.
  SequenceSampler(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt,
                  std::vector<std::vector<int32_t>> bad_words, std::vector<int32_t> end_ids);

  // Structured output: before the first draw.
  void set_constraint(std::unique_ptr<TokenConstraint> constraint);
  bool constrained() const {
    return constraint_ != nullptr;
  }
  // What the constraint allows in the next draw; `buffer` holds a bit per token. It need not be the
  // thread that draws: all accepted tokens happen before, and the draw after.
  DrawMask FillMask(std::span<uint32_t> buffer);

  // The next draw in the form that devices take. `mask` and the sampler must stay as they are until
  // it has been drawn. Errors: those of Sample that need no row.
  Status Prepare(int64_t vocab_size, const DrawMask& mask, PreparedDraw* prepared) const;
  // What a device has drawn for it. Errors: those of Sample. Without best tokens.
  Result<SampledToken> Complete(const PreparedDraw& prepared, const SampledRow& row) const;

  // The token at `position` = prompt length + number of accepted tokens. With a constraint, `mask`
  // is what FillMask has returned since the last Accept. Errors: kInternal when the row has NaN or
  // +infinity, kInvalidArgument when every token is excluded; the field is "structured_output" when
  // a constraint has a part in it. Changes nothing: call Accept with the token to go on.
  Result<SampledToken> Sample(std::span<const float> logits, SamplerScratch& scratch,
                              const DrawMask& mask = {}) const;

  // Appends a token to the sequence's output, and moves the constraint on. Errors: kInternal when
  // the constraint refuses the token, or has not seen the output so far; nothing is appended then.
  Status Accept(int32_t token_id);
  // Makes room for that many, so that Accept need not allocate.
  void ReserveOutput(int64_t tokens);

 private:
  RowEdit& EditOf(int32_t token_id);
  // The excluded tokens of the next draw, into `excluded`.
  void ListExcluded(std::vector<int32_t>* excluded) const;
  Error NothingLeft(const PreparedDraw& prepared) const;

  const SamplingParams& params_;
  uint64_t seed_;
  int64_t prompt_tokens_;
  std::vector<std::vector<int32_t>> bad_words_;
  std::vector<int32_t> end_ids_;
  std::vector<int32_t> output_;
  std::vector<uint32_t> allowed_bits_;  // of params.allowed_token_ids; empty without
  // Biases and penalties as they apply to the next draw, each token once.
  std::vector<RowEdit> edits_;
  std::unordered_map<int32_t, size_t> edit_of_;  // token -> its place in edits_
  bool counts_outputs_ = false;
  std::unordered_map<int32_t, int64_t> output_counts_;  // filled only when a penalty is used
  std::unique_ptr<TokenConstraint> constraint_;         // may be null
};

}  // namespace deepinfer
