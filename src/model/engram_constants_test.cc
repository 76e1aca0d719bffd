#include "model/engram_constants.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace deepinfer {
namespace {

using ::testing::ElementsAre;

ModelConfig EngramConfig(std::vector<int64_t> layers, int64_t vocab, int64_t heads,
                         int64_t compressed) {
  ModelConfig config;
  config.engram_layer_ids = std::move(layers);
  config.engram_vocab_size = vocab;
  config.engram_n_heads = heads;
  config.engram_max_ngram_size = 4;
  config.engram_compressed_vocab_size = compressed;
  return config;
}

TEST(EngramConstants, ReleasedPrimesAndMultipliersAreThePublishedOnes) {
  const EngramConstants constants =
      ComputeEngramConstants(EngramConfig({1, 14}, 16000000, 8, 99092));
  ASSERT_EQ(constants.layers.size(), 2u);
  EXPECT_THAT(
      constants.layers[0].primes,
      ElementsAre(16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
                  16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
                  16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463));
  EXPECT_THAT(
      constants.layers[1].primes,
      ElementsAre(16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
                  16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
                  16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889));
  EXPECT_THAT(constants.layers[0].offsets,
              ElementsAre(0, 16000057, 32000136, 48000217, 64000314, 80000435, 96000564, 112000697,
                          128000880, 144001069, 160001276, 176001487, 192001740, 208002017,
                          224002306, 240002613, 256002934, 272003273, 288003654, 304004047,
                          320004446, 336004849, 352005258, 368005705));
  EXPECT_EQ(constants.layers[0].rows, 384006168);
  EXPECT_EQ(constants.layers[1].rows, 384016682);
  EXPECT_THAT(constants.layers[0].multipliers,
              ElementsAre(76632096046245, 4839876093313, 35959672319349, 73987337458391));
  EXPECT_THAT(constants.layers[1].multipliers,
              ElementsAre(67716810739261, 51510806800915, 30921347202721, 82619226485591));
}

TEST(EngramConstants, TinyConstantsAreThePublishedOnes) {
  const EngramConstants constants = ComputeEngramConstants(EngramConfig({1, 4}, 1000, 2, 400));
  EXPECT_THAT(constants.layers[0].primes, ElementsAre(1009, 1013, 1019, 1021, 1031, 1033));
  EXPECT_THAT(constants.layers[1].primes, ElementsAre(1039, 1049, 1051, 1061, 1063, 1069));
  EXPECT_THAT(constants.layers[0].multipliers, ElementsAre(18984069153536581, 1198982504596559,
                                                           8908289623672409, 18328883108567563));
  EXPECT_THAT(constants.layers[1].multipliers, ElementsAre(20378323963399201, 1248012217874625,
                                                           18246170261325197, 4695688200551669));
  EXPECT_THAT(ComputeEngramConstants(EngramConfig({0}, 1000, 2, 400)).layers[0].multipliers,
              ElementsAre(14687336538471341, 6220858079111565, 944785137311245, 381101328422907));
  EXPECT_THAT(EngramTableRows(EngramConfig({1, 4}, 1000, 2, 400)), ElementsAre(6126, 6332));
}

TEST(EngramConstants, PrimesStartAtTheVocabularySizeItself) {
  EXPECT_THAT(ComputeEngramConstants(EngramConfig({0}, 2, 2, 400)).layers[0].primes,
              ElementsAre(2, 3, 5, 7, 11, 13));
}

// numpy.random.default_rng(42).random(5), as NumPy's documentation prints it: the top 53 bits of
// each draw.
TEST(NumpyPcg64, UniformDrawsEqualNumpys) {
  NumpyPcg64 generator(42);
  for (const double expected : {0.7739560485559633, 0.4388784397520523, 0.8585979199113825,
                                0.6973680290593639, 0.09417734788764953}) {
    EXPECT_EQ(static_cast<double>(generator.Next() >> 11) * 0x1p-53, expected);
  }
}

}  // namespace
}  // namespace deepinfer
