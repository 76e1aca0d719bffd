#include "base/sha256.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace deepinfer {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::Block(const uint8_t* block) {
  uint32_t schedule[64];
  for (size_t i = 0; i < 16; ++i) {
    schedule[i] = (uint32_t{block[4 * i]} << 24) | (uint32_t{block[4 * i + 1]} << 16) |
                  (uint32_t{block[4 * i + 2]} << 8) | block[4 * i + 3];
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t early = schedule[i - 15];
    const uint32_t late = schedule[i - 2];
    schedule[i] = schedule[i - 16] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ (early >> 3)) +
                  schedule[i - 7] + (std::rotr(late, 17) ^ std::rotr(late, 19) ^ (late >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRoundConstants[i] + schedule[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

Sha256& Sha256::Update(std::string_view bytes) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  num_bytes_ += left;
  while (left > 0) {
    if (num_pending_ == 0 && left >= 64) {
      Block(data);
      data += 64;
      left -= 64;
      continue;
    }
    const size_t count = std::min(left, size_t{64} - num_pending_);
    std::memcpy(pending_.data() + num_pending_, data, count);
    num_pending_ += count;
    data += count;
    left -= count;
    if (num_pending_ == 64) {
      Block(pending_.data());
      num_pending_ = 0;
    }
  }
  return *this;
}

Sha256::Digest Sha256::Finish() {
  const uint64_t num_bits = num_bytes_ * 8;
  constexpr char kPadding[64] = {'\x80'};
  // So that eight bytes remain in the last block.
  Update(std::string_view(kPadding, (num_pending_ < 56 ? 56 : 120) - num_pending_));
  char length[8];
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(num_bits >> (56 - 8 * i));
  Update(std::string_view(length, 8));
  Digest digest;
  for (size_t i = 0; i < 32; ++i)
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

std::string Hex(const Sha256::Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

uint64_t Word(const Sha256::Digest& digest, size_t part) {
  uint64_t word = 0;
  for (size_t i = 0; i < 8; ++i) word = (word << 8) | digest[8 * part + i];
  return word;
}

}  // namespace deepinfer
