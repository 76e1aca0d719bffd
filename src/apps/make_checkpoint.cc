#include "apps/make_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "apps/output.h"
#include "apps/print.h"
#include "base/quoted.h"

namespace deepinfer {

int RunMakeCheckpoint(const MakeCheckpointOptions& options) {
  if (options.preset != "tiny" && options.preset != "slice") {
    return PrintError(Error{
        Code::kInvalidArgument,
        fmt::format("The preset is {}; it must be 'tiny' or 'slice'.", Quoted(options.preset)),
        "preset"});
  }
  const Result<std::string> config =
      options.preset == "tiny" ? TinyConfigJson() : SliceConfigJson(options.slice);
  if (!config) return PrintError(config.error());

  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Clock::time_point printed = start;
  int64_t total = 0;
  RandomCheckpointOptions random;
  random.dir = options.output;
  random.config_json = *config;
  random.seed = options.seed;
  random.num_threads = options.num_threads > 0
                           ? options.num_threads
                           : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  random.progress = [&](int64_t done, int64_t bytes_total) {
    total = bytes_total;
    const Clock::time_point now = Clock::now();
    if (!terminal || now - printed < std::chrono::milliseconds(500)) return;
    printed = now;
    const double seconds = std::chrono::duration<double>(now - start).count();
    PrintStderr("\r{} of {}, {:.0f} MB/s ", HumanBytes(done), HumanBytes(bytes_total),
                static_cast<double>(done) / 1e6 / seconds);
  };
  const Status status = WriteRandomCheckpoint(random);
  if (terminal && printed != start) PrintStderr("\n");
  if (!status) return PrintError(status.error());
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return ExitStatus(Print("Wrote {} of weights to {} in {:.1f} s ({:.0f} MB/s).\n",
                          HumanBytes(total), options.output, seconds,
                          static_cast<double>(total) / 1e6 / seconds));
}

}  // namespace deepinfer
