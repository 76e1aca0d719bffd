#include "apps/selfcheck.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "apps/interrupt.h"
#include "apps/option_names.h"
#include "apps/output.h"
#include "apps/print.h"

namespace deepinfer {
namespace {

std::string Joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

std::string ToJson(const SelfcheckReport& report) {
  nlohmann::ordered_json json = {
      {"passed", report.passed()},         {"complete", report.complete},
      {"variants", report.variants},       {"requests", report.requests},
      {"tokens_compared", report.tokens},  {"cached_tokens", report.cached_tokens},
      {"preemptions", report.preemptions}, {"seconds", report.seconds}};
  if (report.difference.has_value()) {
    const SelfcheckDifference& difference = *report.difference;
    json["difference"] = {
        {"variant", difference.variant.Name()}, {"causes", difference.causes},
        {"request", difference.request},        {"completion", difference.completion},
        {"position", difference.position},      {"what", difference.what}};
  }
  return json.dump(2) + "\n";
}

}  // namespace

int RunSelfcheckCommand(const SelfcheckCommandOptions& options) {
  CatchInterrupts();
  Result<std::optional<OutputFile>> file = CreateIfNamed(options.json);
  if (!file.has_value()) return PrintError(file.error());
  Result<std::unique_ptr<LLM>> llm = LLM::Load(options.llm);
  if (!llm.has_value()) return PrintError(WithOptionNames(llm.error()));
  const Result<SelfcheckReport> checked =
      (*llm)->Selfcheck(options.check, [](const SelfcheckProgress& progress) {
        if (progress.variant_steps == 0) {
          PrintStderr("selfcheck: {}/{}: {}\n", progress.variants_done + 1, progress.variants_total,
                      progress.variant);
        }
        return !Interrupted();
      });
  if (!checked.has_value()) return PrintError(WithOptionNames(checked.error()));
  const SelfcheckReport& report = *checked;
  if ((*file).has_value()) {
    const Status written = (*file)->Write(ToJson(report));
    if (!written.has_value()) return PrintError(written.error());
  }
  if (Interrupted() && !report.difference.has_value()) {
    if (report.variants == 0) {
      PrintStderr("deepinfer: interrupted; nothing was compared.\n");
    } else {
      PrintStderr("deepinfer: interrupted; {} of running {} compared, every answer was the same.\n",
                  Counted(report.variants, "way"), report.variants == 1 ? "was" : "were");
    }
    return kExitInterrupted;
  }
  if (report.passed()) {
    return ExitStatus(
        Print("Every answer is the same: {} requests in {} ways of running, {} tokens compared "
              "({} prompt tokens came from the prefix cache, {} preemptions), {:.1f} s.\n",
              report.requests, report.variants, report.tokens, report.cached_tokens,
              report.preemptions, report.seconds));
  }
  const SelfcheckDifference& difference = *report.difference;
  const Status printed =
      Print("An answer changed. Way of running: {}. Request {}, completion {}, {}: {}.\n{}\n",
            difference.variant.Name(), difference.request, difference.completion,
            difference.position < 0 ? std::string("before the output")
                                    : fmt::format("output position {}", difference.position),
            difference.what,
            Interrupted() && !report.complete && difference.causes.empty()
                ? "Interrupted before a cause was found."
            : difference.causes.empty()
                ? "No single feature explains it: the difference stays without each of them."
                : fmt::format("It is gone without: {}.", Joined(difference.causes)));
  return printed.has_value() ? kExitDifference : ExitStatus(printed);
}

}  // namespace deepinfer
