#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/check.h"
#include "sample/philox.h"

namespace deepinfer {

// Shared by the sequences of a request.
struct Engine::Request {
  int64_t number = 0;
  EngineRequest input;
  RequestOutput output;
  int64_t unfinished = 0;  // completions
  double submitted = 0;    // clock values
  std::optional<double> first_row;
  std::optional<double> first_token;
};

struct Engine::Sequence {
  std::shared_ptr<Request> request;
  int64_t index = 0;
  int64_t max_new_tokens = 0;
  std::vector<int32_t> end_ids;
  std::vector<int32_t> tokens;  // prompt and output
  SequenceSampler sampler;
  CompletionText text;

  std::optional<ModelBackend::SequenceId> handle = {};  // present while running
  int64_t computed = 0;                                 // tokens that the backend holds
  int64_t most_computed = 0;                            // the same, not reset by preemption
  std::string delta_text = {};                          // not yet emitted
  std::vector<int32_t> delta_ids = {};
  bool finished = false;

  const SamplingParams& params() const {
    return request->input.params;
  }
  CompletionOutput& output() {
    return request->output.outputs[static_cast<size_t>(index)];
  }
  int64_t prompt_tokens() const {
    return static_cast<int64_t>(request->input.prompt.size());
  }
  int64_t known() const {
    return static_cast<int64_t>(tokens.size());
  }
  int64_t pending() const {
    return known() - computed;
  }
  int64_t remaining_tokens() const {
    return max_new_tokens - (known() - prompt_tokens());
  }
  // Prompt rows whose logits are still wanted: from this one to the one before the last. Completion
  // 0 collects them.
  int64_t first_prompt_logprob_row() const {
    const bool wanted = index == 0 && params().prompt_logprobs.has_value();
    return wanted ? static_cast<int64_t>(request->output.prompt_logprobs.size()) : prompt_tokens();
  }
  bool wants_prompt_logprobs() const {
    return first_prompt_logprob_row() < prompt_tokens() - 1;
  }
};

Engine::Engine(ModelBackend& backend, const Tokenizer& tokenizer, EngineOptions options,
               EngineEvents events)
    : backend_(backend),
      tokenizer_(tokenizer),
      options_(std::move(options)),
      events_(std::move(events)) {
  DI_CHECK_GE(options_.max_num_seqs, 1);
  DI_CHECK_GE(options_.max_num_batched_tokens, options_.max_num_seqs);
  DI_CHECK_GE(options_.max_prompt_logit_rows, 1);
  max_sequence_tokens_ =
      std::min(options_.max_model_len, backend_.num_blocks() * backend_.block_tokens());
}

Engine::~Engine() {
  for (const std::unique_ptr<Sequence>& sequence : running_) backend_.Close(*sequence->handle);
}

double Engine::Now() const {
  if (options_.clock) return options_.clock();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t Engine::BlocksFor(int64_t tokens) const {
  return (tokens + backend_.block_tokens() - 1) / backend_.block_tokens();
}

Status Engine::CheckRequest(const EngineRequest& request) const {
  const std::vector<Error> problems = request.params.Validate(backend_.vocab_size());
  if (!problems.empty()) {
    Error all = problems.front();
    for (size_t i = 1; i < problems.size(); ++i) all.message += " " + problems[i].message;
    return tl::unexpected<Error>(std::move(all));
  }
  if (request.prompt.empty()) {
    return Fail(Code::kInvalidArgument, "the prompt has no tokens; at least one is needed.",
                "prompt");
  }
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    const int32_t id = request.prompt[i];
    if (id >= 0 && id < backend_.vocab_size()) continue;
    return Fail(Code::kInvalidArgument,
                fmt::format("prompt token {} is {}; token ids of this model are 0 ... {}.", i, id,
                            backend_.vocab_size() - 1),
                fmt::format("prompt_token_ids[{}]", i));
  }
  const int64_t prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const int64_t room_for = request.params.max_tokens == 0 ? 0 : 1;
  if (prompt_tokens + room_for > max_sequence_tokens_) {
    const char* what = max_sequence_tokens_ < options_.max_model_len ? "the cache memory holds"
                                                                     : "the context limit is";
    return Fail(
        Code::kInvalidArgument,
        fmt::format("the prompt has {} tokens, but {} {} tokens for prompt and output together.",
                    prompt_tokens, what, max_sequence_tokens_),
        "prompt");
  }
  return {};
}

Result<int64_t> Engine::Submit(EngineRequest input) {
  DI_RETURN_IF_ERROR(CheckRequest(input));
  auto request = std::make_shared<Request>();
  request->number = next_request_++;
  request->input = std::move(input);
  request->submitted = Now();
  const EngineRequest& in = request->input;
  const int64_t prompt_tokens = static_cast<int64_t>(in.prompt.size());
  request->output.id = in.id;
  request->output.prompt_token_ids = in.prompt;
  request->output.usage.prompt_tokens = prompt_tokens;
  request->output.outputs.resize(static_cast<size_t>(in.params.n));
  request->unfinished = in.params.n;

  std::vector<int32_t> end_ids = in.params.ignore_eos ? std::vector<int32_t>{} : options_.end_ids;
  for (const int64_t id : in.params.stop_token_ids) end_ids.push_back(static_cast<int32_t>(id));
  for (int64_t index = 0; index < in.params.n; ++index) {
    const uint64_t seed = CompletionSeed(in.seed, index);
    request->output.outputs[static_cast<size_t>(index)].index = index;
    request->output.outputs[static_cast<size_t>(index)].seq_seed = seed;
    const int64_t room = max_sequence_tokens_ - prompt_tokens;
    waiting_.push_back(std::make_unique<Sequence>(
        Sequence{.request = request,
                 .index = index,
                 .max_new_tokens = std::min(in.params.max_tokens.value_or(room), room),
                 .end_ids = end_ids,
                 .tokens = in.prompt,
                 .sampler = SequenceSampler(in.params, seed, in.prompt, in.bad_words, end_ids),
                 .text = CompletionText(tokenizer_, in.params)}));
  }
  return request->number;
}

bool Engine::Step() {
  if (waiting_.empty() && running_.empty()) return false;
  MakeRoom();
  Admit();
  const std::vector<PlannedChunk> plan = Schedule();
  if (!plan.empty()) {
    const Result<std::span<const float>> logits = Run(plan);
    int64_t row = 0;
    for (const PlannedChunk& chunk : plan) {
      if (!logits.has_value()) {
        EndWithError(*chunk.sequence, logits.error());
        continue;
      }
      const int64_t vocab = backend_.vocab_size();
      Commit(chunk, logits->subspan(static_cast<size_t>(row * vocab),
                                    static_cast<size_t>(chunk.num_logit_rows * vocab)));
      row += chunk.num_logit_rows;
    }
  }
  RemoveFinished();
  return true;
}

// Every running sequence gets blocks for the tokens it knows, oldest first; the youngest give
// theirs up when there are none.
void Engine::MakeRoom() {
  for (size_t i = 0; i < running_.size(); ++i) {
    while (i < running_.size()) {
      const Status reserved = backend_.Reserve(*running_[i]->handle, running_[i]->pending());
      if (reserved.has_value()) break;
      if (running_.size() == 1) {  // it would fit alone: the memory is lost to something else
        EndWithError(*running_[i], reserved.error());
        break;
      }
      PreemptYoungest();
    }
  }
  RemoveFinished();
}

void Engine::PreemptYoungest() {
  std::unique_ptr<Sequence> sequence = std::move(running_.back());
  running_.pop_back();
  backend_.Close(*sequence->handle);
  sequence->handle.reset();
  sequence->computed = 0;
  ++sequence->request->output.usage.preemptions;
  ++counters_.preemptions;
  waiting_.push_front(std::move(sequence));
}

// First come, first served: nothing overtakes a sequence that does not fit yet, so nothing can
// starve.
void Engine::Admit() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_num_seqs) {
    Sequence& sequence = *waiting_.front();
    if (sequence.max_new_tokens == 0 && !sequence.wants_prompt_logprobs()) {
      Finish(sequence, FinishReason::kLength);
      waiting_.pop_front();
      continue;
    }
    // Room for the next block of output of this sequence, and for one more block of each running
    // one.
    const int64_t growth = std::min(sequence.remaining_tokens(), backend_.block_tokens());
    const int64_t blocks =
        BlocksFor(sequence.known() + growth) + static_cast<int64_t>(running_.size());
    if (!running_.empty() &&
        (blocks > backend_.num_free_blocks() || backend_.num_free_slots() == 0))
      return;
    Status admitted;
    if (Result<ModelBackend::SequenceId> handle = backend_.Open(); handle.has_value()) {
      sequence.handle = *handle;
      admitted = backend_.Reserve(*handle, sequence.known());
    } else {
      admitted = tl::unexpected<Error>(handle.error());
    }
    std::unique_ptr<Sequence> owned = std::move(waiting_.front());
    waiting_.pop_front();
    if (admitted.has_value()) {
      running_.push_back(std::move(owned));
    } else {
      EndWithError(*owned, admitted.error());
    }
  }
}

// Sequences that need one row first, so that a long prompt does not hold up running outputs; the
// rest of the rows goes to prompts in order of arrival.
std::vector<Engine::PlannedChunk> Engine::Schedule() const {
  std::vector<PlannedChunk> plan;
  int64_t rows = options_.max_num_batched_tokens;
  int64_t prompt_logit_rows = options_.max_prompt_logit_rows;
  for (const bool single_rows : {true, false}) {
    for (const std::unique_ptr<Sequence>& sequence : running_) {
      if (rows == 0) return plan;
      if ((sequence->pending() == 1) != single_rows) continue;
      PlannedChunk chunk{sequence.get(), sequence->computed, 0, 0};
      chunk.end = chunk.begin + std::min(sequence->pending(), rows);
      // Rows [first, prompt - 1) are wanted for prompt log-probabilities, and the last row of all
      // to draw from.
      const int64_t first = std::max(chunk.begin, sequence->first_prompt_logprob_row());
      if (sequence->wants_prompt_logprobs() && first < chunk.end) {
        chunk.end = std::min(chunk.end, first + prompt_logit_rows);
        if (chunk.end == chunk.begin) continue;  // later steps have room
        chunk.num_logit_rows = chunk.end - std::min(first, chunk.end);
        prompt_logit_rows -= chunk.num_logit_rows;
      } else if (chunk.end == sequence->known()) {
        chunk.num_logit_rows = 1;
      }
      rows -= chunk.end - chunk.begin;
      plan.push_back(chunk);
    }
  }
  return plan;
}

Result<std::span<const float>> Engine::Run(const std::vector<PlannedChunk>& plan) {
  const double now = Now();
  std::vector<ModelBackend::Chunk> chunks;
  for (const PlannedChunk& chunk : plan) {
    Request& request = *chunk.sequence->request;
    if (!request.first_row.has_value()) request.first_row = now;
    const std::span<const int32_t> tokens = chunk.sequence->tokens;
    chunks.push_back({*chunk.sequence->handle,
                      tokens.subspan(static_cast<size_t>(chunk.begin),
                                     static_cast<size_t>(chunk.end - chunk.begin)),
                      chunk.num_logit_rows});
  }
  ++counters_.steps;
  return backend_.Step(chunks);
}

void Engine::Commit(const PlannedChunk& chunk, std::span<const float> logits) {
  Sequence& sequence = *chunk.sequence;
  const int64_t repeated =
      std::clamp<int64_t>(sequence.most_computed - chunk.begin, 0, chunk.end - chunk.begin);
  counters_.recomputed_tokens += repeated;
  const int64_t new_begin = chunk.begin + repeated;
  counters_.prompt_tokens +=
      std::max<int64_t>(0, std::min(chunk.end, sequence.prompt_tokens()) - new_begin);
  sequence.computed = chunk.end;
  sequence.most_computed = std::max(sequence.most_computed, chunk.end);

  CommitPromptLogprobs(chunk, logits);
  if (sequence.finished || chunk.end < sequence.known()) return;
  if (sequence.max_new_tokens == 0) {
    Finish(sequence, FinishReason::kLength);
    return;
  }
  Result<SampledToken> token =
      sequence.sampler.Sample(logits.last(static_cast<size_t>(backend_.vocab_size())), scratch_);
  if (!token.has_value()) {
    EndWithError(sequence, token.error());
    return;
  }
  CommitToken(sequence, std::move(*token));
}

void Engine::CommitPromptLogprobs(const PlannedChunk& chunk, std::span<const float> logits) {
  Sequence& sequence = *chunk.sequence;
  const size_t vocab = static_cast<size_t>(backend_.vocab_size());
  const int64_t first_row = chunk.end - chunk.num_logit_rows;
  const int64_t begin = std::max(first_row, sequence.first_prompt_logprob_row());
  const int64_t end = std::min(chunk.end, sequence.prompt_tokens() - 1);
  for (int64_t row = begin; row < end; ++row) {
    const int32_t next = sequence.tokens[static_cast<size_t>(row + 1)];
    Result<TokenLogprobs> entry =
        RowLogprobs(logits.subspan(static_cast<size_t>(row - first_row) * vocab, vocab), next,
                    *sequence.params().prompt_logprobs, scratch_);
    if (!entry.has_value()) {
      EndWithError(sequence, entry.error());
      return;
    }
    sequence.request->output.prompt_logprobs.push_back(std::move(*entry));
  }
}

void Engine::CommitToken(Sequence& sequence, SampledToken token) {
  const int32_t id = token.token_id;
  CompletionOutput& output = sequence.output();
  if (!sequence.request->first_token.has_value()) sequence.request->first_token = Now();
  ++counters_.completion_tokens;
  sequence.tokens.push_back(id);
  sequence.sampler.Accept(id);
  output.token_ids.push_back(id);
  sequence.delta_ids.push_back(id);
  if (sequence.params().logprobs.has_value()) {
    output.cumulative_logprob += double{token.logprobs.logprob};
    output.logprobs.push_back(std::move(token.logprobs));
  }

  if (std::find(sequence.end_ids.begin(), sequence.end_ids.end(), id) != sequence.end_ids.end()) {
    output.stop_reason = int64_t{id};
    Finish(sequence, FinishReason::kStop);
    return;
  }
  const int64_t count = static_cast<int64_t>(output.token_ids.size());
  sequence.delta_text += sequence.text.Push(id, count >= sequence.params().min_tokens);
  if (sequence.text.stop_string().has_value()) {
    output.stop_reason = *sequence.text.stop_string();
    Finish(sequence, FinishReason::kStop);
  } else if (sequence.remaining_tokens() == 0) {
    Finish(sequence, FinishReason::kLength);
  } else {
    Emit(sequence, FinishReason::kNone);
  }
}

void Engine::Emit(Sequence& sequence, FinishReason reason) {
  const std::string text = std::exchange(sequence.delta_text, {});
  const std::vector<int32_t> ids = std::exchange(sequence.delta_ids, {});
  sequence.output().text += text;
  if (events_.on_delta)
    events_.on_delta(sequence.request->number, sequence.index, text, ids, reason);
}

void Engine::EndWithError(Sequence& sequence, Error error) {
  sequence.output().error = std::move(error);
  Finish(sequence, FinishReason::kError);
}

void Engine::Finish(Sequence& sequence, FinishReason reason) {
  if (sequence.handle.has_value()) backend_.Close(*std::exchange(sequence.handle, std::nullopt));
  sequence.finished = true;
  sequence.output().finish_reason = reason;
  sequence.delta_text += sequence.text.Finish();
  Emit(sequence, reason);

  Request& request = *sequence.request;
  if (--request.unfinished > 0) return;
  const double now = Now();
  for (const CompletionOutput& output : request.output.outputs) {
    request.output.usage.completion_tokens += static_cast<int64_t>(output.token_ids.size());
  }
  request.output.timings.queue_seconds = request.first_row.value_or(now) - request.submitted;
  request.output.timings.first_token_seconds =
      request.first_token.value_or(now) - request.submitted;
  request.output.timings.total_seconds = now - request.submitted;
  if (events_.on_finished) events_.on_finished(request.number, std::move(request.output));
}

void Engine::RemoveFinished() {
  std::erase_if(running_,
                [](const std::unique_ptr<Sequence>& sequence) { return sequence->finished; });
}

void Engine::Abort() {
  for (const std::unique_ptr<Sequence>& sequence : running_)
    Finish(*sequence, FinishReason::kAbort);
  for (const std::unique_ptr<Sequence>& sequence : waiting_)
    Finish(*sequence, FinishReason::kAbort);
  running_.clear();
  waiting_.clear();
}

}  // namespace deepinfer
