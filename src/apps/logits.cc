#include "apps/logits.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "base/ceil_div.h"
#include "model/config.h"
#include "model/drafting.h"
#include "runtime/device_choice.h"
#include "runtime/session.h"
#include "weights/safetensors.h"

namespace deepinfer {
namespace {

// Rows of one step when a line does not say: bounds the memory of a step.
constexpr int64_t kMaxStepRows = 2048;

struct Job {
  LineId id;
  std::vector<int32_t> tokens;
  std::vector<int64_t> chunks;  // sum is the number of tokens
  int64_t rows = 0;             // of the output: the last ones

  int64_t num_tokens() const {
    return static_cast<int64_t>(tokens.size());
  }
};

Result<Job> MakeJob(const LineId& id, const LogitsLine& line, const LogitsOptions& options,
                    const ModelConfig& config) {
  Job job{id, {}, line.chunks, 0};
  for (size_t i = 0; i < line.token_ids.size(); ++i) {
    const int64_t token = line.token_ids[i];
    if (token < 0 || token >= config.vocab_size) {
      const std::string field = fmt::format("token_ids[{}]", i);
      return Fail(Code::kInvalidArgument,
                  fmt::format("{} is {}; token ids of this model are 0 ... {}.", field, token,
                              config.vocab_size - 1),
                  field);
    }
    job.tokens.push_back(static_cast<int32_t>(token));
  }
  if (job.num_tokens() > config.max_position_embeddings) {
    return Fail(
        Code::kInvalidArgument,
        fmt::format(
            "token_ids has {} tokens; this model supports at most {} (max_position_embeddings).",
            job.num_tokens(), config.max_position_embeddings),
        "token_ids");
  }
  if (job.chunks.empty()) {
    for (int64_t left = job.num_tokens(); left > 0; left -= job.chunks.back())
      job.chunks.push_back(std::min(left, kMaxStepRows));
  }
  job.rows = options.last > 0 ? std::min(options.last, job.num_tokens()) : job.num_tokens();
  return job;
}

// All lines, or one error that lists what is wrong with which.
Result<std::vector<Job>> ReadJobs(const LogitsOptions& options, const ModelConfig& config) {
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(options.input));
  std::vector<Job> jobs;
  IdRegister ids;
  std::string problems;
  for (;;) {
    if (Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, reader.Next());
    if (!line.has_value()) break;
    if (line->too_long) {
      problems +=
          fmt::format("\n  line {}: it is longer than {} bytes.", line->number, kMaxLineBytes);
      continue;
    }
    const ParsedLine<LogitsLine> parsed = ParseLogitsLine(line->text);
    Result<Job> job = parsed.value.has_value()
                          ? MakeJob(*parsed.id, *parsed.value, options, config)
                          : Result<Job>(tl::unexpected<Error>(parsed.value.error()));
    Status added;
    if (job.has_value()) added = ids.Add(job->id, line->number);
    if (job.has_value() && added.has_value()) {
      jobs.push_back(std::move(*job));
    } else {
      problems += fmt::format("\n  line {}: {}", line->number,
                              job.has_value() ? added.error().message : job.error().message);
    }
  }
  if (!problems.empty())
    return Fail(Code::kInvalidArgument, "the input has lines that cannot be used:" + problems);
  return jobs;
}

// The tensors of one job in the order in which they are written.
std::vector<StoredTensor> TensorsOf(const Job& job, const LogitsOptions& options,
                                    const ModelConfig& config) {
  std::vector<StoredTensor> tensors = {
      {job.id.text, StoredDType::kF32, {job.rows, config.vocab_size}}};
  if (options.drafts) {
    const int64_t blocks = std::ssize(job.chunks);
    const int64_t slots = config.dspark_block_size;
    const auto add = [&](const char* name, StoredDType dtype, std::vector<int64_t> shape) {
      tensors.push_back({fmt::format("{}/{}", job.id.text, name), dtype, std::move(shape)});
    };
    add("draft_pos", StoredDType::kI32, {blocks});
    add("draft_tokens", StoredDType::kI32, {blocks, 1 + slots});
    add("draft_conf", StoredDType::kF32, {blocks, slots});
    add("draft_gap", StoredDType::kF32, {blocks, slots});
    add("draft_logits", StoredDType::kF32, {blocks, slots, config.vocab_size});
  }
  if (!options.dump_layers) return tensors;
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    tensors.push_back({fmt::format("{}/streams.{}", job.id.text, layer),
                       StoredDType::kF32,
                       {job.rows, config.hc_mult, config.hidden_size}});
    tensors.push_back({fmt::format("{}/experts.{}", job.id.text, layer),
                       StoredDType::kI32,
                       {job.rows, config.num_experts_per_tok}});
    if (!config.is_index_source(layer)) continue;
    tensors.push_back({fmt::format("{}/selected.{}", job.id.text, layer),
                       StoredDType::kI32,
                       {job.rows, config.index_topk}});
  }
  return tensors;
}

// Appends the last `rows` of a [num_rows, width] array.
template <class T>
Status AppendRows(const std::vector<T>& from, int64_t num_rows, int64_t rows, int64_t width,
                  const char* what, std::vector<T>* to) {
  if (static_cast<int64_t>(from.size()) != num_rows * width) {
    return Fail(Code::kInternal,
                fmt::format("the step returned {} values as {}, expected {} rows of {}",
                            from.size(), what, num_rows, width));
  }
  to->insert(to->end(), from.end() - rows * width, from.end());
  return {};
}

struct LayerRows {
  std::vector<float> streams;
  std::vector<int32_t> experts;
  std::vector<int32_t> selected;
};

Status CollectTrace(const LayerTrace& trace, int64_t rows, const ModelConfig& config,
                    std::vector<LayerRows>* layers) {
  const size_t count = layers->size();
  if (trace.streams.size() != count || trace.experts.size() != count ||
      trace.selected.size() != count) {
    return Fail(Code::kInternal, "the step's trace does not have one entry per layer");
  }
  for (size_t layer = 0; layer < count; ++layer) {
    LayerRows& to = (*layers)[layer];
    const int64_t all = trace.num_rows[layer];
    DI_RETURN_IF_ERROR(AppendRows(trace.streams[layer], all, rows,
                                  config.hc_mult * config.hidden_size, "streams", &to.streams));
    DI_RETURN_IF_ERROR(AppendRows(trace.experts[layer], all, rows, config.num_experts_per_tok,
                                  "experts", &to.experts));
    if (!config.is_index_source(static_cast<int64_t>(layer))) continue;
    DI_RETURN_IF_ERROR(AppendRows(trace.selected[layer], all, rows, config.index_topk,
                                  "selected entries", &to.selected));
  }
  return {};
}

// The blocks behind the steps of a line.
struct DraftRows {
  std::vector<int32_t> positions, tokens;
  std::vector<float> scores, gaps, logits;
};

// Appends the block behind what the session holds. `anchor` is the token that comes next.
Status CollectDraft(const Session& session, int32_t anchor, DraftRows* rows) {
  DI_ASSIGN_OR_RETURN(const Drafts drafts, session.Draft(anchor, true));
  rows->positions.push_back(static_cast<int32_t>(std::ssize(session.tokens())));
  rows->tokens.push_back(anchor);
  const int64_t vocab = drafts.logits.dim(1);
  for (int64_t k = 0; k < drafts.tokens.rows(); ++k) {
    const float* logits = drafts.logits.Row<float>(k);
    const int32_t token = drafts.tokens.Row<int32_t>(k)[0];
    float second = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < vocab; ++i) {
      if (i != token) second = std::max(second, logits[i]);
    }
    rows->tokens.push_back(token);
    rows->scores.push_back(drafts.score.Row<float>(k)[0]);
    rows->gaps.push_back(logits[token] - second);
    rows->logits.insert(rows->logits.end(), logits, logits + vocab);
  }
  return {};
}

template <class T>
Status WriteAll(SafetensorsWriter& writer, std::span<const T> values) {
  return writer.Write(std::as_bytes(values));
}

Status RunJob(Executor& executor, const Job& job, const LogitsOptions& options,
              SafetensorsWriter& writer) {
  const ModelConfig& config = executor.config();
  StatePools pools = MakeStatePools(executor);
  DI_ASSIGN_OR_RETURN(Session session, Session::Create(executor, pools));
  std::vector<LayerRows> layers(static_cast<size_t>(config.num_hidden_layers));
  DraftRows drafts;
  const int64_t first_row = job.num_tokens() - job.rows;
  int64_t begin = 0;
  for (const int64_t count : job.chunks) {
    if (Interrupted()) return Fail(Code::kCancelled, "the command was interrupted.");
    const int64_t rows = std::clamp<int64_t>(begin + count - first_row, 0, count);
    const std::span<const int32_t> ids(job.tokens.data() + begin, static_cast<size_t>(count));
    LayerTrace trace;
    trace.want_streams = true;
    DI_ASSIGN_OR_RETURN(const TensorView logits,
                        session.Append(ids, rows, options.dump_layers ? &trace : nullptr));
    int32_t next = -1;  // the line's, or behind its end the greedy choice
    if (rows > 0) {
      const float* last = logits.Row<float>(rows - 1);
      next = static_cast<int32_t>(std::max_element(last, last + config.vocab_size) - last);
      DI_RETURN_IF_ERROR(WriteAll<float>(writer, {static_cast<const float*>(logits.data()),
                                                  static_cast<size_t>(rows * config.vocab_size)}));
      if (options.dump_layers) {
        DI_RETURN_IF_ERROR(CollectTrace(trace, rows, config, &layers));
      }
    }
    begin += count;
    if (begin < job.num_tokens()) next = job.tokens[static_cast<size_t>(begin)];
    if (options.drafts) DI_RETURN_IF_ERROR(CollectDraft(session, next, &drafts));
  }
  if (options.drafts) {
    DI_RETURN_IF_ERROR(WriteAll<int32_t>(writer, drafts.positions));
    DI_RETURN_IF_ERROR(WriteAll<int32_t>(writer, drafts.tokens));
    for (const std::vector<float>* values : {&drafts.scores, &drafts.gaps, &drafts.logits})
      DI_RETURN_IF_ERROR(WriteAll<float>(writer, *values));
  }
  if (!options.dump_layers) return {};
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    DI_RETURN_IF_ERROR(WriteAll<float>(writer, layers[layer].streams));
    DI_RETURN_IF_ERROR(WriteAll<int32_t>(writer, layers[layer].experts));
    DI_RETURN_IF_ERROR(WriteAll<int32_t>(writer, layers[layer].selected));
  }
  return {};
}

Status WriteLogits(const LogitsOptions& options) {
  if (const std::vector<Error> problems = options.llm.Validate(); !problems.empty())
    return tl::unexpected<Error>(problems[0]);
  DI_RETURN_IF_ERROR(CheckNotTheSameFile(options.input, options.output));
  DI_ASSIGN_OR_RETURN(const CacheFormat cache_format, ParseCacheFormat(options.cache_format));
  DI_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.llm.model_dir));
  if (options.drafts) DI_RETURN_IF_ERROR(CheckDrafting(config, config.dspark_block_size, false));
  CatchInterrupts();
  DI_ASSIGN_OR_RETURN(const std::vector<Job> jobs, ReadJobs(options, config));
  int64_t longest = 1;
  int64_t largest_step = 1;
  std::vector<StoredTensor> tensors;
  for (const Job& job : jobs) {
    longest = std::max(longest, job.num_tokens());
    for (int64_t rows : job.chunks) largest_step = std::max(largest_step, rows);
    for (StoredTensor& tensor : TensorsOf(job, options, config))
      tensors.push_back(std::move(tensor));
  }
  ExecutorOptions executor_options;
  DI_ASSIGN_OR_RETURN(executor_options.device, ChooseDevice(options.llm.device));
  executor_options.model_dir = options.llm.model_dir;
  executor_options.numerics = options.llm.numerics == NumericsProfile::kReference
                                  ? Numerics::kReference
                                  : Numerics::kProduction;
  executor_options.num_threads = options.llm.num_threads;
  executor_options.max_sequences = 1;
  executor_options.max_batched_tokens = largest_step;
  executor_options.window_cache_pages = 0;
  executor_options.cache_format = cache_format;
  if (options.drafts) {
    executor_options.draft_tokens = config.dspark_block_size;
    // Whatever the block is, the sequence is never set back here.
    executor_options.rollback_tokens =
        std::max(executor_options.rollback_tokens, config.dspark_block_size + 1);
  }
  executor_options.cache_tokens = CeilDiv(longest, kBlockTokens) * kBlockTokens;
  DI_ASSIGN_OR_RETURN(const std::unique_ptr<Executor> executor, Executor::Create(executor_options));
  const std::pair<std::string, std::string> metadata[] = {
      {"numerics",
       options.llm.numerics == NumericsProfile::kReference ? "reference" : "production"}};
  DI_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                      SafetensorsWriter::Create(options.output, tensors, metadata));
  for (const Job& job : jobs) {
    const Status done = RunJob(*executor, job, options, writer);
    if (!done.has_value())
      return WithContext(done.error(), fmt::format("line with id '{}'", job.id.text));
  }
  return writer.Finish();
}

}  // namespace

int RunLogits(const LogitsOptions& options) {
  const Status written = WriteLogits(options);
  // The unfinished file is gone with its writer.
  if (!written.has_value() && written.error().code == Code::kCancelled && Interrupted())
    PrintStderr("deepinfer: interrupted; nothing was written.\n");
  return ExitStatus(written);
}

}  // namespace deepinfer
