#include "grammar/tool_call_grammar.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "base/json_value.h"
#include "grammar/grammar.h"
#include "grammar/grammar_test_util.h"
#include "sample/triggered_constraint.h"
#include "text/output_parser.h"
#include "text/text_test_data.h"
#include "text/tool_call_block.h"

namespace deepinfer {
namespace {

constexpr std::string_view kMarker = "｜DSML｜";
using Verdict = TokenConstraint::Verdict;

// ---- A vocabulary with its compiler ------------------------------------------------------------
struct World {
  const Tokenizer* tokenizer;
  int32_t marker;
  int32_t end;
  int32_t slash;
  int64_t vocab_size;
  std::vector<std::string> bytes;
  std::vector<int32_t> closers;  // tokens that bring a text nearer to its end
  std::unique_ptr<GrammarCompiler> compiler;
};

std::unique_ptr<World> MakeWorld(const Tokenizer& tokenizer) {
  auto world = std::make_unique<World>();
  world->tokenizer = &tokenizer;
  world->marker = tokenizer.IdOf(kMarker).value();
  world->end = tokenizer.eos_id().value();
  world->vocab_size = tokenizer.vocab_size() + 5;
  GrammarVocabulary vocabulary;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string text(tokenizer.TokenBytes(id));
    const bool is_text = tokenizer.IdOf(text) != id && !tokenizer.is_special(id);
    vocabulary.token_bytes.push_back(is_text ? text : "");
    for (const std::string_view closer : {"</", "<", "/", "\"", "}", "]"}) {
      if (is_text && text == closer) world->closers.push_back(id);
      if (is_text && text == "/") world->slash = id;
    }
  }
  world->bytes = vocabulary.token_bytes;
  vocabulary.end_ids = {world->end};
  vocabulary.vocab_size = world->vocab_size;
  vocabulary.call_marker_id = world->marker;
  world->compiler = std::make_unique<GrammarCompiler>(std::move(vocabulary), GrammarLimits{});
  return world;
}

const World& SmallWorld() {
  static const std::unique_ptr<World> world = MakeWorld(SmallTokenizer());
  return *world;
}

// Null without the published tokenizer.
const World* PublicWorld() {
  static const std::unique_ptr<World> world =
      PublishedTokenizer() == nullptr ? nullptr : MakeWorld(*PublishedTokenizer());
  return world.get();
}

using Compiled = Result<std::shared_ptr<const CompiledGrammar>>;

Compiled CompileTools(const World& world, std::string_view tools, bool inside_block = true,
                      ChatDialect dialect = ChatDialect::kV41) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kToolCalls;
  spec.text = tools;
  spec.tool_calls = {.dialect = dialect, .inside_block = inside_block};
  return world.compiler->Compile(spec);
}

std::string ToolJson(std::string_view name, std::string_view parameters) {
  JsonValue function = JsonValue::Object{};
  function.Set("name", std::string(name));
  function.Set("description", JsonValue());
  function.Set("parameters", JsonValue::Parse(parameters).value());
  function.Set("strict", JsonValue());
  JsonValue tool = JsonValue::Object{};
  tool.Set("type", "function");
  tool.Set("function", std::move(function));
  return tool.DumpCompact();
}
std::string OneTool(std::string_view parameters) {
  return "[" + ToolJson("f", parameters) + "]";
}
// Of an object schema with one parameter "x", which is required.
std::string OneParameter(std::string_view schema) {
  return OneTool(
      fmt::format(R"({{"type":"object","properties":{{"x":{}}},"required":["x"]}})", schema));
}

// ---- A validator that knows nothing of grammars ------------------------------------------------
bool Same(const JsonValue& a, const JsonValue& b) {
  return a.is_number() && b.is_number() ? a.AsDouble() == b.AsDouble() : a == b;
}

bool HasType(const JsonValue& value, std::string_view type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.if_bool() != nullptr;
  if (type == "string") return value.if_string() != nullptr;
  if (type == "array") return value.if_array() != nullptr;
  if (type == "object") return value.if_object() != nullptr;
  if (type == "number") return value.is_number();
  return value.is_number() && std::floor(value.AsDouble()) == value.AsDouble();
}

size_t CharactersOf(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool IsValid(const JsonValue& value, const JsonValue& schema, const JsonValue& root) {
  if (const bool* boolean = schema.if_bool()) return *boolean;
  const auto valid = [&](const JsonValue& inner, const JsonValue& by) {
    return IsValid(inner, by, root);
  };
  for (const auto& [key, limit] : *schema.if_object()) {
    if (key == "$ref") {
      const std::string name = limit.if_string()->substr(std::string("#/$defs/").size());
      if (!valid(value, *root.Find("$defs")->Find(name))) return false;
    } else if (key == "type") {
      const JsonValue::Array types =
          limit.if_array() == nullptr ? JsonValue::Array{limit} : *limit.if_array();
      if (std::none_of(types.begin(), types.end(),
                       [&](const JsonValue& type) { return HasType(value, *type.if_string()); })) {
        return false;
      }
    } else if (key == "enum" || key == "const") {
      const JsonValue::Array values = key == "const" ? JsonValue::Array{limit} : *limit.if_array();
      if (std::none_of(values.begin(), values.end(),
                       [&](const JsonValue& one) { return Same(value, one); })) {
        return false;
      }
    } else if (key == "anyOf" || key == "oneOf" || key == "allOf") {
      const auto count = std::count_if(limit.if_array()->begin(), limit.if_array()->end(),
                                       [&](const JsonValue& one) { return valid(value, one); });
      if (key == "anyOf"   ? count == 0
          : key == "oneOf" ? count != 1
                           : count < std::ssize(*limit.if_array())) {
        return false;
      }
    } else if (value.is_number()) {
      const double number = value.AsDouble();
      if (key == "minimum" && number < limit.AsDouble()) return false;
      if (key == "maximum" && number > limit.AsDouble()) return false;
      if (key == "exclusiveMinimum" && number <= limit.AsDouble()) return false;
      if (key == "multipleOf" && std::fmod(number, limit.AsDouble()) != 0) return false;
    } else if (const std::string* text = value.if_string()) {
      if (key == "minLength" && CharactersOf(*text) < limit.AsDouble()) return false;
      if (key == "maxLength" && CharactersOf(*text) > limit.AsDouble()) return false;
      if (key == "pattern" && !std::regex_search(*text, std::regex(*limit.if_string()))) {
        return false;
      }
    } else if (const JsonValue::Array* array = value.if_array()) {
      if (key == "minItems" && std::ssize(*array) < limit.AsDouble()) return false;
      if (key == "maxItems" && std::ssize(*array) > limit.AsDouble()) return false;
      if (key == "items" && !std::all_of(array->begin(), array->end(), [&](const JsonValue& item) {
            return valid(item, limit);
          })) {
        return false;
      }
    } else if (const JsonValue::Object* object = value.if_object()) {
      if (key == "minProperties" && std::ssize(*object) < limit.AsDouble()) return false;
      if (key == "maxProperties" && std::ssize(*object) > limit.AsDouble()) return false;
      if (key == "required") {
        for (const JsonValue& name : *limit.if_array()) {
          if (value.Find(*name.if_string()) == nullptr) return false;
        }
      }
      if (key != "properties" && key != "additionalProperties") continue;
      const JsonValue* declared = schema.Find("properties");
      for (const auto& [name, member] : *object) {
        const JsonValue* named = declared == nullptr ? nullptr : declared->Find(name);
        if (key == "properties" && named != nullptr && !valid(member, *named)) return false;
        if (key == "additionalProperties" && named == nullptr && !valid(member, limit)) {
          return false;
        }
      }
    }
  }
  return true;
}

// ---- Tools -------------------------------------------------------------------------------------
struct ToolSet {
  std::string name;
  std::vector<std::pair<std::string, std::string>> tools;  // name, parameters

  std::string Json() const {
    std::string out = "[";
    for (const auto& [tool, parameters] : tools) {
      if (out.size() > 1) out += ",";
      out += ToolJson(tool, parameters);
    }
    return out + "]";
  }
};

std::string ObjectOf(std::string_view properties, std::string_view rest = "") {
  return fmt::format(R"({{"type":"object","properties":{{{}}}{}}})", properties, rest);
}

std::vector<ToolSet> ToolSets() {
  const std::string weather = ObjectOf(
      R"("city":{"type":"string"},"unit":{"enum":["celsius","fahrenheit"]},"days":{"type":"integer","minimum":1,"maximum":14})",
      R"(,"required":["city"])");
  std::vector<ToolSet> sets = {
      {"no parameters named", {{"ping", "{}"}}},
      {"null parameters", {{"ping", "null"}}},
      {"an object without properties", {{"ping", ObjectOf("")}}},
      {"closed without properties", {{"ping", ObjectOf("", R"(,"additionalProperties":false)")}}},
      {"free parameters", {{"free", R"({"type":"object","additionalProperties":true})"}}},
      {"numbers of any name",
       {{"free", R"({"type":"object","additionalProperties":{"type":"number"}})"}}},
      {"a weather tool", {{"get_weather", weather}}},
      {"one optional string", {{"f", ObjectOf(R"("s":{"type":"string"})")}}},
      {"all optional",
       {{"f", ObjectOf(R"("a":{"type":"string"},"b":{"type":"integer"},"c":{"type":"boolean"})")}}},
      {"all required",
       {{"f", ObjectOf(R"("a":{"type":"string"},"b":{"type":"integer"},"c":{"type":"boolean"})",
                       R"(,"required":["a","b","c"],"additionalProperties":false)")}}},
      {"required in the middle",
       {{"f", ObjectOf(R"("a":{"type":"null"},"b":{"type":"integer"},"c":{"type":"null"})",
                       R"(,"required":["b"])")}}},
      {"required without a schema", {{"f", R"({"type":"object","required":["q"]})"}}},
      {"open beside named",
       {{"f", ObjectOf(R"("ab":{"type":"integer"},"a":{"type":"boolean"})",
                       R"(,"required":["ab"],"additionalProperties":{"type":"string"})")}}},
      {"open beside nothing taken",
       {{"f", ObjectOf(R"("a":{"type":"boolean"})", R"(,"additionalProperties":true)")}}},
      {"bounded count",
       {{"f", ObjectOf(R"("a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"})",
                       R"(,"minProperties":1,"maxProperties":2)")}}},
      {"bounded free count",
       {{"f", R"({"type":"object","additionalProperties":{"type":"null"},"maxProperties":2})"}}},
      {"nested objects",
       {{"f",
         ObjectOf(
             R"("o":{"type":"object","properties":{"p":{"type":"object","properties":{"q":{"type":"string"}},"required":["q"]},"r":{"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":3}},"required":["p"]})",
             R"(,"required":["o"])")}}},
      {"any object", {{"f", ObjectOf(R"("o":{"type":"object"})", R"(,"required":["o"])")}}},
      {"any value", {{"f", ObjectOf(R"("v":{})", R"(,"required":["v"])")}}},
      {"a list of strings",
       {{"f", ObjectOf(R"("l":{"type":"array","items":{"type":"string"},"maxItems":3})",
                       R"(,"required":["l"])")}}},
      {"a string or null",
       {{"f", ObjectOf(R"("v":{"type":["string","null"]})", R"(,"required":["v"])")}}},
      {"a string or a number",
       {{"f", ObjectOf(R"("v":{"anyOf":[{"type":"string","maxLength":3},{"type":"number"}]})",
                       R"(,"required":["v"])")}}},
      {"one of two",
       {{"f",
         ObjectOf(
             R"("v":{"oneOf":[{"type":"string"},{"type":"object","properties":{"k":{"type":"integer"}},"required":["k"]}]})",
             R"(,"required":["v"])")}}},
      {"listed strings",
       {{"f", ObjectOf(R"("v":{"type":"string","enum":["a","b c","<","\"quoted\"","多"]})",
                       R"(,"required":["v"])")}}},
      {"listed values of many types",
       {{"f", ObjectOf(R"("v":{"enum":["a",1,2.5,null,true,[1,"x"],{"k":"v"}]})",
                       R"(,"required":["v"])")}}},
      {"constants",
       {{"f", ObjectOf(R"("s":{"const":"only"},"n":{"const":42})", R"(,"required":["s","n"])")}}},
      {"a pattern",
       {{"f", ObjectOf(R"("s":{"type":"string","pattern":"^[a-z]{2,4}-[0-9]+$"})",
                       R"(,"required":["s"])")}}},
      {"a pattern found anywhere",
       {{"f", ObjectOf(R"("s":{"type":"string","pattern":"/]*/"})", R"(,"required":["s"])")}}},
      {"lengths",
       {{"f",
         ObjectOf(
             R"("a":{"type":"string","minLength":2},"b":{"type":"string","minLength":1,"maxLength":5},"c":{"type":"string","maxLength":0})",
             R"(,"required":["a","b","c"])")}}},
      {"a format",
       {{"f", ObjectOf(R"("d":{"type":"string","format":"date"})", R"(,"required":["d"])")}}},
      {"ranges",
       {{"f",
         ObjectOf(
             R"("i":{"type":"integer","minimum":-3,"maximum":250},"x":{"type":"number","exclusiveMinimum":0,"maximum":1.5},"m":{"type":"integer","multipleOf":5,"minimum":-10,"maximum":1000})",
             R"(,"required":["i","x","m"])")}}},
      {"booleans", {{"f", ObjectOf(R"("b":{"type":"boolean"})", R"(,"required":["b"])")}}},
      {"references",
       {{"f",
         R"({"type":"object","$defs":{"t":{"type":"object","properties":{"n":{"type":"integer"},"next":{"$ref":"#/$defs/t"}},"required":["n"]}},"properties":{"list":{"$ref":"#/$defs/t"}},"required":["list"]})"}}},
      {"a referenced object",
       {{"f",
         R"({"$ref":"#/$defs/p","$defs":{"p":{"type":"object","properties":{"s":{"type":"string"}},"required":["s"]}}})"}}},
      {"merged branches",
       {{"f",
         R"({"allOf":[{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]},{"properties":{"b":{"type":"integer"}},"required":["b"]}]})"}}},
      {"alternatives of parameters",
       {{"f",
         R"({"type":"object","anyOf":[{"properties":{"id":{"type":"integer"}},"required":["id"]},{"properties":{"name":{"type":"string"}},"required":["name"]}]})"}}},
      {"names beyond ASCII",
       {{"获取天气", ObjectOf(R"("城市":{"type":"string"},"größe":{"type":"number"})",
                              R"(,"required":["城市"])")}}},
      {"names with spaces and signs",
       {{"do it!", ObjectOf(R"("two words":{"type":"string"},"a>b":{"type":"integer"},
         "x=y' \\":{"type":"boolean"},"":{"type":"null"})",
                            R"(,"required":["two words","a>b","x=y' \\",""])")}}},
      {"names that begin alike",
       {{"get", weather},
        {"get_weather", weather},
        {"get_weather_now", ObjectOf(R"("a":{"type":"string"},"aa":{"type":"string"})")}}},
      {"several tools",
       {{"ping", "{}"},
        {"get_weather", weather},
        {"write_file", ObjectOf(R"("path":{"type":"string"},"content":{"type":"string"})",
                                R"(,"required":["path","content"],"additionalProperties":false)")},
        {"calc", ObjectOf(R"("numbers":{"type":"array","items":{"type":"number"}})",
                          R"(,"required":["numbers"])")}}},
  };
  ToolSet many{"many tools", {}};
  for (int i = 0; i < 40; ++i) many.tools.emplace_back(fmt::format("tool_{}", i), weather);
  sets.push_back(std::move(many));
  return sets;
}

// ---- Random texts of a grammar -----------------------------------------------------------------
std::vector<int32_t> Allowed(const std::vector<uint32_t>& mask) {
  std::vector<int32_t> ids;
  for (size_t word = 0; word < mask.size(); ++word) {
    for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      ids.push_back(static_cast<int32_t>(word * 32) + __builtin_ctz(bits));
    }
  }
  return ids;
}

// Tokens with the end token; empty when no end was reached.
std::vector<int32_t> Walk(const World& world, TokenConstraint* constraint, std::mt19937* random) {
  constexpr size_t kCalm = 100;
  constexpr size_t kLongest = 4'000;
  std::vector<uint32_t> mask = NewMask(world.vocab_size);
  std::vector<int32_t> ids;
  while (ids.size() < kLongest) {
    if (constraint->FillMask(mask) != Verdict::kMasked) {
      ADD_FAILURE() << "no token is allowed behind " << world.tokenizer->Decode(ids);
      return {};
    }
    std::vector<int32_t> closing;
    for (const int32_t id : world.closers) {
      if (MaskHas(mask, id)) closing.push_back(id);
    }
    // Rather "</" than the next tag, and the marker when it closes something.
    const bool opened = !ids.empty() && world.bytes[static_cast<size_t>(ids.back())] == "<";
    if (MaskHas(mask, world.marker)) {
      closing = {opened && MaskHas(mask, world.slash) ? world.slash : world.marker};
    }
    if (MaskHas(mask, world.end)) closing = {world.end};
    const bool close = !closing.empty() && (ids.size() > kCalm || (*random)() % 3 == 0);
    const std::vector<int32_t> from = close ? closing : Allowed(mask);
    const int32_t id = from[(*random)() % from.size()];
    if (!constraint->Accept(id).has_value()) {
      ADD_FAILURE() << "allowed, but not accepted: " << id;
      return {};
    }
    ids.push_back(id);
    // What the mask does not allow is not accepted either, nor is it after going back.
    if ((*random)() % 8 == 0) {
      constraint->Rollback(1);
      const auto other =
          static_cast<int32_t>((*random)() % static_cast<uint64_t>(world.vocab_size));
      if (!MaskHas(mask, other)) {
        EXPECT_FALSE(constraint->Accept(other).has_value());
      }
      EXPECT_TRUE(constraint->Accept(id).has_value());
    }
    if (id == world.end) return ids;
  }
  ADD_FAILURE() << "no end: " << world.tokenizer->Decode(ids);
  return {};
}

struct Parsed {
  std::vector<ToolCall> calls;
  std::string content;
  OutputEnd end = OutputEnd::kStop;
};

Parsed Finished(OutputParser* parser, const std::vector<OutputEvent>& begun) {
  std::vector<OutputEvent> events = begun;
  Parsed parsed;
  parsed.end = parser->Finish(OutputEnd::kStop, &events);
  MessageBuilder message;
  for (const OutputEvent& event : events) message.Add(event);
  parsed.calls = message.message().tool_calls;
  parsed.content = message.message().content;
  return parsed;
}

Parsed ParseTokens(const World& world, const std::vector<int32_t>& ids,
                   OutputParserOptions::Start start) {
  OutputParser parser({.start = start, .tools = true, .stop = {}}, world.tokenizer);
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) {
    if (id != world.end) parser.PushToken(id, &events);
  }
  return Finished(&parser, events);
}

Parsed ParseBytes(std::string_view text, OutputParserOptions::Policy policy) {
  OutputParser parser({.start = OutputParserOptions::Start::kToolCalls,
                       .tools = true,
                       .stop = {},
                       .policy = policy});
  std::vector<OutputEvent> events;
  parser.Push(text, &events);
  return Finished(&parser, events);
}

void ExpectValid(const ToolSet& set, const Parsed& parsed, const std::string& text) {
  SCOPED_TRACE(text);
  EXPECT_EQ(parsed.end, OutputEnd::kToolCalls);
  EXPECT_EQ(parsed.content, "");
  ASSERT_FALSE(parsed.calls.empty());
  for (const ToolCall& call : parsed.calls) {
    const auto tool = std::find_if(set.tools.begin(), set.tools.end(),
                                   [&](const auto& one) { return one.first == call.name; });
    ASSERT_NE(tool, set.tools.end()) << call.name;
    const Result<JsonValue> arguments = JsonValue::Parse(call.arguments);
    ASSERT_TRUE(arguments.has_value()) << call.arguments;
    ASSERT_NE(arguments->if_object(), nullptr) << call.arguments;
    const JsonValue schema = JsonValue::Parse(tool->second).value();
    if (call.name == "ping") {  // of all sets, the one that has no parameters
      EXPECT_EQ(call.arguments, "{}");
      continue;
    }
    EXPECT_TRUE(IsValid(*arguments, schema, schema)) << call.arguments << "\n" << tool->second;
  }
}

// Whether the name of an argument is empty or needs care: a space or a backslash.
bool HasOddName(const ToolCall& call) {
  const JsonValue arguments = JsonValue::Parse(call.arguments).value();
  return std::any_of(arguments.if_object()->begin(), arguments.if_object()->end(),
                     [](const JsonValue::Member& member) {
                       return member.first.empty() ||
                              member.first.find_first_of(" \\") != std::string::npos;
                     });
}

// Over every set of tools, or the first of each `stride`.
void WalkAll(const World& world, int walks, size_t stride) {
  std::mt19937 random(7);
  std::map<std::string, int> calls;
  const std::vector<ToolSet> sets = ToolSets();
  for (size_t i = 0; i < sets.size(); i += stride) {
    const ToolSet& set = sets[i];
    SCOPED_TRACE(set.name);
    for (const bool inside_block : {true, false}) {
      const Compiled grammar = CompileTools(world, set.Json(), inside_block);
      ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
      for (int walk = 0; walk < walks; ++walk) {
        std::vector<int32_t> ids;
        if (inside_block) {
          ids = Walk(world, (*grammar)->NewMatcher(2).get(), &random);
        } else {
          const auto constraint =
              MakeTriggeredConstraint({.trigger_ids = {world.marker}, .bound_id = std::nullopt},
                                      (*grammar)->NewMatcher(2), world.vocab_size);
          const std::vector<int32_t> before = world.tokenizer->Encode("<").value();
          ASSERT_EQ(before.size(), 1U);
          ids = {before[0], world.marker};
          for (const int32_t id : ids) ASSERT_TRUE(constraint->Accept(id).has_value());
          const std::vector<int32_t> rest = Walk(world, constraint.get(), &random);
          ids.insert(ids.end(), rest.begin(), rest.end());
        }
        const std::string text = world.tokenizer->Decode(ids);
        const Parsed parsed = ParseTokens(world, ids,
                                          inside_block ? OutputParserOptions::Start::kToolCalls
                                                       : OutputParserOptions::Start::kContent);
        ExpectValid(set, parsed, text);
        calls[set.name] += static_cast<int>(parsed.calls.size());
        if (testing::Test::HasFailure()) return;
        // Readers of bytes see the same, unless JSON spells the marker or a name is one that they
        // read as the vendor's toolkit does.
        const bool spelled =
            std::any_of(parsed.calls.begin(), parsed.calls.end(), [](const ToolCall& call) {
              return call.arguments.find("DSML") != std::string::npos || HasOddName(call);
            });
        if (!inside_block || spelled) continue;
        std::string bytes;
        for (const int32_t id : ids) {
          if (id != world.end) bytes += world.tokenizer->TokenBytes(id);
        }
        const Parsed by_bytes = ParseBytes(bytes, OutputParserOptions::Policy::kRecommended);
        ASSERT_EQ(by_bytes.calls.size(), parsed.calls.size()) << text;
        for (size_t call = 0; call < parsed.calls.size(); ++call) {
          EXPECT_EQ(by_bytes.calls[call].arguments, parsed.calls[call].arguments) << text;
        }
      }
    }
  }
  for (const auto& [name, count] : calls) EXPECT_GE(count, 2 * walks) << name;
}

TEST(ToolCallGrammar, EveryRandomTextIsCallsWithValidArguments) {
  WalkAll(SmallWorld(), 12, 1);
}

TEST(ToolCallGrammar, EveryRandomTextOfThePublishedVocabularyIsCallsWithValidArguments) {
  if (PublicWorld() == nullptr) GTEST_SKIP() << "the published tokenizer is not here";
  WalkAll(*PublicWorld(), 2, 3);
}

// ---- Texts that are allowed or not -------------------------------------------------------------
// `text` as tokens: where it has "@", the marker's own id; the rest byte by byte, or as the
// tokenizer cuts it.
std::vector<int32_t> Ids(const World& world, std::string_view text, bool bytes) {
  std::vector<int32_t> ids;
  size_t at = 0;
  while (at < text.size()) {
    if (text[at] == '@') {
      ids.push_back(world.marker);
      ++at;
      continue;
    }
    const size_t end = std::min(text.find('@', at), text.size());
    if (bytes) {
      for (; at < end; ++at) {
        const auto found =
            std::find(world.bytes.begin(), world.bytes.end(), std::string(1, text[at]));
        ids.push_back(static_cast<int32_t>(found - world.bytes.begin()));
      }
    } else {
      const std::vector<int32_t> some =
          world.tokenizer->Encode(text.substr(at, end - at), {.parse_special = false}).value();
      ids.insert(ids.end(), some.begin(), some.end());
    }
    at = end;
  }
  return ids;
}

bool AllowsIds(const World& world, const CompiledGrammar& grammar, std::vector<int32_t> ids) {
  const auto matcher = grammar.NewMatcher(4);
  std::vector<uint32_t> mask = NewMask(world.vocab_size);
  ids.push_back(world.end);
  for (const int32_t id : ids) {
    if (matcher->FillMask(mask) != Verdict::kMasked) return false;
    const bool allowed = MaskHas(mask, id);
    EXPECT_EQ(matcher->Accept(id).has_value(), allowed) << id;
    if (!allowed) return false;
  }
  return true;
}

bool AllowsCalls(std::string_view tools, std::string_view text, bool inside_block = true,
                 ChatDialect dialect = ChatDialect::kV41) {
  const World& world = SmallWorld();
  const Compiled grammar = CompileTools(world, tools, inside_block, dialect);
  if (!grammar.has_value()) {
    ADD_FAILURE() << grammar.error().message;
    return false;
  }
  const bool bytes = AllowsIds(world, **grammar, Ids(world, text, true));
  EXPECT_EQ(bytes, AllowsIds(world, **grammar, Ids(world, text, false))) << text;
  return bytes;
}

// Whether "x" may be this, with its type.
bool AllowsValue(std::string_view schema, std::string_view type, std::string_view value) {
  return AllowsCalls(OneParameter(schema),
                     fmt::format("<@ invoke name=\"f\">\n<@ parameter name=\"x\" string=\"{}\">{}"
                                 "</@ parameter>\n</@ invoke>\n</@ calls>",
                                 type, value));
}

TEST(ToolCallGrammar, MarkersAreTheTokenAndNothingThatSpellsIt) {
  const std::string tools = OneTool("{}");
  EXPECT_TRUE(AllowsCalls(tools, "<@ invoke name=\"f\">\n</@ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<｜DSML｜ invoke name=\"f\">\n</@ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<@ invoke name=\"f\">\n</｜DSML｜ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<@ invoke name=\"f\">\n</@ invoke>\n</｜DSML｜ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<@@ invoke name=\"f\">\n</@ invoke>\n</@ calls>"));
}

TEST(ToolCallGrammar, TheMarkerStandsInNoNameAndNoValue) {
  EXPECT_FALSE(AllowsValue(R"({"type":"string"})", "true", "a@b"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string"})", "true", "@"));
  EXPECT_FALSE(AllowsValue(R"({"type":"array"})", "false", "[\"@\"]"));
  EXPECT_FALSE(AllowsValue("{}", "false", "{\"@\":1}"));
  EXPECT_FALSE(AllowsCalls(OneTool(R"({"additionalProperties":true})"),
                           "<@ invoke name=\"f\">\n<@ parameter name=\"a@\" string=\"true\">"
                           "</@ parameter>\n</@ invoke>\n</@ calls>"));
}

TEST(ToolCallGrammar, StringsAreTheTextItself) {
  const std::string_view kString = R"({"type":"string"})";
  for (const std::string_view value :
       {"", "a", "\"quoted\"", "line\nline\n", "</", "<", "</invoke>", "<｜", "｜", "｜｜",
        "｜DSML", "｜DSM｜D", "｜D｜DS｜DSM｜DSML", "多\t", "\\", "</|DSML|", "\x7F\x01"}) {
    EXPECT_TRUE(AllowsValue(kString, "true", value)) << value;
    EXPECT_FALSE(AllowsValue(kString, "false", value)) << value;
  }
  for (const std::string_view value :
       {"｜DSML｜", "</｜DSML｜ parameter>", "a｜D｜DSML｜b", "｜｜DSML｜", "｜DSML｜DSML｜"}) {
    EXPECT_FALSE(AllowsValue(kString, "true", value)) << value;
  }
}

TEST(ToolCallGrammar, LimitsOfStringsHoldForTheTextItself) {
  EXPECT_TRUE(AllowsValue(R"({"type":"string","minLength":2})", "true", "a\n"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","minLength":2})", "true", "ab｜DSML"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string","minLength":2})", "true", "a"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","maxLength":2})", "true", "\"多"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string","maxLength":2})", "true", "abc"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","pattern":"^a\"\\n$"})", "true", "a\"\n"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string","pattern":"^a\"\\n$"})", "true", "a\\\"\\n"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","pattern":"b"})", "true", "abc"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","pattern":"^[a-z]+$","maxLength":3})", "true", "ab"));
  EXPECT_FALSE(
      AllowsValue(R"({"type":"string","pattern":"^[a-z]+$","maxLength":3})", "true", "abcd"));
  EXPECT_TRUE(AllowsValue(R"({"type":"string","format":"date"})", "true", "2024-02-28"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string","format":"date"})", "true", "2024-02-30"));
  EXPECT_FALSE(AllowsValue(R"({"type":"string","pattern":"D"})", "true", "｜DSML｜"));
  EXPECT_TRUE(AllowsValue(R"({"enum":["a \"b\"","c\nd"]})", "true", "a \"b\""));
  EXPECT_TRUE(AllowsValue(R"({"enum":["a \"b\"","c\nd"]})", "true", "c\nd"));
  EXPECT_FALSE(AllowsValue(R"({"enum":["a \"b\"","c\nd"]})", "true", "a"));
  EXPECT_FALSE(AllowsValue(R"({"enum":["a"]})", "false", "\"a\""));
}

TEST(ToolCallGrammar, EverythingElseIsJsonUnderItsSchema) {
  EXPECT_TRUE(AllowsValue(R"({"type":"integer","minimum":3})", "false", "12"));
  EXPECT_FALSE(AllowsValue(R"({"type":"integer","minimum":3})", "false", "2"));
  EXPECT_FALSE(AllowsValue(R"({"type":"integer","minimum":3})", "true", "12"));
  EXPECT_TRUE(AllowsValue(R"({"type":"array","items":{"type":"string"}})", "false", "[\"a\\n\"]"));
  EXPECT_FALSE(AllowsValue(R"({"type":"array","items":{"type":"string"}})", "false", "[1]"));
  EXPECT_TRUE(AllowsValue(R"({"type":"object","properties":{"a":{"type":"null"}}})", "false",
                          "{\"a\": null}"));
}

TEST(ToolCallGrammar, ValuesOfSeveralTypesHaveBothForms) {
  for (const std::string_view schema :
       {R"({"type":["string","null"]})", R"({"anyOf":[{"type":"string"},{"type":"null"}]})",
        R"({"enum":["a",null]})"}) {
    EXPECT_TRUE(AllowsValue(schema, "true", "a")) << schema;
    EXPECT_TRUE(AllowsValue(schema, "false", "null")) << schema;
    EXPECT_FALSE(AllowsValue(schema, "false", "\"a\"")) << schema;
    EXPECT_FALSE(AllowsValue(schema, "false", "1")) << schema;
  }
  EXPECT_TRUE(AllowsValue("{}", "true", "1"));
  EXPECT_TRUE(AllowsValue("{}", "false", "1"));
  EXPECT_FALSE(AllowsValue("{}", "false", "\"1\""));
}

TEST(ToolCallGrammar, ParametersComeInOrderAndOnce) {
  const std::string tools = OneTool(ObjectOf(
      R"("a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"})", R"(,"required":["b"])"));
  const auto allows = [&](std::string_view names) {
    std::string text = "<@ invoke name=\"f\">\n";
    for (const char name : names) {
      text += fmt::format("<@ parameter name=\"{}\" string=\"false\">null</@ parameter>\n", name);
    }
    return AllowsCalls(tools, text + "</@ invoke>\n</@ calls>");
  };
  for (const std::string_view names : {"b", "ab", "bc", "abc"}) EXPECT_TRUE(allows(names)) << names;
  for (const std::string_view names : {"", "a", "c", "ac", "ba", "bb", "abcd", "d"}) {
    EXPECT_FALSE(allows(names)) << names;
  }
}

TEST(ToolCallGrammar, CallsWithoutArgumentsMayHaveTheirEmptyLine) {
  const std::string tools = OneTool("{}");
  EXPECT_TRUE(AllowsCalls(tools, "<@ invoke name=\"f\">\n\n</@ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<@ invoke name=\"f\">\n\n\n</@ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(OneParameter(R"({"const":1})"),
                           "<@ invoke name=\"f\">\n\n<@ parameter name=\"x\" string=\"false\">1"
                           "</@ parameter>\n</@ invoke>\n</@ calls>"));
}

TEST(ToolCallGrammar, SeveralCallsAreAllowedAndOneIsNeeded) {
  const std::string tools = "[" + ToolJson("ab", "{}") + "," + ToolJson("a", "{}") + "]";
  const std::string a = "<@ invoke name=\"a\">\n\n</@ invoke>\n";
  const std::string ab = "<@ invoke name=\"ab\">\n\n</@ invoke>\n";
  EXPECT_TRUE(AllowsCalls(tools, a + "</@ calls>"));
  EXPECT_TRUE(AllowsCalls(tools, ab + a + ab + "</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, "<@ invoke name=\"abc\">\n\n</@ invoke>\n</@ calls>"));
  EXPECT_FALSE(AllowsCalls(tools, a));
  EXPECT_FALSE(AllowsCalls(tools, a + "</@ calls>\n"));
}

TEST(ToolCallGrammar, OutsideOfABlockTheTextBeginsBehindTheFirstMarker) {
  const std::string tools = OneTool("{}");
  const std::string call = "<@ invoke name=\"f\">\n\n</@ invoke>\n</@ calls>";
  EXPECT_TRUE(AllowsCalls(tools, " calls>\n" + call, false));
  EXPECT_FALSE(AllowsCalls(tools, call, false));
  EXPECT_FALSE(AllowsCalls(tools, " calls>\n" + call, true));
  EXPECT_FALSE(AllowsCalls(tools, "@ calls>\n" + call, false));
}

TEST(ToolCallGrammar, TheOlderDialectHasItsOwnTags) {
  const std::string tools = OneParameter(R"({"type":"string"})");
  const std::string call =
      "<@invoke name=\"f\">\n<@parameter name=\"x\" string=\"true\">a</@parameter>\n</@invoke>\n"
      "</@tool_calls>";
  EXPECT_TRUE(AllowsCalls(tools, call, true, ChatDialect::kV4));
  EXPECT_TRUE(AllowsCalls(tools, "tool_calls>\n" + call, false, ChatDialect::kV4));
  EXPECT_FALSE(AllowsCalls(tools, call, true, ChatDialect::kV41));
}

// What prompts show the model as its own calls.
TEST(ToolCallGrammar, BlocksOfThePromptAreAllowed) {
  const World* world = PublicWorld();
  if (world == nullptr) GTEST_SKIP() << "the published tokenizer is not here";
  const std::string parameters = ObjectOf(
      R"("s":{"type":"string"},"n":{"type":"number"},"l":{"type":"array"},"o":{"type":"object"},"b":{"type":"boolean"},"z":{"type":["null","string"]})");
  const std::vector<ToolCall> calls = {
      {.id = "", .name = "f", .arguments = R"({"s":"多 lines\n\n","n":-1.5e+16,"l":[1,[],"x"]})"},
      {.id = "", .name = "f", .arguments = "{}"},
      {.id = "", .name = "g", .arguments = R"({"s":"</","o":{"a":{"b":null}},"b":true,"z":null})"}};
  for (const ChatDialect dialect : {ChatDialect::kV41, ChatDialect::kV4}) {
    PromptBuilder prompt("<image>");
    AppendToolCallBlock(calls, EncodingProfile::kRecipe, dialect, &prompt);
    const ChatPrompt block = prompt.Take();
    PromptBuilder begin("<image>");
    AppendToolCallBlockBegin(dialect, &begin);
    const size_t opening = begin.Take().text.size();
    for (const bool inside_block : {true, false}) {
      const Compiled grammar = CompileTools(
          *world, "[" + ToolJson("f", parameters) + "," + ToolJson("g", parameters) + "]",
          inside_block, dialect);
      ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
      // "\n\n<", the marker, and the rest.
      const size_t from = inside_block ? opening : 3 + kMarker.size();
      const std::vector<int32_t> ids =
          world->tokenizer->Encode(block.text.substr(from), {.parse_special = true}).value();
      EXPECT_GE(std::count(ids.begin(), ids.end(), world->marker), 10);
      EXPECT_TRUE(AllowsIds(*world, **grammar, ids)) << block.text;
    }
  }
}

// ---- Other grammars ----------------------------------------------------------------------------
TEST(ToolCallGrammar, OtherGrammarsNeverAllowTheMarker) {
  const World& world = SmallWorld();
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kStructuralTag;
  spec.text = R"({"type":"structural_tag","format":{"type":"any_text"}})";
  for (const bool regex : {false, true}) {
    if (regex) {
      spec.kind = GrammarSpec::Kind::kRegex;
      spec.text = "[\\x00-\\u{10FFFF}]*";
    }
    const Compiled grammar = world.compiler->Compile(spec);
    ASSERT_TRUE(grammar.has_value()) << grammar.error().message;
    const auto matcher = (*grammar)->NewMatcher(2);
    std::vector<uint32_t> mask = NewMask(world.vocab_size);
    ASSERT_EQ(matcher->FillMask(mask), Verdict::kMasked);
    EXPECT_FALSE(MaskHas(mask, world.marker));
    EXPECT_FALSE(matcher->Accept(world.marker).has_value());
    EXPECT_TRUE(MaskHas(mask, Ids(world, "<", true)[0]));
  }
}

// ---- Errors ------------------------------------------------------------------------------------
void ExpectRefused(std::string_view tools, Code code, const std::vector<std::string>& parts,
                   std::string_view field) {
  SCOPED_TRACE(tools);
  const Compiled grammar = CompileTools(SmallWorld(), tools);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(CodeName(grammar.error().code), CodeName(code)) << grammar.error().message;
  for (const std::string& part : parts) {
    EXPECT_THAT(grammar.error().message, testing::HasSubstr(part));
  }
  EXPECT_EQ(grammar.error().field, field);
}

TEST(ToolCallGrammar, WrongListsAreRefusedWithTheirPlace) {
  ExpectRefused("{", Code::kInvalidArgument, {"list of tools"}, "");
  ExpectRefused("{}", Code::kInvalidArgument, {"at least one tool"}, "#");
  ExpectRefused("[]", Code::kInvalidArgument, {"at least one tool"}, "#");
  ExpectRefused("[1]", Code::kInvalidArgument, {"#/0", "object"}, "#/0");
  ExpectRefused(R"([{"type":"custom"}])", Code::kInvalidArgument, {"function"}, "#/0/type");
  ExpectRefused(R"([{"type":"function"}])", Code::kInvalidArgument, {"object"}, "#/0/function");
  ExpectRefused(R"([{"type":"function","function":{"name":""}}])", Code::kInvalidArgument,
                {"at least one character"}, "#/0/function/name");
  ExpectRefused("[" + ToolJson("a", "{}") + "," + ToolJson("a", "{}") + "]", Code::kInvalidArgument,
                {"another tool"}, "#/1/function/name");
}

TEST(ToolCallGrammar, WrongSchemasAreRefusedWithTheToolAndThePlace) {
  const std::string path = "#/0/function/parameters";
  ExpectRefused(OneTool(R"({"type":"string"})"), Code::kInvalidArgument, {"'f'", "#/type"},
                path + "/type");
  ExpectRefused(OneTool("1"), Code::kInvalidArgument, {"'f'"}, path);
  ExpectRefused(OneTool("false"), Code::kInvalidArgument, {"'f'", "cannot be called"}, path);
  ExpectRefused(OneParameter(R"({"type":"array","uniqueItems":true})"), Code::kUnsupported,
                {"'f'", "#/properties/x/uniqueItems"}, path + "/properties/x/uniqueItems");
  ExpectRefused(OneParameter(R"({"type":"strin"})"), Code::kInvalidArgument,
                {"'f'", "#/properties/x/type"}, path + "/properties/x/type");
  ExpectRefused(OneParameter(R"({"type":"string","pattern":"("})"), Code::kInvalidArgument,
                {"'f'", "#/properties/x/pattern"}, path + "/properties/x/pattern");
  ExpectRefused(OneParameter(R"({"const":"a｜DSML｜"})"), Code::kUnsupported, {"'f'", "marker"},
                path + "/properties/x");
  ExpectRefused(OneTool(R"({"type":"object","patternProperties":{"a":{}}})"), Code::kUnsupported,
                {"'f'", "patternProperties"}, path + "/patternProperties");
  ExpectRefused(OneTool(R"({"enum":[{}]})"), Code::kUnsupported, {"'f'", "#/enum"}, path + "/enum");
  ExpectRefused(OneParameter(R"({"type":"string","pattern":"^｜$"})"), Code::kInvalidArgument,
                {"'f'", "cannot be called"}, path);
  ExpectRefused("[" + ToolJson("ok", "{}") + "," + ToolJson("bad", R"({"not":{}})") + "]",
                Code::kUnsupported, {"'bad'", "not"}, "#/1/function/parameters/not");
}

TEST(ToolCallGrammar, NamesThatTheMarkupCannotHoldAreRefused) {
  ExpectRefused("[" + ToolJson("a\"b", "{}") + "]", Code::kUnsupported, {"a\"b", "quotes"},
                "#/0/function/name");
  ExpectRefused("[" + ToolJson("a\nb", "{}") + "]", Code::kUnsupported, {"control characters"},
                "#/0/function/name");
  ExpectRefused(OneTool(ObjectOf(R"("a\"b":{})")), Code::kUnsupported, {"'f'", "quotes"},
                "#/0/function/parameters/properties/a\"b");
  ExpectRefused(OneTool(ObjectOf(R"("｜DSML｜":{})")), Code::kUnsupported, {"'f'", "marker"},
                "#/0/function/parameters/properties/｜DSML｜");
}

TEST(ToolCallGrammar, DeepAlternativesEndWithAnError) {
  std::string schema = R"({"type":"string"})";
  for (int i = 0; i < 40; ++i) schema = R"({"anyOf":[)" + schema + "]}";
  ExpectRefused(
      OneParameter(schema), Code::kResourceExhausted, {"'f'", "alternatives"},
      "#/0/function/parameters/properties/x" + [] {
        std::string path;
        for (int i = 0; i < 17; ++i) path += "/anyOf/0";
        return path;
      }());
}

TEST(ToolCallGrammar, AVocabularyWithoutTheMarkerHasNoCalls) {
  GrammarSpec spec;
  spec.kind = GrammarSpec::Kind::kToolCalls;
  spec.text = OneTool("{}");
  const Compiled grammar = TestCompiler().Compile(spec);
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(CodeName(grammar.error().code), CodeName(Code::kUnsupported));
}

TEST(ToolCallGrammar, PlacesAndDialectsAreKeptApartInTheCache) {
  const std::string tools = OneTool("{}");
  const auto inside = CompileTools(SmallWorld(), tools, true).value();
  const auto outside = CompileTools(SmallWorld(), tools, false).value();
  const auto older = CompileTools(SmallWorld(), tools, true, ChatDialect::kV4).value();
  EXPECT_NE(inside, outside);
  EXPECT_NE(inside, older);
  EXPECT_EQ(inside, CompileTools(SmallWorld(), tools, true).value());
}

}  // namespace
}  // namespace deepinfer
