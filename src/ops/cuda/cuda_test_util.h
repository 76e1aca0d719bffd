// Helpers of the CUDA operations' tests: a stream of device 0, copies of tensors there and back,
// and comparison with a CPU result.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "ops/batch_layout.h"
#include "ops/op_test_util.h"
#include "tensor/copy.h"
#include "tensor/cuda_device.h"
#include "tensor/stream.h"

namespace deepinfer::testing {

// Whether kernels run on a GPU, or on the CPU in the emulated build.
inline bool OnRealDevice() {
  const auto properties = cuda::GetDeviceProperties(0);
  return properties.has_value() && properties->name != "emulated device";
}

// The first line of cases that are too large for the emulation. A macro, because skipping returns
// from the function that it is written in.
#define DI_DEVICE_ONLY() \
  if (!::deepinfer::testing::OnRealDevice()) GTEST_SKIP() << "This case runs on a GPU only."

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto stream = Stream::CreateCuda(0, 1);
    if (!stream.has_value()) GTEST_SKIP() << stream.error().message;
    stream_ = std::move(*stream);
  }
  Stream& stream() {
    return *stream_;
  }
  Stream& cpu_stream() {
    return cpu_stream_;
  }

 private:
  std::unique_ptr<Stream> stream_;
  Stream cpu_stream_{1};
};

// A device tensor. New ones hold NaN bytes (0xff), so that elements that were not written show.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(DType dtype, std::initializer_list<int64_t> shape, Stream& stream) {
    const TensorView extent(static_cast<void*>(nullptr), dtype, shape);
    bytes_ = extent.num_elements() * DTypeBytes(dtype);
    buffer_ = Buffer::Allocate(stream.device(), std::max<int64_t>(1, bytes_)).value();
    view_ = buffer_.View(dtype, shape);
    EXPECT_TRUE(cuda::FillBytes(buffer_.data(), 0xff, bytes_, stream.cuda_stream()).has_value());
    EXPECT_TRUE(stream.Synchronize().has_value());
  }
  // A copy of a contiguous host tensor.
  DeviceTensor(const TensorView& host, Stream& stream) {
    bytes_ = host.num_elements() * DTypeBytes(host.dtype());
    buffer_ = Buffer::Allocate(stream.device(), std::max<int64_t>(1, bytes_)).value();
    switch (host.rank()) {
      case 1:
        view_ = buffer_.View(host.dtype(), {host.dim(0)});
        break;
      case 2:
        view_ = buffer_.View(host.dtype(), {host.dim(0), host.dim(1)});
        break;
      case 3:
        view_ = buffer_.View(host.dtype(), {host.dim(0), host.dim(1), host.dim(2)});
        break;
      default:
        view_ = buffer_.View(host.dtype(), {host.dim(0), host.dim(1), host.dim(2), host.dim(3)});
    }
    EXPECT_TRUE(CopyToDevice(host.data(), view_, stream).has_value());
    EXPECT_TRUE(stream.Synchronize().has_value());
  }
  const TensorView& view() const {
    return view_;
  }
  // The contents as a host tensor of the same dtype and shape.
  OwnedTensor Download(Stream& stream) const {
    OwnedTensor host;
    switch (view_.rank()) {
      case 1:
        host = OwnedTensor(view_.dtype(), {view_.dim(0)});
        break;
      case 2:
        host = OwnedTensor(view_.dtype(), {view_.dim(0), view_.dim(1)});
        break;
      case 3:
        host = OwnedTensor(view_.dtype(), {view_.dim(0), view_.dim(1), view_.dim(2)});
        break;
      default:
        host = OwnedTensor(view_.dtype(), {view_.dim(0), view_.dim(1), view_.dim(2), view_.dim(3)});
    }
    const Status copied = CopyToHost(view_, host.view().data(), stream);
    EXPECT_TRUE(copied.has_value()) << copied.error().message;
    return host;
  }

 private:
  Buffer buffer_;
  TensorView view_;
  int64_t bytes_ = 0;
};

// ||a - b|| / ||b|| over bf16 or f32 elements; NaN if there is one.
inline double RelativeError(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(a.num_elements(), b.num_elements());
  double difference = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < b.num_elements(); ++i) {
    const double x = Value(a, i);
    const double y = Value(b, i);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1.0));
}

}  // namespace deepinfer::testing
