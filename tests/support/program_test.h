// Fixture for tests that run the program `deepinfer` as a user does: a folder of their own, files,
// lines of JSON.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace deepinfer::testing_support {

class ProgramTest : public ::testing::Test {
 protected:
  ProgramTest()
      : dir_(std::filesystem::temp_directory_path() /
             ("deepinfer_program_test_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(dir_);
  }
  ~ProgramTest() override {
    std::filesystem::remove_all(dir_);
  }

  std::string Path(const std::string& name) const {
    return (dir_ / name).string();
  }
  // Writes a file of the test's folder and returns its path.
  std::string Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
    return Path(name);
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static std::vector<nlohmann::json> ReadLines(const std::string& path) {
    std::vector<nlohmann::json> lines;
    std::ifstream file(path, std::ios::binary);
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  // The exit status of a shell command.
  static int Shell(const std::string& command) {
    const int wait = std::system(command.c_str());
    return WIFEXITED(wait) ? WEXITSTATUS(wait) : -1;
  }

  // Starts a program without waiting for it; the words begin with its path. Standard error goes to
  // a file, and the other standard streams to descriptors if they are given.
  static pid_t Start(const std::vector<std::string>& words, const std::string& log, int in = -1,
                     int out = -1) {
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    const int error = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (error >= 0) ::dup2(error, STDERR_FILENO);
    if (in >= 0) ::dup2(in, STDIN_FILENO);
    if (out >= 0) ::dup2(out, STDOUT_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  struct Ended {
    int status = -1;         // the exit status; 128 + the signal that ended it
    int64_t peak_bytes = 0;  // of memory
  };
  static Ended Wait(pid_t pid) {
    int wait = 0;
    struct ::rusage usage = {};
    if (::wait4(pid, &wait, 0, &usage) != pid) return {};
    return {WIFEXITED(wait) ? WEXITSTATUS(wait) : 128 + WTERMSIG(wait),
            int64_t{usage.ru_maxrss} * 1024};
  }

  std::filesystem::path dir_;
};

}  // namespace deepinfer::testing_support
