// Attention, indexer, hyper-connections and row operations at the published model's sizes.
#include "ops/bench/model_ops_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/batch_layout.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/indexer/indexer.h"
#include "ops/moe/moe.h"
#include "ops/quantize/group_quantize.h"
#include "ops/quantize/quantize.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "tensor/buffer.h"
#include "tensor/float_formats.h"

namespace deepinfer {
namespace {

constexpr int64_t kHidden = 5120;
constexpr int64_t kHeads = 64;
constexpr int64_t kHeadDim = 512;
constexpr int64_t kPairs = 32;
constexpr int64_t kWindow = 128;
constexpr int64_t kTopK = 512;
constexpr int64_t kIndexHeads = 32;
constexpr int64_t kIndexDim = 128;
constexpr int64_t kEntriesPerBlock = 128;
constexpr int64_t kIntermediate = 2304;
constexpr int64_t kExpertsPerToken = 6;

class Random {
 public:
  uint64_t Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return state_ >> 33;
  }
  // Uniform in +-1.
  float Signed() {
    return static_cast<float>(Next()) * 0x1p-30f - 1.0f;
  }

 private:
  uint64_t state_ = 42;
};

// Memory and a view of it, filled with numbers in +-gain, small positive integers, or bytes, by
// element type.
class Data {
 public:
  static Result<Data> Make(DType dtype, std::initializer_list<int64_t> shape, float gain = 1.0f) {
    Data data;
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    DI_ASSIGN_OR_RETURN(data.buffer_,
                        Buffer::AllocateZeroed({}, extent.num_elements() * DTypeBytes(dtype)));
    data.view_ = data.buffer_.View(dtype, shape);
    Random random;
    for (int64_t i = 0; i < extent.num_elements(); ++i) {
      if (dtype == DType::kF32)
        static_cast<float*>(data.buffer_.data())[i] = random.Signed() * gain;
      if (dtype == DType::kBf16)
        static_cast<Bf16*>(data.buffer_.data())[i] = F32ToBf16(random.Signed() * gain);
    }
    return data;
  }
  const TensorView& view() const {
    return view_;
  }
  int32_t* ints() const {
    return static_cast<int32_t*>(buffer_.data());
  }
  uint8_t* bytes() const {
    return static_cast<uint8_t*>(buffer_.data());
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

// Random codes with scales near one, `record_bytes` per record of which the last `scale_bytes` are
// scales.
void FillRecords(const Data& data, int64_t record_bytes, int64_t scale_bytes, uint8_t first_scale,
                 uint8_t code_mask) {
  Random random;
  const int64_t total = data.view().num_elements();
  for (int64_t i = 0; i < total; ++i) {
    const bool scale = i % record_bytes >= record_bytes - scale_bytes;
    data.bytes()[i] = scale ? static_cast<uint8_t>(first_scale + random.Next() % 4)
                            : static_cast<uint8_t>(random.Next()) & code_mask;
  }
}

// One sequence of `context` tokens of which the last `rows` are the step's.
struct OneSequence {
  Data positions, row_sequence, start, slot, table, pages, first_page, window_begin;
  BatchLayout layout;

  static Result<OneSequence> Make(int64_t rows, int64_t context) {
    OneSequence s;
    const int64_t blocks = (context + kEntriesPerBlock - 1) / kEntriesPerBlock;
    DI_ASSIGN_OR_RETURN(s.positions, Data::Make(DType::kI32, {rows}));
    DI_ASSIGN_OR_RETURN(s.row_sequence, Data::Make(DType::kI32, {rows}));
    DI_ASSIGN_OR_RETURN(s.start, Data::Make(DType::kI32, {2}));
    DI_ASSIGN_OR_RETURN(s.slot, Data::Make(DType::kI32, {1}));
    DI_ASSIGN_OR_RETURN(s.table, Data::Make(DType::kI32, {1, blocks}));
    for (int64_t r = 0; r < rows; ++r)
      s.positions.ints()[r] = static_cast<int32_t>(context - rows + r);
    s.start.ints()[1] = static_cast<int32_t>(rows);
    for (int64_t b = 0; b < blocks; ++b) s.table.ints()[b] = static_cast<int32_t>(b);
    // Two window pages of kWindow positions hold the window before up to kWindow rows.
    DI_ASSIGN_OR_RETURN(s.pages, Data::Make(DType::kI32, {1, 2}));
    DI_ASSIGN_OR_RETURN(s.first_page, Data::Make(DType::kI32, {1}));
    DI_ASSIGN_OR_RETURN(s.window_begin, Data::Make(DType::kI32, {1}));
    s.pages.ints()[1] = 1;
    s.first_page.ints()[0] = static_cast<int32_t>(context / kWindow - 2);
    s.layout = {s.positions.view(),  s.row_sequence.view(), s.start.view(),
                s.slot.view(),       s.table.view(),        s.pages.view(),
                s.first_page.view(), s.window_begin.view()};
    return s;
  }
};

}  // namespace

Status BenchSparseAttention(OpsBench& bench) {
  // Enough entries that a selection of 512 is cold in the nearer caches; each call uses another
  // selection.
  constexpr int64_t kContext = 32768;
  constexpr int64_t kSelections = 16;
  for (int64_t rows : {1, 64}) {
    for (bool window_only : {false, true}) {
      const int64_t keys = kWindow + (window_only ? 0 : kTopK);
      const std::string name = fmt::format("{} rows x {} keys", rows, keys);
      if (!bench.Wants("sparse_attention", name)) continue;
      DI_ASSIGN_OR_RETURN(const OneSequence sequence, OneSequence::Make(rows, kContext));
      DI_ASSIGN_OR_RETURN(const Data q, Data::Make(DType::kBf16, {rows, kHeads, kHeadDim}, 3.0f));
      DI_ASSIGN_OR_RETURN(const Data window,
                          Data::Make(DType::kU8, {rows, Q8RecordBytes(kHeadDim)}));
      DI_ASSIGN_OR_RETURN(const Data pages,
                          Data::Make(DType::kU8, {2, kWindow, Q8RecordBytes(kHeadDim)}));
      DI_ASSIGN_OR_RETURN(const Data blocks,
                          Data::Make(DType::kU8, {kContext / kEntriesPerBlock, kEntriesPerBlock,
                                                  Q4ERecordBytes(kHeadDim)}));
      DI_ASSIGN_OR_RETURN(const Data selected,
                          Data::Make(DType::kI32, {kSelections * rows, kTopK}));
      DI_ASSIGN_OR_RETURN(const Data sink, Data::Make(DType::kF32, {kHeads}));
      DI_ASSIGN_OR_RETURN(const Data table, Data::Make(DType::kF32, {rows, kPairs, 2}));
      DI_ASSIGN_OR_RETURN(const Data out, Data::Make(DType::kBf16, {rows, kHeads * kHeadDim}));
      FillRecords(window, Q8RecordBytes(kHeadDim), kHeadDim / 32, 118, 0xbf);
      FillRecords(pages, Q8RecordBytes(kHeadDim), kHeadDim / 32, 118, 0xbf);
      FillRecords(blocks, Q4ERecordBytes(kHeadDim), kHeadDim / 16, 0x30, 0xff);
      Random random;
      for (int64_t i = 0; i < kSelections * rows * kTopK; ++i) {
        // One of every 62 entries: ascending, spread over the context.
        selected.ints()[i] =
            static_cast<int32_t>(i % kTopK * 62 + static_cast<int64_t>(random.Next() % 62));
      }
      SparseAttentionArgs args;
      args.q = q.view();
      args.window_records = window.view();
      args.window_pages = pages.view();
      args.window = kWindow;
      args.layout = sequence.layout;
      args.sink = sink.view();
      args.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
      args.table = table.view();
      args.out = out.view();
      if (!window_only) args.kv_blocks = blocks.view();
      OpsBenchCase bench_case;
      bench_case.op = "sparse_attention";
      bench_case.name = name;
      // Records, queries in, outputs out.
      bench_case.bytes = static_cast<double>(rows * (kWindow * Q8RecordBytes(kHeadDim) +
                                                     (keys - kWindow) * Q4ERecordBytes(kHeadDim) +
                                                     4 * kHeads * kHeadDim));
      bench_case.flops = 4.0 * static_cast<double>(rows * kHeads * keys * kHeadDim);
      int64_t turn = 0;
      bench_case.run = [&] {
        if (!window_only) args.selected = selected.view().Rows(turn * rows, (turn + 1) * rows);
        turn = (turn + 1) % kSelections;
        return SparseAttention(args, bench.stream());
      };
      DI_RETURN_IF_ERROR(bench.Measure(bench_case));
    }
  }
  return {};
}

Status BenchIndexer(OpsBench& bench) {
  const int64_t record_bytes = Q4PRecordBytes(kIndexDim);
  for (int64_t context : {4096, 32768, 131072}) {
    for (int64_t rows : {1, 16}) {
      const std::string name = fmt::format("{} rows x {} entries", rows, context);
      if (!bench.Wants("indexer", name)) continue;
      DI_ASSIGN_OR_RETURN(const OneSequence sequence, OneSequence::Make(rows, context));
      DI_ASSIGN_OR_RETURN(const Data q, Data::Make(DType::kBf16, {rows, kIndexHeads, kIndexDim}));
      DI_ASSIGN_OR_RETURN(const Data weights, Data::Make(DType::kBf16, {rows, kIndexHeads}));
      DI_ASSIGN_OR_RETURN(const Data selected, Data::Make(DType::kI32, {rows, kTopK}));
      std::vector<Data> copies;
      const int64_t wanted = OpsBench::CopiesForColdData(context * record_bytes);
      for (int64_t i = 0; i < wanted; ++i) {
        DI_ASSIGN_OR_RETURN(Data blocks, Data::Make(DType::kU8, {context / kEntriesPerBlock,
                                                                 kEntriesPerBlock, record_bytes}));
        FillRecords(blocks, record_bytes, kIndexDim / 32, 120, 0xff);
        copies.push_back(std::move(blocks));
      }
      std::vector<uint8_t> record(static_cast<size_t>(record_bytes));
      std::vector<float> x(kIndexDim);
      for (int64_t i = 0; i < rows * kIndexHeads; ++i) {
        Bf16* head = q.view().Row<Bf16>(0) + i * kIndexDim;
        for (int64_t d = 0; d < kIndexDim; ++d) x[static_cast<size_t>(d)] = Bf16ToF32(head[d]);
        EncodeQ4PRecord(x.data(), kIndexDim, record.data());
        DecodeQ4PRecord(record.data(), kIndexDim, x.data());
        for (int64_t d = 0; d < kIndexDim; ++d) head[d] = F32ToBf16(x[static_cast<size_t>(d)]);
      }
      IndexerArgs args;
      args.q = q.view();
      args.weights = weights.view();
      args.layout = sequence.layout;
      args.selected = selected.view();
      OpsBenchCase bench_case;
      bench_case.op = "indexer";
      bench_case.name = name;
      bench_case.bytes = static_cast<double>(context * record_bytes);
      bench_case.flops = 2.0 * static_cast<double>(rows * context * kIndexHeads * kIndexDim);
      size_t turn = 0;
      bench_case.run = [&] {
        args.blocks = copies[turn].view();
        turn = (turn + 1) % copies.size();
        return Indexer(args, bench.stream());
      };
      DI_RETURN_IF_ERROR(bench.Measure(bench_case));
    }
  }
  return {};
}

Status BenchHyperConnection(OpsBench& bench) {
  for (int64_t rows : {1, 64}) {
    const double row_bytes = 2.0 * static_cast<double>(rows * kHidden);
    const std::string name = fmt::format("{} rows", rows);
    if (!bench.Wants("hc_mix", name) && !bench.Wants("hc_collapse_norm", name) &&
        !bench.Wants("hc_expand", name))
      continue;
    DI_ASSIGN_OR_RETURN(const Data base, Data::Make(DType::kF32, {kHcCoefficients}));
    DI_ASSIGN_OR_RETURN(const Data scale, Data::Make(DType::kF32, {3}));
    DI_ASSIGN_OR_RETURN(const Data pre, Data::Make(DType::kF32, {rows, 4}));
    DI_ASSIGN_OR_RETURN(const Data post, Data::Make(DType::kF32, {rows, 4}));
    DI_ASSIGN_OR_RETURN(const Data comb, Data::Make(DType::kF32, {rows, 16}, 0.25f));
    DI_ASSIGN_OR_RETURN(const Data weight, Data::Make(DType::kBf16, {kHidden}));
    DI_ASSIGN_OR_RETURN(const Data x, Data::Make(DType::kBf16, {rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data y, Data::Make(DType::kBf16, {rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data grid, Data::Make(DType::kBf16, {rows, kHidden}));
    // fn belongs to one of 80 places of the model and is cold; the streams of a step are what the
    // previous operation left.
    std::vector<Data> fn;
    const int64_t wanted = OpsBench::CopiesForColdData(4 * kHcCoefficients * 4 * kHidden);
    for (int64_t i = 0; i < wanted; ++i) {
      DI_ASSIGN_OR_RETURN(Data copy,
                          Data::Make(DType::kF32, {kHcCoefficients, 4 * kHidden}, 0.01f));
      fn.push_back(std::move(copy));
    }
    DI_ASSIGN_OR_RETURN(const Data streams, Data::Make(DType::kBf16, {rows, 4, kHidden}));
    if (bench.Wants("hc_mix", name)) {
      HcMixArgs args;
      args.streams = streams.view();
      args.base = base.view();
      args.scale = scale.view();
      args.pre = pre.view();
      args.post = post.view();
      args.comb = comb.view();
      OpsBenchCase bench_case;
      bench_case.op = "hc_mix";
      bench_case.name = name;
      bench_case.bytes = 4.0 * kHcCoefficients * 4 * kHidden + 4 * row_bytes;
      bench_case.flops = 2.0 * kHcCoefficients * 4 * static_cast<double>(rows * kHidden);
      size_t turn = 0;
      bench_case.run = [&] {
        args.fn = fn[turn].view();
        turn = (turn + 1) % fn.size();
        return HcMix(args, bench.stream());
      };
      DI_RETURN_IF_ERROR(bench.Measure(bench_case));
    }
    if (bench.Wants("hc_collapse_norm", name)) {
      HcCollapseNormArgs args;
      args.streams = streams.view();
      args.pre = pre.view();
      args.weight = weight.view();
      args.y = y.view();
      args.y_grid = grid.view();
      OpsBenchCase bench_case;
      bench_case.op = "hc_collapse_norm";
      bench_case.name = name;
      bench_case.bytes = 6 * row_bytes;
      bench_case.flops = 8.0 * static_cast<double>(rows * kHidden);
      bench_case.run = [&] { return HcCollapseNorm(args, bench.stream()); };
      DI_RETURN_IF_ERROR(bench.Measure(bench_case));
    }
    if (bench.Wants("hc_expand", name)) {
      HcExpandArgs args;
      args.x = x.view();
      args.post = post.view();
      args.comb = comb.view();
      args.streams = streams.view();
      OpsBenchCase bench_case;
      bench_case.op = "hc_expand";
      bench_case.name = name;
      bench_case.bytes = 9 * row_bytes;
      bench_case.flops = 36.0 * static_cast<double>(rows * kHidden);
      bench_case.run = [&] { return HcExpand(args, bench.stream()); };
      DI_RETURN_IF_ERROR(bench.Measure(bench_case));
    }
  }
  return {};
}

Status BenchRowOps(OpsBench& bench) {
  for (int64_t rows : {1, 64}) {
    DI_ASSIGN_OR_RETURN(const Data x, Data::Make(DType::kBf16, {rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data y, Data::Make(DType::kBf16, {rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data grid, Data::Make(DType::kBf16, {rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data weight, Data::Make(DType::kBf16, {kHidden}));
    DI_ASSIGN_OR_RETURN(const Data heads, Data::Make(DType::kBf16, {rows, kHeads, kHeadDim}));
    DI_ASSIGN_OR_RETURN(const Data table, Data::Make(DType::kF32, {rows, kPairs, 2}));
    const int64_t expert_rows = rows * kExpertsPerToken;
    DI_ASSIGN_OR_RETURN(const Data gate, Data::Make(DType::kBf16, {expert_rows, kIntermediate}));
    DI_ASSIGN_OR_RETURN(const Data up, Data::Make(DType::kBf16, {expert_rows, kIntermediate}));
    DI_ASSIGN_OR_RETURN(const Data act, Data::Make(DType::kBf16, {expert_rows, kIntermediate}));
    DI_ASSIGN_OR_RETURN(const Data routed, Data::Make(DType::kBf16, {expert_rows, kHidden}));
    DI_ASSIGN_OR_RETURN(const Data position, Data::Make(DType::kI32, {rows, kExpertsPerToken}));
    for (int64_t i = 0; i < expert_rows; ++i)
      position.ints()[i] = static_cast<int32_t>(expert_rows - 1 - i);
    Stream& stream = bench.stream();
    const auto measure = [&](const char* op, double elements_moved,
                             std::function<Status()> run) -> Status {
      OpsBenchCase bench_case;
      bench_case.op = op;
      bench_case.name = fmt::format("{} rows", rows);
      bench_case.bytes = 2.0 * elements_moved * static_cast<double>(rows);
      bench_case.run = std::move(run);
      if (!bench.Wants(bench_case.op, bench_case.name)) return {};
      return bench.Measure(bench_case);
    };
    DI_RETURN_IF_ERROR(measure("rms_norm", 3 * kHidden, [&] {
      return RmsNorm({x.view(), weight.view(), y.view(), grid.view()}, stream);
    }));
    DI_RETURN_IF_ERROR(measure("quantize_fp8", 2 * kHidden, [&] {
      return QuantizeFp8({x.view(), y.view()}, stream);
    }));
    DI_RETURN_IF_ERROR(measure("rope", kHeads * 4 * kPairs, [&] {
      return Rope({heads.view(), table.view()}, stream);
    }));
    DI_RETURN_IF_ERROR(measure("swiglu", 3 * kExpertsPerToken * kIntermediate, [&] {
      return Swiglu({gate.view(), up.view(), {}, 10.0f, act.view()}, stream);
    }));
    DI_RETURN_IF_ERROR(measure("moe_combine", (kExpertsPerToken + 2) * kHidden, [&] {
      return MoeCombine({routed.view(), position.view(), position.view(), x.view(), y.view()},
                        stream);
    }));
  }
  return {};
}

}  // namespace deepinfer
