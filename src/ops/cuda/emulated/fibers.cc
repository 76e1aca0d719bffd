// Fibers are switched by a few instructions of assembly; blocks that run together have a thread of
// the host each, of which one runs at a time, so that their __shared__ variables (thread_local) are
// apart.
#include "ops/cuda/emulated/fibers.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "ops/cuda/emulated/matrix.h"

#ifndef __x86_64__
#error "The emulation of CUDA kernels switches stacks in x86-64 assembly."
#endif

// Saves the registers that a call preserves on the stack, exchanges the stack and restores them.
extern "C" void di_switch_stack(void** save, void* load);
asm(R"(
.text
.globl di_switch_stack
.type di_switch_stack, @function
di_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size di_switch_stack, . - di_switch_stack
)");

namespace deepinfer::cuda::emulated {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxSharedBytes = 227 * 1024;  // what a block can have on Hopper
constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = 256 * 1024;  // address space; memory is taken where it is used
constexpr int kMaxTogether = 64;            // blocks of a cooperative launch
constexpr int64_t kMaxIdleYields = 100'000'000;

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

class Group;

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
  ~Block() {
    if (stacks != nullptr) munmap(stacks, static_cast<size_t>(num_stacks) * kStackBytes);
    if (shared_mapping != nullptr) munmap(shared_mapping, kSharedMappingBytes);
  }
  // Dynamic shared memory ends where a page begins that cannot be read or written.
  static constexpr size_t kSharedMappingBytes =
      (kMaxSharedBytes + kPageBytes - 1) / kPageBytes * kPageBytes + kPageBytes;
};

thread_local constinit Block* current_block = nullptr;

char* ThreadPointer() {
  return static_cast<char*>(__builtin_thread_pointer());
}

void* MapMemory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DI_CHECK(memory != MAP_FAILED);
  return memory;
}

void MakeReady(Fiber* fiber) {
  fiber->waits_for = nullptr;
  fiber->block->ready.Push(fiber);
}

void SwitchTo(Block* block, Fiber* next, void** save) {
  block->current = next;
  threadIdx = next->thread_index;
  di_switch_stack(save, next->stack_pointer);
}

// Leaves the current fiber, which someone else makes ready again.
void Leave(Block* block) {
  Fiber* fiber = block->current;
  if (block->ready.empty() || block->pass_turn) {
    block->current = nullptr;
    di_switch_stack(&fiber->stack_pointer, block->scheduler_stack);
  } else if (Fiber* next = block->ready.Pop(); next != fiber) {
    SwitchTo(block, next, &fiber->stack_pointer);
  }
}

void WaitFor(Block* block, const char* what, uint64_t detail) {
  block->idle_yields = 0;
  block->current->waits_for = what;
  block->current->detail = detail;
  Leave(block);
}

// ---- Blocks that run together
// --------------------------------------------------------------------

// One launch's blocks that can wait for each other, one at a time on its thread of the host. A
// block has its turn until none of its fibers can run.
class Group {
 public:
  Group(const char* kernel_name, int count, int threads, void (*body)(void*), void* body_arguments)
      : kernel(kernel_name),
        size(count),
        live(threads * count),
        thread(body),
        arguments(body_arguments) {
    blocks.resize(static_cast<size_t>(count));
    barrier.pending = live;
  }

  const char* kernel;
  int size;
  int live;  // threads that have not returned
  void (*thread)(void*);
  void* arguments;
  bool cooperative = false;
  std::vector<Block*> blocks;
  GroupBarrierState barrier;

  // Runs the fibers of `block` whenever it is its turn, until all blocks have ended.
  void RunBlock(Block* block);

 private:
  bool NextTurn(Block* block);
  [[noreturn]] void Deadlock();

  std::mutex mutex_;
  std::condition_variable turn_changed_;
  int turn_ = 0;  // -1: all have ended
};

// Who runs after `block`, which cannot go on; false when all have ended.
bool Group::NextTurn(Block* block) {
  for (int step = 1; step <= size; ++step) {
    const int rank = (static_cast<int>(block->rank) + step) % size;
    if (!blocks[static_cast<size_t>(rank)]->ready.empty()) {
      turn_ = rank;
      return true;
    }
  }
  for (const Block* other : blocks)
    if (other->live > 0) Deadlock();
  turn_ = -1;
  return false;
}

void Group::RunBlock(Block* block) {
  current_block = block;
  blockIdx = block->index;
  block->thread_pointer = ThreadPointer();
  const int rank = static_cast<int>(block->rank);
  std::unique_lock<std::mutex> lock(mutex_);
  bool more = true;
  while (more) {
    if (turn_ != rank) turn_changed_.wait(lock, [&] { return turn_ == rank || turn_ < 0; });
    if (turn_ < 0) break;
    block->pass_turn = false;
    while (!block->ready.empty() && !block->pass_turn)
      SwitchTo(block, block->ready.Pop(), &block->scheduler_stack);
    more = NextTurn(block);
    if (turn_ != rank) turn_changed_.notify_all();
  }
  current_block = nullptr;
}

std::string Describe(const Block& block) {
  std::string text;
  for (size_t begin = 0; begin < block.fibers.size();) {
    const Fiber& first = block.fibers[begin];
    size_t end = begin + 1;
    while (end < block.fibers.size() && block.fibers[end].waits_for == first.waits_for &&
           block.fibers[end].detail == first.detail && block.fibers[end].ended == first.ended)
      ++end;
    const char* what = first.ended                  ? "returned"
                       : first.waits_for == nullptr ? "can run"
                                                    : first.waits_for;
    text += fmt::format("  block ({}, {}, {}) threads {} to {}: {} ({:#x})\n", block.index.x,
                        block.index.y, block.index.z, begin, end - 1, what, first.detail);
    begin = end;
  }
  return text;
}

void Group::Deadlock() {
  std::fprintf(stderr, "Emulated kernel '%s': deadlock, no thread can go on.\n", kernel);
  for (const Block* block : blocks) std::fputs(Describe(*block).c_str(), stderr);
  std::abort();
}

// ---- Blocks
// --------------------------------------------------------------------------------------

void CompleteExchange(const Block* block, Exchange* exchange) {
  const uint32_t waiting = exchange->arrived;
  exchange->arrived = 0;
  ++exchange->round;
  for (uint32_t left = waiting; left != 0; left &= left - 1) {
    Fiber* fiber = exchange->waiting[std::countr_zero(left)];
    if (fiber != block->current) MakeReady(fiber);
  }
}

void ReleaseBarrier(NamedBarrier* barrier) {
  barrier->arrived = 0;
  barrier->threads = 0;
  barrier->last_votes = barrier->votes;
  barrier->votes = 0;
  for (Fiber* fiber : barrier->waiting) MakeReady(fiber);
  barrier->waiting.clear();
}

void CountGroupArrival(Group* group) {
  GroupBarrierState& barrier = group->barrier;
  if (--barrier.pending > 0) return;
  barrier.pending = group->live;
  ++barrier.round;
  for (Fiber* fiber : barrier.waiting) MakeReady(fiber);
  barrier.waiting.clear();
}

// The hardware goes on copying into memory that another block may have by then.
void CheckNothingPending(const Block& block) {
  if (!block.bulk_copies.empty())
    KernelFailed("the block ends before a BulkCopy that nobody has waited for");
  for (const std::deque<PendingMma>& mmas : block.pending_mmas)
    if (!mmas.empty())
      KernelFailed("the block ends before a WarpgroupMma that nobody has waited for");
}

// A thread that has returned is missed by nobody who waits for all that are left.
void EndFiber(Block* block) {
  Fiber* fiber = block->current;
  fiber->ended = true;
  --block->live;
  block->idle_yields = 0;
  Warp& warp = block->warps[static_cast<size_t>(fiber->number / 32)];
  warp.live &= ~(1u << (fiber->number % 32));
  for (Exchange& exchange : warp.exchanges)
    if (exchange.arrived != 0 && exchange.arrived == (exchange.mask & warp.live))
      CompleteExchange(block, &exchange);
  NamedBarrier& all = block->barriers[0];
  if (all.arrived > 0 && all.threads == 0 && all.arrived == block->live) ReleaseBarrier(&all);
  --block->group->live;
  const bool has_arrived =
      fiber->in_group_barrier && fiber->group_round == block->group->barrier.round;
  if (!has_arrived) CountGroupArrival(block->group);
  if (block->live == 0) CheckNothingPending(*block);
  Leave(block);
}

void RunFiber() {
  Block* block = current_block;
  block->group->thread(block->group->arguments);
  EndFiber(block);
  std::abort();  // a fiber that has ended is never switched to
}

void PrepareStacks(Block* block, int threads) {
  if (block->num_stacks < threads) {
    if (block->stacks != nullptr)
      munmap(block->stacks, static_cast<size_t>(block->num_stacks) * kStackBytes);
    block->stacks = static_cast<char*>(MapMemory(static_cast<size_t>(threads) * kStackBytes));
    block->num_stacks = threads;
    for (int i = 0; i < threads; ++i)
      mprotect(block->stacks + static_cast<size_t>(i) * kStackBytes, kPageBytes, PROT_NONE);
  }
  for (int i = 0; i < threads; ++i) {
    // Stacks begin at different places of a page, so that they do not share lines of a cache set.
    char* top = block->stacks + static_cast<size_t>(i + 1) * kStackBytes - (i % 16) * 256;
    void** slots = reinterpret_cast<void**>(top);
    slots[-1] = nullptr;  // the return address of RunFiber, which does not return
    slots[-2] = reinterpret_cast<void*>(&RunFiber);
    for (int saved = 3; saved <= 8; ++saved) slots[-saved] = nullptr;
    block->fibers[static_cast<size_t>(i)].stack_pointer = slots - 8;
  }
}

void PrepareSharedMemory(Block* block, int bytes) {
  if (block->shared_mapping == nullptr) {
    block->shared_mapping = static_cast<unsigned char*>(MapMemory(Block::kSharedMappingBytes));
    mprotect(block->shared_mapping + Block::kSharedMappingBytes - kPageBytes, kPageBytes,
             PROT_NONE);
  }
  const int rounded = (bytes + 1023) / 1024 * 1024;
  block->shared = block->shared_mapping + Block::kSharedMappingBytes - kPageBytes - rounded;
  block->shared_bytes = bytes;
  std::memset(block->shared, 0xff, static_cast<size_t>(rounded));
}

// What lies between the end of dynamic shared memory and the page behind it.
void CheckSharedMemoryEnd(const char* kernel, const Block& block) {
  for (int i = block.shared_bytes; i % 1024 != 0; ++i) {
    if (block.shared[i] == 0xff) continue;
    std::fprintf(stderr,
                 "Emulated kernel '%s': block (%u, %u, %u) wrote behind its %d bytes of "
                 "dynamic shared memory, at %d.\n",
                 kernel, block.index.x, block.index.y, block.index.z, block.shared_bytes, i);
    std::abort();
  }
}

void Prepare(Block* block, Group* group, uint32_t rank, uint3 index, bool late,
             const LaunchConfig& config) {
  block->group = group;
  block->rank = rank;
  block->index = index;
  block->late = late;
  const int threads = config.block;
  block->fibers.resize(static_cast<size_t>(threads));
  block->live = threads;
  block->current = nullptr;
  block->thread_pointer = nullptr;
  block->ready = ReadyQueue();
  block->idle_yields = 0;
  for (NamedBarrier& barrier : block->barriers) {
    barrier.arrived = 0;
    barrier.threads = 0;
    barrier.votes = 0;
    barrier.waiting.clear();
  }
  block->barrier_waiters.clear();
  block->bulk_copies.clear();
  const size_t warps = static_cast<size_t>((threads + 31) / 32);
  block->warps.resize(warps);
  block->warp_collectives.assign(warps, Collective());
  block->warpgroup_collectives.assign((warps + 3) / 4, Collective());
  block->pending_mmas.resize((warps + 3) / 4);
  for (size_t i = 0; i < warps; ++i) {
    const int lanes = std::min(32, threads - static_cast<int>(i) * 32);
    block->warps[i].live = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
    block->warps[i].exchanges.clear();
  }
  PrepareStacks(block, threads);
  PrepareSharedMemory(block, config.shared_bytes);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = block->fibers[static_cast<size_t>(i)];
    fiber.block = block;
    fiber.number = i;
    fiber.thread_index = {static_cast<unsigned int>(i), 0, 0};
    fiber.detail = 0;
    fiber.ended = false;
    fiber.in_group_barrier = false;
    fiber.copies.clear();
    fiber.copy_groups = 0;
    fiber.mma_groups = 0;
  }
  for (int i = 0; i < threads; ++i)
    MakeReady(&block->fibers[static_cast<size_t>(late ? threads - 1 - i : i)]);
}

Block* RunningBlock(const char* what) {
  if (current_block == nullptr) {
    std::fprintf(stderr, "%s was called outside of a kernel.\n", what);
    std::abort();
  }
  return current_block;
}

}  // namespace

Status CheckShape(const char* name, const LaunchConfig& config) {
  const auto invalid = [&](const char* problem) -> Status {
    return Fail(
        Code::kInternal,
        fmt::format("The launch of kernel '{}' failed: {} (grid {}x{}x{}, block {}, {} bytes "
                    "of shared memory, cluster {}).",
                    name, problem, config.grid.x, config.grid.y, config.grid.z, config.block,
                    config.shared_bytes, config.cluster));
  };
  if (config.block < 1 || config.block > kMaxThreads) return invalid("the block's size");
  if (config.shared_bytes < 0 || config.shared_bytes > kMaxSharedBytes)
    return invalid("the size of shared memory");
  if (config.grid.x > 0x7fffffffu || config.grid.y > 65535 || config.grid.z > 65535)
    return invalid("the grid's size");
  if (config.cluster < 1 || config.cluster > 16 ||
      config.grid.x % static_cast<uint32_t>(config.cluster) != 0)
    return invalid("the cluster's size");
  if (config.cooperative && config.cluster > 1) return invalid("clusters of a cooperative launch");
  if (config.cooperative && uint64_t{config.grid.x} * config.grid.y * config.grid.z > kMaxTogether)
    return invalid("too many blocks to run at once");
  return {};
}

Status RunGrid(const char* name, const LaunchConfig& config, void (*thread)(void*),
               void* arguments) {
  DI_RETURN_IF_ERROR(CheckShape(name, config));
  const GridShape grid = config.grid;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  const int group_size = config.cooperative ? static_cast<int>(num_blocks) : config.cluster;
  if (current_block != nullptr) KernelFailed("a kernel launches the kernel '%s'", name);

  thread_local std::vector<std::unique_ptr<Block>> blocks;
  thread_local uint64_t launches = 0;
  ++launches;
  while (blocks.size() < static_cast<size_t>(group_size))
    blocks.push_back(std::make_unique<Block>());

  const dim3 block_shape = {static_cast<unsigned int>(config.block), 1, 1};
  const dim3 grid_shape = {grid.x, grid.y, grid.z};
  for (uint64_t first = 0; first < num_blocks; first += static_cast<uint64_t>(group_size)) {
    Group group(name, group_size, config.block, thread, arguments);
    group.cooperative = config.cooperative;
    for (int i = 0; i < group_size; ++i) {
      const uint64_t flat = first + static_cast<uint64_t>(i);
      const uint3 index = {static_cast<unsigned int>(flat % grid.x),
                           static_cast<unsigned int>(flat / grid.x % grid.y),
                           static_cast<unsigned int>(flat / grid.x / grid.y)};
      Block* block = blocks[static_cast<size_t>(i)].get();
      group.blocks[static_cast<size_t>(i)] = block;
      const bool late = (flat + launches) % 2 != 0;
      Prepare(block, &group, static_cast<uint32_t>(i), index, late, config);
    }
    const auto run = [&](int i) {
      blockDim = block_shape;
      gridDim = grid_shape;
      group.RunBlock(group.blocks[static_cast<size_t>(i)]);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < group_size; ++i) others.emplace_back(run, i);
    run(0);
    for (std::thread& other : others) other.join();
    for (const Block* block : group.blocks) CheckSharedMemoryEnd(name, *block);
  }
  return {};
}

void KernelFailed(const char* format, ...) {
  const Block* block = current_block;
  if (block != nullptr)
    std::fprintf(stderr,
                 "Emulated kernel '%s', block (%u, %u, %u), thread %u: ", block->group->kernel,
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs(".\n", stderr);
  std::abort();
}

void Yield() {
  Block* block = RunningBlock("Yield");
  if (++block->idle_yields > kMaxIdleYields)
    KernelFailed("threads wait for a value in memory that nobody writes");
  // When everyone only polls, another block has to go on.
  block->pass_turn = block->group->size > 1 && block->idle_yields % (block->live + 1) == 0;
  block->ready.Push(block->current);
  Leave(block);
}

void YieldToOtherBlocks() {
  const Block* block = current_block;
  if (block != nullptr && block->group->cooperative) Yield();
}

// ---- Shared memory
// -------------------------------------------------------------------------------

unsigned char* DynamicSharedBase() {
  return RunningBlock("DynamicShared")->shared;
}
int DynamicSharedBytes() {
  return RunningBlock("DynamicShared")->shared_bytes;
}

uint32_t SharedAddressOf(const void* shared) {
  const Block* block = RunningBlock("SharedAddress");
  const ptrdiff_t offset = static_cast<const unsigned char*>(shared) - block->shared;
  if (offset < 0 || offset > block->shared_bytes)
    KernelFailed("SharedAddress of something that is not in dynamic shared memory");
  return kDynamicSharedAddress + static_cast<uint32_t>(offset);
}

const unsigned char* SharedMemoryAt(uint32_t address, uint32_t bytes, const char* what) {
  const Block* block = RunningBlock(what);
  const int64_t offset = int64_t{address} - kDynamicSharedAddress;
  if (offset < 0 || offset + bytes > block->shared_bytes)
    KernelFailed("%s reads at %lld of the %d bytes of dynamic shared memory", what,
                 static_cast<long long>(offset), block->shared_bytes);
  return block->shared + offset;
}

void* ClusterPeer(const void* shared, uint32_t rank) {
  const Block* block = RunningBlock("an access to the cluster");
  if (block->group->cooperative) KernelFailed("an access to a cluster in a cooperative launch");
  if (rank >= static_cast<uint32_t>(block->group->size))
    KernelFailed("rank %u of a cluster of %d", rank, block->group->size);
  const Block* peer = block->group->blocks[rank];
  if (peer->live == 0) KernelFailed("an access to a block of the cluster that has ended");
  const unsigned char* pointer = static_cast<const unsigned char*>(shared);
  if (pointer >= block->shared && pointer < block->shared + block->shared_bytes)
    return peer->shared + (pointer - block->shared);
  // A __shared__ variable lies at the same distance from every thread's own pointer.
  const ptrdiff_t distance = reinterpret_cast<const char*>(shared) - block->thread_pointer;
  if (distance < -(1 << 24) || distance >= 0)
    KernelFailed("an access to the cluster with an address that is not in shared memory");
  if (peer->thread_pointer == nullptr)
    KernelFailed("an access to a block of the cluster that has not begun");
  return peer->thread_pointer + distance;
}

uint32_t RankInCluster() {
  const Block* block = RunningBlock("ClusterRank");
  return block->group->cooperative ? 0 : block->rank;
}

void CheckAligned(const void* pointer, int alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) != 0)
    KernelFailed("%s with address %p, not a multiple of %d", what, pointer, alignment);
}

// ---- Waiting
// -------------------------------------------------------------------------------------

void BlockBarrier(const char* what, int id, int threads, bool wait) {
  Block* block = RunningBlock(what);
  if (id < 0 || id > 15) KernelFailed("%s with barrier %d of 16", what, id);
  if (threads % 32 != 0 || threads > static_cast<int>(block->fibers.size()))
    KernelFailed("%s of %d threads in a block of %zu", what, threads, block->fibers.size());
  NamedBarrier& barrier = block->barriers[id];
  if (barrier.arrived > 0 && barrier.threads != threads)
    KernelFailed("%s of %d threads with barrier %d, where others say %d", what, threads, id,
                 barrier.threads);
  barrier.threads = threads;
  ++barrier.arrived;
  if (barrier.arrived == (threads == 0 ? block->live : threads)) {
    ReleaseBarrier(&barrier);
  } else if (wait) {
    barrier.waiting.push_back(block->current);
    WaitFor(block, what, static_cast<uint64_t>(id));
  }
}

int BlockVote(const char* what, bool value) {
  Block* block = RunningBlock(what);
  if (value) ++block->barriers[0].votes;
  BlockBarrier(what, 0, 0, true);
  return block->barriers[0].last_votes;
}

void ArriveAtGroupBarrier(const char* what) {
  Block* block = RunningBlock(what);
  Fiber* fiber = block->current;
  if (block->group->cooperative) KernelFailed("%s in a cooperative launch", what);
  if (fiber->in_group_barrier) KernelFailed("%s twice without waiting", what);
  fiber->in_group_barrier = true;
  fiber->group_round = block->group->barrier.round;
  CountGroupArrival(block->group);
}

void WaitForGroupBarrier(const char* what) {
  Block* block = RunningBlock(what);
  Fiber* fiber = block->current;
  GroupBarrierState& barrier = block->group->barrier;
  if (!fiber->in_group_barrier) KernelFailed("%s without having arrived", what);
  if (fiber->group_round == barrier.round) {
    barrier.waiting.push_back(fiber);
    WaitFor(block, what, 0);
  }
  fiber->in_group_barrier = false;
}

const uint64_t* WarpExchange(const char* what, uint32_t mask, uint64_t value) {
  Block* block = RunningBlock(what);
  Fiber* fiber = block->current;
  Warp& warp = block->warps[static_cast<size_t>(fiber->number / 32)];
  const int lane = fiber->number % 32;
  if (((mask >> lane) & 1u) == 0)
    KernelFailed("%s with mask 0x%08x, which lacks the calling lane %d", what, mask, lane);
  size_t found = 0;
  while (found < warp.exchanges.size() && warp.exchanges[found].mask != mask) ++found;
  if (found == warp.exchanges.size()) warp.exchanges.emplace_back().mask = mask;
  Exchange* exchange = &warp.exchanges[found];
  if (exchange->arrived == 0) {
    exchange->what = what;
  } else if (exchange->what != what && std::strcmp(exchange->what, what) != 0) {
    KernelFailed("%s, while other lanes of mask 0x%08x are in %s", what, mask, exchange->what);
  }
  const uint32_t buffer = exchange->round % 2;
  exchange->values[buffer][lane] = value;
  exchange->waiting[lane] = fiber;
  exchange->arrived |= 1u << lane;
  if (exchange->arrived == (mask & warp.live)) {
    CompleteExchange(block, exchange);
  } else {
    WaitFor(block, what, mask);
    exchange = &warp.exchanges[found];  // others may have added masks
  }
  return exchange->values[buffer];
}

namespace {

// `action` gets the pointers that all threads have handed in.
template <class Action>
void RunCollective(Block* block, Collective* collective, const char* what, int place, int size,
                   void* mine, const Action& action) {
  if (collective->arrived == 0) {
    collective->what = what;
  } else if (std::strcmp(collective->what, what) != 0) {
    KernelFailed("%s, while other threads are in %s", what, collective->what);
  }
  collective->arguments[place] = mine;
  collective->waiting[place] = block->current;
  if (++collective->arrived < size) {
    WaitFor(block, what, 0);
    return;
  }
  action(collective->arguments);
  collective->arrived = 0;
  for (int i = 0; i < size; ++i)
    if (i != place) MakeReady(collective->waiting[i]);
}

void RunPendingMma(PendingMma* pending) {
  void* arguments[128];
  for (size_t i = 0; i < 128; ++i) {
    WarpgroupMma& mma = pending->arguments[i];
    if (mma.a_registers != nullptr) mma.a_registers = pending->registers[i].data();
    arguments[i] = &mma;
  }
  pending->action(arguments);
}

// Keeps an instruction until it is waited for. The hardware may read registers of A late as well,
// but the compiler sees to it that they stay.
void KeepMma(Block* block, std::deque<PendingMma>* mmas, void (*action)(void* const*),
             void* const* arguments) {
  PendingMma& pending = mmas->emplace_back();
  pending.group = block->current->mma_groups;
  pending.action = action;
  for (size_t i = 0; i < 128; ++i) {
    pending.arguments[i] = *static_cast<const WarpgroupMma*>(arguments[i]);
    if (const uint32_t* registers = pending.arguments[i].a_registers; registers != nullptr)
      std::copy_n(registers, 4, pending.registers[i].begin());
  }
}

void RunBulkCopy(const PendingBulkCopy& copy) {
  std::memcpy(copy.shared, copy.global, copy.bytes);
  AddToBarrier(copy.barrier, 0, copy.bytes, "BulkCopy");
}

void RunBulkCopies(Block* block, const uint64_t* barrier) {
  std::vector<PendingBulkCopy> copies;
  std::erase_if(block->bulk_copies, [&](const PendingBulkCopy& copy) {
    if (copy.barrier == barrier) copies.push_back(copy);
    return copy.barrier == barrier;
  });
  for (const PendingBulkCopy& copy : copies) RunBulkCopy(copy);
}

void RunCopies(Fiber* fiber, uint32_t groups) {
  size_t done = 0;
  for (; done < fiber->copies.size() && fiber->copies[done].group < groups; ++done) {
    const PendingCopy& copy = fiber->copies[done];
    if (copy.global != nullptr) {
      std::memcpy(copy.shared, copy.global, 16);
    } else {
      std::memset(copy.shared, 0, 16);
    }
  }
  fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + static_cast<ptrdiff_t>(done));
}

void RegisterBarrierCompletion(Block* block, const uint64_t* barrier, uint32_t ended_parity) {
  std::vector<BarrierWaiter>& waiters = block->barrier_waiters;
  size_t kept = 0;
  for (const BarrierWaiter& waiter : waiters) {
    if (waiter.barrier == barrier && waiter.parity == ended_parity) {
      MakeReady(waiter.fiber);
    } else {
      waiters[kept++] = waiter;
    }
  }
  waiters.resize(kept);
}

// A barrier's word: what the phase still waits for.
constexpr int kMaxArrivals = 8191;
struct BarrierState {
  uint32_t phase = 0;  // parity of the phase under way
  int expected = 0;    // arrivals per phase
  int pending = 0;     // arrivals that are missing
  int32_t bytes = 0;   // that have come and were not announced yet; negative: that are missing
};

uint64_t Pack(const BarrierState& state) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(state.bytes)) << 32) |
         (static_cast<uint64_t>(state.phase) << 31) |
         (static_cast<uint64_t>(state.expected) << 15) | static_cast<uint64_t>(state.pending);
}

BarrierState Unpack(const uint64_t* barrier, const char* what) {
  CheckAligned(barrier, 8, what);
  BarrierState state;
  const uint64_t word = *barrier;
  state.bytes = static_cast<int32_t>(static_cast<uint32_t>(word >> 32));
  state.phase = static_cast<uint32_t>(word >> 31) & 1u;
  state.expected = static_cast<int>((word >> 15) & 0xffffu);
  state.pending = static_cast<int>(word & 0x7fffu);
  if (state.expected < 1 || state.expected > kMaxArrivals || state.pending > state.expected)
    KernelFailed("%s with a barrier that was not initialised", what);
  return state;
}

}  // namespace

void WarpCollective(const char* what, void* mine, void (*action)(void* const*)) {
  Block* block = RunningBlock(what);
  const size_t warp = static_cast<size_t>(block->current->number / 32);
  if (block->warps[warp].live != 0xffffffffu)
    KernelFailed("%s in a warp that has not all its lanes", what);
  RunCollective(block, &block->warp_collectives[warp], what, block->current->number % 32, 32, mine,
                action);
}

void RunWarpgroupMma(const char* what, WarpgroupMma* mine, void (*action)(void* const*)) {
  Block* block = RunningBlock(what);
  const size_t group = static_cast<size_t>(block->current->number / 128);
  for (size_t warp = 4 * group; warp < 4 * group + 4; ++warp)
    if (warp >= block->warps.size() || block->warps[warp].live != 0xffffffffu)
      KernelFailed("%s in a warpgroup that has not all its threads", what);
  RunCollective(block, &block->warpgroup_collectives[group], what, block->current->number % 128,
                128, mine, [&](void* const* arguments) {
                  if (block->late) {
                    KeepMma(block, &block->pending_mmas[group], action, arguments);
                  } else {
                    action(arguments);
                  }
                });
}

void CommitWarpgroupMmas() {
  ++RunningBlock("WarpgroupCommit")->current->mma_groups;
}

void WaitForWarpgroupMmas(int pending) {
  Block* block = RunningBlock("WarpgroupWait");
  const Fiber& fiber = *block->current;
  std::deque<PendingMma>& mmas = block->pending_mmas[static_cast<size_t>(fiber.number / 128)];
  while (!mmas.empty() && mmas.front().group + static_cast<uint32_t>(pending) < fiber.mma_groups) {
    RunPendingMma(&mmas.front());
    mmas.pop_front();
  }
}

void StartCopy(void* shared, const void* global) {
  Block* block = RunningBlock("CopyAsync16");
  Fiber* fiber = block->current;
  fiber->copies.push_back({shared, global, fiber->copy_groups});
  if (!block->late) RunCopies(fiber, fiber->copy_groups + 1);
}

void CommitCopyGroup() {
  ++RunningBlock("CommitCopies")->current->copy_groups;
}

void WaitForCopyGroups(int pending) {
  Fiber* fiber = RunningBlock("WaitCopies")->current;
  if (static_cast<uint32_t>(pending) < fiber->copy_groups)
    RunCopies(fiber, fiber->copy_groups - static_cast<uint32_t>(pending));
}

void ArriveOnCopies(uint64_t* barrier) {
  Fiber* fiber = RunningBlock("BarrierArriveOnCopies")->current;
  RunCopies(fiber, fiber->copy_groups + 1);
  AddToBarrier(barrier, 1, 0, "BarrierArriveOnCopies");
}

void StartBulkCopy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  Block* block = RunningBlock("BulkCopy");
  Unpack(barrier, "BulkCopy");
  const PendingBulkCopy copy{shared, global, bytes, barrier};
  const bool awaited =
      std::any_of(block->barrier_waiters.begin(), block->barrier_waiters.end(),
                  [&](const BarrierWaiter& waiter) { return waiter.barrier == barrier; });
  if (block->late && !awaited) {
    block->bulk_copies.push_back(copy);
  } else {
    RunBulkCopy(copy);
  }
}

void InitBarrier(uint64_t* barrier, int arrivals) {
  CheckAligned(barrier, 8, "BarrierInit");
  if (arrivals < 1 || arrivals > kMaxArrivals) KernelFailed("BarrierInit of %d arrivals", arrivals);
  *barrier = Pack({.phase = 0, .expected = arrivals, .pending = arrivals, .bytes = 0});
}

void AddToBarrier(uint64_t* barrier, int arrivals, int64_t bytes, const char* what) {
  Block* block = RunningBlock(what);
  BarrierState state = Unpack(barrier, what);
  if (arrivals > state.pending)
    KernelFailed("%s: more arrivals than the barrier's %d", what, state.expected);
  state.pending -= arrivals;
  state.bytes += static_cast<int32_t>(bytes);
  if (state.bytes > (1 << 20) || state.bytes < -(1 << 20))
    KernelFailed("%s: %d bytes are more than a barrier counts", what, state.bytes);
  const bool complete = state.pending == 0 && state.bytes == 0;
  if (complete) {
    state.phase ^= 1u;
    state.pending = state.expected;
  }
  *barrier = Pack(state);
  block->idle_yields = 0;
  if (complete) RegisterBarrierCompletion(block, barrier, state.phase ^ 1u);
}

void WaitForBarrier(uint64_t* barrier, uint32_t parity) {
  Block* block = RunningBlock("BarrierWait");
  if (parity > 1) KernelFailed("BarrierWait for parity %u", parity);
  if (Unpack(barrier, "BarrierWait").phase != parity) return;
  RunBulkCopies(block, barrier);
  if (Unpack(barrier, "BarrierWait").phase != parity) return;
  block->barrier_waiters.push_back({barrier, parity, block->current});
  WaitFor(block, "BarrierWait", reinterpret_cast<uint64_t>(barrier));
}

}  // namespace deepinfer::cuda::emulated
