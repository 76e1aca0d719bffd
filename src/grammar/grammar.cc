#include "grammar/grammar.h"

#include <dlpack/dlpack.h>
#include <fmt/core.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/json_value.h"
#include "base/quoted.h"
#include "grammar/core_matcher.h"
#include "grammar/ebnf.h"
#include "grammar/grammar_tree.h"
#include "grammar/mask_cache.h"
#include "grammar/pattern.h"
#include "grammar/schema_tree.h"
#include "grammar/structural_tag.h"
#include "grammar/tool_call_grammar.h"

namespace deepinfer {
namespace {

using Clock = std::chrono::steady_clock;

// Threads that compile, and those that may go on beyond a compilation's time limit.
constexpr int kCompileThreads = 2;
constexpr int kMaxOverdue = 4;
// What the library keeps of the rules it has seen, to compile the same rule faster in the next
// grammar.
constexpr int64_t kRuleCacheBytes = int64_t{256} << 20;
constexpr size_t kMaxChoices = 4096;
constexpr int kMaxWhitespace = 64;

// Nothing that the library throws may go further.
template <class Function>
auto Guarded(Code code, std::string_view what, const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Fail(Code::kResourceExhausted, fmt::format("There is not enough memory {}.", what));
  } catch (const std::exception& error) {
    return Fail(code, fmt::format("The grammar library failed {}: {}.", what,
                                  WithoutFullStop(error.what())));
  }
}

// ---- Matchers ----------------------------------------------------------------------------------
// What all matchers of a compiler share.
struct Shared {
  explicit Shared(const GrammarLimits& limits)
      : masks(limits.mask_cache_bytes),
        kept_mask(std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double, std::micro>(limits.kept_mask_microseconds))) {}

  std::vector<int32_t> end_ids;
  int64_t size = 0;                     // of the vocabulary
  std::optional<TokenLengths> lengths;  // before the first matcher
  MaskCache masks;
  Clock::duration kept_mask;
  std::optional<int32_t> call_marker_id;
};

// What the library takes for the marker's text, since it draws no token without one. No character
// begins with this byte, so that no grammar matches it as text.
constexpr char kMarkerStandIn = '\xFF';

class Matcher final : public TokenConstraint {
 public:
  Matcher(const xgrammar::CompiledGrammar& grammar, int32_t grammar_number,
          std::shared_ptr<Shared> shared, bool allows_marker, int64_t max_rollback)
      : shared_(std::move(shared)),
        forbidden_(allows_marker ? std::nullopt : shared_->call_marker_id),
        matcher_(grammar),
        grammar_number_(grammar_number),
        max_rollback_(max_rollback) {}

  Verdict FillMask(std::span<uint32_t> mask) override {
    const auto words = static_cast<size_t>((shared_->size + 31) / 32);
    DI_CHECK_EQ(mask.size(), words);
    if (ends_ > 0) {
      std::fill(mask.begin(), mask.end(), 0);
      for (const int32_t id : shared_->end_ids) {
        mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
      }
      return Verdict::kMasked;
    }
    const Status filled = Guarded(Code::kInternal, "to compute a mask", [&]() -> Status {
      FillText(mask);
      return {};
    });
    if (!filled) return Verdict::kDeadEnd;
    if (forbidden_)
      mask[static_cast<size_t>(*forbidden_) / 32] &= ~(uint32_t{1} << *forbidden_ % 32);
    const bool any = std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
    return any ? Verdict::kMasked : Verdict::kDeadEnd;
  }

  Status Accept(int32_t token_id) override {
    if (token_id < 0 || token_id >= shared_->size) {
      return Fail(Code::kInternal, fmt::format("The token {} is outside the vocabulary of {} rows.",
                                               token_id, shared_->size));
    }
    const bool is_end = std::find(shared_->end_ids.begin(), shared_->end_ids.end(), token_id) !=
                        shared_->end_ids.end();
    if (ends_ > 0) {
      if (!is_end) {
        return Fail(Code::kInternal,
                    fmt::format("The token {} comes behind the end of the text.", token_id));
      }
      ++ends_;
      ++accepted_;
      return {};
    }
    DI_RETURN_IF_ERROR(Guarded(Code::kInternal, "to accept a token", [&]() -> Status {
      if (token_id != forbidden_ && matcher_.AcceptToken(token_id)) return {};
      return Fail(Code::kInternal,
                  fmt::format("The grammar does not allow the token {} here.", token_id));
    }));
    if (is_end) ends_ = 1;
    ++accepted_;
    return {};
  }

  void Rollback(int64_t tokens) override {
    DI_CHECK(tokens >= 0 && tokens <= max_rollback_ && tokens <= accepted_);
    accepted_ -= tokens;
    // Ends behind the first are counted here only.
    if (ends_ > 1) {
      const int64_t own = std::min(tokens, ends_ - 1);
      ends_ -= own;
      tokens -= own;
    }
    if (tokens == 0) return;
    ends_ = 0;
    matcher_.Rollback(static_cast<int>(tokens));
  }

  int64_t max_rollback() const override {
    return max_rollback_;
  }
  int64_t num_accepted() const override {
    return accepted_;
  }

 private:
  void FillText(std::span<uint32_t> mask) {
    const bool has_key = shared_->masks.enabled() && StateKey(matcher_, &key_);
    if (has_key) {
      key_.push_back(grammar_number_);
      if (shared_->masks.Find(key_, mask)) return;
    }
    const Clock::time_point begin = Clock::now();
    if (!FillNearLimit(&matcher_, *shared_->lengths, mask)) {
      auto shape = static_cast<int64_t>(mask.size());
      DLTensor tensor{};
      tensor.data = mask.data();
      tensor.device = {kDLCPU, 0};
      tensor.ndim = 1;
      tensor.dtype = {kDLInt, 32, 1};
      tensor.shape = &shape;
      matcher_.FillNextTokenBitmask(&tensor);
    }
    // The library sets the bits behind the last row too.
    if (shared_->size % 32 != 0) mask.back() &= (uint32_t{1} << (shared_->size % 32)) - 1;
    if (has_key && Clock::now() - begin >= shared_->kept_mask) shared_->masks.Add(key_, mask);
  }

  std::shared_ptr<Shared> shared_;
  std::optional<int32_t> forbidden_;  // free text of a structural tag would allow it
  xgrammar::GrammarMatcher matcher_;
  int32_t grammar_number_;  // no other grammar of the compiler has it
  std::vector<int32_t> key_;
  int64_t max_rollback_;
  int64_t accepted_ = 0;
  int64_t ends_ = 0;  // end tokens accepted, of which the library knows the first
};

class Compiled final : public CompiledGrammar {
 public:
  Compiled(xgrammar::CompiledGrammar grammar, int32_t number, std::shared_ptr<Shared> shared,
           bool allows_marker)
      : grammar_(std::move(grammar)),
        number_(number),
        shared_(std::move(shared)),
        allows_marker_(allows_marker),
        memory_bytes_(static_cast<int64_t>(grammar_.MemorySizeBytes())) {}

  int64_t memory_bytes() const override {
    return memory_bytes_;
  }
  std::unique_ptr<TokenConstraint> NewMatcher(int64_t max_rollback) const override {
    return std::make_unique<Matcher>(grammar_, number_, shared_, allows_marker_, max_rollback);
  }

 private:
  xgrammar::CompiledGrammar grammar_;
  int32_t number_;
  std::shared_ptr<Shared> shared_;
  bool allows_marker_;
  int64_t memory_bytes_;
};

// ---- Specifications ----------------------------------------------------------------------------
Status CheckSpec(const GrammarSpec& spec, const GrammarLimits& limits) {
  int64_t bytes = static_cast<int64_t>(spec.text.size());
  for (const std::string& choice : spec.choices) bytes += static_cast<int64_t>(choice.size());
  if (bytes > limits.max_text_bytes) {
    return Fail(Code::kResourceExhausted,
                fmt::format("The description of the grammar has {} bytes; at most {} are allowed.",
                            bytes, limits.max_text_bytes));
  }
  if (spec.max_whitespace < 0 || spec.max_whitespace > kMaxWhitespace) {
    return Fail(Code::kInvalidArgument, fmt::format("max_whitespace is {}; allowed are 0 ... {}.",
                                                    spec.max_whitespace, kMaxWhitespace));
  }
  if (spec.kind == GrammarSpec::Kind::kChoice) {
    if (spec.choices.empty() || spec.choices.size() > kMaxChoices) {
      return Fail(Code::kInvalidArgument, fmt::format("There are {} choices; allowed are 1 ... {}.",
                                                      spec.choices.size(), kMaxChoices));
    }
  } else if (spec.text.empty() && spec.kind != GrammarSpec::Kind::kJsonObject &&
             spec.kind != GrammarSpec::Kind::kRegex) {
    return Fail(Code::kInvalidArgument, "The description of the grammar is empty.");
  }
  return {};
}

Status ChoicesToTree(const std::vector<std::string>& choices, GrammarTree* tree) {
  const GrammarTree::RuleId root = tree->AddRule("the choices");
  std::vector<GrammarTree::NodeId> nodes;
  for (size_t i = 0; i < choices.size(); ++i) {
    size_t offset = 0;
    while (offset < choices[i].size()) {
      if (NextCodePoint(choices[i], &offset) < 0) {
        return Fail(Code::kInvalidArgument, fmt::format("Choice {} is not UTF-8.", i));
      }
    }
    nodes.push_back(tree->Literal(choices[i]));
  }
  tree->SetBody(root, tree->Choice(std::move(nodes)));
  return {};
}

// The rules of a specification in the library's notation; not of a structural tag.
Result<std::string> RulesOf(const GrammarSpec& spec, const Shared& vocabulary) {
  GrammarTree tree;
  const JsonTextOptions options{spec.max_whitespace};
  switch (spec.kind) {
    case GrammarSpec::Kind::kJsonSchema: {
      auto schema = JsonValue::Parse(spec.text);
      if (!schema) return WithContext(std::move(schema.error()), "The schema");
      DI_RETURN_IF_ERROR(SchemaToTree(*schema, options, &tree));
      break;
    }
    case GrammarSpec::Kind::kJsonObject:
      DI_RETURN_IF_ERROR(JsonObjectToTree(options, &tree));
      break;
    case GrammarSpec::Kind::kRegex: {
      const GrammarTree::RuleId root = tree.AddRule("the pattern");
      DI_ASSIGN_OR_RETURN(const GrammarTree::NodeId body,
                          PatternToTree(spec.text, PatternUse::kWholeText, &tree));
      tree.SetBody(root, body);
      break;
    }
    case GrammarSpec::Kind::kEbnf:
      DI_RETURN_IF_ERROR(EbnfToTree(spec.text, &tree));
      break;
    case GrammarSpec::Kind::kChoice:
      DI_RETURN_IF_ERROR(ChoicesToTree(spec.choices, &tree));
      break;
    case GrammarSpec::Kind::kToolCalls:
      if (!vocabulary.call_marker_id) {
        return Fail(Code::kUnsupported,
                    "The tokenizer has no token for the marker of tool calls, so that calls cannot "
                    "be constrained.");
      }
      DI_RETURN_IF_ERROR(ToolCallsToTree(spec.text,
                                         {.dialect = spec.tool_calls.dialect,
                                          .inside_block = spec.tool_calls.inside_block,
                                          .marker_id = *vocabulary.call_marker_id,
                                          .json = options},
                                         &tree));
      break;
    case GrammarSpec::Kind::kStructuralTag:
      DI_CHECK(false);
  }
  DI_RETURN_IF_ERROR(tree.Check());
  return tree.ToEbnf();
}

std::string CacheKey(const GrammarSpec& spec) {
  std::string key = fmt::format("{} {} ", static_cast<int>(spec.kind), spec.max_whitespace);
  if (spec.kind == GrammarSpec::Kind::kToolCalls) {
    key += fmt::format("{} {} ", static_cast<int>(spec.tool_calls.dialect),
                       spec.tool_calls.inside_block);
  }
  if (spec.kind == GrammarSpec::Kind::kChoice) {
    for (const std::string& choice : spec.choices)
      key += fmt::format("{}:", choice.size()) + choice;
  } else if (spec.kind != GrammarSpec::Kind::kJsonObject) {
    key += spec.text;
  }
  return key;
}

using CompileResult = Result<std::shared_ptr<const CompiledGrammar>>;

struct Job {
  GrammarSpec spec;
  std::string key;
  std::optional<Clock::time_point> started;
  bool overdue = false;  // nobody waits any longer
  std::optional<CompileResult> result;
  std::condition_variable changed;
};

}  // namespace

// All members are under the mutex, except the library's objects, which are safe for threads.
struct GrammarCompiler::Impl {
  Impl(GrammarVocabulary given, GrammarLimits given_limits)
      : limits(given_limits),
        vocabulary(std::move(given)),
        shared(std::make_shared<Shared>(given_limits)) {
    shared->end_ids = vocabulary.end_ids;
    shared->size = vocabulary.vocab_size;
    shared->call_marker_id = vocabulary.call_marker_id;
    DI_CHECK_GE(vocabulary.vocab_size, static_cast<int64_t>(vocabulary.token_bytes.size()));
    for (const int32_t id : vocabulary.end_ids) {
      DI_CHECK(id >= 0 && id < vocabulary.vocab_size);
      DI_CHECK(id != vocabulary.call_marker_id);
    }
    if (const std::optional<int32_t> id = vocabulary.call_marker_id) {
      DI_CHECK(*id >= 0 && *id < static_cast<int64_t>(vocabulary.token_bytes.size()));
    }
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
      work_available.notify_all();
    }
    for (std::thread& thread : threads) thread.join();
  }

  CompileResult Compile(const GrammarSpec& spec) {
    DI_RETURN_IF_ERROR(CheckSpec(spec, limits));
    std::string key = CacheKey(spec);
    std::unique_lock lock(mutex);
    if (const auto found = cache.find(key); found != cache.end()) {
      ++counters.cache_hits;
      recency.splice(recency.begin(), recency, found->second.recency);
      return found->second.grammar;
    }
    std::shared_ptr<Job> job;
    if (const auto found = in_flight.find(key); found != in_flight.end()) {
      job = found->second;
    } else {
      job = std::make_shared<Job>();
      job->spec = spec;
      job->key = key;
      in_flight.emplace(std::move(key), job);
      queue.push_back(job);
      StartThreads();
      work_available.notify_one();
    }
    const auto limit = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(limits.compile_seconds));
    while (!job->result) {
      // What waits for its turn has all the time: others must not make it fail.
      if (!job->started && !job->overdue) {
        job->changed.wait(lock);
        continue;
      }
      const Clock::time_point begin = *job->started;
      if (job->overdue || Clock::now() >= begin + limit) {
        if (!job->overdue) {
          job->overdue = true;
          in_flight.erase(job->key);
          ++overdue;
          StartThreads();  // others may wait for the thread that this one keeps
          ++counters.failed;
          job->changed.notify_all();
        }
        return Fail(Code::kResourceExhausted,
                    fmt::format("The grammar was not compiled within compile_seconds, {} s.",
                                limits.compile_seconds));
      }
      job->changed.wait_until(lock, begin + limit);
    }
    return *job->result;
  }

  // With the mutex held.
  void StartThreads() {
    const size_t wanted = std::min(queue.size(), static_cast<size_t>(kCompileThreads));
    const auto allowed = static_cast<size_t>(kCompileThreads + std::min(overdue, kMaxOverdue));
    while (idle < wanted && running < allowed) {
      ++running;
      ++idle;
      threads.emplace_back([this] { Work(); });
    }
  }

  void Work() {
    std::unique_lock lock(mutex);
    while (true) {
      work_available.wait(lock, [&] { return stopping || !queue.empty(); });
      if (stopping) return;
      const std::shared_ptr<Job> job = std::move(queue.front());
      queue.pop_front();
      if (job->overdue) continue;
      --idle;
      job->started = Clock::now();
      job->changed.notify_all();
      lock.unlock();
      CompileResult result = Guarded(Code::kInvalidArgument, "to compile the grammar",
                                     [&] { return CompileNow(job->spec); });
      lock.lock();
      ++idle;
      if (result) {
        ++counters.compiled;
        Remember(job->key, *result);
      } else if (!job->overdue) {
        ++counters.failed;
      }
      if (job->overdue) {
        --overdue;
      } else {
        in_flight.erase(job->key);
      }
      job->result = std::move(result);
      job->changed.notify_all();
      if (running > static_cast<size_t>(kCompileThreads + std::min(overdue, kMaxOverdue))) {
        --running;
        --idle;
        return;
      }
    }
  }

  CompileResult CompileNow(const GrammarSpec& spec) {
    const auto converted =
        spec.kind == GrammarSpec::Kind::kStructuralTag
            ? RewriteStructuralTag(spec.text, JsonTextOptions{spec.max_whitespace})
            : RulesOf(spec, *shared);
    if (!converted) return tl::unexpected<Error>(converted.error());
    std::call_once(library_ready, [&] { PrepareLibrary(); });
    xgrammar::CompiledGrammar grammar = [&] {
      if (spec.kind != GrammarSpec::Kind::kStructuralTag) {
        // As text: grammars that are given parsed are printed and read again by the library, with
        // escapes that swallow the letters behind them.
        return compiler->CompileGrammar(*converted, "root");
      }
      return compiler->CompileStructuralTag(*converted);
    }();
    auto compiled = std::make_shared<Compiled>(std::move(grammar), ++last_number, shared,
                                               spec.kind == GrammarSpec::Kind::kToolCalls);
    if (compiled->memory_bytes() > limits.max_grammar_bytes) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("The compiled grammar has {} bytes; at most max_grammar_bytes, {}, "
                              "are allowed.",
                              compiled->memory_bytes(), limits.max_grammar_bytes));
    }
    return compiled;
  }

  // Sorts the vocabulary: on the first compilation's thread, not at start.
  void PrepareLibrary() {
    // Tokens of the end are not text; the library takes ids without text for special.
    std::vector<std::string> tokens = std::move(vocabulary.token_bytes);
    for (const int32_t id : vocabulary.end_ids) {
      if (static_cast<size_t>(id) < tokens.size()) tokens[static_cast<size_t>(id)].clear();
    }
    if (const std::optional<int32_t> id = shared->call_marker_id) {
      tokens[static_cast<size_t>(*id)] = std::string(2, kMarkerStandIn);
    }
    const xgrammar::TokenizerInfo info(tokens, xgrammar::VocabType::RAW,
                                       static_cast<int>(vocabulary.vocab_size), vocabulary.end_ids);
    shared->lengths.emplace(info);
    compiler.emplace(info, /*max_threads=*/1, /*cache_enabled=*/true, kRuleCacheBytes);
  }

  // With the mutex held.
  void Remember(const std::string& key, const std::shared_ptr<const CompiledGrammar>& grammar) {
    const int64_t bytes = grammar->memory_bytes() + static_cast<int64_t>(key.size());
    if (bytes > limits.cache_bytes || cache.count(key) > 0) return;
    while (counters.cache_bytes + bytes > limits.cache_bytes) {
      const auto oldest = cache.find(recency.back());
      counters.cache_bytes -= oldest->second.bytes;
      cache.erase(oldest);
      recency.pop_back();
    }
    recency.push_front(key);
    cache.emplace(key, Entry{grammar, bytes, recency.begin()});
    counters.cache_bytes += bytes;
  }

  struct Entry {
    std::shared_ptr<const CompiledGrammar> grammar;
    int64_t bytes;
    std::list<std::string>::iterator recency;
  };

  const GrammarLimits limits;
  GrammarVocabulary vocabulary;  // its bytes move into the library
  const std::shared_ptr<Shared> shared;
  std::once_flag library_ready;
  std::atomic<int32_t> last_number = 0;  // of a compiled grammar
  std::optional<xgrammar::GrammarCompiler> compiler;

  std::mutex mutex;
  std::condition_variable work_available;
  bool stopping = false;
  std::deque<std::shared_ptr<Job>> queue;
  std::unordered_map<std::string, std::shared_ptr<Job>> in_flight;
  size_t running = 0;  // threads, without those that have ended
  size_t idle = 0;
  int overdue = 0;  // jobs that run although nobody waits
  std::list<std::thread> threads;
  std::unordered_map<std::string, Entry> cache;
  std::list<std::string> recency;  // latest first
  Counters counters;
};

GrammarCompiler::GrammarCompiler(GrammarVocabulary vocabulary, GrammarLimits limits)
    : impl_(std::make_unique<Impl>(std::move(vocabulary), limits)) {}

GrammarCompiler::~GrammarCompiler() = default;

Result<std::shared_ptr<const CompiledGrammar>> GrammarCompiler::Compile(const GrammarSpec& spec) {
  return impl_->Compile(spec);
}

GrammarCompiler::Counters GrammarCompiler::counters() const {
  std::lock_guard lock(impl_->mutex);
  Counters counters = impl_->counters;
  counters.masks_found = impl_->shared->masks.found();
  return counters;
}

}  // namespace deepinfer
