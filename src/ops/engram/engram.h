// Engram: hashed n-gram table look-ups added to the residual streams (model description, section
// 11).
#pragma once

#include <cstdint>
#include <span>

#include "base/error.h"
#include "tensor/stream.h"
#include "tensor/tensor_view.h"

namespace deepinfer {

// r_n = a_0 M_0 xor a_1 M_1 ... xor a_{n-1} M_{n-1};  row[(n-2) heads + h] = r_n mod P[n][h] +
// offset, for n = 2 ... ngram.
struct EngramHashArgs {
  TensorView
      lookback;  // [rows, ngram] i32: compressed ids at positions t, t-1, ...; already padded
  std::span<const int64_t> multipliers;  // ngram
  std::span<const int64_t> primes;       // (ngram - 1) * heads, n = 2 first
  std::span<const int64_t> offsets;      // exclusive prefix sums of the primes
  TensorView table_rows;                 // [rows, (ngram - 1) * heads] i64
};
Status EngramHash(const EngramHashArgs& args, Stream& stream);

// out[t] = the addressed table rows, dequantised (exact in bf16) and concatenated in column order.
struct EngramGatherArgs {
  TensorView table_rows;  // [rows, lookups] i64, each < table rows
  TensorView weight;      // [table rows, channels] E4M3; may be a mapped file
  TensorView scale;       // [table rows, channels / 32] E8M0
  TensorView out;         // [rows, lookups * channels] bf16
};
Status EngramGather(const EngramGatherArgs& args, Stream& stream);

// Per stream s, with kv = key[4][hidden] then value[hidden]:
//   dot = sum_d (h[s,d] * q_weight[s,d] k_weight[s,d]) * key[s,d] * rsqrt(mean h^2 + eps) *
//   rsqrt(mean key^2 + eps) * hidden^-0.5 gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot));
//   h[s] = bf16(h[s] + gate * value)
struct EngramApplyArgs {
  TensorView kv;        // [rows, 5 * hidden] bf16
  TensorView q_weight;  // [4, hidden] bf16
  TensorView k_weight;  // [4, hidden] bf16
  TensorView streams;   // [rows, 4, hidden] bf16, updated in place
  float eps = 1e-20f;
};
Status EngramApply(const EngramApplyArgs& args, Stream& stream);

// gate(dot) above.
float EngramGate(float dot);

}  // namespace deepinfer
