// Fibers are switched by a few instructions of assembly; blocks that run together have a thread of
// the host each, of which one runs at a time, so that their __shared__ variables (thread_local) are
// apart.
#include "ops/cuda/emulated/fibers.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "ops/cuda/emulated/block.h"

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

constexpr int64_t kMaxIdleYields = 100'000'000;

char* ThreadPointer() {
  return static_cast<char*>(__builtin_thread_pointer());
}

void* MapMemory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DI_CHECK(memory != MAP_FAILED);
  return memory;
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

// ---- Blocks that run together -------------------------------------------------------------------

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

[[noreturn]] void Deadlock(const Group& group) {
  std::fprintf(stderr, "Emulated kernel '%s': deadlock, no thread can go on.\n", group.kernel);
  for (const Block* block : group.blocks) std::fputs(Describe(*block).c_str(), stderr);
  std::abort();
}

// Who runs after `block`, which cannot go on; false when all have ended.
bool PassTurn(Block* block) {
  Group& group = *block->group;
  const int size = static_cast<int>(group.blocks.size());
  for (int step = 1; step <= size; ++step) {
    const int rank = (static_cast<int>(block->rank) + step) % size;
    if (!group.blocks[static_cast<size_t>(rank)]->ready.empty()) {
      group.turn = rank;
      return true;
    }
  }
  if (group.live > 0) Deadlock(group);
  group.turn = -1;
  return false;
}

// Runs the fibers of `block` whenever it is its turn, until all blocks of its group have ended.
void RunBlock(Block* block) {
  current_block = block;
  blockIdx = block->index;
  block->thread_pointer = ThreadPointer();
  Group& group = *block->group;
  const int rank = static_cast<int>(block->rank);
  std::unique_lock<std::mutex> lock(group.mutex);
  bool more = true;
  while (more) {
    group.turn_changed.wait(lock, [&] { return group.turn == rank || group.turn < 0; });
    if (group.turn < 0) break;
    block->pass_turn = false;
    while (!block->ready.empty() && !block->pass_turn)
      SwitchTo(block, block->ready.Pop(), &block->scheduler_stack);
    more = PassTurn(block);
    if (group.turn != rank) group.turn_changed.notify_all();
  }
  current_block = nullptr;
}

// ---- Blocks -------------------------------------------------------------------------------------

void RunFiber() {
  Block* block = current_block;
  block->group->thread(block->group->arguments);
  Fiber* fiber = block->current;
  fiber->ended = true;
  block->warps[static_cast<size_t>(fiber->number / 32)].live &= ~(1u << (fiber->number % 32));
  --block->live;
  --block->group->live;
  block->idle_yields = 0;
  LeaveBarriers(block);
  if (block->live == 0) CheckNothingPending(*block);
  Leave(block);
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

}  // namespace

Block::~Block() {
  if (stacks != nullptr) munmap(stacks, static_cast<size_t>(num_stacks) * kStackBytes);
  if (shared_mapping != nullptr) munmap(shared_mapping, kSharedMappingBytes);
}

Block* RunningBlock(const char* what) {
  if (current_block == nullptr) {
    std::fprintf(stderr, "%s was called outside of a kernel.\n", what);
    std::abort();
  }
  return current_block;
}

void WaitFor(Block* block, const char* what, uint64_t detail) {
  block->idle_yields = 0;
  block->current->waits_for = what;
  block->current->detail = detail;
  Leave(block);
}

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
    Group group;
    group.kernel = name;
    group.thread = thread;
    group.arguments = arguments;
    group.cooperative = config.cooperative;
    group.live = config.block * group_size;
    group.barrier.pending = group.live;
    group.blocks.resize(static_cast<size_t>(group_size));
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
      RunBlock(group.blocks[static_cast<size_t>(i)]);
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
  block->pass_turn = block->group->blocks.size() > 1 && block->idle_yields % (block->live + 1) == 0;
  block->ready.Push(block->current);
  Leave(block);
}

void YieldToOtherBlocks() {
  const Block* block = current_block;
  if (block != nullptr && block->group->cooperative) Yield();
}

// ---- Shared memory ------------------------------------------------------------------------------

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
  if (rank >= block->group->blocks.size())
    KernelFailed("rank %u of a cluster of %zu", rank, block->group->blocks.size());
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

}  // namespace deepinfer::cuda::emulated
