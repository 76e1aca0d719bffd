// The CUDA kernel of ops/gated_linear against the linears and the activation one after the other.
#include "ops/gated_linear/gated_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ops/cuda/cuda_test_util.h"
#include "ops/linear/linear_test_util.h"
#include "ops/moe/moe.h"
#include "ops/quantize/group_quantize.h"

namespace deepinfer::testing {
namespace {

struct GatedCase {
  WeightFormat format;
  int64_t intermediate;
  int64_t k;
  bool gathered;
  bool weighted;
  std::vector<int32_t> offsets;  // empty: one group without offsets
  int64_t rows;
};

const GatedCase kCases[] = {
    {WeightFormat::kFp4Group, 96, 288, true, true, {0, 0, 1, 1, 4, 13, 13, 40}, 40},
    {WeightFormat::kFp4Group, 160, 32, true, true, {0, 1, 3}, 3},
    {WeightFormat::kFp8Block, 64, 320, false, false, {}, 1},
    {WeightFormat::kFp8Block, 96, 1312, false, false, {}, 20},
    {WeightFormat::kFp8Block, 32, 64, true, false, {}, 3},
    {WeightFormat::kBf16, 32, 48, false, true, {0, 2, 2, 5}, 5},
};

class GatedLinearCudaTest : public CudaTest {
 protected:
  // Everything that a call needs, on the device and on the host.
  struct Setup {
    std::vector<StoredWeight> stored;
    std::vector<LinearWeight> gate, up, host_gate, host_up;
    std::vector<const LinearWeight*> gate_pointers, up_pointers, host_gate_pointers,
        host_up_pointers;
    OwnedTensor x, row_index, offsets, row_weight;
    DeviceTensor device_x, device_row_index, device_offsets, device_row_weight;
    GatedLinearArgs args, host_args;  // without out
  };

  static std::vector<const LinearWeight*> Pointers(const std::vector<LinearWeight>& weights) {
    std::vector<const LinearWeight*> pointers;
    for (const LinearWeight& weight : weights) pointers.push_back(&weight);
    return pointers;
  }

  std::unique_ptr<Setup> Make(const GatedCase& c, Numerics numerics) {
    auto setup = std::make_unique<Setup>();
    const int64_t groups = c.offsets.empty() ? 1 : std::ssize(c.offsets) - 1;
    std::vector<LinearSource> gate, up;
    for (int64_t g = 0; g < groups; ++g) {
      for (std::vector<LinearSource>* side : {&gate, &up}) {
        setup->stored.push_back(RandomWeight(
            c.format, c.intermediate, c.k, static_cast<uint32_t>(setup->stored.size()), 115, 121));
        side->push_back(setup->stored.back().source);
      }
    }
    setup->gate = PackLinearStack(gate, stream()).value();
    setup->up = PackLinearStack(up, stream()).value();
    setup->host_gate = PackLinearStack(gate, cpu_stream()).value();
    setup->host_up = PackLinearStack(up, cpu_stream()).value();
    setup->gate_pointers = Pointers(setup->gate);
    setup->up_pointers = Pointers(setup->up);
    setup->host_gate_pointers = Pointers(setup->host_gate);
    setup->host_up_pointers = Pointers(setup->host_up);

    const int64_t x_rows = c.gathered ? c.rows + 2 : c.rows;
    setup->x = NormalTensor(DType::kBf16, {x_rows, c.k}, 1);
    setup->device_x = DeviceTensor(setup->x.view(), stream());
    GatedLinearArgs args{.x = {},
                         .row_index = {},
                         .group_offsets = {},
                         .gate_weights = {},
                         .up_weights = {},
                         .row_weight = {},
                         .limit = 10.0f,
                         .out = {},
                         .numerics = numerics};
    setup->args = setup->host_args = args;
    setup->args.x = setup->device_x.view();
    setup->host_args.x = setup->x.view();
    setup->args.gate_weights = setup->gate_pointers;
    setup->args.up_weights = setup->up_pointers;
    setup->host_args.gate_weights = setup->host_gate_pointers;
    setup->host_args.up_weights = setup->host_up_pointers;
    if (c.gathered) {
      setup->row_index = OwnedTensor(DType::kI32, {c.rows});
      Random random(2);
      for (int64_t r = 0; r < c.rows; ++r)
        setup->row_index.Row<int32_t>(0)[r] = static_cast<int32_t>(random.Below(x_rows));
      setup->device_row_index = DeviceTensor(setup->row_index.view(), stream());
      setup->args.row_index = setup->device_row_index.view();
      setup->host_args.row_index = setup->row_index.view();
    }
    if (!c.offsets.empty()) {
      setup->offsets = OwnedTensor(DType::kI32, {groups + 1});
      std::copy(c.offsets.begin(), c.offsets.end(), setup->offsets.Row<int32_t>(0));
      setup->device_offsets = DeviceTensor(setup->offsets.view(), stream());
      setup->args.group_offsets = setup->device_offsets.view();
      setup->host_args.group_offsets = setup->offsets.view();
    }
    if (c.weighted) {
      setup->row_weight = NormalTensor(DType::kF32, {c.rows}, 3);
      setup->device_row_weight = DeviceTensor(setup->row_weight.view(), stream());
      setup->args.row_weight = setup->device_row_weight.view();
      setup->host_args.row_weight = setup->row_weight.view();
    }
    return setup;
  }

  OwnedTensor Run(GatedLinearArgs args, int64_t rows, int64_t intermediate) {
    const DeviceTensor out(DType::kBf16, {rows, intermediate}, stream());
    args.out = out.view();
    const Status status = GatedLinear(args, stream());
    EXPECT_TRUE(status.has_value()) << status.error().message;
    return out.Download(stream());
  }
};

// Values are compared by groups of 32, because a value next to a tie moves by a step of the grid,
// and a maximum next to a power of two moves the grid of its whole group.
void ExpectSameGrid(const TensorView& got, const TensorView& want, const std::string& what) {
  ASSERT_EQ(got.num_elements(), want.num_elements());
  EXPECT_LT(RelativeError(got, want), 0.02) << what;
  int64_t different = 0;
  for (int64_t i = 0; i < want.num_elements(); ++i) different += Value(got, i) != Value(want, i);
  EXPECT_LE(different, want.num_elements() / 20 + 2) << what;
  // On the grid: quantising again changes nothing.
  for (int64_t row = 0; row < got.rows(); ++row) {
    std::vector<float> values(static_cast<size_t>(got.dim(1)));
    for (int64_t i = 0; i < got.dim(1); ++i)
      values[static_cast<size_t>(i)] = Bf16ToF32(got.Row<Bf16>(row)[i]);
    std::vector<float> again = values;
    Q8InPlace(again.data(), got.dim(1));
    EXPECT_EQ(values, again) << what << " row " << row;
  }
}

TEST_F(GatedLinearCudaTest, ResultsAreThoseOfTheCpu) {
  for (const Numerics numerics : {Numerics::kProduction, Numerics::kReference}) {
    for (const GatedCase& c : kCases) {
      const auto setup = Make(c, numerics);
      const OwnedTensor got = Run(setup->args, c.rows, c.intermediate);
      const OwnedTensor want(DType::kBf16, {c.rows, c.intermediate});
      setup->host_args.out = want.view();
      ASSERT_TRUE(GatedLinear(setup->host_args, cpu_stream()).has_value());
      ExpectSameGrid(got.view(), want.view(),
                     fmt::format("format {} intermediate {} k {} rows {}",
                                 static_cast<int>(c.format), c.intermediate, c.k, c.rows));
    }
  }
}

TEST_F(GatedLinearCudaTest, ARowHasTheBitsThatItHasAlone) {
  for (const GatedCase& c : kCases) {
    const auto setup = Make(c, Numerics::kProduction);
    const OwnedTensor all = Run(setup->args, c.rows, c.intermediate);
    for (int64_t r = 0; r < c.rows; r += 1 + r / 8) {
      int64_t group = 0;
      while (!c.offsets.empty() && c.offsets[static_cast<size_t>(group) + 1] <= r) ++group;
      GatedLinearArgs args = setup->args;
      const int64_t x_row = c.gathered ? setup->row_index.Row<int32_t>(0)[r] : r;
      args.x = setup->device_x.view().Rows(x_row, x_row + 1);
      args.row_index = {};
      args.group_offsets = {};
      args.gate_weights = args.gate_weights.subspan(static_cast<size_t>(group), 1);
      args.up_weights = args.up_weights.subspan(static_cast<size_t>(group), 1);
      if (c.weighted) args.row_weight = setup->device_row_weight.view().Rows(r, r + 1);
      const OwnedTensor alone = Run(args, 1, c.intermediate);
      EXPECT_EQ(CountDifferentBits(all.view().Rows(r, r + 1), alone.view()), 0)
          << "row " << r << " k " << c.k;
    }
  }
}

TEST_F(GatedLinearCudaTest, GateAndUpAreThoseOfTheLinears) {
  // The same product by two linears, then the activation on the host from their bf16 results.
  for (const GatedCase& c : kCases) {
    if (!c.offsets.empty() || c.gathered) continue;
    const auto setup = Make(c, Numerics::kProduction);
    const OwnedTensor got = Run(setup->args, c.rows, c.intermediate);
    OwnedTensor sides[2];
    for (int side = 0; side < 2; ++side) {
      const DeviceTensor y(DType::kBf16, {c.rows, c.intermediate}, stream());
      ASSERT_TRUE(Linear({.x = setup->args.x,
                          .weight = side == 0 ? setup->gate_pointers[0] : setup->up_pointers[0],
                          .y = y.view()},
                         stream())
                      .has_value());
      sides[side] = y.Download(stream());
    }
    const OwnedTensor want(DType::kBf16, {c.rows, c.intermediate});
    cpu_stream().set_use_reference(true);
    ASSERT_TRUE(Swiglu({.gate = sides[0].view(),
                        .up = sides[1].view(),
                        .row_weight = {},
                        .limit = 10.0f,
                        .out = want.view(),
                        .numerics = Numerics::kProduction},
                       cpu_stream())
                    .has_value());
    int64_t different = 0;
    for (int64_t i = 0; i < want.view().num_elements(); ++i)
      different += Value(got.view(), i) != Value(want.view(), i);
    // The exponentials differ in their last bits, which shows next to ties of the grid only.
    EXPECT_LE(different, want.view().num_elements() / 200 + 1) << "k " << c.k;
  }
}

}  // namespace
}  // namespace deepinfer::testing
