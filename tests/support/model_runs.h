// Running the small test checkpoints: loading, reproducible token ids, logits of all rows, and
// units of cache memory overwritten on purpose.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/session.h"
#include "support/test_device.h"

namespace deepinfer::testing_support {

using Rows = std::vector<std::vector<float>>;  // logits of every row of a sequence

// The checkpoint of a recorded model, or empty if it is not on this machine.
inline std::string CheckpointDir(const std::string& folder) {
  for (const char* root : {DI_TEST_DATA_DIR "/model/", DI_SHARED_DIR "/golden/model/"}) {
    const std::string dir = root + folder + "/checkpoint";
    if (std::filesystem::exists(dir)) return dir;
  }
  return {};
}

inline std::unique_ptr<Executor> LoadExecutor(const std::string& folder, int threads,
                                              ExecutorOptions options = {}) {
  options.model_dir = CheckpointDir(folder);
  options.device = TestDevice();
  options.num_threads = threads;
  options.max_sequences = 16;
  options.cache_tokens = 16384;
  auto executor = Executor::Create(options);
  EXPECT_TRUE(executor.has_value()) << executor.error().message;
  return std::move(*executor);
}

inline std::vector<int32_t> RandomIds(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(generator() % 512));
  return ids;
}

// Runs several sequences at once; chunks[s] are the chunk sizes of sequence s, one step takes the
// next chunk of every sequence that has one.
inline std::vector<Rows> RunTogether(Executor& executor,
                                     const std::vector<std::vector<int32_t>>& ids,
                                     const std::vector<std::vector<int64_t>>& chunks) {
  StatePools pools = MakeStatePools(executor);
  std::vector<Session> sessions;
  for (size_t s = 0; s < ids.size(); ++s)
    sessions.push_back(std::move(*Session::Create(executor, pools)));
  std::vector<Rows> rows(ids.size());
  for (size_t round = 0;; ++round) {
    std::vector<Session::Part> step;
    std::vector<size_t> who;
    for (size_t s = 0; s < ids.size(); ++s) {
      if (round >= chunks[s].size()) continue;
      const auto size = static_cast<size_t>(chunks[s][round]);
      step.push_back({.session = &sessions[s],
                      .ids = std::span(ids[s]).subspan(sessions[s].tokens().size(), size),
                      .num_logit_rows = chunks[s][round]});
      who.push_back(s);
    }
    if (step.empty()) return rows;
    auto logits = Session::Step(step);
    EXPECT_TRUE(logits.has_value());
    int64_t row = 0;
    for (size_t i = 0; i < who.size(); ++i) {
      for (int64_t r = 0; r < step[i].num_logit_rows; ++r, ++row) {
        rows[who[i]].emplace_back(logits->Row<float>(row),
                                  logits->Row<float>(row) + logits->dim(1));
      }
    }
  }
}

inline Rows RunAlone(Executor& executor, const std::vector<int32_t>& ids,
                     const std::vector<int64_t>& chunks) {
  return RunTogether(executor, {ids}, {chunks})[0];
}

// Empty when equal bit for bit, else where the first difference is.
inline std::string FirstDifference(const Rows& a, const Rows& b) {
  if (a.size() != b.size())
    return "row counts " + std::to_string(a.size()) + " and " + std::to_string(b.size());
  for (size_t r = 0; r < a.size(); ++r) {
    if (std::memcmp(a[r].data(), b[r].data(), a[r].size() * sizeof(float)) != 0)
      return "row " + std::to_string(r);
  }
  return {};
}

inline std::vector<int64_t> RandomCuts(int64_t total, uint32_t seed, int64_t largest) {
  std::mt19937 generator(seed);
  std::vector<int64_t> cuts;
  while (total > 0) {
    const int64_t size = std::min<int64_t>(
        total, 1 + static_cast<int64_t>(generator() % static_cast<uint32_t>(largest)));
    cuts.push_back(size);
    total -= size;
  }
  return cuts;
}

// Fills every unit that nobody refers to with bytes that are not numbers in any format.
inline void PoisonUnreferenced(Executor& executor, const StatePools& pools) {
  const auto poison = [](const TensorView& view, const BlockPool& pool) {
    if (view.empty()) return;
    for (int64_t id = 0; id < pool.size(); ++id) {
      if (pool.references(static_cast<int32_t>(id)) > 0) continue;
      Poison(view.Rows(id, id + 1));
    }
  };
  const CacheMemory& memory = executor.memory();
  for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
    poison(memory.KvBlocks(p), pools.blocks);
    poison(memory.IndexBlocks(p), pools.blocks);
    poison(memory.Remainders(p), pools.slots);
  }
  for (int64_t layer = 0; layer < memory.geometry().num_layers; ++layer)
    poison(memory.WindowPages(layer), pools.window_pages);
}

// Appends ids and adds the logits of their rows; none of them for null.
inline void AppendRows(Session& session, std::span<const int32_t> ids, Rows* rows) {
  auto logits = session.Append(ids, rows == nullptr ? 0 : std::ssize(ids));
  ASSERT_TRUE(logits.has_value()) << logits.error().message;
  for (int64_t r = 0; r < logits->rows(); ++r)
    rows->emplace_back(logits->Row<float>(r), logits->Row<float>(r) + logits->dim(1));
}

inline std::vector<int32_t> Concat(std::span<const int32_t> a, std::span<const int32_t> b) {
  std::vector<int32_t> ids(a.begin(), a.end());
  ids.insert(ids.end(), b.begin(), b.end());
  return ids;
}

inline Rows RowsFrom(const Rows& rows, int64_t begin, int64_t end = -1) {
  return {rows.begin() + begin, end < 0 ? rows.end() : rows.begin() + end};
}

}  // namespace deepinfer::testing_support
