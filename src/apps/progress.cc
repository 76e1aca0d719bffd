#include "apps/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "apps/output.h"

namespace deepinfer {
namespace {

std::string Duration(double seconds) {
  const int64_t whole = static_cast<int64_t>(std::min(seconds, 1e9) + 0.5);
  if (whole < 3600) return fmt::format("{:02}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

std::string ProgressText(const ProgressSample& sample) {
  const double seconds = std::max(sample.seconds, 1e-3);
  std::string text = sample.total < 0 ? fmt::format("{} done", sample.done)
                                      : fmt::format("{}/{} done", sample.done, sample.total);
  if (sample.failed > 0) text += fmt::format(" ({} failed)", sample.failed);
  text += fmt::format(", prompt {:.1f} tok/s, output {:.1f} tok/s",
                      static_cast<double>(sample.prompt_tokens) / seconds,
                      static_cast<double>(sample.completion_tokens) / seconds);
  if (sample.done == sample.total) return text + fmt::format(", took {}", Duration(sample.seconds));
  const int64_t done_now = sample.done - sample.done_before;
  if (done_now <= 0 || sample.total < 0) return text;
  return text + fmt::format(", {} left", Duration(sample.seconds / static_cast<double>(done_now) *
                                                  static_cast<double>(sample.total - sample.done)));
}

ProgressLine::ProgressLine(std::string name)
    : name_(std::move(name)), terminal_(::isatty(STDERR_FILENO) == 1) {}

void ProgressLine::Update(const ProgressSample& sample) {
  if (sample.seconds - last_seconds_ < (terminal_ ? 0.2 : 10.0)) return;
  Print(sample, false);
}

void ProgressLine::Finish(const ProgressSample& sample) {
  Print(sample, true);
}

void ProgressLine::Print(const ProgressSample& sample, bool last) {
  last_seconds_ = sample.seconds;
  const std::string text = name_ + ": " + ProgressText(sample);
  if (terminal_) {
    // Carriage return and "erase to the end of the line".
    PrintStderr("\r{}\x1b[K{}", text, last ? "\n" : "");
  } else {
    PrintStderr("{}\n", text);
  }
}

}  // namespace deepinfer
