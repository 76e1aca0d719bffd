#include "apps/generate.h"

#include <fmt/core.h>

#include <memory>
#include <vector>

#include "apps/generate_job.h"
#include "apps/interrupt.h"
#include "apps/jsonl.h"
#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

int RunPrompt(LLM& llm, const GenerateOptions& options, const SamplingParams& params) {
  if (params.n != 1) {
    return PrintError({Code::kInvalidArgument,
                       fmt::format("n is {}; --prompt prints one completion.", params.n), "n"});
  }
  Request request;
  request.sampling_params = params;
  if (options.chat) {
    Chat chat;
    chat.messages.emplace_back().content.text = options.prompt;
    request.prompt = std::move(chat);
  } else {
    request.prompt = options.prompt;
  }
  Status written;
  bool thinking = false;
  GenerateCallbacks callbacks;
  callbacks.on_text = [&](const StreamEvent& event) {
    // A blank line between what the model thinks and what it says.
    const bool begins = thinking && !event.text.empty();
    thinking = (thinking || !event.reasoning.empty()) && !begins;
    if (written.has_value())
      written =
          WriteStdout(fmt::format("{}{}{}", event.reasoning, begins ? "\n\n" : "", event.text));
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
  if (!options.input.empty()) return RunGenerateJob(options, *defaults);
  Result<ReportFiles> reports = ReportFiles::Create(options.reports, {});
  if (!reports.has_value()) return PrintError(reports.error());
  Result<std::unique_ptr<LLM>> llm = LLM::Load(options.llm);
  if (!llm.has_value()) return PrintError(WithOptionNames(llm.error()));
  const int status = RunPrompt(**llm, options, *defaults);
  const Status reported = reports->Write(**llm);
  return status == kExitOk && !reported.has_value() ? PrintError(reported.error()) : status;
}

}  // namespace deepinfer
