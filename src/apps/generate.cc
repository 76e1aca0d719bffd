#include "apps/generate.h"

#include <fmt/core.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "apps/progress.h"

namespace deepinfer {
namespace {

// Everything that was read, before anything runs: requests in order, and where in the output each
// belongs.
struct Batch {
  std::vector<Request> requests;
  std::vector<LineId> ids;                                   // of the requests
  std::vector<int64_t> places;                               // of the requests, in the output
  std::vector<int64_t> lines;                                // of the requests, in the input
  std::vector<std::pair<int64_t, std::string>> error_lines;  // place and line of what cannot run
  int64_t total = 0;
};

Result<Batch> ReadBatch(const std::string& path, const SamplingParams& defaults) {
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(path));
  Batch batch;
  IdRegister ids;
  for (;;) {
    if (Interrupted()) return Fail(Code::kCancelled, "reading was interrupted.");
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, reader.Next());
    if (!line.has_value()) return batch;
    const int64_t place = batch.total++;
    if (line->too_long) {
      const Error error{Code::kInvalidArgument,
                        fmt::format("the line is longer than {} bytes.", kMaxLineBytes), ""};
      batch.error_lines.emplace_back(place, ErrorLine(std::nullopt, line->number, error));
      continue;
    }
    ParsedLine<Request> parsed = ParseGenerateLine(line->text, defaults);
    Status accepted;
    if (parsed.id.has_value()) accepted = ids.Add(*parsed.id, line->number);
    if (!parsed.value.has_value()) accepted = tl::unexpected<Error>(parsed.value.error());
    if (!accepted.has_value()) {
      batch.error_lines.emplace_back(place, ErrorLine(parsed.id, line->number, accepted.error()));
      continue;
    }
    batch.requests.push_back(std::move(*parsed.value));
    batch.ids.push_back(*parsed.id);
    batch.places.push_back(place);
    batch.lines.push_back(line->number);
  }
}

// Names of sampling parameters in engine errors are fields of sampling_params in a line.
Error InLine(Error error) {
  for (const char* top_level : {"prompt", "messages"}) {
    if (error.field.rfind(top_level, 0) == 0 && error.field != "prompt_logprobs") return error;
  }
  if (!error.field.empty()) error.field = "sampling_params." + error.field;
  return error;
}

bool Failed(const RequestOutput& output) {
  if (output.error.has_value()) return true;
  for (const CompletionOutput& completion : output.outputs) {
    if (completion.error.has_value()) return true;
  }
  return false;
}

bool Aborted(const RequestOutput& output) {
  if (output.error.has_value()) return output.error->code == Code::kCancelled;
  for (const CompletionOutput& completion : output.outputs) {
    if (completion.finish_reason == FinishReason::kAbort) return true;
  }
  return false;
}

int RunFile(LLM& llm, const GenerateOptions& options, const SamplingParams& defaults) {
  Result<Batch> batch = ReadBatch(options.input, defaults);
  if (!batch.has_value()) {
    if (batch.error().code == Code::kCancelled)
      WriteStderr("deepinfer: interrupted while reading the input; nothing was generated.\n");
    return PrintError(batch.error());
  }
  Result<OrderedWriter> writer = OrderedWriter::Create(options.output);
  if (!writer.has_value()) return PrintError(writer.error());

  Status written;
  const auto put = [&](int64_t place, std::string line) {
    if (written.has_value()) written = writer->Put(place, std::move(line));
  };
  ProgressSample sample;
  sample.total = batch->total;
  for (auto& [place, line] : batch->error_lines) put(place, std::move(line));
  sample.failed = sample.done = static_cast<int64_t>(batch->error_lines.size());

  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  ProgressLine progress_line("generate");
  GenerateCallbacks callbacks;
  callbacks.on_finished = [&](size_t index, const RequestOutput& output) {
    if (Aborted(output)) return;
    ++sample.done;
    if (Failed(output)) ++sample.failed;
    const LineId& id = batch->ids[index];
    put(batch->places[index], output.error.has_value()
                                  ? ErrorLine(id, batch->lines[index], InLine(*output.error))
                                  : OutputLine(id, output));
  };
  callbacks.on_progress = [&](const Progress& progress) {
    sample.prompt_tokens = progress.prompt_tokens;
    sample.completion_tokens = progress.completion_tokens;
    sample.seconds = elapsed();
    if (options.show_progress) progress_line.Update(sample);
    return written.has_value() && !Interrupted();
  };
  llm.Generate(batch->requests, callbacks);
  if (written.has_value()) written = writer->Finish();
  sample.seconds = elapsed();
  if (!written.has_value()) return PrintError(written.error());
  if (options.show_progress) progress_line.Finish(sample);
  if (sample.done < sample.total && Interrupted()) {
    PrintStderr("deepinfer: interrupted; {} of {} lines are finished and written.\n", sample.done,
                sample.total);
    return kExitInterrupted;
  }
  return sample.failed > 0 ? kExitSomeLinesFailed : kExitOk;
}

int RunPrompt(LLM& llm, const GenerateOptions& options, const SamplingParams& params) {
  if (params.n != 1) {
    return PrintError({Code::kInvalidArgument,
                       fmt::format("n is {}; --prompt prints one completion.", params.n), "n"});
  }
  Request request;
  request.sampling_params = params;
  if (options.chat) {
    request.prompt = Chat{.messages = {Message{"user", options.prompt, std::nullopt}}};
  } else {
    request.prompt = options.prompt;
  }
  Status written;
  GenerateCallbacks callbacks;
  callbacks.on_text = [&](const StreamEvent& event) {
    if (written.has_value()) written = WriteStdout(event.text);
  };
  callbacks.on_progress = [&](const Progress&) { return written.has_value() && !Interrupted(); };
  const std::vector<RequestOutput> outputs =
      llm.Generate(std::span<const Request>(&request, 1), callbacks);
  if (outputs[0].error.has_value()) return PrintError(*outputs[0].error);
  if (written.has_value()) written = WriteStdout("\n");
  if (outputs[0].outputs[0].error.has_value()) return PrintError(*outputs[0].outputs[0].error);
  if (Interrupted()) return kExitInterrupted;
  return ExitStatus(written);
}

}  // namespace

int RunGenerate(const GenerateOptions& options) {
  const Result<SamplingParams> defaults = ParseSamplingParams(options.sampling_params);
  if (!defaults.has_value()) return PrintError(defaults.error());
  CatchInterrupts();
  if (!options.input.empty()) {
    const Status different = CheckNotTheSameFile(options.input, options.output);
    if (!different.has_value()) return PrintError(different.error());
  }
  Result<std::unique_ptr<LLM>> llm = LLM::Load(options.llm);
  if (!llm.has_value()) return PrintError(llm.error());
  return options.input.empty() ? RunPrompt(**llm, options, *defaults)
                               : RunFile(**llm, options, *defaults);
}

}  // namespace deepinfer
