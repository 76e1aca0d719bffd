// SHA-256 (FIPS 180-4): fingerprints of ids, input lines, journal records and model files, where
// two different contents must not be taken for the same. Not for secrets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace deepinfer {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256& Update(std::string_view bytes);
  // Ends the message; the object must not be used afterwards.
  Digest Finish();

  static Digest Of(std::string_view bytes) {
    return Sha256().Update(bytes).Finish();
  }

 private:
  void Block(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_ = {};
  size_t num_pending_ = 0;
  uint64_t num_bytes_ = 0;
};

// 64 hexadecimal digits.
std::string Hex(const Sha256::Digest& digest);
// Eight of its bytes, `part` 0 ... 3, as a number.
uint64_t Word(const Sha256::Digest& digest, size_t part = 0);

}  // namespace deepinfer
