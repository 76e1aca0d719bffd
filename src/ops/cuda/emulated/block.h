// The state of blocks and fibers, shared by the files of the emulation that schedule them
// (fibers.cc) and make them wait (waiting.cc).
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "ops/cuda/emulated/fibers.h"
#include "ops/cuda/emulated/language.h"
#include "ops/cuda/emulated/matrix.h"

namespace deepinfer::cuda::emulated {

constexpr int kMaxThreads = 1024;
constexpr int kMaxSharedBytes = 227 * 1024;  // what a block can have on Hopper
constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = 256 * 1024;  // address space; memory is taken where it is used
constexpr int kMaxTogether = 64;            // blocks of a cooperative launch

struct Block;

struct PendingCopy {
  void* shared;
  const void* global;  // null: zeros
  uint32_t group;
};

struct Fiber {
  Block* block = nullptr;
  void* stack_pointer = nullptr;
  uint3 thread_index = {};
  int number = 0;
  const char* waits_for = nullptr;  // null: can run, or has ended
  uint64_t detail = 0;              // barrier id, mask or address, for messages
  bool ended = false;
  bool in_group_barrier = false;  // has arrived, has not waited
  uint32_t group_round = 0;       // the round of the group's barrier in which it has arrived

  // Copies of 16 bytes that have not been made yet, with their groups.
  std::vector<PendingCopy> copies;
  uint32_t copy_groups = 0;  // that were committed
  uint32_t mma_groups = 0;
};

// Fibers in the order in which they will run; each is in it at most once.
class ReadyQueue {
 public:
  bool empty() const {
    return begin_ == end_;
  }
  uint32_t size() const {
    return end_ - begin_;
  }
  void Push(Fiber* fiber) {
    slots_[end_++ % kMaxThreads] = fiber;
  }
  Fiber* Pop() {
    return slots_[begin_++ % kMaxThreads];
  }

 private:
  Fiber* slots_[kMaxThreads];
  uint32_t begin_ = 0;
  uint32_t end_ = 0;
};

// The barrier of a cluster, whose two halves can be apart.
struct GroupBarrierState {
  int pending = 0;  // threads that have neither arrived nor returned
  uint32_t round = 0;
  std::vector<Fiber*> waiting;
};

struct NamedBarrier {
  int threads = 0;  // how many it waits for; 0: all that have not returned
  int arrived = 0;
  int votes = 0;  // for true, in this round and in the one before
  int last_votes = 0;
  std::vector<Fiber*> waiting;
};

// Lanes that exchange values. The buffers alternate: a lane can be one exchange ahead of those that
// have not read yet, never two.
struct Exchange {
  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint32_t round = 0;
  const char* what = nullptr;
  Fiber* waiting[32] = {};
  uint64_t values[2][32] = {};
};

struct Warp {
  uint32_t live = 0;
  std::vector<Exchange> exchanges;  // one per mask that was used
};

// Threads that hand in a pointer each for an instruction of all of them.
struct Collective {
  const char* what = nullptr;
  int arrived = 0;
  void* arguments[128] = {};
  Fiber* waiting[128] = {};
};

struct PendingBulkCopy {
  void* shared;
  const void* global;
  uint32_t bytes;
  uint64_t* barrier;
};

// An instruction of a warpgroup that has been issued but not run.
struct PendingMma {
  uint32_t group;
  void (*action)(void* const*);
  std::array<WarpgroupMma, 128> arguments;
  std::array<std::array<uint32_t, 4>, 128> registers;
};

struct BarrierWaiter {
  const uint64_t* barrier;
  uint32_t parity;
  Fiber* fiber;
};

struct Group;

struct Block {
  Group* group = nullptr;
  uint32_t rank = 0;
  uint3 index = {};
  std::vector<Fiber> fibers;
  int live = 0;
  Fiber* current = nullptr;
  void* scheduler_stack = nullptr;
  ReadyQueue ready;
  bool late = false;        // copies and warpgroup instructions run when they are waited for
  int64_t idle_yields = 0;  // since a fiber last did anything else
  bool pass_turn = false;

  NamedBarrier barriers[16];
  std::vector<Warp> warps;
  std::vector<Collective> warp_collectives;
  std::vector<Collective> warpgroup_collectives;
  std::vector<BarrierWaiter> barrier_waiters;
  std::vector<PendingBulkCopy> bulk_copies;
  std::vector<std::deque<PendingMma>> pending_mmas;  // by warpgroup

  unsigned char* shared = nullptr;
  int shared_bytes = 0;
  char* thread_pointer = nullptr;  // of the host's thread that runs the block

  // Memory that stays from launch to launch.
  char* stacks = nullptr;
  int num_stacks = 0;
  unsigned char* shared_mapping = nullptr;

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
  // Dynamic shared memory ends where a page begins that cannot be read or written.
  static constexpr size_t kSharedMappingBytes =
      (kMaxSharedBytes + kPageBytes - 1) / kPageBytes * kPageBytes + kPageBytes;
};

// One launch's blocks that can wait for each other, one at a time on its thread of the host. A
// block has its turn until none of its fibers can run.
struct Group {
  const char* kernel = nullptr;
  void (*thread)(void*) = nullptr;
  void* arguments = nullptr;
  bool cooperative = false;
  int live = 0;  // threads that have not returned
  std::vector<Block*> blocks;
  GroupBarrierState barrier;

  std::mutex mutex;
  std::condition_variable turn_changed;
  int turn = 0;  // index of the block; -1: all have ended
};

// The block whose fibers this thread of the host runs; null outside of kernels.
inline thread_local constinit Block* current_block = nullptr;
// The same; the process ends outside of kernels.
Block* RunningBlock(const char* what);

inline void MakeReady(Fiber* fiber) {
  fiber->waits_for = nullptr;
  fiber->block->ready.Push(fiber);
}

// Leaves the current fiber until MakeReady. `what` and `detail` are for messages.
void WaitFor(Block* block, const char* what, uint64_t detail);

// The current fiber ends: nobody waits for it any more.
void LeaveBarriers(Block* block);
// The kernel fails if asynchronous work of a block that has ended was not waited for.
void CheckNothingPending(const Block& block);

}  // namespace deepinfer::cuda::emulated
