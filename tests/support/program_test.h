// Fixture for tests that run the program `deepinfer` as a user does: a folder of their own, files,
// lines of JSON.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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

  std::filesystem::path dir_;
};

}  // namespace deepinfer::testing_support
