// Jobs of `deepinfer generate` that are killed, interrupted, damaged and continued: nothing is
// lost, nothing is done twice, and the output is that of an undisturbed run.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/file.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/job_test.h"

namespace {

namespace fs = std::filesystem;
using deepinfer::testing_support::kModel;
using deepinfer::testing_support::kProgram;
using deepinfer::testing_support::Lines;
using nlohmann::json;
using ::testing::HasSubstr;

using GenerateJobTest = deepinfer::testing_support::JobTest;

TEST_F(GenerateJobTest, TenKillsOfThreeHundredLinesChangeNothing) {
  KillAndResume(300, 10, 1);
}

TEST_F(GenerateJobTest, AJobWithoutASeedKeepsTheOneThatItDrew) {
  Write("in.jsonl", Lines(400));
  pid_t pid = Start(Words({"--output", Path("out"), "--max-num-seqs", "4"}), Path("log"));
  ASSERT_TRUE(Grows(pid, Path("out.partial"), 2000));
  ::kill(pid, SIGKILL);
  ASSERT_EQ(Wait(pid).status, 128 + SIGKILL);
  const std::string journal = Read(Path("out.partial"));
  const size_t begin = journal.find("\tseed=") + 6;
  const std::string seed = journal.substr(begin, journal.find_first_of("\t\n", begin) - begin);
  ASSERT_EQ(RunJob({"--resume"}).status, 3) << Log();
  ASSERT_EQ(RunJob({"--seed", seed}, "again").status, 3) << Log();
  EXPECT_EQ(Read(Path("out")), Read(Path("again")));
  ASSERT_EQ(RunJob({}, "other").status, 3);
  EXPECT_NE(Read(Path("out")), Read(Path("other")));
}

TEST_F(GenerateJobTest, AKillWhileTheOutputIsWrittenLeavesAllOrNothing) {
  Write("in.jsonl", Lines(400));
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  const std::string expected = Read(Path("undisturbed"));
  const std::string journal = WholeJournal();
  ASSERT_EQ(CountLines(journal), 401u);
  std::mt19937 rng(3);
  int killed = 0;
  for (int i = 0; i < 40; ++i) {
    fs::remove(Path("out"));
    Write("out.partial", journal);
    const pid_t pid = Start(Words({"--output", Path("out"), "--resume"}), Path("log"));
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 20'000));
    ::kill(pid, SIGKILL);
    if (Wait(pid).status == 128 + SIGKILL) ++killed;
    ASSERT_TRUE(Exists("out") || Exists("out.partial"));
    if (Exists("out")) {
      ASSERT_EQ(Read(Path("out")), expected);
    }
    const int status = RunJob({"--resume"}).status;
    ASSERT_TRUE(status == 3 || (status == 0 && Log().find("nothing is left") != std::string::npos))
        << Log();
    ASSERT_EQ(Read(Path("out")), expected);
    ASSERT_FALSE(Exists("out.partial"));
  }
  EXPECT_GT(killed, 0);
}

TEST_F(GenerateJobTest, ATornOrDamagedJournalIsCutAndItsLinesRunAgain) {
  Write("in.jsonl", Lines(41));
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  const std::string expected = Read(Path("undisturbed"));
  const std::string journal = WholeJournal();
  ASSERT_EQ(CountLines(journal), 42u);
  const size_t last = journal.rfind('\n', journal.size() - 2) + 1;
  for (size_t size = last; size < journal.size(); size += 31) {
    Write("out.partial", journal.substr(0, size));
    ASSERT_EQ(RunJob({"--resume"}).status, 3) << Log();
    ASSERT_EQ(Read(Path("out")), expected);
    if (size > last) {
      EXPECT_THAT(Log(), HasSubstr("are not a whole result and were cut"));
    }
  }
  for (const size_t damaged : {journal.find('\n') + 5, journal.size() / 2, last + 3}) {
    std::string bytes = journal;
    bytes[damaged] ^= 4;
    Write("out.partial", bytes);
    ASSERT_EQ(RunJob({"--resume"}).status, 3) << Log();
    ASSERT_EQ(Read(Path("out")), expected) << damaged;
  }
  // Without its header a journal says nothing.
  Write("out.partial", journal.substr(0, 40));
  EXPECT_EQ(RunJob({"--resume"}).status, 1);
  EXPECT_THAT(Log(), HasSubstr("has a damaged header. Delete it (--overwrite does)"));
  EXPECT_EQ(Read(Path("out.partial")), journal.substr(0, 40));
  EXPECT_EQ(RunJob({"--overwrite", "--seed", "5"}).status, 3);
  EXPECT_EQ(Read(Path("out")), expected);
}

TEST_F(GenerateJobTest, AnotherJobIsNotContinuedAndTheMessageNamesTheDifference) {
  const std::string input = Lines(41);
  Write("in.jsonl", input);
  const std::string journal = PartialJournal(20);
  const auto refused = [&](const std::vector<std::string>& more, const std::string& says) {
    EXPECT_EQ(RunJob(more).status, 1) << says;
    EXPECT_THAT(Log(), HasSubstr(says));
    EXPECT_EQ(Read(Path("out.partial")), journal) << says;
    EXPECT_FALSE(Exists("out"));
  };
  refused({}, "there is a journal of an unfinished job, '" + Path("out.partial") +
                  "'. Continue that job with --resume, or delete the file (--overwrite does)");
  refused({"--resume", "--seed", "6"}, "cannot be resumed: --seed is 6 and the job has 5.");
  refused({"--resume", "--sampling-params", R"({"top_k": 5})"},
          R"(--sampling-params is '{"top_k":5}' and was '{}')");
  refused({"--resume", "--numerics", "reference"},
          "--numerics is 'reference' and was 'production'");
  refused({"--resume", "--max-model-len", "100"}, "--max-model-len is '100' and was '0'");
  refused({"--resume", "--replay", "compact"}, "--replay is 'keep 0' and was 'off'");
  refused({"--resume", "--approximate-hit-tokens", "200"},
          "--approximate-hit-tokens is '200' and was '0'");
  refused({"--resume", "--cache-tokens", "128"}, "a request has room for 128 tokens and had ");
  Write("in.jsonl", input + R"({"id": "one more", "prompt": "x"})");
  refused({"--resume"}, "the number of lines of the input is 42 and was 41");
  std::string changed = input;
  changed.replace(changed.find("line-7"), 6, "lone-7");
  Write("in.jsonl", changed);
  refused({"--resume"}, "the input has as many lines as before, but not the same ones");
  Write("in.jsonl", input);

  // Another model of the same shape: one weight is another.
  fs::copy(kModel, Path("model"));
  const std::string shard = Path("model/model-00003-of-00009.safetensors");
  std::string weights = Read(shard);
  weights.back() ^= 1;
  Write("model/model-00003-of-00009.safetensors", weights);
  std::vector<std::string> words = Words({"--output", Path("out"), "--resume"});
  words[3] = Path("model");
  EXPECT_EQ(Wait(Start(words, Path("log"))).status, 1);
  EXPECT_THAT(Log(), HasSubstr("the files of the model are not the same"));
  weights.back() ^= 1;
  Write("model/model-00003-of-00009.safetensors", weights);  // a copy is the same model
  EXPECT_EQ(Wait(Start(words, Path("log"))).status, 3) << Log();

  // Spelling and what does not change results may differ.
  EXPECT_EQ(RunJob({"--seed", "5", "--max-errors", "0", "--sampling-params",
                    R"({"top_k": 5, "min_p": 0.1})"})
                .status,
            4);
  EXPECT_EQ(RunJob({"--resume", "--sampling-params", R"({ "min_p":0.1,"top_k":5 })",
                    "--max-num-seqs", "3"})
                .status,
            3)
      << Log();
}

TEST_F(GenerateJobTest, OneProcessAtATimeWorksOnAJob) {
  Write("in.jsonl", Lines(41));
  PartialJournal(20);
  const int fd = ::open(Path("out.partial").c_str(), O_RDONLY);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  for (const char* option : {"--resume", "--overwrite"}) {
    EXPECT_EQ(RunJob({option}).status, 1);
    EXPECT_THAT(Log(), HasSubstr("another process is working on the job"));
  }
  ::close(fd);
  EXPECT_EQ(RunJob({"--resume"}).status, 3);
}

TEST_F(GenerateJobTest, ResumingAFinishedJobSaysSoWithoutLoadingTheModel) {
  Write("in.jsonl", Lines(10));
  ASSERT_EQ(RunJob({"--resume"}).status, 0) << Log();
  EXPECT_THAT(Log(), HasSubstr("there is no job to resume"));
  const std::string output = Read(Path("out"));
  ASSERT_EQ(CountLines(output), 10u);
  std::vector<std::string> words = Words({"--output", Path("out"), "--resume"});
  words[3] = "/nonexistent";
  EXPECT_EQ(Wait(Start(words, Path("log"))).status, 0);
  EXPECT_THAT(Log(), HasSubstr("is complete and has no journal; nothing is left to resume."));
  EXPECT_EQ(Read(Path("out")), output);
}

TEST_F(GenerateJobTest, TheFirstSignalFinishesWhatRunsAndNamesTheCommandThatGoesOn) {
  Write("in.jsonl", Lines(800));
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  const pid_t pid = Start(
      Words({"--output", Path("out it's"), "--seed", "5", "--max-num-seqs", "4"}), Path("log"));
  ASSERT_TRUE(Grows(pid, Path("out it's.partial"), 5000));
  ::kill(pid, SIGTERM);
  EXPECT_EQ(Wait(pid).status, 130);
  const std::string log = Log();
  EXPECT_THAT(log, HasSubstr(" of 800 lines are finished, and the journal "));
  const size_t done = CountLines(Read(Path("out it's.partial"))) - 1;
  EXPECT_GT(done, 10u);
  EXPECT_LT(done, 800u);
  EXPECT_FALSE(Exists("out it's"));
  const std::string says = "to go on:\n  ";
  const size_t command = log.find(says) + says.size();
  ASSERT_NE(log.find(says), std::string::npos) << log;
  EXPECT_EQ(Shell(log.substr(command, log.find('\n', command) - command) + " 2> " + Path("log")),
            3);
  EXPECT_EQ(Read(Path("out it's")), Read(Path("undisturbed")));
}

TEST_F(GenerateJobTest, ASecondSignalStopsAfterTheStep) {
  std::string input = R"({"id": 0, "prompt": "x", "sampling_params": {"max_tokens": 1}})"
                      "\n";
  const json params = {{"max_tokens", 1000}, {"ignore_eos", true}, {"n", 64}};
  input += json{{"id", 1}, {"prompt", "x"}, {"sampling_params", params}}.dump() + "\n";
  Write("in.jsonl", input);
  const pid_t pid = Start(Words({"--output", Path("out")}), Path("log"));
  ASSERT_TRUE(Grows(pid, Path("out.partial"), 600)) << Log();
  ::kill(pid, SIGINT);
  while (Log().find("finishing the 1 line that began. Interrupt again to stop") ==
         std::string::npos)
    ASSERT_EQ(::waitpid(pid, nullptr, WNOHANG), 0) << Log();
  ::kill(pid, SIGTERM);
  EXPECT_EQ(Wait(pid).status, 130);
  EXPECT_THAT(Log(), HasSubstr("1 of 2 lines is finished"));
  EXPECT_EQ(CountLines(Read(Path("out.partial"))), 2u);
}

TEST_F(GenerateJobTest, TooManyErrorsStopTheJobWhichCanGoOn) {
  Write("in.jsonl", Lines(410));  // ten are wrong
  EXPECT_EQ(RunJob({"--max-errors", "10"}, "enough").status, 3) << Log();
  ASSERT_EQ(RunJob({"--seed", "5", "--max-errors", "3"}).status, 4);
  EXPECT_THAT(Log(), HasSubstr("4 lines failed, more than --max-errors 3; stopped."));
  EXPECT_THAT(Log(), HasSubstr("--resume\n"));
  EXPECT_FALSE(Exists("out"));
  // The errors of the job count, not those of the run.
  EXPECT_EQ(RunJob({"--resume", "--max-errors", "3"}).status, 4);
  EXPECT_EQ(RunJob({"--resume", "--max-errors", "6"}).status, 4);
  EXPECT_THAT(Log(), HasSubstr("7 lines failed"));
  EXPECT_EQ(RunJob({"--resume"}).status, 3) << Log();
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  EXPECT_EQ(Read(Path("out")), Read(Path("undisturbed")));

  EXPECT_EQ(Wait(Start(Words({"--max-errors", "0", "--output", "/dev/stdout"}), Path("log"), -1,
                       ::open("/dev/null", O_WRONLY)))
                .status,
            4);
  EXPECT_EQ(Log().find("--resume"), std::string::npos);
  Write("in.jsonl", Lines(40));
  EXPECT_EQ(RunJob({"--max-errors", "0"}).status, 0);
}

TEST_F(GenerateJobTest, AnIdIsUsedOnceAlsoAcrossAResume) {
  Write("in.jsonl",
        Lines(200) + R"({"id": "line-3", "prompt": "x", "sampling_params": {"max_tokens": 1}})");
  const std::string journal = PartialJournal(100);
  ASSERT_NE(journal.find("\"id\":\"line-3\",\"outputs\""), std::string::npos);
  ASSERT_EQ(journal.find("was used"), std::string::npos);
  ASSERT_EQ(RunJob({"--resume"}).status, 3) << Log();
  const std::vector<json> outputs = ReadLines(Path("out"));
  ASSERT_EQ(outputs.size(), 201u);
  EXPECT_TRUE(outputs[3].contains("outputs"));
  EXPECT_THAT(outputs[200]["error"]["message"].get<std::string>(),
              HasSubstr("id 'line-3' was used in line 5 already"));
}

TEST_F(GenerateJobTest, LinesAreExchangedOneByOneOverPipes) {
  int to[2];
  int from[2];
  ASSERT_EQ(::pipe2(to, O_CLOEXEC) + ::pipe2(from, O_CLOEXEC), 0);
  const pid_t pid =
      Start({kProgram, "generate", "--model", kModel, "--input", "-"}, Path("log"), to[0], from[1]);
  ::close(to[0]);
  ::close(from[1]);
  for (int i = 0; i < 5; ++i) {
    std::string line =
        json{{"id", i}, {"prompt", "x"}, {"sampling_params", {{"max_tokens", 3}}}}.dump() + "\n";
    if (i == 2) line = "{\"id\": 2}\n";
    // In two pieces: half a line is none.
    ASSERT_EQ(::write(to[1], line.data(), 5), 5);
    ASSERT_GT(::write(to[1], line.data() + 5, line.size() - 5), 0);
    std::string answer;
    while (!answer.ends_with('\n')) {
      struct ::pollfd ready = {from[0], POLLIN, 0};
      ASSERT_EQ(::poll(&ready, 1, 60'000), 1) << "no answer to line " << i;
      char bytes[4096];
      const ssize_t count = ::read(from[0], bytes, sizeof(bytes));
      ASSERT_GT(count, 0) << Log();
      answer.append(bytes, static_cast<size_t>(count));
    }
    EXPECT_EQ(json::parse(answer)["id"], i);
    EXPECT_EQ(json::parse(answer).contains("error"), i == 2);
  }
  ::close(to[1]);
  EXPECT_EQ(Wait(pid).status, 3);
  EXPECT_THAT(Log(), HasSubstr("5/5 done (1 failed)"));
  ::close(from[0]);
}

TEST_F(GenerateJobTest, APipedJobIsResumedWithTheSameLines) {
  const std::string input = Lines(41);
  Write("in.jsonl", input);
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  std::vector<std::string> words = Words({"--output", Path("out"), "--seed", "5"});
  words[6] = "-";
  const auto piped = [&](const std::string& text, std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    int to[2];
    EXPECT_EQ(::pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(::write(to[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    const pid_t pid = Start(more, Path("log"), to[0]);
    ::close(to[0]);
    ::close(to[1]);
    return Wait(pid).status;
  };
  ASSERT_EQ(piped(input, {"--max-errors", "0"}), 4);
  EXPECT_THAT(Log(), HasSubstr("to go on, with the same lines on the standard input:"));
  std::string changed = input;
  changed.replace(changed.find("\"colour\""), 8, "\"color\"");
  EXPECT_EQ(piped(changed, {"--resume"}), 1);
  EXPECT_THAT(Log(), HasSubstr("of the input '-' is not the line that this job has finished"));
  EXPECT_EQ(piped(input.substr(0, input.find('\n') + 1), {"--resume"}), 1);
  EXPECT_THAT(Log(), HasSubstr("the input differs"));
  EXPECT_EQ(piped(input, {"--resume"}), 3) << Log();
  EXPECT_EQ(Read(Path("out")), Read(Path("undisturbed")));
}

TEST_F(GenerateJobTest, AFullDiskKeepsWhatIsFinished) {
  Write("in.jsonl", Lines(300));
  ASSERT_EQ(RunJob({"--seed", "5"}, "undisturbed").status, 3);
  std::string command = "ulimit -f 20; exec";
  for (const std::string& word : Words({"--output", Path("out"), "--seed", "5"}))
    command += " " + word;
  EXPECT_EQ(Shell("bash -c '" + command + "' 2> " + Path("log")), 1);
  EXPECT_THAT(Log(), HasSubstr("writing the journal '" + Path("out.partial") +
                               "' failed: File too large."));
  EXPECT_THAT(Log(), HasSubstr("to go on:"));
  EXPECT_GT(CountLines(Read(Path("out.partial"))), 10u);
  EXPECT_EQ(RunJob({"--resume"}).status, 3) << Log();
  EXPECT_EQ(Read(Path("out")), Read(Path("undisturbed")));

  EXPECT_EQ(Wait(Start(Words({"--output", "/dev/full"}), Path("log"))).status, 1);
  EXPECT_THAT(Log(), HasSubstr("No space left on device"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST_F(GenerateJobTest, PlacesThatCannotBeWrittenAreRefusedBeforeTheModelIsLoaded) {
  Write("in.jsonl", Lines(3));
  const auto refused = [&](const std::string& output, const std::vector<std::string>& more,
                           const std::string& says) {
    std::vector<std::string> words = Words({"--output", output});
    words.insert(words.end(), more.begin(), more.end());
    words[3] = "/nonexistent";
    EXPECT_EQ(Wait(Start(words, Path("log"))).status, 1) << output;
    EXPECT_THAT(Log(), HasSubstr(says)) << output;
  };
  refused(Path("none/out"), {}, "cannot be opened: No such file or directory.");
  refused("/proc/out", {}, "the job's journal '/proc/out.partial' cannot be opened: ");
  refused(Path("in.jsonl"), {}, "input and output are the same file");
  refused("/dev/null", {"--resume"}, "--resume needs an output that is a file");
  fs::create_directory(Path("folder"));
  refused(Path("folder"), {}, "is a directory; a file is expected.");
  refused("-", {"--resume"}, "--resume needs an output that is a file");
  fs::create_directory(Path("out.partial"));
  refused(Path("out"), {}, "cannot be opened: Is a directory.");
  fs::remove(Path("out.partial"));
  ASSERT_EQ(::mkfifo(Path("out.partial").c_str(), 0666), 0);
  refused(Path("out"), {}, "is a FIFO, not a regular file.");
  fs::remove(Path("out.partial"));

  // The journal's name is the input's.
  fs::rename(Path("in.jsonl"), Path("out.partial"));
  std::vector<std::string> words = Words({"--output", Path("out"), "--overwrite"});
  words[6] = Path("out.partial");
  EXPECT_EQ(Wait(Start(words, Path("log"))).status, 1);
  EXPECT_THAT(Log(), HasSubstr("has the name of a file that this job writes"));
  EXPECT_EQ(Read(Path("out.partial")), Lines(3));
}

TEST_F(GenerateJobTest, TheOldOutputStaysUntilTheNewOneIsComplete) {
  Write("in.jsonl", Lines(400));
  Write("real", "old\n");
  fs::permissions(Path("real"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("real", Path("out"));
  const pid_t pid = Start(Words({"--output", Path("out"), "--max-num-seqs", "4"}), Path("log"));
  ASSERT_TRUE(Grows(pid, Path("real.partial"), 5000)) << Log();
  EXPECT_EQ(Read(Path("out")), "old\n");
  EXPECT_EQ(Wait(pid).status, 3);
  EXPECT_TRUE(fs::is_symlink(Path("out")));
  EXPECT_EQ(CountLines(Read(Path("real"))), 400u);
  EXPECT_EQ(fs::status(Path("real")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(GenerateJobTest, OptionsOfJobsNeedAnInput) {
  for (const char* option : {"--resume", "--overwrite", "--seed 1", "--max-errors 1"}) {
    EXPECT_EQ(Shell(std::string(kProgram) + " generate --model " + kModel + " --prompt x " +
                    option + " 2> " + Path("log")),
              2)
        << option;
  }
  Write("in.jsonl", "");
  EXPECT_EQ(RunJob({"--resume", "--overwrite"}).status, 2);
  EXPECT_EQ(RunJob({"--max-errors", "-1"}).status, 2);
  EXPECT_EQ(RunJob({"--seed", "-1"}).status, 2);
}

}  // namespace
