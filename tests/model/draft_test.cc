// The draft layers: blocks against a plain statement of them, what a block may and may not depend
// on, and verification of drafts, accepted or not, leaving no trace in the state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/draft_reference.h"
#include "support/model_runs.h"
#include "tensor/copy.h"

namespace deepinfer {
namespace {

using namespace testing_support;  // NOLINT
using ::testing::HasSubstr;

std::span<const int32_t> First(const std::vector<int32_t>& ids, int64_t count) {
  return std::span(ids).first(static_cast<size_t>(count));
}
std::span<const int32_t> From(const std::vector<int32_t>& ids, int64_t begin, int64_t count) {
  return std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
}

// All that a pass says about one block.
struct Block {
  std::vector<int32_t> tokens;
  std::vector<float> scores, confidences;
  Rows logits;
  bool operator==(const Block& other) const {
    return tokens == other.tokens && scores == other.scores && confidences == other.confidences &&
           FirstDifference(logits, other.logits).empty();
  }
};

Block BlockOf(const Drafts& drafts, int64_t chunk) {
  Block block;
  const int64_t slots = drafts.tokens.rows();
  for (int64_t k = 0; k < slots; ++k) {
    block.tokens.push_back(drafts.tokens.Row<int32_t>(k)[chunk]);
    block.scores.push_back(drafts.score.Row<float>(k)[chunk]);
    block.confidences.push_back(drafts.confidence.Row<float>(k)[chunk]);
    const float* row = drafts.logits.Row<float>(chunk * slots + k);
    block.logits.emplace_back(row, row + drafts.logits.dim(1));
  }
  return block;
}

class DraftTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Executor> Load(int threads = 2, ExecutorOptions options = {}) {
    options.draft_tokens = kBlock;
    return LoadExecutor(GetParam(), threads, options);
  }
  static Block Draft(const Session& session, int32_t anchor) {
    const auto drafts = session.Draft(anchor, true);
    EXPECT_TRUE(drafts.has_value()) << drafts.error().message;
    return drafts.has_value() ? BlockOf(*drafts, 0) : Block();
  }
  // Of the prompt's first tokens, run in these chunks, and the next one as the anchor.
  static Block DraftBehind(Executor& executor, StatePools& pools, const std::vector<int32_t>& ids,
                           const std::vector<int64_t>& chunks) {
    Session session = *Session::Create(executor, pools);
    for (const int64_t size : chunks)
      AppendRows(session, From(ids, std::ssize(session.tokens()), size), nullptr);
    return Draft(session, ids[session.tokens().size()]);
  }

  static constexpr int64_t kBlock = 3;
};

TEST_P(DraftTest, BlocksAreThoseOfThePlainReference) {
  auto executor = Load();
  const ModelConfig& config = executor->config();
  const int64_t window = config.sliding_window;
  const std::vector<int32_t> ids = RandomIds(3 * window + 2, 11);
  StatePools pools = MakeStatePools(*executor);
  PoisonUnreferenced(*executor, pools);
  Session session = *Session::Create(*executor, pools);
  DraftReference reference(CheckpointDir(GetParam()), config);
  const auto width = static_cast<size_t>(4 * config.hidden_size);
  int near_ties = 0;
  for (int64_t length = 1; length <= 3 * window + 1; ++length) {
    LayerTrace trace;
    trace.want_streams = true;
    ASSERT_TRUE(session.Append(From(ids, length - 1, 1), 0, &trace).has_value());
    std::vector<std::vector<float>> streams;
    for (const int64_t layer : config.dspark_target_layer_ids) {
      // No target layer of these models looks n-grams up, so its entry is the exit before it.
      ASSERT_LT(config.engram_index(layer), 0);
      const float* begin = trace.streams[static_cast<size_t>(layer - 1)].data();
      streams.emplace_back(begin, begin + width);
    }
    reference.AddPosition(streams);
    const int64_t p = length - 1;
    if (p > 1 && std::abs(p - window) > 2 && p != 3 * window) continue;
    const int32_t anchor = ids[static_cast<size_t>(length)];
    const Block ours = Draft(session, anchor);
    const DraftReference::Block expected = reference.Draft(length, anchor, kBlock);
    for (int64_t k = 0; k < kBlock; ++k) {
      const auto slot = static_cast<size_t>(k);
      double difference = 0.0, square = 0.0;
      for (size_t i = 0; i < expected.logits[slot].size(); ++i) {
        const double b = expected.logits[slot][i];
        difference += (ours.logits[slot][i] - b) * (ours.logits[slot][i] - b);
        square += b * b;
      }
      // Sums in another order: 1e-6, unless one crosses a rounding to the FP8 grid.
      const double limit = OnCuda() ? 0.1 : 0.01;
      EXPECT_LE(std::sqrt(difference / square), limit) << "position " << p << " slot " << k;
      EXPECT_NEAR(ours.scores[slot], expected.scores[slot], 0.1) << "position " << p;
      const double sigmoid = 1.0 / (1.0 + std::exp(-static_cast<double>(ours.scores[slot])));
      EXPECT_NEAR(ours.confidences[slot], sigmoid, 1e-6);
      if (ours.tokens[slot] == expected.tokens[slot]) continue;
      // The chain goes elsewhere behind a near-tie.
      const Rows::value_type& row = expected.logits[slot];
      EXPECT_LE(row[static_cast<size_t>(expected.tokens[slot])] -
                    row[static_cast<size_t>(ours.tokens[slot])],
                limit * std::sqrt(square / static_cast<double>(row.size())))
          << "position " << p << " slot " << k;
      ++near_ties;
      break;
    }
  }
  EXPECT_LE(near_ties, OnCuda() ? 2 : 0);
}

TEST_P(DraftTest, ABlockAloneEqualsTheSameBlockInAnyBatchAndAtAnyThreadCount) {
  std::vector<std::vector<int32_t>> ids;
  for (uint32_t s = 0; s < 9; ++s) ids.push_back(RandomIds(2 + s * 29 % 140, 50 + s));
  std::vector<Block> expected;
  for (const int threads : {1, 2, 5}) {
    auto executor = Load(threads);
    StatePools pools = MakeStatePools(*executor);
    std::vector<Session> sessions;
    std::vector<DraftChunk> chunks;
    for (const std::vector<int32_t>& prompt : ids) {
      sessions.push_back(std::move(*Session::Create(*executor, pools)));
      AppendRows(sessions.back(), First(prompt, std::ssize(prompt) - 1), nullptr);
    }
    for (size_t s = 0; s < ids.size(); ++s) {
      chunks.push_back(sessions[s].ChunkForDraft(ids[s].back()));
      const Block alone = Draft(sessions[s], ids[s].back());
      if (threads == 1) expected.push_back(alone);
      EXPECT_EQ(alone, expected[s]) << "sequence " << s << ", " << threads << " threads";
    }
    for (const bool reversed : {false, true}) {
      std::vector<DraftChunk> order = chunks;
      if (reversed) std::reverse(order.begin(), order.end());
      const auto drafts = executor->Draft(order, true);
      ASSERT_TRUE(drafts.has_value()) << drafts.error().message;
      for (size_t i = 0; i < order.size(); ++i) {
        const size_t s = reversed ? order.size() - 1 - i : i;
        EXPECT_EQ(BlockOf(*drafts, static_cast<int64_t>(i)), expected[s]) << "sequence " << s;
      }
    }
  }
}

TEST_P(DraftTest, HowAPromptWasCutChangesNothing) {
  auto executor = Load();
  StatePools pools = MakeStatePools(*executor);
  PoisonUnreferenced(*executor, pools);
  for (const int64_t length : {2, 9, 33, 130, 145}) {
    const std::vector<int32_t> ids = RandomIds(length + 1, static_cast<uint32_t>(length));
    const Block whole = DraftBehind(*executor, pools, ids, {length});
    EXPECT_EQ(
        DraftBehind(*executor, pools, ids, std::vector<int64_t>(static_cast<size_t>(length), 1)),
        whole);
    for (uint32_t seed = 0; seed < 3; ++seed)
      EXPECT_EQ(DraftBehind(*executor, pools, ids, RandomCuts(length, seed, 20)), whole) << length;
  }
}

// Everything in the state of a sequence that a later step or block can read, as bytes.
std::string VisibleState(Executor& executor, const Session& session, Stream& stream) {
  const CacheMemory& memory = executor.memory();
  const SequenceState& state = session.state();
  const int64_t n = state.num_tokens();
  std::string bytes;
  const auto add = [&](const TensorView& units, int64_t unit, int64_t row) {
    std::vector<char> record(static_cast<size_t>(units.dim(2) * DTypeBytes(units.dtype())));
    const TensorView rows = units.Rows(unit, unit + 1).Reshape({units.dim(1), units.dim(2)});
    EXPECT_TRUE(CopyToHost(rows.Rows(row, row + 1), record.data(), stream).has_value());
    bytes.append(record.data(), record.size());
  };
  for (int64_t p = 0; p < std::ssize(memory.geometry().producers); ++p) {
    const CacheGeometry::Producer& producer = memory.geometry().producers[static_cast<size_t>(p)];
    for (const TensorView& blocks : {memory.KvBlocks(p), memory.IndexBlocks(p)}) {
      for (int64_t j = 0; j < n / producer.ratio; ++j)
        add(blocks, state.blocks()[static_cast<size_t>(j / blocks.dim(1))], j % blocks.dim(1));
    }
    if (producer.remainder_floats > 0 && n % 2 == 1) {
      const TensorView remainders = memory.Remainders(p);
      add(remainders, state.slot(), (n - 1) % remainders.dim(1));
    }
  }
  // A row at n sees window - 1 positions before it, a block the whole window.
  for (int64_t layer = 0; layer < memory.geometry().num_layers; ++layer) {
    const TensorView pages = memory.WindowPages(layer);
    for (int64_t p = std::max<int64_t>(0, n - executor.config().sliding_window); p < n; ++p) {
      const int64_t page = p / kBlockTokens - state.first_window_page();
      add(pages, state.window_pages()[static_cast<size_t>(page)], p % kBlockTokens);
    }
  }
  return bytes;
}

// The forced acceptance of every number of drafts at every length, so at every alignment with the
// groups of ratio 2, with the rows of the remainders and with pages and blocks: what later reads
// can see is what a sequence that never speculated has, and so are the next rows and drafts.
TEST_P(DraftTest, VerifiedAndRejectedDraftsLeaveNoTrace) {
  auto executor = Load();
  auto cold = Load();
  auto stream = OnCuda() ? std::move(*Stream::CreateCuda(executor->options().device.index, 1))
                         : Stream::Create(1).value();
  const int64_t last = kBlockTokens + 12;
  const std::vector<int32_t> ids = RandomIds(last + kBlock + 3, 21);
  // What a plain run has at every length.
  std::vector<std::string> states(1);
  std::vector<Block> drafts(1);
  Rows rows;
  StatePools cold_pools = MakeStatePools(*cold);
  Session plain = *Session::Create(*cold, cold_pools);
  for (int64_t n = 1; n <= last + kBlock + 2; ++n) {
    AppendRows(plain, From(ids, n - 1, 1), &rows);
    states.push_back(VisibleState(*cold, plain, *stream));
    drafts.push_back(Draft(plain, ids[static_cast<size_t>(n)]));
  }
  StatePools pools = MakeStatePools(*executor);
  PoisonUnreferenced(*executor, pools);
  Session session = *Session::Create(*executor, pools);
  Rows ignored;
  AppendRows(session, First(ids, 1), &ignored);
  for (int64_t n = 1; n < last; ++n) {
    // Every fourth length is reached without a block of drafts right before it.
    for (int64_t m = 0; n % 4 != 3 && m <= kBlock; ++m) {
      // The anchor and m drafts are the sequence's own tokens; what follows is rejected.
      std::vector<int32_t> verified(ids.begin() + n, ids.begin() + n + 1 + m);
      for (int64_t k = m; k < kBlock; ++k)
        verified.push_back((ids[static_cast<size_t>(n + 1 + k)] + 1 + static_cast<int32_t>(k)) %
                           512);
      const Block before = Draft(session, ids[static_cast<size_t>(n)]);
      ASSERT_EQ(before, drafts[static_cast<size_t>(n)]) << n << " tokens";
      Rows verification;
      AppendRows(session, verified, &verification);
      ASSERT_EQ(FirstDifference(RowsFrom(verification, 0, 1 + m), RowsFrom(rows, n, n + 1 + m)), "")
          << n << " tokens, " << m << " accepted";
      ASSERT_TRUE(session.Truncate(n + 1 + m));
      ASSERT_EQ(VisibleState(*executor, session, *stream), states[static_cast<size_t>(n + 1 + m)])
          << n << " tokens, " << m << " accepted";
      ASSERT_EQ(Draft(session, ids[static_cast<size_t>(n + 1 + m)]),
                drafts[static_cast<size_t>(n + 1 + m)])
          << n << " tokens, " << m << " accepted";
      Rows next;
      AppendRows(session, From(ids, n + 1 + m, 1), &next);
      ASSERT_EQ(FirstDifference(next, RowsFrom(rows, n + 1 + m, n + 2 + m)), "");
      ASSERT_TRUE(session.Truncate(n));
      if (n % 16 == 0) PoisonUnreferenced(*executor, pools);
    }
    AppendRows(session, From(ids, n, 1), &ignored);
  }
}

TEST_P(DraftTest, SharedPrefixesAndSavedStatesDraftTheSame) {
  auto executor = Load();
  const int64_t window = executor->config().sliding_window;
  const std::vector<int32_t> ids = RandomIds(150, 31);
  StatePools pools = MakeStatePools(*executor);
  for (const int64_t length : {int64_t{2}, window, window + 2, int64_t{128}, int64_t{134}}) {
    // A sequence goes on behind a shared prefix with a token of its own, so a block never begins
    // right behind it.
    const Block expected = DraftBehind(*executor, pools, ids, {length + 1});
    Session first = *Session::Create(*executor, pools);
    AppendRows(first, First(ids, length), nullptr);
    SharedPrefix prefix;
    prefix.num_tokens = length;
    const int64_t units = (length + kBlockTokens - 1) / kBlockTokens;
    prefix.blocks = {first.state().blocks().begin(), first.state().blocks().begin() + units};
    prefix.first_window_page = std::max<int64_t>(0, length - window + 1) / kBlockTokens;
    const auto pages = first.state().window_pages().begin() - first.state().first_window_page();
    prefix.window_pages = {pages + prefix.first_window_page, pages + units};
    Session shared = *Session::Continue(*executor, pools, prefix, First(ids, length));
    PoisonUnreferenced(*executor, pools);
    AppendRows(shared, From(ids, length, 1), nullptr);
    EXPECT_EQ(Draft(shared, ids[static_cast<size_t>(length + 1)]), expected) << length;
    AppendRows(first, From(ids, length, 1), nullptr);
    const auto image = *first.Save();
    Session restored = *Session::Restore(*executor, pools, image, First(ids, length + 1));
    PoisonUnreferenced(*executor, pools);
    EXPECT_EQ(Draft(restored, ids[static_cast<size_t>(length + 1)]), expected) << length;
  }
}

TEST_P(DraftTest, WithBoundedReplayBlocksSeeTheKeptRows) {
  std::vector<std::vector<Block>> blocks;
  for (const ReplayMode mode : {ReplayMode::kMask, ReplayMode::kCompact}) {
    ExecutorOptions options;
    options.replay = mode;
    auto executor = Load(2, options);
    const std::vector<int32_t> ids = RandomIds(160, 41);
    StatePools pools = MakeStatePools(*executor);
    PoisonUnreferenced(*executor, pools);
    std::vector<Block>& of_mode = blocks.emplace_back();
    for (const int64_t begin : {0, 3, 100, 147}) {
      for (const int64_t chunk : {7, 50, 200}) {
        Session session = *Session::Create(*executor, pools);
        session.set_decoder_begin(begin);
        while (std::ssize(session.tokens()) < 150) {
          const int64_t at = std::ssize(session.tokens());
          AppendRows(session, From(ids, at, std::min<int64_t>(chunk, 150 - at)), nullptr);
        }
        of_mode.push_back(Draft(session, ids[150]));
        if (chunk > 7) {
          EXPECT_EQ(of_mode.back(), of_mode[of_mode.size() - 2]) << begin;
        }
      }
    }
    EXPECT_NE(of_mode[0], of_mode[9]);  // 147 cuts into the block's window
  }
  EXPECT_EQ(blocks[0], blocks[1]);
}

// Writes given tokens, slot after slot.
class GivenTokens : public DraftChooser {
 public:
  explicit GivenTokens(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {}
  Status Choose(int64_t slot, const TensorView& logits, const TensorView& tokens,
                Stream& stream) override {
    EXPECT_EQ(logits.rows(), 1);
    EXPECT_EQ(logits.dim(1), 512);
    return CopyToDevice(&tokens_[static_cast<size_t>(slot)], tokens, stream);
  }

 private:
  std::vector<int32_t> tokens_;
};

TEST_P(DraftTest, AChooserDecidesTheChainAndAConfidenceKnowsOnlyTheTokensBefore) {
  auto executor = Load();
  StatePools pools = MakeStatePools(*executor);
  Session session = *Session::Create(*executor, pools);
  AppendRows(session, RandomIds(20, 5), nullptr);
  const DraftChunk chunk = session.ChunkForDraft(7);
  const Block greedy = Draft(session, 7);
  const auto run = [&](std::vector<int32_t> tokens) {
    GivenTokens chooser(std::move(tokens));
    const auto drafts = executor->Draft({&chunk, 1}, true, &chooser);
    EXPECT_TRUE(drafts.has_value()) << drafts.error().message;
    return BlockOf(*drafts, 0);
  };
  EXPECT_EQ(run(greedy.tokens), greedy);
  for (int64_t changed = 0; changed < kBlock; ++changed) {
    const auto at = static_cast<size_t>(changed);
    std::vector<int32_t> tokens = greedy.tokens;
    tokens[at] = (tokens[at] + 100) % 512;
    const Block other = run(tokens);
    EXPECT_EQ(other.tokens, tokens);
    for (size_t k = 0; k < kBlock; ++k) {
      const bool follows = k == at + 1;
      EXPECT_EQ(other.scores[k] == greedy.scores[k], !follows) << changed << " " << k;
      EXPECT_EQ(other.logits[k] == greedy.logits[k], !follows) << changed << " " << k;
    }
  }
}

TEST_P(DraftTest, TemperaturesChangeConfidencesOnly) {
  auto executor = Load();
  StatePools pools = MakeStatePools(*executor);
  Session session = *Session::Create(*executor, pools);
  AppendRows(session, RandomIds(20, 5), nullptr);
  const Block plain = Draft(session, 7);
  const float each[] = {2.0f, 0.5f, 1.0f};
  ASSERT_TRUE(executor->SetDraftTemperatures(each).has_value());
  const Block scaled = Draft(session, 7);
  EXPECT_EQ(scaled.tokens, plain.tokens);
  EXPECT_EQ(scaled.scores, plain.scores);
  for (size_t k = 0; k < kBlock; ++k) {
    const double z = static_cast<double>(plain.scores[k]) / each[k];
    EXPECT_NEAR(scaled.confidences[k], 1.0 / (1.0 + std::exp(-z)), 1e-6) << k;
  }
  const float one[] = {1.0f};
  ASSERT_TRUE(executor->SetDraftTemperatures(one).has_value());
  EXPECT_EQ(Draft(session, 7), plain);
  for (const std::vector<float>& wrong :
       {std::vector<float>{}, {1, 1}, {0}, {1, -1, 1}, {1, 1, INFINITY}}) {
    const Status refused = executor->SetDraftTemperatures(wrong);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().field, "draft_temperatures");
  }
}

TEST_P(DraftTest, WithoutDraftingNothingOfItIsThere) {
  auto drafting = Load();
  auto plain = LoadExecutor(GetParam(), 2);
  EXPECT_LT(plain->memory_use().weight_bytes, drafting->memory_use().weight_bytes);
  EXPECT_LT(plain->memory_plan().total_bytes(), drafting->memory_plan().total_bytes());
  EXPECT_EQ(plain->memory().geometry().num_layers, plain->config().num_hidden_layers);
  const std::vector<int32_t> ids = RandomIds(60, 3);
  EXPECT_EQ(FirstDifference(RunAlone(*plain, ids, {40, 20}), RunAlone(*drafting, ids, {40, 20})),
            "");
  StatePools pools = MakeStatePools(*plain);
  Session session = *Session::Create(*plain, pools);
  AppendRows(session, First(ids, 5), nullptr);
  const auto refused = session.Draft(1);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().field, "draft_tokens");
  EXPECT_FALSE(plain->SetDraftTemperatures({}).has_value());
}

TEST_P(DraftTest, BlocksOfAnotherLengthHaveToBeForced) {
  ExecutorOptions options;
  options.model_dir = CheckpointDir(GetParam());
  options.device = TestDevice();
  options.cache_tokens = 1024;
  options.draft_tokens = 5;
  const auto refused = Executor::Create(options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, HasSubstr("trained on blocks of 3"));
  options.force_draft_tokens = true;
  auto executor = Executor::Create(options);
  ASSERT_TRUE(executor.has_value()) << executor.error().message;
  StatePools pools = MakeStatePools(**executor);
  Session session = *Session::Create(**executor, pools);
  AppendRows(session, RandomIds(20, 5), nullptr);
  const auto drafts = session.Draft(7);
  ASSERT_TRUE(drafts.has_value()) << drafts.error().message;
  EXPECT_EQ(drafts->tokens.rows(), 5);
  EXPECT_TRUE(drafts->logits.empty());
  options.rollback_tokens = 5;
  const auto too_few = Executor::Create(options);
  ASSERT_FALSE(too_few.has_value());
  EXPECT_EQ(too_few.error().field, "rollback_tokens");
  EXPECT_THAT(too_few.error().message, HasSubstr("at least 6"));
}

TEST_P(DraftTest, RequestsThatDoNotFitAreRefused) {
  auto executor = Load();
  StatePools pools = MakeStatePools(*executor);
  Session session = *Session::Create(*executor, pools);
  AppendRows(session, RandomIds(140, 5), nullptr);
  const DraftChunk good = session.ChunkForDraft(7);
  ASSERT_TRUE(executor->Draft({&good, 1}).has_value());
  const auto field = [&](const DraftChunk& chunk) {
    const auto refused = executor->Draft({&chunk, 1});
    return refused.has_value() ? std::string("none") : refused.error().field;
  };
  DraftChunk chunk = good;
  chunk.anchor = 512;
  EXPECT_EQ(field(chunk), "anchor");
  chunk = good;
  chunk.length = 0;
  EXPECT_EQ(field(chunk), "length");
  chunk = good;
  chunk.window_begin = 140;
  EXPECT_EQ(field(chunk), "window_begin");
  chunk = good;
  chunk.window_pages = good.window_pages.first(good.window_pages.size() - 1);
  EXPECT_EQ(field(chunk), "window_pages");
  const int32_t wrong[] = {1 << 20, 1 << 20};
  chunk.window_pages = wrong;
  EXPECT_EQ(field(chunk), "window_pages");
  EXPECT_EQ(executor->Draft({}).error().field, "chunks");
  const std::vector<DraftChunk> many(17, good);
  EXPECT_EQ(executor->Draft(many).error().field, "chunks");
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, DraftTest, ::testing::Values("two", "three"));

}  // namespace
}  // namespace deepinfer
