// Runs kernels on the CPU, for tests without a GPU: every thread of a block is a fiber that runs
// until it has to wait for others. Only one fiber runs at a time. It shows wrong indices and
// layouts, barriers that do not fit, and uninitialised or overrun dynamic shared memory. It does
// not model time or weak memory order.
//
// Asynchronous work happens as early as possible in one half of the blocks, and in the other half,
// the late blocks, only when it is waited for: a missing wait reads old contents there, and a
// buffer that is refilled too early loses its contents in the others. Late blocks also start their
// threads from the last to the first. Which blocks are late alternates along the grid and from
// launch to launch.
//
// Errors that the hardware would answer with a fault or with silence (misaligned copies, wrong
// barrier counts, a deadlock) end the process with a message that names the kernel and the thread.
//
// Called by device.cuh and warpgroup.cuh of this directory only.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "ops/cuda/emulated/language.h"
#include "ops/cuda/launch_config.h"

namespace deepinfer::cuda::emulated {

struct WarpgroupMma;

// Errors: kInternal, for shapes that the hardware would not launch.
Status CheckShape(const char* name, const LaunchConfig& config);
// Runs the whole grid before it returns: one block after another; the blocks of a cluster, or all
// of a cooperative launch, together. `thread` is called once per thread. Errors: those of
// CheckShape.
Status RunGrid(const char* name, const LaunchConfig& config, void (*thread)(void* arguments),
               void* arguments);

// Ends the process; the message names the kernel, block and thread that are running.
[[noreturn]] void KernelFailed(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Lets other threads run, for loops that wait for a value in memory.
void Yield();
// The same, but only where blocks run together: what one block waits for, another one may write.
void YieldToOtherBlocks();

// ---- Shared memory ------------------------------------------------------------------------------

unsigned char* DynamicSharedBase();
int DynamicSharedBytes();
// Where dynamic shared memory begins in the address space that descriptors use.
inline constexpr uint32_t kDynamicSharedAddress = 1024;
uint32_t SharedAddressOf(const void* shared);
// Dynamic shared memory at such an address; the kernel fails unless all the bytes belong to it.
const unsigned char* SharedMemoryAt(uint32_t address, uint32_t bytes, const char* what);
// The same place in the shared memory of another block of the cluster.
void* ClusterPeer(const void* shared, uint32_t rank);
uint32_t RankInCluster();

// The kernel fails unless `pointer` is a multiple of `alignment`.
void CheckAligned(const void* pointer, int alignment, const char* what);

// ---- Waiting ------------------------------------------------------------------------------------

// Barrier `id` of the block. `threads` 0 stands for all that have not returned.
void BlockBarrier(const char* what, int id, int threads, bool wait);
// The barrier of all threads of a cluster, in two halves.
void ArriveAtGroupBarrier(const char* what);
void WaitForGroupBarrier(const char* what);

// Gives every lane the values of all lanes of `mask`, by lane. They stay until the lane's next
// exchange.
const uint64_t* WarpExchange(const char* what, uint32_t mask, uint64_t value);
// All 32 lanes hand in a pointer each; the last one to come runs `action` on all of them, then
// everyone goes on.
void WarpCollective(const char* what, void* mine, void (*action)(void* const* lanes));
// The same for the 128 threads of a warpgroup; late blocks run `action` when it is waited for.
void RunWarpgroupMma(const char* what, WarpgroupMma* mine, void (*action)(void* const* threads));
void CommitWarpgroupMmas();
void WaitForWarpgroupMmas(int pending);

// Barriers in shared memory. `arrivals` and `bytes` are added to what the phase has seen; bytes
// that are announced count negatively.
void InitBarrier(uint64_t* barrier, int arrivals);
void AddToBarrier(uint64_t* barrier, int arrivals, int64_t bytes, const char* what);
// The same at the barrier at the same place in another block of the cluster.
void AddToPeerBarrier(uint64_t* barrier, uint32_t rank, int arrivals, int64_t bytes,
                      const char* what);
void WaitForBarrier(uint64_t* barrier, uint32_t parity);

// ---- Copies -------------------------------------------------------------------------------------

// 16 bytes, zeros where `global` is null; groups are the thread's own.
void StartCopy(void* shared, const void* global);
void CommitCopyGroup();
void WaitForCopyGroups(int pending);
void ArriveOnCopies(uint64_t* barrier);
void StartBulkCopy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);

}  // namespace deepinfer::cuda::emulated
