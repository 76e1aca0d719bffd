// What a sequence may draw next, decided by what it has drawn so far: the sampler's view of a
// grammar. One object belongs to one sequence and is called by one thread at a time.
//
// Order of calls, per token: FillMask, then Accept of the token that was drawn. The state follows
// accepted tokens only. FillMask need not be called by the thread that calls Accept, but never at
// the same time.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

namespace deepinfer {

class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  enum class Verdict : uint8_t {
    kFree,     // every token is allowed; the mask was not written
    kMasked,   // the mask says which
    kDeadEnd,  // no token is allowed
  };
  // Bit (id % 32) of mask[id / 32] is set when `id` is allowed: [(vocab_size + 31) / 32], all of it
  // is written when the verdict is kMasked. Changes no state.
  virtual Verdict FillMask(std::span<uint32_t> mask) = 0;

  // The drawn token. Errors: kInternal when the constraint did not allow it; the state is then
  // unchanged.
  virtual Status Accept(int32_t token_id) = 0;

  // Takes the last `tokens` accepted ones back. max_rollback() bounds how far it can go behind the
  // largest num_accepted() there has been, over several calls too.
  virtual void Rollback(int64_t tokens) = 0;
  virtual int64_t max_rollback() const = 0;

  // Tokens accepted so far (and not taken back): for the check that sampler and constraint agree.
  virtual int64_t num_accepted() const = 0;
};

}  // namespace deepinfer
