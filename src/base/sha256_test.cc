#include "base/sha256.h"

#include <gtest/gtest.h>

namespace deepinfer {
namespace {

// Examples of FIPS 180-4 and its validation files.
TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(Hex(Sha256::Of("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(Sha256::Of("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256::Of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Hex(Sha256::Of(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnHowTheMessageIsCut) {
  std::string message;
  for (int i = 0; i < 300; ++i) message += static_cast<char>(i * 7);
  for (size_t size = 0; size <= message.size(); ++size) {
    const std::string_view text = std::string_view(message).substr(0, size);
    for (const size_t piece : {1u, 3u, 63u, 64u, 65u}) {
      Sha256 hash;
      for (size_t i = 0; i < size; i += piece) hash.Update(text.substr(i, piece));
      ASSERT_EQ(hash.Finish(), Sha256::Of(text)) << size << " in pieces of " << piece;
    }
  }
}

TEST(Sha256, WordsAreItsBytesInOrder) {
  EXPECT_EQ(Word(Sha256::Of("abc")), 0xba7816bf8f01cfeau);
  EXPECT_EQ(Word(Sha256::Of("abc"), 3), 0xb410ff61f20015adu);
}

}  // namespace
}  // namespace deepinfer
