#include "apps/replay_schedule.h"

#include <optional>

#include "apps/jsonl.h"
#include "apps/output.h"
#include "apps/print.h"
#include "sched/recorder.h"

namespace deepinfer {
namespace {

// Twice what a recorder writes.
constexpr size_t kMaxRecordingBytes = size_t{128} << 20;

Result<std::string> ReadAll(const std::string& path) {
  DI_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(path));
  std::string text;
  for (;;) {
    DI_ASSIGN_OR_RETURN(const std::optional<InputLine> line, reader.Next());
    if (!line.has_value()) return text;
    text += line->text;
    text += '\n';
    if (line->too_long || text.size() > kMaxRecordingBytes) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("the recording is longer than {} bytes.", kMaxRecordingBytes));
    }
  }
}

}  // namespace

int RunReplaySchedule(const std::string& path) {
  const Result<std::string> text = ReadAll(path);
  if (!text.has_value()) return PrintError(text.error());
  const Result<ScheduleReplay> replay = ReplaySchedule(*text);
  if (!replay.has_value()) return PrintError(replay.error());
  const SchedulerCounters& counters = replay->counters;
  Status printed = Print(
      "{} calls, {} steps: {} prompt rows, {} output rows, {} cached tokens, {} rows again, "
      "{} preemptions.\n",
      replay->num_calls, replay->num_steps, counters.prompt_tokens, counters.decode_tokens,
      counters.cached_tokens, counters.recomputed_tokens, counters.preemptions);
  if (!printed.has_value()) return ExitStatus(printed);
  if (!replay->first_divergence.has_value())
    return ExitStatus(Print("Every decision is the recorded one.\n"));
  printed = Print("A decision differs, line {}: {}\n", replay->first_divergence->line,
                  replay->first_divergence->description);
  return printed.has_value() ? kExitDifference : ExitStatus(printed);
}

}  // namespace deepinfer
