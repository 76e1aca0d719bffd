// The execution context that every operation takes: where it runs, on which threads, with which
// kernels, and scratch memory that lives until the operation ends. One stream is used by one thread
// at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/cpu_features.h"
#include "base/thread_pool.h"
#include "tensor/buffer.h"

namespace deepinfer {

// What an allocation of scratch takes: aligned, and never nothing.
int64_t RoundUpScratch(int64_t bytes);

class Stream {
 public:
  // A CPU stream with its own thread pool; scratch is allocated on demand. Errors: those of
  // ThreadPool::Create.
  static Result<std::unique_ptr<Stream>> Create(int num_threads);
  // Like Create, for callers to whom a refused thread is a bug.
  explicit Stream(int num_threads);
  // A stream of a CUDA device; the pool is for work on the host between operations. Operations
  // return when their kernels are in the stream; Synchronize waits for them. Errors: those of
  // Create and of tensor/cuda_device.h.
  static Result<std::unique_ptr<Stream>> CreateCuda(int device_index, int num_threads);
  ~Stream();

  Device device() const {
    return device_;
  }
  // The runtime's stream; null on a CPU.
  void* cuda_stream() const {
    return cuda_stream_;
  }
  // Multiprocessors of the device; 0 on a CPU.
  int sm_count() const {
    return sm_count_;
  }
  // Counters on the device that are zero whenever no kernel of the stream runs: a kernel that
  // counts arrivals leaves them as it found them. Null on a CPU.
  static constexpr int64_t kArrivalCounters = 16384;
  int32_t* arrival_counters() {
    return static_cast<int32_t*>(arrival_counters_.data());
  }
  // 9 for Hopper, 10 for Blackwell; 0 on a CPU.
  int compute_major() const {
    return compute_major_;
  }
  // Waits for everything in the stream and reports what failed there. Nothing to wait for on a CPU.
  Status Synchronize();
  ThreadPool& pool() {
    return *pool_;
  }

  // Highest instruction-set level that kernels may use; at most what the host has. Lower it to test
  // the others.
  CpuLevel cpu_level() const {
    return cpu_level_;
  }
  void set_cpu_level(CpuLevel level);

  // True: run the plain scalar reference of every operation that has one, instead of the tuned
  // implementation.
  bool use_reference() const {
    return use_reference_;
  }
  void set_use_reference(bool value) {
    use_reference_ = value;
  }

  // Makes that much scratch memory ready in one piece, so that steps which need no more allocate
  // nothing. Outside of all scopes only. Errors: kResourceExhausted.
  Status ReserveScratch(int64_t bytes);
  // The most that was in use at a time.
  int64_t peak_scratch_bytes() const {
    return peak_scratch_bytes_;
  }
  // What the stream holds.
  int64_t held_scratch_bytes() const;

 private:
  friend class ScratchScope;
  explicit Stream(std::unique_ptr<ThreadPool> pool);

  struct Chunk {
    Buffer buffer;
    int64_t used = 0;
  };

  Device device_;
  void* cuda_stream_ = nullptr;
  int sm_count_ = 0;
  int compute_major_ = 0;
  Buffer arrival_counters_;
  std::unique_ptr<ThreadPool> pool_;
  CpuLevel cpu_level_;
  bool use_reference_ = false;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  size_t current_chunk_ = 0;
  int64_t scratch_bytes_ = 0;  // in use
  int64_t peak_scratch_bytes_ = 0;
};

// Scratch memory of a stream: bump allocation, returned when the scope ends. Scopes nest. Memory is
// uninitialised and 256-byte aligned; pointers stay valid until the scope ends. Not for use inside
// parallel loops: allocate before them.
class ScratchScope {
 public:
  explicit ScratchScope(Stream& stream);
  ~ScratchScope();
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

  void* AllocateBytes(int64_t bytes);
  template <class T>
  T* Allocate(int64_t count) {
    return static_cast<T*>(AllocateBytes(count * static_cast<int64_t>(sizeof(T))));
  }
  TensorView Tensor(DType dtype, std::initializer_list<int64_t> shape);

 private:
  Stream& stream_;
  size_t saved_chunk_;
  int64_t saved_used_;
  int64_t saved_bytes_;
};

}  // namespace deepinfer
