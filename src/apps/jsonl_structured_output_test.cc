// The names under which a line asks for a structured output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "apps/jsonl.h"

namespace deepinfer {
namespace {

using ::testing::HasSubstr;
using Kind = StructuredOutput::Kind;

Result<std::optional<StructuredOutput>> Parse(const std::string& fields,
                                              const SamplingParams& defaults = {}) {
  auto parsed = ParseGenerateLine(
      R"({"id": "a", "prompt": "x", "sampling_params": {)" + fields + "}}", defaults);
  if (!parsed.value.has_value()) return tl::unexpected<Error>(parsed.value.error());
  return parsed.value->sampling_params.structured_output;
}

StructuredOutput Good(const std::string& fields) {
  const Result<std::optional<StructuredOutput>> parsed = Parse(fields);
  EXPECT_TRUE(parsed.has_value()) << fields << ": " << parsed.error().message;
  EXPECT_TRUE(parsed.has_value() && parsed->has_value()) << fields;
  return parsed.has_value() ? parsed->value_or(StructuredOutput{}) : StructuredOutput{};
}

Error Bad(const std::string& fields) {
  const Result<std::optional<StructuredOutput>> parsed = Parse(fields);
  EXPECT_FALSE(parsed.has_value()) << fields;
  return parsed.has_value() ? Error{} : parsed.error();
}

TEST(StructuredOutputFields, EveryKindHasItsUsualName) {
  const StructuredOutput object =
      Good(R"("structured_outputs": {"json": {"type": "object", "x": [1, {"a": "}\""}]}})");
  EXPECT_EQ(object.kind, Kind::kJsonSchema);
  EXPECT_EQ(object.schema, R"({"type": "object", "x": [1, {"a": "}\""}]})");
  EXPECT_EQ(object.max_whitespace, 2);
  EXPECT_EQ(Good(R"("structured_outputs": {"json": "{\"type\": \"null\"}"})").schema,
            R"({"type": "null"})");
  const StructuredOutput regex = Good(R"("structured_outputs": {"regex": "[0-9]+é"})");
  EXPECT_EQ(regex.kind, Kind::kRegex);
  EXPECT_EQ(regex.schema, "[0-9]+é");
  const StructuredOutput choice = Good(R"("structured_outputs": {"choice": ["yes", "no"]})");
  EXPECT_EQ(choice.kind, Kind::kChoice);
  EXPECT_EQ(choice.choices, (std::vector<std::string>{"yes", "no"}));
  EXPECT_EQ(Good(R"("structured_outputs": {"grammar": "root ::= \"a\""})").kind, Kind::kEbnf);
  EXPECT_EQ(Good(R"("structured_outputs": {"json_object": true})").kind, Kind::kJsonObject);
  EXPECT_EQ(Good(R"("structured_outputs": {"structural_tag": {"type": "x"}})").kind,
            Kind::kStructuralTag);
  // What is null is not there.
  EXPECT_EQ(Good(R"("structured_outputs": {"json": null, "regex": "a", "json_object": false,
                                           "whitespace_pattern": null}, "guided_json": null)")
                .kind,
            Kind::kRegex);
}

TEST(StructuredOutputFields, TheOlderNamesMeanTheSame) {
  EXPECT_EQ(Good(R"("guided_json": {"type": "null"})").schema, R"({"type": "null"})");
  EXPECT_EQ(Good(R"("guided_regex": "a")").kind, Kind::kRegex);
  EXPECT_EQ(Good(R"("guided_choice": ["a"])").choices, std::vector<std::string>{"a"});
  EXPECT_EQ(Good(R"("guided_grammar": "root ::= \"a\"")").kind, Kind::kEbnf);
  EXPECT_EQ(Good(R"("guided_json_object": true)").kind, Kind::kJsonObject);
  EXPECT_EQ(Good(R"("guided_whitespace_pattern": "", "guided_json": "{}")").max_whitespace, 0);
}

TEST(StructuredOutputFields, ThePublishedEnginesFieldHasItsMeaning) {
  const StructuredOutput json = Good(
      R"("so_args": {"schema": "{}", "schema_type": "json", "trigger_token_ids": [5, 6], "bound_token_id": 7})");
  EXPECT_EQ(json.kind, Kind::kJsonSchema);
  EXPECT_EQ(json.schema, "{}");
  EXPECT_EQ(json.trigger_token_ids, (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(json.bound_token_id, 7);
  EXPECT_EQ(Good(R"("so_args": {"schema_type": "regex", "schema": "a"})").kind, Kind::kRegex);
  EXPECT_EQ(Good(R"("so_args": {"schema_type": "ebnf", "schema": "a"})").kind, Kind::kEbnf);
  EXPECT_EQ(Good(R"("so_args": {"schema_type": "choice", "schema": ["a", "b"]})").choices.size(),
            2u);
  EXPECT_EQ(Good(R"("so_args": {"schema_type": "json_object"})").kind, Kind::kJsonObject);
  EXPECT_EQ(Good(R"("so_args": {"schema_type": "structural_tag", "schema": {"a": 1}})").schema,
            R"({"a": 1})");
  const struct {
    const char* fields;
    const char* field;
    const char* says;
  } cases[] = {
      {R"({"schema_type": "json"})", "schema", "is missing"},
      {R"({"schema": "{}"})", "schema_type", "is missing"},
      {R"({"schema_type": "xml", "schema": "{}"})", "schema_type", "'xml'; allowed are json"},
      {R"({"schema_type": "json", "schema": ""})", "schema", "is empty"},
      {R"({"schema_type": "json", "schema": ["a"]})", "schema", "only choice has one"},
      {R"({"schema_type": "json", "schema": 5})", "schema", "an object, true, false, or a string"},
      {R"({"schema_type": "regex", "schema": {"a": 1}})", "schema", "allowed is a text"},
      {R"({"schema_type": "choice", "schema": "a"})", "schema", "a list of texts"},
      {R"({"schema_type": "choice", "schema": []})", "schema", "a list of texts"},
      {R"({"schema_type": "choice", "schema": ["a", ""]})", "schema[1]", "is empty"},
      {R"({"schema_type": "json_object", "schema": "{}"})", "schema", "needs none"},
      {R"({"schema_type": "json", "schema": "{}", "serialized": "x"})", "serialized",
       "is not supported"},
      {R"({"schema_type": "json", "schema": "{}", "bound_token_ids": [1]})", "bound_token_ids",
       "is not supported"},
      {R"({"schema_type": "json", "schema": "{}", "bound_token_id": 1})", "bound_token_id",
       "without sampling_params.so_args.trigger_token_ids"},
      {R"({"schema_type": "json", "schema": "{}", "extra": 1})", "extra", "not a known field"},
  };
  for (const auto& c : cases) {
    const Error error = Bad(std::string(R"("so_args": )") + c.fields);
    EXPECT_EQ(error.field, std::string("sampling_params.so_args.") + c.field) << error.message;
    EXPECT_THAT(error.message, HasSubstr(c.says));
  }
}

TEST(StructuredOutputFields, AnyTwoKindsAreAnErrorThatNamesBoth) {
  const std::string inside = "sampling_params.structured_outputs";
  struct Field {
    std::string text;
    std::string name;
    std::string outer;  // fields of one object go into it together
  };
  std::vector<Field> fields;
  for (const auto& [name, value] :
       {std::pair{"json", R"("{}")"}, std::pair{"regex", R"("a")"}, std::pair{"choice", R"(["a"])"},
        std::pair{"grammar", R"("root")"}, std::pair{"json_object", "true"},
        std::pair{"structural_tag", R"("{}")"}}) {
    const std::string text = std::string("\"") + name + "\": " + value;
    fields.push_back({text, inside + "." + name, "structured_outputs"});
    if (std::string(name) != "structural_tag") {
      fields.push_back(
          {"\"guided_" + text.substr(1), std::string("sampling_params.guided_") + name, ""});
    }
  }
  fields.push_back(
      {R"("so_args": {"schema_type": "json", "schema": "{}"})", "sampling_params.so_args", ""});
  const auto wrapped = [](const Field& field) {
    return field.outer.empty() ? field.text : "\"" + field.outer + "\": {" + field.text + "}";
  };
  int pairs = 0;
  for (const Field& a : fields) {
    for (const Field& b : fields) {
      if (&a == &b) continue;
      const bool together = !a.outer.empty() && a.outer == b.outer;
      const std::string line = together ? "\"" + a.outer + "\": {" + a.text + ", " + b.text + "}"
                                        : wrapped(a) + ", " + wrapped(b);
      const Error error = Bad(line);
      EXPECT_THAT(error.message, HasSubstr(a.name + " and " + b.name + " both say")) << line;
      EXPECT_EQ(error.field, b.name);
      ++pairs;
    }
  }
  EXPECT_EQ(pairs, 12 * 11);
}

TEST(StructuredOutputFields, EmptyOnesAreErrors) {
  for (const char* name : {"json", "regex", "grammar", "structural_tag"}) {
    const Error error = Bad(std::string(R"("structured_outputs": {")") + name + R"(": ""})");
    EXPECT_EQ(error.field, std::string("sampling_params.structured_outputs.") + name);
    EXPECT_THAT(error.message, HasSubstr("is empty"));
  }
  for (const char* name : {"guided_json", "guided_regex", "guided_grammar"}) {
    const Error error = Bad(std::string("\"") + name + R"(": "")");
    EXPECT_EQ(error.field, std::string("sampling_params.") + name);
  }
  EXPECT_EQ(Bad(R"("guided_choice": [])").field, "sampling_params.guided_choice");
  EXPECT_EQ(Bad(R"("guided_choice": ["a", ""])").field, "sampling_params.guided_choice[1]");
  EXPECT_THAT(Bad(R"("structured_outputs": {})").message, HasSubstr("one is needed"));
  EXPECT_THAT(Bad(R"("structured_outputs": {"json_object": false})").message,
              HasSubstr("one is needed"));
  EXPECT_THAT(Bad(R"("structured_outputs": {"json": 1})").message,
              HasSubstr("an object, true, false, or a string"));
  EXPECT_THAT(Bad(R"("guided_backend": "x")").message, HasSubstr("not a known field"));
}

TEST(StructuredOutputFields, WhiteSpaceIsBoundedOrRefusedByName) {
  const auto bound = [](const std::string& fields) {
    return Good(R"("structured_outputs": {"json": "{}", )" + fields + "}").max_whitespace;
  };
  EXPECT_EQ(bound(R"("whitespace_pattern": "")"), 0);
  EXPECT_EQ(bound(R"("whitespace_pattern": "[ ]?")"), 1);
  EXPECT_EQ(bound(R"("whitespace_pattern": " ?")"), 1);
  EXPECT_EQ(bound(R"("whitespace_pattern": "\\s{0,3}")"), 3);
  EXPECT_EQ(bound(R"("whitespace_pattern": "[ \\n\t]{0,64}")"), 64);
  EXPECT_EQ(bound(R"("disable_any_whitespace": true)"), 0);
  EXPECT_EQ(bound(R"("disable_any_whitespace": false)"), 2);
  EXPECT_EQ(bound(R"("max_whitespace": 5)"), 5);
  EXPECT_EQ(bound(R"("max_whitespace": 5, "disable_any_whitespace": false)"), 5);
  for (const char* pattern : {"[ ]*", "\\\\s+", " ", "[ ]{1,2}", "[ ]{0,65}", "[a]?", "[]?", "[ ",
                              " {0,", " {0,}", "x", " ??", "[ ]{0,-1}", "\\\\s*"}) {
    const Error error =
        Bad(std::string(R"("guided_json": "{}", "guided_whitespace_pattern": ")") + pattern + "\"");
    EXPECT_EQ(error.field, "sampling_params.guided_whitespace_pattern") << pattern;
    EXPECT_THAT(error.message, HasSubstr("max_whitespace says the same"));
  }
  EXPECT_THAT(Bad(R"("guided_whitespace_pattern": "")").message, HasSubstr("without a schema"));
  EXPECT_THAT(Bad(R"("structured_outputs": {"regex": "a", "max_whitespace": 0})").message,
              HasSubstr("no white space between JSON tokens"));
  EXPECT_THAT(Bad(R"("structured_outputs": {"json": "{}", "max_whitespace": 65})").message,
              HasSubstr("0 ... 64"));
  EXPECT_THAT(Bad(R"("structured_outputs": {"json": "{}", "max_whitespace": 0,
                                            "whitespace_pattern": ""})")
                  .message,
              HasSubstr("both say how much"));
}

TEST(StructuredOutputFields, ALineReplacesOrClearsTheDefault) {
  const SamplingParams defaults =
      *ParseSamplingParams(R"({"structured_outputs": {"regex": "a", "trigger_token_ids": [3]}})");
  EXPECT_EQ((*Parse("", defaults))->schema, "a");
  EXPECT_EQ((*Parse("", defaults))->trigger_token_ids, std::vector<int64_t>{3});
  const std::optional<StructuredOutput> replaced = *Parse(R"("guided_json": "{}")", defaults);
  EXPECT_EQ(replaced->kind, Kind::kJsonSchema);
  EXPECT_TRUE(replaced->trigger_token_ids.empty());
  EXPECT_FALSE(Parse(R"("structured_outputs": null)", defaults)->has_value());
  EXPECT_FALSE(Parse(R"("so_args": null)", defaults)->has_value());
}

TEST(StructuredOutputFields, BrokenSchemasOfALineAreErrorsOrText) {
  EXPECT_FALSE(Parse(R"("guided_json": {"a": )").has_value());
  EXPECT_FALSE(Parse(R"("guided_json": {"a": [1, 2})").has_value());
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += R"({"a":)";
  EXPECT_FALSE(Parse(R"("guided_json": )" + deep).has_value());
}

}  // namespace
}  // namespace deepinfer
