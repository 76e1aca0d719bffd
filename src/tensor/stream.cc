#include "tensor/stream.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "tensor/cuda_device.h"

namespace deepinfer {
namespace {

constexpr int64_t kAlignment = 256;  // what a GPU's allocations have
constexpr int64_t kMinChunkBytes = int64_t{8} << 20;

}  // namespace

Result<std::unique_ptr<Stream>> Stream::Create(int num_threads) {
  DI_ASSIGN_OR_RETURN(std::unique_ptr<ThreadPool> pool, ThreadPool::Create(num_threads));
  return std::unique_ptr<Stream>(new Stream(std::move(pool)));
}

Result<std::unique_ptr<Stream>> Stream::CreateCuda(int device_index, int num_threads) {
  DI_ASSIGN_OR_RETURN(const int count, cuda::DeviceCount());
  if (device_index < 0 || device_index >= count) {
    return Fail(Code::kInvalidArgument,
                fmt::format("There is no CUDA device {}; this machine has {}.", device_index,
                            count == 1 ? "one, number 0" : fmt::format("0 to {}", count - 1)),
                "device");
  }
  DI_ASSIGN_OR_RETURN(const cuda::DeviceProperties properties,
                      cuda::GetDeviceProperties(device_index));
  if (properties.compute_major < 9) {
    return Fail(Code::kUnsupported,
                fmt::format("CUDA device {} is a {} of compute capability {}.{}; kernels exist for "
                            "9.0 (Hopper) and 10.0 (Blackwell).",
                            device_index, properties.name, properties.compute_major,
                            properties.compute_minor),
                "device");
  }
  DI_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, Create(num_threads));
  stream->device_ = {DeviceKind::kCuda, device_index};
  stream->sm_count_ = properties.sm_count;
  stream->compute_major_ = properties.compute_major;
  DI_ASSIGN_OR_RETURN(stream->cuda_stream_, cuda::CreateStream(device_index));
  constexpr int64_t kCounterBytes = kArrivalCounters * static_cast<int64_t>(sizeof(int32_t));
  DI_ASSIGN_OR_RETURN(stream->arrival_counters_, Buffer::Allocate(stream->device_, kCounterBytes));
  DI_RETURN_IF_ERROR(
      cuda::FillBytes(stream->arrival_counters_.data(), 0, kCounterBytes, stream->cuda_stream_));
  return stream;
}

Stream::~Stream() {
  if (cuda_stream_ != nullptr) cuda::DestroyStream(device_.index, cuda_stream_);
}

Status Stream::Synchronize() {
  if (cuda_stream_ == nullptr) return {};
  return cuda::Synchronize(cuda_stream_);
}

Stream::Stream(int num_threads) : Stream(std::make_unique<ThreadPool>(num_threads)) {}

Stream::Stream(std::unique_ptr<ThreadPool> pool)
    : pool_(std::move(pool)), cpu_level_(HostCpuFeatures().best_level()) {}

void Stream::set_cpu_level(CpuLevel level) {
  cpu_level_ = std::min(level, HostCpuFeatures().best_level());
}

int64_t RoundUpScratch(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

Status Stream::ReserveScratch(int64_t bytes) {
  DI_CHECK_EQ(scratch_bytes_, 0);
  auto chunk = std::make_unique<Chunk>();
  DI_ASSIGN_OR_RETURN(chunk->buffer, Buffer::Allocate(device(), RoundUpScratch(bytes)));
  chunks_.clear();
  chunks_.push_back(std::move(chunk));
  current_chunk_ = 0;
  return {};
}

int64_t Stream::held_scratch_bytes() const {
  int64_t bytes = 0;
  for (const auto& chunk : chunks_) bytes += chunk->buffer.bytes();
  return bytes;
}

ScratchScope::ScratchScope(Stream& stream)
    : stream_(stream),
      saved_chunk_(stream.current_chunk_),
      saved_used_(stream.chunks_.empty() ? 0 : stream.chunks_[stream.current_chunk_]->used),
      saved_bytes_(stream.scratch_bytes_) {}

ScratchScope::~ScratchScope() {
  stream_.scratch_bytes_ = saved_bytes_;
  if (stream_.chunks_.empty()) return;
  for (size_t i = saved_chunk_ + 1; i < stream_.chunks_.size(); ++i) stream_.chunks_[i]->used = 0;
  stream_.chunks_[saved_chunk_]->used = saved_used_;
  stream_.current_chunk_ = saved_chunk_;
}

void* ScratchScope::AllocateBytes(int64_t bytes) {
  const int64_t rounded = RoundUpScratch(bytes);
  stream_.scratch_bytes_ += rounded;
  stream_.peak_scratch_bytes_ = std::max(stream_.peak_scratch_bytes_, stream_.scratch_bytes_);
  auto& chunks = stream_.chunks_;
  for (size_t i = stream_.current_chunk_; i < chunks.size(); ++i) {
    if (chunks[i]->buffer.bytes() - chunks[i]->used >= rounded) {
      stream_.current_chunk_ = i;
      char* pointer = static_cast<char*>(chunks[i]->buffer.data()) + chunks[i]->used;
      chunks[i]->used += rounded;
      return pointer;
    }
  }
  auto chunk = std::make_unique<Stream::Chunk>();
  Result<Buffer> buffer = Buffer::Allocate(stream_.device(), std::max(rounded, kMinChunkBytes));
  DI_CHECK(
      buffer
          .has_value());  // step buffers are sized by the plan; running out here is a planning bug
  chunk->buffer = std::move(*buffer);
  chunk->used = rounded;
  chunks.push_back(std::move(chunk));
  stream_.current_chunk_ = chunks.size() - 1;
  return chunks.back()->buffer.data();
}

TensorView ScratchScope::Tensor(DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view(static_cast<void*>(nullptr), dtype, shape, stream_.device());
  void* data = AllocateBytes(view.num_elements() * DTypeBytes(dtype));
  return TensorView(data, dtype, shape, stream_.device());
}

}  // namespace deepinfer
