#include "engine/batch_runner.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "engine/resolve_request.h"

namespace deepinfer {
namespace {

// The name under which the request gave its prompt.
const char* PromptField(const Request& request) {
  constexpr const char* kFields[] = {"prompt", "prompt_token_ids", "messages"};
  return kFields[request.prompt.index()];
}

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
    events.on_delta = [this](const EngineDelta& delta) {
      if (!callbacks_.on_text) return;
      callbacks_.on_text({.request = index_of_.at(delta.request),
                          .completion = delta.completion,
                          .text = delta.text,
                          .reasoning = delta.reasoning,
                          .token_ids = delta.token_ids,
                          .finish_reason = delta.finish_reason});
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
