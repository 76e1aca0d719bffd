// What fibers wait for: barriers of a block and of a cluster, exchanges between lanes, instructions
// of a warp or a warpgroup, barriers in shared memory, and copies.
#include <algorithm>
#include <bit>
#include <cstring>

#include "ops/cuda/emulated/block.h"
#include "ops/cuda/emulated/fibers.h"
#include "ops/cuda/emulated/matrix.h"

namespace deepinfer::cuda::emulated {
namespace {

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

}  // namespace

void LeaveBarriers(Block* block) {
  const Fiber* fiber = block->current;
  Warp& warp = block->warps[static_cast<size_t>(fiber->number / 32)];
  for (Exchange& exchange : warp.exchanges)
    if (exchange.arrived != 0 && exchange.arrived == (exchange.mask & warp.live))
      CompleteExchange(block, &exchange);
  NamedBarrier& all = block->barriers[0];
  if (all.arrived > 0 && all.threads == 0 && all.arrived == block->live) ReleaseBarrier(&all);
  Group* group = block->group;
  const bool has_arrived = fiber->in_group_barrier && fiber->group_round == group->barrier.round;
  if (!has_arrived) CountGroupArrival(group);
}

// The hardware goes on copying into memory that another block may have by then.
void CheckNothingPending(const Block& block) {
  if (!block.bulk_copies.empty())
    KernelFailed("the block ends before a BulkCopy that nobody has waited for");
  for (const std::deque<PendingMma>& mmas : block.pending_mmas)
    if (!mmas.empty())
      KernelFailed("the block ends before a WarpgroupMma that nobody has waited for");
}

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

void RunCopy(const PendingCopy& copy) {
  if (copy.global != nullptr) {
    std::memcpy(copy.shared, copy.global, 16);
  } else {
    std::memset(copy.shared, 0, 16);
  }
}

void RunCopies(Fiber* fiber, uint32_t groups) {
  size_t done = 0;
  for (; done < fiber->copies.size() && fiber->copies[done].group < groups; ++done)
    RunCopy(fiber->copies[done]);
  fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + static_cast<ptrdiff_t>(done));
}

void WakeBarrierWaiters(Block* block, const uint64_t* barrier, uint32_t ended_parity) {
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
  const PendingCopy copy{shared, global, fiber->copy_groups};
  if (block->late) {
    fiber->copies.push_back(copy);
  } else {
    RunCopy(copy);
  }
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

namespace {

void AddToBarrierOf(Block* block, uint64_t* barrier, int arrivals, int64_t bytes,
                    const char* what) {
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
  if (complete) WakeBarrierWaiters(block, barrier, state.phase ^ 1u);
}

}  // namespace

void AddToBarrier(uint64_t* barrier, int arrivals, int64_t bytes, const char* what) {
  AddToBarrierOf(RunningBlock(what), barrier, arrivals, bytes, what);
}

void AddToPeerBarrier(uint64_t* barrier, uint32_t rank, int arrivals, int64_t bytes,
                      const char* what) {
  auto* remote = static_cast<uint64_t*>(ClusterPeer(barrier, rank));
  AddToBarrierOf(RunningBlock(what)->group->blocks[rank], remote, arrivals, bytes, what);
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
