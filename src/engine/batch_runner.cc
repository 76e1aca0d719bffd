#include "engine/batch_runner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "text/chat_prompt.h"
#include "text/utf8.h"

namespace deepinfer {
namespace {

Error FirstOf(const std::vector<Error>& problems) {
  Error all = problems.front();
  for (size_t i = 1; i < problems.size(); ++i) all.message += " " + problems[i].message;
  return all;
}

tl::unexpected<Error> WithField(Error error, std::string field) {
  if (error.field.empty()) error.field = std::move(field);
  return tl::unexpected<Error>(std::move(error));
}

Result<std::vector<int32_t>> ResolveText(const std::string& text, const Tokenizer& tokenizer) {
  if (text.empty())
    return Fail(Code::kInvalidArgument, "prompt is empty; at least one character is needed.",
                "prompt");
  Result<std::vector<int32_t>> ids = tokenizer.Encode(text);
  if (!ids.has_value()) return WithField(std::move(ids.error()), "prompt");
  const std::optional<int32_t> bos = tokenizer.bos_id();
  if (bos.has_value() && (ids->empty() || ids->front() != *bos)) ids->insert(ids->begin(), *bos);
  return ids;
}

Result<std::vector<int32_t>> ResolveIds(const std::vector<int64_t>& ids, int64_t vocab_size) {
  if (ids.empty()) {
    return Fail(Code::kInvalidArgument, "prompt_token_ids is empty; at least one token is needed.",
                "prompt_token_ids");
  }
  std::vector<int32_t> tokens;
  tokens.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      const std::string field = fmt::format("prompt_token_ids[{}]", i);
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} is {}; token ids of this model are 0 ... {}.", field, ids[i],
                              vocab_size - 1),
                  field);
    }
    tokens.push_back(static_cast<int32_t>(ids[i]));
  }
  return tokens;
}

Result<std::vector<int32_t>> ResolveChat(const Chat& chat, const Tokenizer& tokenizer) {
  if (chat.messages.empty())
    return Fail(Code::kInvalidArgument, "messages is empty; at least one is needed.", "messages");
  std::vector<basic_chat::ChatMessage> messages;
  for (const Message& message : chat.messages) {
    messages.push_back({message.role, message.content, message.reasoning_content});
  }
  basic_chat::ChatOptions options;
  options.mode =
      chat.thinking ? basic_chat::ThinkingMode::kThinking : basic_chat::ThinkingMode::kChat;
  options.reasoning_effort = chat.reasoning_effort;
  Result<std::vector<int32_t>> ids = basic_chat::EncodeChat(tokenizer, messages, options);
  if (!ids.has_value()) return WithField(std::move(ids.error()), "messages");
  return ids;
}

Status CheckText(std::string_view text, const std::string& field) {
  const std::optional<size_t> bad = FindInvalidUtf8(text);
  if (!bad.has_value()) return {};
  return Fail(Code::kInvalidArgument,
              fmt::format("{} is not UTF-8 at byte {}; only UTF-8 text can match.", field, *bad),
              field);
}

Status CheckTexts(const std::vector<std::string>& texts, const char* field) {
  for (size_t i = 0; i < texts.size(); ++i)
    DI_RETURN_IF_ERROR(CheckText(texts[i], fmt::format("{}[{}]", field, i)));
  return {};
}

// Where a conversation's prompt leaves the model inside of its reasoning, a structured output
// begins after it. Markers in what users have written are text, not tokens.
void BeginAfterReasoning(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt,
                         StructuredOutput& output) {
  const std::optional<int32_t> open = tokenizer.IdOf("<think>");
  const std::optional<int32_t> close = tokenizer.IdOf("</think>");
  if (!open.has_value() || !close.has_value()) return;
  const auto last = std::find_if(prompt.rbegin(), prompt.rend(),
                                 [&](int32_t id) { return id == *open || id == *close; });
  if (last != prompt.rend() && *last == *open) output.trigger_token_ids = {*close};
}

// The fields that decide when a request runs.
Status CheckServiceFields(const Request& request) {
  constexpr int64_t kMaxPriority = 1'000'000;
  constexpr size_t kMaxNameBytes = 256;
  if (request.priority < -kMaxPriority || request.priority > kMaxPriority) {
    return Fail(Code::kInvalidArgument,
                fmt::format("priority is {}; allowed are {} ... {}.", request.priority,
                            -kMaxPriority, kMaxPriority),
                "priority");
  }
  if (request.timeout_seconds.has_value() && !(*request.timeout_seconds > 0.0)) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format("timeout_seconds is {}; it must be more than 0.", *request.timeout_seconds),
        "timeout_seconds");
  }
  for (const auto& [text, field] :
       {std::pair{&request.user_id, "user_id"}, std::pair{&request.cache_salt, "cache_salt"}}) {
    if (text->size() <= kMaxNameBytes) continue;
    return Fail(
        Code::kInvalidArgument,
        fmt::format("{} has {} bytes; allowed are at most {}.", field, text->size(), kMaxNameBytes),
        field);
  }
  return {};
}

// Each forbidden text at the beginning of a word and inside of one.
Status ResolveBadWords(const SamplingParams& params, const Tokenizer& tokenizer,
                       std::vector<std::vector<int32_t>>* words) {
  for (const std::vector<int64_t>& ids : params.bad_words_token_ids)
    words->emplace_back(ids.begin(), ids.end());
  for (size_t i = 0; i < params.bad_words.size(); ++i) {
    for (const char* space : {"", " "}) {
      Result<std::vector<int32_t>> ids = tokenizer.Encode(space + params.bad_words[i]);
      if (!ids.has_value())
        return WithField(std::move(ids.error()), fmt::format("bad_words[{}]", i));
      if (!ids->empty()) words->push_back(std::move(*ids));
    }
  }
  return {};
}

Result<std::vector<int32_t>> ResolvePrompt(const Request& request, const Tokenizer& tokenizer,
                                           int64_t vocab_size) {
  if (const auto* text = std::get_if<std::string>(&request.prompt))
    return ResolveText(*text, tokenizer);
  if (const auto* ids = std::get_if<std::vector<int64_t>>(&request.prompt))
    return ResolveIds(*ids, vocab_size);
  return ResolveChat(std::get<Chat>(request.prompt), tokenizer);
}

// The name under which the request gave its prompt.
const char* PromptField(const Request& request) {
  constexpr const char* kFields[] = {"prompt", "prompt_token_ids", "messages"};
  return kFields[request.prompt.index()];
}

}  // namespace

std::vector<int32_t> EndOfTurnIds(const Tokenizer& tokenizer, int64_t eos_id, int64_t vocab_size) {
  std::vector<int32_t> ids = {static_cast<int32_t>(eos_id)};
  const auto add = [&](std::optional<int32_t> id) {
    if (id.has_value() && *id < vocab_size && std::find(ids.begin(), ids.end(), *id) == ids.end())
      ids.push_back(*id);
  };
  add(tokenizer.bos_id());
  for (const char* opening : {"<｜System｜>", "<｜User｜>", "<｜Assistant｜>"})
    add(tokenizer.IdOf(opening));
  return ids;
}

Result<EngineRequest> ResolveRequest(const Request& request, const Tokenizer& tokenizer,
                                     int64_t vocab_size,
                                     const std::function<uint64_t()>& fresh_seed) {
  const SamplingParams& params = request.sampling_params;
  if (const std::vector<Error> problems = params.Validate(vocab_size); !problems.empty()) {
    return tl::unexpected<Error>(FirstOf(problems));
  }
  DI_RETURN_IF_ERROR(CheckTexts(params.stop, "stop"));
  if (params.structured_output.has_value()) {
    DI_RETURN_IF_ERROR(CheckText(params.structured_output->schema, "structured_output.schema"));
    DI_RETURN_IF_ERROR(CheckTexts(params.structured_output->choices, "structured_output.choices"));
  }
  DI_RETURN_IF_ERROR(CheckServiceFields(request));
  EngineRequest resolved;
  resolved.id = request.id;
  resolved.params = params;
  DI_RETURN_IF_ERROR(ResolveBadWords(params, tokenizer, &resolved.bad_words));
  DI_ASSIGN_OR_RETURN(resolved.prompt, ResolvePrompt(request, tokenizer, vocab_size));
  std::optional<StructuredOutput>& output = resolved.params.structured_output;
  if (output.has_value() && output->trigger_token_ids.empty() &&
      std::holds_alternative<Chat>(request.prompt)) {
    BeginAfterReasoning(tokenizer, resolved.prompt, *output);
  }
  resolved.user_id = request.user_id;
  resolved.priority = static_cast<int32_t>(request.priority);
  if (request.timeout_seconds.has_value()) resolved.timeout_seconds = *request.timeout_seconds;
  resolved.cache_salt = request.cache_salt;
  resolved.seed = params.seq_seed.has_value() ? *params.seq_seed : fresh_seed();
  return resolved;
}

namespace {

using FinishedSink = std::function<void(size_t index, RequestOutput output)>;

// One run of the engine over a source.
class StreamRun {
 public:
  // `total`: -1 if only the source knows.
  StreamRun(const BatchContext& context, const RequestSource& next,
            const GenerateCallbacks& callbacks, int64_t total, const FinishedSink& finished)
      : context_(context),
        next_(next),
        callbacks_(callbacks),
        finished_(finished),
        engine_(context.engine),
        before_(context.engine.counters()),
        // A few more than can run, so that a step that ends some sequences can begin others.
        wanted_(engine_.max_num_seqs() + std::max<int64_t>(1, engine_.max_num_seqs() / 8)) {
    progress_.requests_total = total;
    engine_.set_events(Events());
  }
  ~StreamRun() {
    engine_.Abort();
    // Rows that are still in flight.
    while (engine_.Step()) {
    }
    engine_.set_events({});
  }
  StreamRun(const StreamRun&) = delete;
  StreamRun& operator=(const StreamRun&) = delete;

  // Returns early when on_progress stops it.
  void Run() {
    Supply();
    for (;;) {
      const bool ran = engine_.Step();
      if (!ran && ended_) return;
      const EngineCounters counters = engine_.counters();
      progress_.prompt_tokens = counters.prompt_tokens - before_.prompt_tokens;
      progress_.cached_tokens = counters.cached_tokens - before_.cached_tokens;
      progress_.completion_tokens = counters.completion_tokens - before_.completion_tokens;
      progress_.running = engine_.num_running();
      if (callbacks_.on_progress && !callbacks_.on_progress(progress_)) {
        engine_.Abort();
        return;
      }
      Supply();
    }
  }

 private:
  EngineEvents Events() {
    EngineEvents events;
    events.on_delta = [this](int64_t request, int64_t completion, std::string_view text,
                             std::span<const int32_t> token_ids, FinishReason reason) {
      if (callbacks_.on_text)
        callbacks_.on_text({index_of_.at(request), completion, text, token_ids, reason});
    };
    events.on_finished = [this](int64_t request, RequestOutput output) {
      const auto entry = index_of_.find(request);
      const size_t index = entry->second;
      index_of_.erase(entry);
      Finish(index, std::move(output));
    };
    return events;
  }

  void Finish(size_t index, RequestOutput output) {
    ++progress_.requests_done;
    finished_(index, std::move(output));
  }

  void Refuse(size_t index, const Request& request, Error error) {
    RequestOutput output;
    output.id = request.id;
    output.error = std::move(error);
    Finish(index, std::move(output));
  }

  int64_t in_engine() const {
    return engine_.num_waiting() + engine_.num_running();
  }

  // Takes requests while there is room. Prompts are tokenised here, a little ahead of the model
  // only, so that the first step does not wait for many. Requests that cannot start do not make it
  // go on for ever.
  void Supply() {
    for (int64_t asked = 0; asked < wanted_ && !ended_ && in_engine() < wanted_; ++asked) {
      NextRequest answer = next_(/*may_wait=*/in_engine() == 0);
      if (std::holds_alternative<NoRequestYet>(answer)) return;
      if (std::holds_alternative<EndOfRequests>(answer)) {
        ended_ = true;
        progress_.requests_total = static_cast<int64_t>(taken_);
        return;
      }
      Submit(taken_++, std::get<Request>(answer));
    }
  }

  void Submit(size_t index, const Request& request) {
    Result<EngineRequest> resolved =
        ResolveRequest(request, context_.tokenizer, engine_.vocab_size(), context_.fresh_seed);
    if (!resolved.has_value()) {
      engine_.CountRefused();
      return Refuse(index, request, resolved.error());
    }
    const Result<int64_t> number = engine_.Submit(std::move(*resolved));
    if (number.has_value()) {
      index_of_.emplace(*number, index);
      return;
    }
    Error error = number.error();
    if (error.field == "prompt") error.field = PromptField(request);
    Refuse(index, request, std::move(error));
  }

  const BatchContext& context_;
  const RequestSource& next_;
  const GenerateCallbacks& callbacks_;
  const FinishedSink& finished_;
  Engine& engine_;
  const EngineCounters before_;
  const int64_t wanted_;
  size_t taken_ = 0;
  bool ended_ = false;
  std::unordered_map<int64_t, size_t> index_of_;  // by the engine's number, while in the engine
  Progress progress_;
};

}  // namespace

void RunStream(const BatchContext& context, const RequestSource& next,
               const GenerateCallbacks& callbacks) {
  const FinishedSink finished = [&](size_t index, const RequestOutput& output) {
    if (callbacks.on_finished) callbacks.on_finished(index, output);
  };
  StreamRun(context, next, callbacks, -1, finished).Run();
}

std::vector<RequestOutput> RunBatch(const BatchContext& context, std::span<const Request> requests,
                                    const GenerateCallbacks& callbacks) {
  std::vector<RequestOutput> outputs(requests.size());
  const FinishedSink finished = [&](size_t index, RequestOutput output) {
    outputs[index] = std::move(output);
    if (callbacks.on_finished) callbacks.on_finished(index, outputs[index]);
  };
  size_t taken = 0;
  const RequestSource next = [&](bool) -> NextRequest {
    if (taken == requests.size()) return EndOfRequests{};
    return requests[taken++];
  };
  StreamRun(context, next, callbacks, static_cast<int64_t>(requests.size()), finished).Run();
  for (; taken < requests.size(); ++taken) {
    RequestOutput output;
    output.id = requests[taken].id;
    output.error = Error{Code::kCancelled,
                         "the request was not started because the caller stopped the batch.", ""};
    finished(taken, std::move(output));
  }
  return outputs;
}

}  // namespace deepinfer
