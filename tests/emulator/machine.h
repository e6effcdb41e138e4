#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/emulator/fiber.h"

// A GPU for tests: the threads of one cluster at a time, each a fiber, in an order drawn from a
// seed. What the hardware does beside the threads - copies, products - is done by tasks that happen
// at any later moment. A cluster whose threads all wait, with no task left, is a deadlock and is
// reported with what they wait for.
namespace cadre::emulator {

constexpr int kWarp = 32, kWarpgroup = 128;

/// Threads that wait until as many as belong to it have come.
struct Meeting {
  int come = 0;
  uint64_t round = 0;
  bool vote = false, outcome = false;  ///< of __syncthreads_or
};

/// What the lanes of a warp show each other; two rounds, since a quick lane is one ahead at most.
struct WarpBoard {
  Meeting meeting;
  std::array<std::array<uint64_t, kWarp>, 2> shown{};
};

/// A product of the tensor cores that the threads of a warpgroup hand in one by one.
struct WarpgroupProduct {
  std::array<float*, kWarpgroup> sums{};
  std::array<const uint32_t*, kWarpgroup> registers{};  ///< of the first operand, if it is there
  int come = 0;
  uint64_t a = 0, b = 0;
  std::function<void(const WarpgroupProduct&)> run;
};
struct Warpgroup {
  std::deque<WarpgroupProduct> open;  ///< oldest first, from number `done` on
  int64_t done = 0;
  bool has_task = false;
};

struct Block {
  int rank = 0;  ///< in the cluster
  uint3 index{};
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* shared = nullptr;  ///< dynamic shared memory, aligned
  int shared_bytes = 0, threads_left = 0;
  std::array<Meeting, 16> meetings;  ///< bar.sync by number; 0 is __syncthreads
  std::vector<WarpBoard> warps;
  std::vector<Warpgroup> warpgroups;
};

/// Copies to device memory that a thread has started, up to a tma_commit().
struct StoreGroup {
  int reading = 0, writing = 0;
};

/// Copies to shared memory that a thread has started, up to a cp_async_commit().
struct CopyGroup {
  int left = 0;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  int number = 0;  ///< in the block
  uint3 index{};
  const char* waits_for = nullptr;  ///< null: it does not
  int64_t products = 0;             ///< handed in
  bool has_waited = false;          ///< for what is before the kernel
  std::deque<int64_t> product_groups;
  std::deque<std::shared_ptr<StoreGroup>> store_groups;
  std::shared_ptr<StoreGroup> open_stores;
  std::deque<std::shared_ptr<CopyGroup>> copy_groups;
  std::shared_ptr<CopyGroup> open_copies;

  WarpBoard& warp() const { return block->warps[size_t(number / kWarp)]; }
  Warpgroup& warpgroup() const { return block->warpgroups[size_t(number / kWarpgroup)]; }
  int lanes() const;  ///< of its warp
};

/// How a kernel was launched.
struct GridShape {
  dim3 blocks, threads;
  int shared_bytes = 0, cluster = 1;
  bool dependent = false;  ///< its threads wait for what is before it
};

/// What threads see of themselves.
struct Builtins {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
inline thread_local Builtins builtins{};

/// Runs `kernel` in every thread of the grid. Throws std::runtime_error on a deadlock or a misuse.
void run_grid(const GridShape&, const std::function<void()>& kernel);

/// The order of threads and tasks follows from this number, which counts up by itself.
void set_seed(uint64_t);
uint64_t seed();

// For the words of kernels, called by their threads.

Thread& self();
/// Throws out of the grid.
[[noreturn]] void fail(const std::string& why);
inline void expect(bool good, const char* why) {
  if (!good) fail(why);
}
/// Goes on once `over()`, which is evaluated again whenever `at` is notified.
void wait_until(const void* at, const char* what, const std::function<bool()>& over);
void notify(const void* at);
/// Happens at some time, by nobody.
void later(std::function<void()> task);
/// Lets others go first, now and then.
void may_switch();

/// Lets others run, for a thread that asks in a loop whether something has happened.
void poll();
/// Waits for `threads` threads, and says whether any of them voted.
bool meet(Meeting&, int threads, const char* what, bool vote = false);
/// Waits for all threads of the cluster.
void meet_cluster();
/// Shows a value to the lanes of the warp, and sees theirs.
const std::array<uint64_t, kWarp>& show(uint64_t value);
/// The same place of shared memory in another block of the cluster.
void* in_block(const void* here, int rank);
/// Bytes from the start of the block's dynamic shared memory, and back.
uint32_t shared_offset(const void*);
void* from_shared(uint32_t offset, int bytes);

}  // namespace cadre::emulator
