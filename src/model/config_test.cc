#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace deepinfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ReadText(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string Released() {
  return ReadText(DI_TEST_DATA_DIR "/configs/released.json");
}

// `text` with its first occurrence of `from` replaced.
std::string Edited(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string ErrorOf(const std::string& json) {
  const Result<ModelConfig> config = ParseModelConfig(json);
  return config ? "no error" : config.error().message;
}

TEST(ModelConfig, ReleasedFileParsesWithItsPublishedValues) {
  const Result<ModelConfig> config = ParseModelConfig(Released());
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->vocab_size, 129280);
  EXPECT_EQ(config->hidden_size, 5120);
  EXPECT_EQ(config->rms_norm_eps, 1e-20f);
  EXPECT_EQ(config->rope_factor, 16);
  EXPECT_EQ(config->rope_original_positions, 65536);
  EXPECT_EQ(config->gate_temp, 1.0f);
  EXPECT_EQ(config->routed_scaling_factor, 1.5f);
  EXPECT_EQ(config->image_token_id, 129264);
  EXPECT_EQ(config->vision.min_pixels, 295936);
  EXPECT_EQ(config->vision.max_wh_ratio, 0);
  EXPECT_EQ(config->engram_rows_per_token(), 24);
}

// The layer table of the model description, section 3.
TEST(ModelConfig, ReleasedLayerScheduleIsThePublishedTable) {
  const Result<ModelConfig> config = ParseModelConfig(Released());
  ASSERT_TRUE(config);
  EXPECT_EQ(config->decoder_start(), 20);
  struct Row {
    int64_t first, last, ratio;
    LayerRole role;
    int64_t kv, index;
  };
  const Row rows[] = {
      {0, 1, 0, LayerRole::kWindowOnly, -1, -1}, {2, 2, 2, LayerRole::kFull, 2, 2},
      {3, 7, 2, LayerRole::kReuse, 2, 2},        {8, 8, 2, LayerRole::kFull, 8, 8},
      {9, 13, 2, LayerRole::kReuse, 8, 8},       {14, 14, 2, LayerRole::kFull, 14, 14},
      {15, 19, 2, LayerRole::kReuse, 14, 14},    {20, 20, 1, LayerRole::kFull, 20, 20},
      {21, 23, 1, LayerRole::kReuse, 20, 20},    {24, 24, 1, LayerRole::kReindex, 20, 24},
      {25, 27, 1, LayerRole::kReuse, 20, 24},    {28, 28, 1, LayerRole::kReindex, 20, 28},
      {29, 31, 1, LayerRole::kReuse, 20, 28},    {32, 32, 1, LayerRole::kReindex, 20, 32},
      {33, 35, 1, LayerRole::kReuse, 20, 32},    {36, 36, 1, LayerRole::kReindex, 20, 36},
      {37, 39, 1, LayerRole::kReuse, 20, 36}};
  int64_t covered = 0;
  for (const Row& row : rows) {
    for (int64_t layer = row.first; layer <= row.last; ++layer, ++covered) {
      EXPECT_EQ(config->ratio(layer), row.ratio) << layer;
      EXPECT_EQ(config->role(layer), row.role) << layer;
      EXPECT_EQ(config->kv_source(layer), row.kv) << layer;
      EXPECT_EQ(config->index_source(layer), row.index) << layer;
      EXPECT_EQ(config->engram_index(layer), layer == 1 ? 0 : (layer == 14 ? 1 : -1)) << layer;
      EXPECT_EQ(config->is_kv_source(layer), row.role == LayerRole::kFull) << layer;
      EXPECT_EQ(config->is_index_source(layer),
                row.role == LayerRole::kFull || row.role == LayerRole::kReindex)
          << layer;
    }
  }
  EXPECT_EQ(covered, 40);
}

TEST(ModelConfig, SmallConfigurationsParseWithTheirRoles) {
  const Result<ModelConfig> two = LoadModelConfig(DI_TEST_DATA_DIR "/model/two/checkpoint");
  ASSERT_TRUE(two) << two.error().message;
  EXPECT_EQ(two->role(0), LayerRole::kWindowOnly);
  EXPECT_EQ(two->role(1), LayerRole::kFull);
  EXPECT_EQ(two->decoder_start(), 1);
  const Result<ModelConfig> three = LoadModelConfig(DI_TEST_DATA_DIR "/model/three/checkpoint");
  ASSERT_TRUE(three) << three.error().message;
  EXPECT_EQ(three->role(0), LayerRole::kFull);
  EXPECT_EQ(three->role(1), LayerRole::kFull);
  EXPECT_EQ(three->role(2), LayerRole::kReindex);
  EXPECT_EQ(three->kv_source(2), 1);
  const Result<ModelConfig> tiny =
      ParseModelConfig(ReadText(DI_TEST_DATA_DIR "/configs/tiny.json"));
  ASSERT_TRUE(tiny) << tiny.error().message;
  using enum LayerRole;
  const LayerRole roles[] = {kWindowOnly, kWindowOnly, kFull,  kReuse,   kFull,
                             kReuse,      kFull,       kReuse, kReindex, kReuse};
  for (int64_t layer = 0; layer < 10; ++layer) EXPECT_EQ(tiny->role(layer), roles[layer]) << layer;
  const Result<ModelConfig> wide =
      ParseModelConfig(ReadText(DI_TEST_DATA_DIR "/configs/wide-three.json"));
  ASSERT_TRUE(wide) << wide.error().message;
}

TEST(ModelConfig, AllProblemsAreListedInOneMessage) {
  std::string json = Edited(Released(), "\"vocab_size\": 129280", "\"vocab_size\": -1");
  json = Edited(json, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"");
  json = Edited(json, "\"quant_method\": \"fp8\"", "\"quant_method\": \"int4\"");
  json = Edited(json, "\"q_lora_rank\": 1280,", "");
  EXPECT_THAT(
      ErrorOf(json),
      AllOf(HasSubstr("4 problems"),
            HasSubstr("text_config.vocab_size is -1; allowed are integers from"),
            HasSubstr("text_config.hidden_act is \"gelu\"; this engine supports \"silu\" only"),
            HasSubstr("quantization_config.quant_method is \"int4\""),
            HasSubstr("text_config.q_lora_rank is missing")));
}

TEST(ModelConfig, EveryFixedOrRangedValueIsRefusedWithItsPath) {
  struct Case {
    const char* from;
    const char* to;
    const char* field;
  };
  const Case cases[] = {
      {"\"dtype\": \"bfloat16\"", "\"dtype\": \"float16\"", "dtype"},
      {"\"activation_scheme\": \"dynamic\"", "\"activation_scheme\": \"static\"",
       "quantization_config.activation_scheme"},
      {"\"weight_block_size\": [32, 32]", "\"weight_block_size\": [128, 128]",
       "quantization_config.weight_block_size"},
      {"\"scale_fmt\": \"ue8m0\"", "\"scale_fmt\": \"fp32\"", "quantization_config.scale_fmt"},
      {"\"expert_dtype\": \"fp4\"", "\"expert_dtype\": \"fp8\"",
       "quantization_config.expert_dtype"},
      {"\"attention_bias\": false", "\"attention_bias\": true", "text_config.attention_bias"},
      {"\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1", "text_config.attention_dropout"},
      {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": 8",
       "text_config.num_key_value_heads"},
      {"\"hidden_size\": 5120", "\"hidden_size\": 5121", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": 9223372036854775807", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": \"5120\"", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": 5120.5", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": 18446744073709551615", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": null", "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"hidden_size\": true", "text_config.hidden_size"},
      {"\"o_groups\": 8", "\"o_groups\": 7", "text_config.num_attention_heads"},
      {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 63", "text_config.qk_rope_head_dim"},
      {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 256", "text_config.qk_rope_head_dim"},
      {"\"num_experts_per_tok\": 6", "\"num_experts_per_tok\": 0",
       "text_config.num_experts_per_tok"},
      {"\"n_routed_experts\": 384", "\"n_routed_experts\": 5", "text_config.num_experts_per_tok"},
      {"\"n_routed_experts\": 384", "\"n_routed_experts\": 4096", "text_config.n_routed_experts"},
      {"\"compress_ratios\": [0, 0, 2", "\"compress_ratios\": [0, 2, 2",
       "text_config.compress_ratios[1]"},
      {"\"compress_ratios\": [0, 0, 2", "\"compress_ratios\": [0, 0, 0, 2",
       "text_config.compress_ratios"},
      {"1, 0, 0, 0]", "1, 0, 0, 1]", "text_config.compress_ratios[42]"},
      {"1, 1, 0, 0, 0]", "1, 2, 0, 0, 0]", "text_config.compress_ratios[39]"},
      {"\"compress_ratios\": [0, 0, 2", "\"compress_ratios\": [0, 0, 4",
       "text_config.compress_ratios[2]"},
      {"\"kv_source_layer_ids\": [2, 8, 14, 20]", "\"kv_source_layer_ids\": [2, 14, 8, 20]",
       "text_config.kv_source_layer_ids"},
      {"\"kv_source_layer_ids\": [2, 8, 14, 20]", "\"kv_source_layer_ids\": [2, 9, 14, 20]",
       "text_config.kv_source_layer_ids"},
      {"\"kv_source_layer_ids\": [2, 8, 14, 20]", "\"kv_source_layer_ids\": [2, 8, 14, 20, 24]",
       "text_config.kv_source_layer_ids"},
      {"\"kv_source_layer_ids\": [2, 8, 14, 20]", "\"kv_source_layer_ids\": []",
       "text_config.compress_ratios[2]"},
      {"32, 36]", "32, 40]", "text_config.index_source_layer_ids"},
      {"\"index_source_layer_ids\": [2", "\"index_source_layer_ids\": [1, 2",
       "text_config.index_source_layer_ids"},
      {"\"index_topk\": 512", "\"index_topk\": 16385", "text_config.index_topk"},
      {"\"candidate_source_layer_id\": 20", "\"candidate_source_layer_id\": 24",
       "text_config.candidate_source_layer_id"},
      {"\"engram_layer_ids\": [1, 14]", "\"engram_layer_ids\": [1, 20]",
       "text_config.engram_layer_ids"},
      {"\"engram_layer_ids\": [1, 14]", "\"engram_layer_ids\": [1]",
       "text_config.engram_num_embeddings"},
      {"384006168", "384006169", "text_config.engram_num_embeddings"},
      {"\"engram_pad_token_id\": 2", "\"engram_pad_token_id\": 129280",
       "text_config.engram_pad_token_id"},
      {"\"hc_mult\": 4", "\"hc_mult\": 2", "text_config.hc_mult"},
      {"\"dspark_markov_rank\": 256", "\"dspark_markov_rank\": 0",
       "text_config.dspark_markov_rank"},
      {"\"dspark_target_layer_ids\": [37", "\"dspark_target_layer_ids\": [19",
       "text_config.dspark_target_layer_ids"},
      {"\"dspark_target_layer_ids\": [37, 38, 39]", "\"dspark_target_layer_ids\": []",
       "text_config.dspark_target_layer_ids"},
      {"\"rope_type\": \"yarn\"", "\"rope_type\": \"linear\"",
       "text_config.rope_scaling.rope_type"},
      {"\"beta_slow\": 1", "\"beta_slow\": 32", "text_config.rope_scaling.beta_fast"},
      {"\"rope_theta\": 10000", "\"rope_theta\": 1", "text_config.rope_theta"},
      {"\"image_token_id\": 129264", "\"image_token_id\": 129280", "image_token_id"},
      {"\"num_attention_heads\": 16", "\"num_attention_heads\": 15",
       "vision_config.num_attention_heads"},
      {"\"max_wh_ratio\": null", "\"max_wh_ratio\": -1", "vision_config.max_wh_ratio"},
      {"\"hidden_size\": 5120", "\"hc_shifted\": false, \"hidden_size\": 5120",
       "text_config.hc_shifted"},
      {"\"hidden_size\": 5120", "\"hidden_size\": 5120, \"hidden_size\": 5120",
       "text_config.hidden_size"},
      {"\"hidden_size\": 5120", "\"index_k_source_layer_ids\": [2], \"hidden_size\": 5120",
       "text_config.index_k_source_layer_ids"},
  };
  for (const Case& c : cases) {
    const Result<ModelConfig> config = ParseModelConfig(Edited(Released(), c.from, c.to));
    ASSERT_FALSE(config) << c.to;
    EXPECT_EQ(config.error().field, c.field) << config.error().message;
    EXPECT_THAT(config.error().message, HasSubstr(c.field));
  }
}

TEST(ModelConfig, IntegralFloatsAndUnknownKeysAreAccepted) {
  EXPECT_EQ(ErrorOf(Edited(Released(), "\"hidden_size\": 5120",
                           "\"transformers_version\": \"5.0\", \"hidden_size\": 5120.0")),
            "no error");
}

TEST(ModelConfig, OtherModelsGetTheirOwnSentence) {
  const std::string v4 = ErrorOf(
      R"({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "hidden_size": 4096})");
  EXPECT_THAT(v4, HasSubstr("This is a DeepSeek-V4 checkpoint"));
  EXPECT_THAT(
      ErrorOf(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})"),
      AllOf(HasSubstr("another model"), HasSubstr("'llama'"), Not(HasSubstr("DeepSeek-V4 "))));
  EXPECT_THAT(ErrorOf("{}"), HasSubstr("neither model_type nor architectures"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf("{\"model_type\""), HasSubstr("not valid JSON"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("not valid JSON"));
}

TEST(LoadModelConfig, WrongDirectoriesAreExplained) {
  const auto message = [](const std::string& dir) { return LoadModelConfig(dir).error().message; };
  EXPECT_THAT(message("deepseek-ai/DeepSeek-V4.1-Flash"), HasSubstr("Hugging Face hub"));
  EXPECT_THAT(message("/no/such/directory"),
              AllOf(HasSubstr("does not exist"), Not(HasSubstr("hub"))));
  EXPECT_THAT(message("./no/such"), Not(HasSubstr("hub")));
  EXPECT_THAT(message(DI_TEST_DATA_DIR "/configs/released.json"), HasSubstr("is a file"));
  EXPECT_THAT(message(DI_TEST_DATA_DIR "/configs"), HasSubstr("no config.json"));
  EXPECT_THAT(message(""), HasSubstr("is empty"));
}

TEST(ModelConfig, ANumberThatDoesNotFitIsNamedWithItsKey) {
  const std::string released = Released();
  for (const char* number : {"1e999", "-1e999", "18446744073709551616", "-9223372036854775809"}) {
    const Result<ModelConfig> config = ParseModelConfig(
        Edited(released, "\"hidden_size\": 5120", std::string("\"hidden_size\": ") + number));
    ASSERT_FALSE(config);
    EXPECT_EQ(config.error().field, "hidden_size");
    EXPECT_THAT(config.error().message,
                AllOf(HasSubstr(std::string("the number '") + number + "' in line "),
                      HasSubstr("(key 'hidden_size')"), HasSubstr("does not fit")));
  }
  EXPECT_THAT(ErrorOf("{\"a\\\"1e999\": 1e-999,\n \"b\": [2, 007]}"),
              AllOf(HasSubstr("the number '007' in line 2 (key 'b')"), Not(HasSubstr("does not"))));
}

TEST(ModelConfig, BrokenJsonIsReportedInOneSentence) {
  for (const char* json : {"", "{", "{\"a\": }", "[1, 2", "{\"a\": \"\\q\"}", "{\"a\": 1-}"}) {
    EXPECT_THAT(ErrorOf(json), AllOf(HasSubstr("not valid"), Not(HasSubstr("..")))) << json;
  }
}

TEST(ModelConfig, AModelTypeThatIsNotATextIsShownAsItIs) {
  EXPECT_THAT(ErrorOf(R"({"model_type": 4, "architectures": ["DeepseekV41ForCausalLM"]})"),
              AllOf(HasSubstr("model_type is 4 "), Not(HasSubstr("''"))));
  EXPECT_THAT(ErrorOf(R"({"model_type": "deepseek_v41"})"), HasSubstr("architectures is missing"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "deepseek_v41", "architectures": [7]})"),
              HasSubstr("architectures is [7]"));
}

TEST(LoadModelConfig, AConfigThatCannotBeReadIsNotCalledMissing) {
  namespace fs = std::filesystem;
  const fs::path dir =
      fs::temp_directory_path() / fmt::format("deepinfer_config_access_{}", ::getpid());
  fs::create_directories(dir);
  const auto error = [](const fs::path& path) {
    const Result<ModelConfig> config = LoadModelConfig(path.string());
    return config ? "no error" : config.error().message;
  };
  ASSERT_EQ(::mkfifo((dir / "config.json").c_str(), 0600), 0);
  EXPECT_THAT(error(dir), HasSubstr("config.json' is not a regular file, it is a FIFO"));
  fs::remove(dir / "config.json");
  fs::create_symlink("config.json", dir / "config.json");
  EXPECT_THAT(error(dir), HasSubstr("Too many levels of symbolic links"));
  fs::create_symlink("loop", dir / "loop");
  EXPECT_THAT(error(dir / "loop"), HasSubstr("Too many levels of symbolic links"));
  // Root may search every directory, so that the check runs as somebody else.
  fs::permissions(dir, fs::perms::owner_read);
  const bool root = ::geteuid() == 0;
  ASSERT_TRUE(!root || ::seteuid(65534) == 0);
  const std::string denied = error(dir);
  ASSERT_TRUE(!root || ::seteuid(0) == 0);
  fs::permissions(dir, fs::perms::owner_all);
  fs::remove_all(dir);
  EXPECT_THAT(denied, HasSubstr("Permission denied"));
}

}  // namespace
}  // namespace deepinfer
