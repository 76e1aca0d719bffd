#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <utility>

#include "apps/chat_line.h"
#include "apps/jsonl.h"
#include "base/json_value.h"
#include "base/quoted.h"
#include "base/utf8.h"

namespace deepinfer {
namespace {

namespace ondemand = simdjson::ondemand;

// The path of the value that holds byte `offset` of a JSON text, for instance
// "sampling_params.stop[1]"; empty at the top level. The text may be broken.
std::string PathAt(std::string_view text, size_t offset) {
  struct Level {
    bool is_array;
    size_t index;
    std::string key;
  };
  std::vector<Level> levels;
  std::string last_string;
  for (size_t i = 0; i < offset && i < text.size(); ++i) {
    switch (text[i]) {
      case '"': {
        size_t end = i + 1;
        while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
        if (end >= offset) i = offset;  // inside of this string
        last_string = std::string(text.substr(i + 1, end - i - 1));
        i = std::max(i, end);
        break;
      }
      case ':':
        if (!levels.empty()) levels.back().key = last_string;
        break;
      case ',':
        if (!levels.empty()) levels.back().key.clear(), ++levels.back().index;
        break;
      case '{':
      case '[':
        if (levels.size() == 64) return "";  // no field of ours is that deep
        levels.push_back({text[i] == '[', 0, ""});
        break;
      case '}':
      case ']':
        if (!levels.empty()) levels.pop_back();
        break;
      default:
        break;
    }
  }
  std::string path;
  for (const Level& level : levels) {
    if (level.is_array) {
      path += fmt::format("[{}]", level.index);
    } else if (!level.key.empty()) {
      path += (path.empty() ? "" : ".") + level.key;
    }
  }
  return path;
}

// Reads values of one line and collects everything that is wrong with it. After a syntax error
// (`broken`) nothing else is read.
class Reader {
 public:
  bool broken() const {
    return broken_;
  }
  bool failed() const {
    return broken_ || !problems_.empty();
  }
  void Add(std::string field, std::string message) {
    if (problems_.size() < kMaxProblems)
      problems_.push_back(Error{Code::kInvalidArgument, std::move(message), std::move(field)});
  }
  void AddAll(std::vector<Error> problems) {
    for (Error& problem : problems) Add(std::move(problem.field), std::move(problem.message));
  }
  // All problems as one error; the first gives the field.
  Error TakeError() {
    return Joined(problems_);
  }

  void Syntax(const std::string& field, simdjson::error_code code) {
    if (!broken_)
      Add(field, fmt::format("{} is not valid JSON: {}.", field.empty() ? "the line" : field,
                             WithoutFullStop(simdjson::error_message(code))));
    broken_ = true;
  }

  void Mismatch(const std::string& field, ondemand::value value, const char* allowed) {
    std::string_view token = value.raw_json_token();
    while (!token.empty() && static_cast<unsigned char>(token.back()) <= ' ')
      token.remove_suffix(1);
    const std::string shown = token == "{"   ? "an object"
                              : token == "[" ? "a list"
                                             : Quoted(token, 60);
    Add(field, fmt::format("{} is {}; allowed is {}.", field.empty() ? "the line" : field, shown,
                           allowed));
  }

  bool IsNull(ondemand::value value) {
    ondemand::json_type type;
    return value.type().get(type) == simdjson::SUCCESS && type == ondemand::json_type::null &&
           value.is_null();
  }

  void Read(const std::string& field, ondemand::value value, double* out) {
    if (Is(field, value, ondemand::json_type::number, "a number"))
      Take(field, value, value.get(*out), "a finite number");
  }
  void Read(const std::string& field, ondemand::value value, int64_t* out) {
    if (Is(field, value, ondemand::json_type::number, "an integer"))
      Take(field, value, value.get(*out), "an integer of 64 bits");
  }
  void Read(const std::string& field, ondemand::value value, bool* out) {
    if (Is(field, value, ondemand::json_type::boolean, "true or false"))
      Take(field, value, value.get(*out), "true or false");
  }
  void Read(const std::string& field, ondemand::value value, std::string* out) {
    if (!Is(field, value, ondemand::json_type::string, "a string")) return;
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) {
      Add(field, fmt::format("{} has an escape sequence that is no character: half of a surrogate "
                             "pair, or an unknown one.",
                             field));
      return Stop();
    }
    *out = text;
  }
  // Null means absent.
  template <class T>
  void Read(const std::string& field, ondemand::value value, std::optional<T>* out) {
    if (IsNull(value)) {
      out->reset();
    } else {
      Read(field, value, &out->emplace());
    }
  }
  template <class T>
  void Read(const std::string& field, ondemand::value value, std::vector<T>* out) {
    out->clear();
    ondemand::array array;
    if (!Is(field, value, ondemand::json_type::array, "a list") ||
        !Take(field, value, value.get(array), "a list"))
      return;
    for (auto element : array) {
      ondemand::value item;
      const std::string name = fmt::format("{}[{}]", field, out->size());
      if (const auto code = element.get(item); code != simdjson::SUCCESS) return Syntax(name, code);
      T parsed{};
      Read(name, item, &parsed);
      if (broken_) return;
      out->push_back(std::move(parsed));
      if (problems_.size() == kMaxProblems) return Stop();
    }
  }

  // Calls read(key, value) for each field of an object; `read` returns false for a field it does
  // not know.
  template <class F>
  void ReadObject(const std::string& field, ondemand::value value, std::string_view known, F read) {
    ondemand::object object;
    if (!Is(field, value, ondemand::json_type::object, "an object") ||
        !Take(field, value, value.get(object), "an object"))
      return;
    ReadFields(field, object, known, read);
  }

  template <class F>
  void ReadFields(const std::string& path, ondemand::object object, std::string_view known,
                  F read) {
    std::vector<std::string> seen;
    for (auto entry : object) {
      std::string_view raw_key;
      ondemand::value value;
      if (auto code = entry.unescaped_key().get(raw_key); code != simdjson::SUCCESS)
        return Syntax(path, code);
      const std::string key(raw_key);
      const std::string field = path.empty() ? key : path + "." + key;
      if (auto code = entry.value().get(value); code != simdjson::SUCCESS)
        return Syntax(field, code);
      if (std::find(seen.begin(), seen.end(), key) != seen.end()) {
        Add(field, fmt::format("{} is given twice.", Quoted(field)));
      } else if (!read(key, field, value) && !broken_) {
        Add(field, fmt::format("{} is not a known field; known are {}.", Quoted(field), known));
      }
      seen.push_back(key);
      if (seen.size() > kMaxFields) {
        Add(path, fmt::format("{} has more than {} fields.", path.empty() ? "the line" : path,
                              kMaxFields));
        return Stop();
      }
      if (broken_) return;
    }
  }

 private:
  static constexpr size_t kMaxProblems = 20;
  static constexpr size_t kMaxFields = 2000;

  void Stop() {
    broken_ = true;
  }

  bool Is(const std::string& field, ondemand::value value, ondemand::json_type wanted,
          const char* allowed) {
    ondemand::json_type type;
    if (value.type().get(type) != simdjson::SUCCESS) {  // NaN and the like
      Mismatch(field, value, allowed);
      Stop();
      return false;
    }
    if (type == wanted) return true;
    Mismatch(field, value, allowed);
    return false;
  }

  bool Take(const std::string& field, ondemand::value value, simdjson::error_code code,
            const char* allowed) {
    if (code == simdjson::SUCCESS) return true;
    Mismatch(field, value, allowed);
    if (code != simdjson::INCORRECT_TYPE) Stop();
    return false;
  }

  std::vector<Error> problems_;
  bool broken_ = false;
};

bool IsWholeNumber(std::string_view text, int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

void ReadSeed(Reader& reader, const std::string& field, ondemand::value value,
              std::optional<uint64_t>* out) {
  out->reset();
  if (reader.IsNull(value)) return;
  uint64_t seed = 0;
  if (value.get(seed) == simdjson::SUCCESS) {
    *out = seed;
    return;
  }
  int64_t negative = 0;  // modulo 2^64
  reader.Read(field, value, &negative);
  *out = static_cast<uint64_t>(negative);
}

void ReadLogitBias(Reader& reader, const std::string& field, ondemand::value value,
                   std::map<int64_t, double>* out) {
  out->clear();
  reader.ReadObject(field, value, "token ids",
                    [&](const std::string& key, const std::string& name, ondemand::value bias) {
                      int64_t id = 0;
                      if (!IsWholeNumber(key, &id)) {
                        reader.Add(name, fmt::format("{} has the key {}; keys are token ids.",
                                                     field, Quoted(key)));
                      } else if (out->contains(id)) {
                        reader.Add(name, fmt::format("{} names token {} twice.", field, id));
                      } else {
                        reader.Read(name, bias, &(*out)[id]);
                      }
                      return true;
                    });
}

void ReadLogprobsMode(Reader& reader, const std::string& field, ondemand::value value,
                      LogprobsMode* out) {
  std::string name;
  reader.Read(field, value, &name);
  if (name == "processed") {
    *out = LogprobsMode::kProcessed;
  } else if (name == "raw") {
    *out = LogprobsMode::kRaw;
  } else if (!reader.failed()) {
    reader.Add(field,
               fmt::format("{} is {}; allowed are 'raw' and 'processed'.", field, Quoted(name)));
  }
}

// ---- Structured outputs -------------------------------------------------------------------------

// {0,n} and the like of one white space character: the largest n; nullopt for everything else.
std::optional<int64_t> BoundOfWhitespacePattern(std::string_view pattern) {
  if (pattern.empty()) return 0;
  const auto skip = [&pattern](std::string_view part) {
    if (pattern.substr(0, part.size()) != part) return false;
    pattern.remove_prefix(part.size());
    return true;
  };
  const auto skip_character = [&skip] {
    for (const std::string_view one : {" ", "\n", "\t", "\r", "\\n", "\\t", "\\r", "\\s"}) {
      if (skip(one)) return true;
    }
    return false;
  };
  if (skip("[")) {
    if (!skip_character()) return std::nullopt;
    while (skip_character()) {
    }
    if (!skip("]")) return std::nullopt;
  } else if (!skip_character()) {
    return std::nullopt;
  }
  if (pattern == "?") return 1;
  int64_t bound = 0;
  if (!skip("{0,") || pattern.empty() || pattern.back() != '}') return std::nullopt;
  pattern.remove_suffix(1);
  if (!IsWholeNumber(pattern, &bound) || bound < 0 || bound > 64) return std::nullopt;
  return bound;
}

// What the fields of a request say about its structured output, under all their names: one kind of
// constraint, given once.
class ConstraintFields {
 public:
  explicit ConstraintFields(Reader& reader) : reader_(reader) {}

  // False for a key that has nothing to do with structured outputs.
  bool Read(const std::string& key, const std::string& field, ondemand::value value) {
    if (key == "structured_outputs") return ReadUsual(field, value), true;
    if (key == "so_args") return ReadPublished(field, value), true;
    if (key == "guided_whitespace_pattern") return ReadWhitespace(key.substr(7), field, value);
    for (const std::string_view name :
         {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"}) {
      if (key == name) return ReadKind(key.substr(7), field, value);
    }
    return false;
  }

  // When all fields have been read. Without any of them `output` stays what it is.
  void Apply(std::optional<StructuredOutput>* output) {
    if (reader_.failed()) return;
    if (kind_field_.empty()) {
      if (!whitespace_field_.empty()) {
        reader_.Add(whitespace_field_,
                    fmt::format("{} is given without a schema that it is for.", whitespace_field_));
      } else if (cleared_) {
        output->reset();
      }
      return;
    }
    if (!whitespace_field_.empty()) {
      if (output_.kind != Kind::kJsonSchema && output_.kind != Kind::kJsonObject &&
          output_.kind != Kind::kStructuralTag) {
        reader_.Add(whitespace_field_,
                    fmt::format("{} is given, but {} has no white space between JSON tokens.",
                                whitespace_field_, kind_field_));
        return;
      }
      output_.max_whitespace = static_cast<int>(max_whitespace_);
    }
    *output = std::move(output_);
  }

 private:
  using Kind = StructuredOutput::Kind;

  // False when another field has given one.
  bool Begin(Kind kind, const std::string& field) {
    if (!kind_field_.empty()) {
      reader_.Add(field, fmt::format("{} and {} both say what the output must look like; give one "
                                     "of them.",
                                     kind_field_, field));
      return false;
    }
    kind_field_ = field;
    output_.kind = kind;
    return true;
  }

  void CheckNotEmpty(const std::string& field, std::string_view text) {
    if (text.empty() && !reader_.failed()) reader_.Add(field, fmt::format("{} is empty.", field));
  }

  // A JSON text: as a string, or as the object itself.
  void ReadJson(const std::string& field, ondemand::value value, std::string* out) {
    ondemand::json_type type = ondemand::json_type::null;
    if (value.type().get(type) == simdjson::SUCCESS && type == ondemand::json_type::object) {
      ondemand::object object;
      std::string_view text;
      auto code = value.get(object);
      if (code == simdjson::SUCCESS) code = object.raw_json().get(text);
      if (code != simdjson::SUCCESS) return reader_.Syntax(field, code);
      *out = text;
    } else if (type == ondemand::json_type::boolean) {  // a schema, too
      bool any = false;
      reader_.Read(field, value, &any);
      *out = any ? "true" : "false";
    } else if (type == ondemand::json_type::string) {
      reader_.Read(field, value, out);
    } else {
      reader_.Mismatch(field, value, "an object, true, false, or a string that holds one of them");
    }
  }

  void ReadChoices(const std::string& field, ondemand::value value) {
    reader_.Read(field, value, &output_.choices);
    if (reader_.failed()) return;
    if (output_.choices.empty()) reader_.Add(field, fmt::format("{} is empty.", field));
    for (size_t i = 0; i < output_.choices.size(); ++i)
      CheckNotEmpty(fmt::format("{}[{}]", field, i), output_.choices[i]);
  }

  // One kind under the names that structured_outputs and, with guided_ in front, the older fields
  // have. Null means absent.
  bool ReadKind(const std::string& name, const std::string& field, ondemand::value value) {
    Kind kind = Kind::kJsonSchema;
    if (name == "regex") {
      kind = Kind::kRegex;
    } else if (name == "choice") {
      kind = Kind::kChoice;
    } else if (name == "grammar") {
      kind = Kind::kEbnf;
    } else if (name == "json_object") {
      kind = Kind::kJsonObject;
    } else if (name == "structural_tag") {
      kind = Kind::kStructuralTag;
    } else if (name != "json") {
      return false;
    }
    if (reader_.IsNull(value)) return true;
    if (kind == Kind::kJsonObject) {
      bool wanted = false;
      reader_.Read(field, value, &wanted);
      if (wanted) Begin(kind, field);
    } else if (!Begin(kind, field)) {
      // The value is not needed; simdjson skips it.
    } else if (kind == Kind::kChoice) {
      ReadChoices(field, value);
    } else {
      if (kind == Kind::kRegex || kind == Kind::kEbnf) {
        reader_.Read(field, value, &output_.schema);
      } else {
        ReadJson(field, value, &output_.schema);
      }
      CheckNotEmpty(field, output_.schema);
    }
    return true;
  }

  bool ReadWhitespace(const std::string& name, const std::string& field, ondemand::value value) {
    int64_t bound = 0;
    if (name == "whitespace_pattern") {
      std::optional<std::string> pattern;
      reader_.Read(field, value, &pattern);
      if (!pattern.has_value()) return true;
      const std::optional<int64_t> known = BoundOfWhitespacePattern(*pattern);
      if (!known.has_value()) {
        reader_.Add(field,
                    fmt::format("{} is {}; allowed are the empty pattern and bounded repetitions "
                                "of white space such as \"[ ]?\" and \"[ \\n\\t]{{0,N}}\" with N "
                                "up to 64. max_whitespace says the same as a number.",
                                field, Quoted(*pattern, 60)));
        return true;
      }
      bound = *known;
    } else if (name == "disable_any_whitespace") {
      std::optional<bool> disable;
      reader_.Read(field, value, &disable);
      if (!disable.value_or(false)) return true;
    } else if (name == "max_whitespace") {
      std::optional<int64_t> number;
      reader_.Read(field, value, &number);
      if (!number.has_value()) return true;
      if (*number < 0 || *number > 64) {
        reader_.Add(field, fmt::format("{} is {}; allowed are 0 ... 64.", field, *number));
        return true;
      }
      bound = *number;
    } else {
      return false;
    }
    if (!whitespace_field_.empty()) {
      reader_.Add(field, fmt::format("{} and {} both say how much white space there may be; give "
                                     "one of them.",
                                     whitespace_field_, field));
    }
    whitespace_field_ = field;
    max_whitespace_ = bound;
    return true;
  }

  bool ReadTrigger(const std::string& name, const std::string& field, ondemand::value value) {
    if (name == "trigger_token_ids") {
      std::optional<std::vector<int64_t>> ids;
      reader_.Read(field, value, &ids);
      if (ids.has_value()) output_.trigger_token_ids = std::move(*ids);
    } else if (name == "bound_token_id") {
      reader_.Read(field, value, &output_.bound_token_id);
    } else {
      return false;
    }
    return true;
  }

  void CheckTrigger(const std::string& path) {
    if (!output_.bound_token_id.has_value() || !output_.trigger_token_ids.empty()) return;
    reader_.Add(path + ".bound_token_id",
                fmt::format("{}.bound_token_id is given without {}.trigger_token_ids, whose rest "
                            "it forces.",
                            path, path));
  }

  // {"json": ...} and so on.
  void ReadUsual(const std::string& path, ondemand::value value) {
    if (reader_.IsNull(value)) {
      cleared_ = true;
      return;
    }
    const std::string before = kind_field_;
    reader_.ReadObject(
        path, value,
        "json, regex, choice, grammar, json_object, structural_tag, whitespace_pattern, "
        "disable_any_whitespace, max_whitespace, trigger_token_ids and bound_token_id",
        [&](const std::string& key, const std::string& field, ondemand::value item) {
          return ReadKind(key, field, item) || ReadWhitespace(key, field, item) ||
                 ReadTrigger(key, field, item);
        });
    if (reader_.failed()) return;
    if (kind_field_ == before) {
      reader_.Add(path, fmt::format("{} has none of json, regex, choice, grammar, json_object and "
                                    "structural_tag; one is needed.",
                                    path));
    }
    CheckTrigger(path);
  }

  // {"schema_type", "schema", "trigger_token_ids"?, "bound_token_id"?}.
  void ReadPublished(const std::string& path, ondemand::value value) {
    if (reader_.IsNull(value)) {
      cleared_ = true;
      return;
    }
    static constexpr std::pair<std::string_view, Kind> kTypes[] = {
        {"json", Kind::kJsonSchema},
        {"regex", Kind::kRegex},
        {"ebnf", Kind::kEbnf},
        {"choice", Kind::kChoice},
        {"json_object", Kind::kJsonObject},
        {"structural_tag", Kind::kStructuralTag}};
    std::string type;
    std::string schema;
    std::vector<std::string> choices;
    bool has_type = false;
    bool has_schema = false;
    bool schema_is_text = true;
    reader_.ReadObject(
        path, value, "schema_type, schema, trigger_token_ids and bound_token_id",
        [&](const std::string& key, const std::string& field, ondemand::value item) {
          if (key == "schema_type") return reader_.Read(field, item, &type), has_type = true;
          if (key == "schema") {
            has_schema = true;
            ondemand::json_type json = ondemand::json_type::null;
            if (item.type().get(json) == simdjson::SUCCESS && json == ondemand::json_type::array) {
              reader_.Read(field, item, &choices);
            } else {
              schema_is_text = json == ondemand::json_type::string;
              ReadJson(field, item, &schema);
            }
            return true;
          }
          if (key == "serialized" || key == "bound_token_ids") {
            reader_.Add(field, fmt::format("{} is not supported; {}.", field,
                                           key == "serialized" ? "schema has the description itself"
                                                               : "bound_token_id is a single id"));
            return true;
          }
          return ReadTrigger(key, field, item);
        });
    if (reader_.failed()) return;
    const std::string schema_field = path + ".schema";
    if (!has_type) reader_.Add(path + ".schema_type", path + ".schema_type is missing.");
    const auto* const named =
        std::find_if(std::begin(kTypes), std::end(kTypes),
                     [&type](const auto& entry) { return entry.first == type; });
    if (has_type && named == std::end(kTypes)) {
      reader_.Add(path + ".schema_type",
                  fmt::format("{}.schema_type is {}; allowed are json, regex, ebnf, choice, "
                              "json_object and structural_tag.",
                              path, Quoted(type)));
    }
    const bool needs_schema = named == std::end(kTypes) || named->second != Kind::kJsonObject;
    if (needs_schema && !has_schema) reader_.Add(schema_field, schema_field + " is missing.");
    if (has_schema && !needs_schema)
      reader_.Add(schema_field, schema_field + " is given, but json_object needs none.");
    if (reader_.failed() || !Begin(named->second, path)) return;
    if (named->second == Kind::kChoice) {
      if (choices.empty()) reader_.Add(schema_field, schema_field + " must be a list of texts.");
    } else if (!choices.empty()) {
      reader_.Add(schema_field, schema_field + " is a list; only choice has one.");
    } else if (!schema_is_text && output_.kind != Kind::kJsonSchema &&
               output_.kind != Kind::kStructuralTag) {
      reader_.Add(schema_field, schema_field + " is no text; allowed is a text.");
    } else if (needs_schema) {
      CheckNotEmpty(schema_field, schema);
    }
    for (size_t i = 0; i < choices.size(); ++i)
      CheckNotEmpty(fmt::format("{}[{}]", schema_field, i), choices[i]);
    output_.schema = std::move(schema);
    output_.choices = std::move(choices);
    CheckTrigger(path);
  }

  Reader& reader_;
  StructuredOutput output_;
  std::string kind_field_;  // that gave the kind; empty: none yet
  std::string whitespace_field_;
  int64_t max_whitespace_ = 0;
  bool cleared_ = false;  // an explicit null
};

constexpr std::string_view kSamplingFields =
    "temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, "
    "logit_bias, allowed_token_ids, "
    "bad_words, bad_words_token_ids, min_tokens, max_tokens, stop, stop_token_ids, "
    "include_stop_str_in_output, ignore_eos, n, "
    "logprobs, prompt_logprobs, logprobs_mode, seq_seed (or seed), skip_special_tokens, "
    "structured_outputs, so_args, guided_json, guided_regex, guided_choice, guided_grammar, "
    "guided_json_object and guided_whitespace_pattern";

bool ReadSamplingField(Reader& reader, const std::string& key, const std::string& field,
                       ondemand::value value, SamplingParams* p) {
  if (key == "temperature") return reader.Read(field, value, &p->temperature), true;
  if (key == "top_k") return reader.Read(field, value, &p->top_k), true;
  if (key == "top_p") return reader.Read(field, value, &p->top_p), true;
  if (key == "min_p") return reader.Read(field, value, &p->min_p), true;
  if (key == "presence_penalty") return reader.Read(field, value, &p->presence_penalty), true;
  if (key == "frequency_penalty") return reader.Read(field, value, &p->frequency_penalty), true;
  if (key == "repetition_penalty") return reader.Read(field, value, &p->repetition_penalty), true;
  if (key == "logit_bias") return ReadLogitBias(reader, field, value, &p->logit_bias), true;
  if (key == "allowed_token_ids") return reader.Read(field, value, &p->allowed_token_ids), true;
  if (key == "bad_words") return reader.Read(field, value, &p->bad_words), true;
  if (key == "bad_words_token_ids") return reader.Read(field, value, &p->bad_words_token_ids), true;
  if (key == "min_tokens") return reader.Read(field, value, &p->min_tokens), true;
  if (key == "max_tokens") return reader.Read(field, value, &p->max_tokens), true;
  if (key == "stop") return reader.Read(field, value, &p->stop), true;
  if (key == "stop_token_ids") return reader.Read(field, value, &p->stop_token_ids), true;
  if (key == "include_stop_str_in_output")
    return reader.Read(field, value, &p->include_stop_str_in_output), true;
  if (key == "ignore_eos") return reader.Read(field, value, &p->ignore_eos), true;
  if (key == "n") return reader.Read(field, value, &p->n), true;
  if (key == "logprobs") return reader.Read(field, value, &p->logprobs), true;
  if (key == "prompt_logprobs") return reader.Read(field, value, &p->prompt_logprobs), true;
  if (key == "logprobs_mode")
    return ReadLogprobsMode(reader, field, value, &p->logprobs_mode), true;
  if (key == "seq_seed" || key == "seed") return ReadSeed(reader, field, value, &p->seq_seed), true;
  if (key == "skip_special_tokens") return reader.Read(field, value, &p->skip_special_tokens), true;
  return false;
}

void ReadSamplingParams(Reader& reader, const std::string& path, ondemand::value value,
                        SamplingParams* params) {
  bool has_seed = false;
  ConstraintFields constraint(reader);
  reader.ReadObject(path, value, kSamplingFields,
                    [&](const std::string& key, const std::string& field, ondemand::value item) {
                      if (key == "seq_seed" || key == "seed") {
                        if (has_seed)
                          reader.Add(field,
                                     "seed and seq_seed are the same parameter; give one of them.");
                        has_seed = true;
                      }
                      return constraint.Read(key, field, item) ||
                             ReadSamplingField(reader, key, field, item, params);
                    });
  constraint.Apply(&params->structured_output);
}

// A field of the conversation, as it is.
void ReadChatField(Reader& reader, const std::string& key, const std::string& field,
                   ondemand::value value, JsonValue* chat) {
  std::string_view text;
  if (const auto code = simdjson::to_json_string(value).get(text); code != simdjson::SUCCESS)
    return reader.Syntax(field, code);
  Result<JsonValue> parsed = JsonValue::Parse(text);
  if (!parsed.has_value()) {
    reader.Add(field, fmt::format("{} cannot be read: {}", field, parsed.error().message));
  } else if (!parsed->is_null()) {
    chat->Set(key, std::move(*parsed));
  }
}

void ReadId(Reader& reader, const std::string& field, ondemand::value value,
            std::optional<LineId>* id) {
  ondemand::json_type type = ondemand::json_type::null;
  if (value.type().get(type) == simdjson::SUCCESS && type == ondemand::json_type::number) {
    int64_t number = 0;
    reader.Read(field, value, &number);
    if (!reader.failed()) *id = LineId{fmt::format("{}", number), true};
    return;
  }
  if (type != ondemand::json_type::string)
    return reader.Mismatch(field, value, "a string or an integer");
  std::string text;
  reader.Read(field, value, &text);
  if (reader.broken()) return;
  if (text.empty() || text.size() > 1024) {
    reader.Add(field, fmt::format("id has {} bytes; allowed are 1 ... 1024.", text.size()));
    return;
  }
  *id = LineId{std::move(text), false};
}

// Whether nothing follows the value that was read. This version of the parser tells so by having no
// location.
bool AtEnd(ondemand::document& document) {
  const char* location = nullptr;
  return document.current_location().get(location) != simdjson::SUCCESS;
}

// The id of a line whose remainder may be anything.
std::optional<LineId> FindId(ondemand::parser& parser, const simdjson::padded_string& json) {
  ondemand::document document;
  ondemand::object object;
  if (parser.iterate(json).get(document) != simdjson::SUCCESS ||
      document.get_object().get(object) != simdjson::SUCCESS)
    return {};
  ondemand::value value;
  if (object.find_field_unordered("id").get(value) != simdjson::SUCCESS) return {};
  Reader reader;
  std::optional<LineId> id;
  ReadId(reader, "id", value, &id);
  return id;
}

// Parses the object of one line: read(key, field, value) for every field but the id, then check()
// if all were fine so far.
template <class T, class Read, class Check>
ParsedLine<T> ParseLine(std::string_view line, std::string_view known, T* parsed, Reader& reader,
                        Read read, Check check) {
  ParsedLine<T> result{std::nullopt, T{}};
  ondemand::parser parser;
  const auto fail = [&](Error error) {
    result.value = tl::unexpected<Error>(std::move(error));
    return result;
  };
  if (const std::optional<size_t> bad = FindInvalidUtf8(line); bad.has_value()) {
    std::string lossy;
    AppendLossyUtf8(line, &lossy);
    result.id = FindId(parser, simdjson::padded_string(lossy));
    const std::string path = PathAt(line, *bad);
    return fail(Error{Code::kInvalidArgument,
                      fmt::format("{} is not UTF-8 at byte {} of the line.",
                                  path.empty() ? "the line" : path, *bad),
                      path});
  }
  const simdjson::padded_string json(line);
  result.id = FindId(parser, json);

  ondemand::document document;
  ondemand::object object;
  simdjson::error_code code = parser.iterate(json).get(document);
  if (code == simdjson::SUCCESS) code = document.get_object().get(object);
  if (code == simdjson::INCORRECT_TYPE) {
    return fail(Error{Code::kInvalidArgument, "the line is not a JSON object.", ""});
  }
  if (code != simdjson::SUCCESS) {
    reader.Syntax("", code);
    return fail(reader.TakeError());
  }
  std::optional<LineId> id;
  bool has_id = false;
  reader.ReadFields("", object, known,
                    [&](const std::string& key, const std::string& field, ondemand::value value) {
                      if (key != "id") return read(key, field, value);
                      has_id = true;
                      ReadId(reader, field, value, &id);
                      return true;
                    });
  if (!reader.broken()) {
    if (!AtEnd(document)) reader.Add("", "the line goes on after its JSON object.");
    if (!has_id) reader.Add("id", "id is missing; every line needs one, a string or an integer.");
  }
  if (!reader.failed()) check();
  if (reader.failed()) return fail(reader.TakeError());
  result.value = std::move(*parsed);
  return result;
}

}  // namespace

ParsedLine<Request> ParseGenerateLine(std::string_view line, const SamplingParams& defaults) {
  Request request;
  request.sampling_params = defaults;
  Reader reader;
  std::vector<std::string> prompts;  // names of the fields that give one
  JsonValue chat = JsonValue::Object{};
  const auto read = [&](const std::string& key, const std::string& field, ondemand::value value) {
    if (key == "prompt") {
      reader.Read(field, value, &request.prompt.emplace<std::string>());
    } else if (key == "prompt_token_ids") {
      reader.Read(field, value, &request.prompt.emplace<std::vector<int64_t>>());
    } else if (IsChatField(key)) {
      ReadChatField(reader, key, field, value, &chat);
      if (key != "messages") return true;
    } else if (key == "sampling_params") {
      ReadSamplingParams(reader, field, value, &request.sampling_params);
      return true;
    } else if (key == "user_id") {
      reader.Read(field, value, &request.user_id);
      return true;
    } else if (key == "priority") {
      reader.Read(field, value, &request.priority);
      return true;
    } else if (key == "timeout_seconds") {
      reader.Read(field, value, &request.timeout_seconds);
      return true;
    } else if (key == "cache_salt") {
      reader.Read(field, value, &request.cache_salt);
      return true;
    } else {
      return false;
    }
    prompts.push_back(key);
    return true;
  };
  const auto check = [&] {
    if (prompts.empty()) {
      reader.Add("prompt",
                 "the prompt is missing; give one of prompt, prompt_token_ids and messages.");
      return;
    }
    if (prompts.size() > 1) {
      reader.Add(prompts[1],
                 fmt::format(
                     "{} and {} are both given; give one of prompt, prompt_token_ids and messages.",
                     prompts[0], prompts[1]));
      return;
    }
    if (prompts[0] == "messages") {
      if (chat.Find("messages") == nullptr) {
        reader.Add("messages", "messages is null; allowed is a list of messages.");
        return;
      }
      if (chat.Find("response_format") != nullptr &&
          request.sampling_params.structured_output.has_value()) {
        reader.Add("response_format",
                   "response_format and a structured output of sampling_params are both given; an "
                   "output follows one description.");
        return;
      }
      Result<Chat> read_chat = ChatFromLine(chat);
      if (read_chat.has_value()) {
        request.prompt = std::move(*read_chat);
      } else {
        reader.Add(read_chat.error().field, read_chat.error().message);
      }
    } else if (!chat.if_object()->empty()) {
      const std::string& option = chat.if_object()->front().first;
      reader.Add(option, fmt::format("{} is given without messages; it has no effect on other "
                                     "prompts.",
                                     option));
    }
    std::vector<Error> problems = request.sampling_params.Validate();
    for (Error& problem : problems) problem.field = "sampling_params." + problem.field;
    reader.AddAll(std::move(problems));
  };
  ParsedLine<Request> parsed = ParseLine(
      line,
      "id, prompt, prompt_token_ids, messages, tools, tool_choice, response_format, thinking, "
      "thinking_mode, reasoning_effort, encoding_profile, drop_thinking, sampling_params, user_id, "
      "priority, timeout_seconds and cache_salt",
      &request, reader, read, check);
  if (parsed.value.has_value() && parsed.id.has_value()) parsed.value->id = parsed.id->text;
  return parsed;
}

ParsedLine<TextLine> ParseTextLine(std::string_view line) {
  TextLine parsed;
  Reader reader;
  bool found = false;
  const auto read = [&](const std::string& key, const std::string& field, ondemand::value value) {
    if (key != "text") return false;
    reader.Read(field, value, &parsed.text);
    return found = true;
  };
  const auto check = [&] {
    if (!found) reader.Add("text", "text is missing.");
  };
  return ParseLine(line, "id and text", &parsed, reader, read, check);
}

ParsedLine<IdsLine> ParseIdsLine(std::string_view line) {
  IdsLine parsed;
  Reader reader;
  bool found = false;
  const auto read = [&](const std::string& key, const std::string& field, ondemand::value value) {
    if (key != "ids") return false;
    reader.Read(field, value, &parsed.ids);
    return found = true;
  };
  const auto check = [&] {
    if (!found) reader.Add("ids", "ids is missing.");
  };
  return ParseLine(line, "id and ids", &parsed, reader, read, check);
}

ParsedLine<LogitsLine> ParseLogitsLine(std::string_view line) {
  LogitsLine parsed;
  Reader reader;
  std::string ids_field;
  bool has_chunks = false;
  const auto read = [&](const std::string& key, const std::string& field, ondemand::value value) {
    if (key == "token_ids" || key == "ids") {
      if (!ids_field.empty())
        reader.Add(field, "ids and token_ids are the same field; give one of them.");
      ids_field = field;
      reader.Read(field, value, &parsed.token_ids);
    } else if (key == "chunks") {
      has_chunks = true;
      reader.Read(field, value, &parsed.chunks);
    } else {
      return false;
    }
    return true;
  };
  const auto check = [&] {
    const std::string name = ids_field.empty() ? "token_ids" : ids_field;
    if (parsed.token_ids.empty())
      reader.Add(name, fmt::format("{} is missing or empty; at least one token is needed.", name));
    int64_t left = static_cast<int64_t>(parsed.token_ids.size());
    for (size_t i = 0; i < parsed.chunks.size(); ++i) {
      if (parsed.chunks[i] >= 1 && parsed.chunks[i] <= left) {
        left -= parsed.chunks[i];
        continue;
      }
      reader.Add(fmt::format("chunks[{}]", i),
                 fmt::format("chunks[{}] is {}; allowed are 1 ... {}, the tokens that are left.", i,
                             parsed.chunks[i], left));
      return;
    }
    if (has_chunks && left > 0) {
      reader.Add("chunks", fmt::format("chunks leave out the last {} of {} tokens.", left,
                                       parsed.token_ids.size()));
    }
  };
  return ParseLine(line, "id, token_ids (or ids) and chunks", &parsed, reader, read, check);
}

Result<SamplingParams> ParseSamplingParams(std::string_view json) {
  if (const std::optional<size_t> bad = FindInvalidUtf8(json); bad.has_value()) {
    return Fail(Code::kInvalidArgument,
                fmt::format("sampling_params is not UTF-8 at byte {}.", *bad), "sampling_params");
  }
  SamplingParams params;
  Reader reader;
  ondemand::parser parser;
  const simdjson::padded_string padded(json);
  ondemand::document document;
  ondemand::value value;
  simdjson::error_code code = parser.iterate(padded).get(document);
  if (code == simdjson::SUCCESS) code = document.get_value().get(value);
  if (code != simdjson::SUCCESS) {
    reader.Syntax("sampling_params", code);
  } else {
    ReadSamplingParams(reader, "sampling_params", value, &params);
    if (!reader.failed() && !AtEnd(document))
      reader.Add("sampling_params", "sampling_params goes on after its JSON object.");
  }
  if (!reader.failed()) reader.AddAll(params.Validate());
  if (reader.failed()) return tl::unexpected<Error>(reader.TakeError());
  return params;
}

}  // namespace deepinfer
