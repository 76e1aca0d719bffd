// Fixture for jobs of `deepinfer generate`: inputs, processes that are killed, journals.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/program_test.h"

namespace deepinfer::testing_support {

inline constexpr char kProgram[] = DI_BINARY_DIR "/deepinfer";
inline constexpr char kModel[] = DI_TEST_DATA_DIR "/model/two/checkpoint";

// Lines of all kinds with short outputs, most without a seed; every 41st is wrong.
inline std::string Lines(size_t count) {
  std::mt19937 rng(11);
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    nlohmann::json line = {{"id", "line-" + std::to_string(i)},
                           {"sampling_params", {{"max_tokens", 1 + rng() % 6}}}};
    nlohmann::json ids = nlohmann::json::array();
    for (size_t n = 1 + rng() % 8; n > 0; --n) ids.push_back(rng() % 480);
    line["prompt_token_ids"] = ids;
    if (i % 5 == 0) line["sampling_params"]["n"] = 2;
    if (i % 7 == 0) line["sampling_params"]["seed"] = i;
    if (i % 11 == 0) line["sampling_params"]["temperature"] = 0;
    if (i % 41 == 40) line["colour"] = "blue";
    text += line.dump() + "\n";
    if (i % 13 == 0) text += " \r\n";  // counted, not answered
  }
  return text;
}

class JobTest : public ProgramTest {
 protected:
  std::vector<std::string> Words(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {kProgram,         "generate",     "--model",
                                      kModel,           "--no-timings", "--input",
                                      Path("in.jsonl"), "--threads",    "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // Runs a job to the output `out` and returns the exit status. Messages are in the file "log".
  Ended RunJob(std::vector<std::string> more = {}, const std::string& out = "out") const {
    more.insert(more.begin(), {"--output", Path(out)});
    return Wait(Start(Words(more), Path("log")));
  }
  std::string Log() const {
    return Read(Path("log"));
  }
  bool Exists(const std::string& name) const {
    return std::filesystem::exists(Path(name));
  }
  static size_t SizeOf(const std::string& path) {
    std::error_code failed;
    const auto size = std::filesystem::file_size(path, failed);
    return failed ? 0 : size;
  }
  // Waits until a file has this many bytes, or the process has ended.
  static bool Grows(pid_t pid, const std::string& path, size_t bytes) {
    while (SizeOf(path) < bytes) {
      siginfo_t info = {};
      if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid == pid)
        return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }
  static size_t CountLines(const std::string& text) {
    return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  // The journal of a job whose lines are all finished, without its output.
  std::string WholeJournal(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"--seed", "5"};
    words.insert(words.end(), more.begin(), more.end());
    std::filesystem::create_directory(Path("out.partial.sorted"));  // stands in the way
    EXPECT_EQ(RunJob(words).status, 1);
    EXPECT_NE(Log().find("All results are in '" + Path("out.partial") + "'."), std::string::npos)
        << Log();
    std::filesystem::remove(Path("out.partial.sorted"));
    return Read(Path("out.partial"));
  }
  // Leaves the journal of a job that died when it had finished this many lines.
  std::string PartialJournal(size_t lines) const {
    const std::string whole = WholeJournal({"--max-num-seqs", "4"});
    size_t end = whole.find('\n') + 1;
    for (; lines > 0; --lines) end = whole.find('\n', end) + 1;
    Write("out.partial", whole.substr(0, end));
    return whole.substr(0, end);
  }

  // Kills a job of `num_lines` lines `num_kills` times, at random moments between its beginning and
  // its end, and compares what it gives in the end with an undisturbed run.
  void KillAndResume(size_t num_lines, int num_kills, unsigned seed) {
    Write("in.jsonl", Lines(num_lines));
    ASSERT_EQ(RunJob({"--seed", "5", "--no-progress"}, "undisturbed").status, 3) << Log();
    const std::string expected = Read(Path("undisturbed"));
    ASSERT_EQ(CountLines(expected), num_lines);

    std::mt19937 rng(seed);
    const std::string journal = Path("out.partial");
    // Records are longer than output lines by their heads.
    const size_t expected_bytes = expected.size() + 50 * num_lines;
    size_t useful_kills = 0;  // that happened after new results
    for (int left = num_kills; left > 0; --left) {
      const size_t before = SizeOf(journal);
      const pid_t pid =
          Start(Words({"--output", Path("out"), "--seed", "5", "--resume", "--max-num-seqs",
                       std::to_string(1 + rng() % 12), "--no-progress"}),
                Path("log"));
      if (left > num_kills / 3 && rng() % 5 == 0) {  // perhaps while it starts
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % 60'000));
      } else {
        // So that a part of the job is left after the last kill, too.
        const size_t share =
            (expected_bytes - std::min(before, expected_bytes)) / static_cast<size_t>(left + 5);
        Grows(pid, journal, before + 1 + rng() % (2 * share + 1));
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % 1000));
      }
      ::kill(pid, SIGKILL);
      const int status = Wait(pid).status;
      ASSERT_EQ(status, 128 + SIGKILL) << left << " kills left: " << Log();
      ASSERT_FALSE(Exists("out"));
      if (SizeOf(journal) > before) ++useful_kills;
    }
    EXPECT_GT(useful_kills, static_cast<size_t>(num_kills) / 3);
    EXPECT_EQ(RunJob({"--seed", "5", "--resume"}).status, 3) << Log();
    EXPECT_EQ(Read(Path("out")), expected);
    EXPECT_FALSE(Exists("out.partial"));
    EXPECT_FALSE(Exists("out.partial.sorted"));
  }
};

}  // namespace deepinfer::testing_support
