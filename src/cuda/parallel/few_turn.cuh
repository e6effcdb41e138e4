#pragma once
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/parallel/exchange.cuh"

// How the blocks of one kernel go through an exchange of few tokens. What takes long is what
// crosses to another rank or waits for memory, one after another; and instructions, each of which
// comes from memory too. So what the host knows it says, and only who says that this rank is ready
// waits for a fence.
namespace cadre::cuda {

/// An exchange, and whether anything is brought by its kernel; else all that others read was
/// written by kernels before.
struct FewJob : parallel::ExchangeJob {
  bool brings = false;

  explicit FewJob(const parallel::ExchangeJob& job)
      : ExchangeJob(job),
        brings(std::any_of(job.brought.begin(), job.brought.end(),
                           [](const parallel::BroughtRows& b) { return b.is_written(); })) {}
};

/// The exchange that a kernel goes through.
struct Turn {
  const WindowTable& window;
  const FewJob& job;
  uint32_t last_epoch;  ///< on its way until it is wanted

  __device__ Turn(const WindowTable& table, const FewJob& exchange)
      : window(table), job(exchange), last_epoch(table.home().epoch) {}
  __device__ uint32_t epoch() const { return last_epoch + 1; }
  __device__ Way way(Step from, bool begins) const {
    return Way(window, job.name, epoch(), from, begins);
  }
  __device__ WindowFlags flags(bool is_fenced = false) const { return {window, is_fenced}; }
};

/// Whether a warp has to wait until the window may be written, or a rank has failed: kernels before
/// that met a failure wrote nothing.
__device__ inline bool must_wait(const Turn& turn) {
  const parallel::Control& home = turn.window.home();
  bool waits = load_relaxed_system(&home.failure) != 0;
  for (int p = int(threadIdx.x) % portable::kLanes; p < turn.window.ranks; p += portable::kLanes)
    waits |= !schedule::has_reached(load_acquire_system(&home.read[p]), turn.last_epoch);
  const bool any_waits = __any_sync(~0u, waits);
  __syncwarp();  // behind what a lane has acquired
  return any_waits;
}

/// Brings what this rank has, and says so; whether no rank failed. `write()` is what each warp has
/// to write with it. Where nothing is brought, the last warps, which have the least to write, pass
/// a fence for what kernels before wrote while others look and write, and say that it is there.
template <class Write>
__device__ bool bring(const Turn& turn, Write&& write) {
  const WindowTable& window = turn.window;
  const int peer = int(blockDim.x) - 1 - int(threadIdx.x);
  const int warp_first = peer / portable::kLanes * portable::kLanes;
  const bool fences = !turn.job.brings && warp_first < window.ranks;
  if (fences) fence_system();
  const bool waits = !fences && must_wait(turn);
  const bool writes = !fences && !waits && !turn.job.brings;
  if (writes) write();
  if (__syncthreads_or(waits)) {
    Way way = turn.way(Step::kAwaitReaders, true);
    way.go_to(Step::kWrite);
    if (way.any_stopped()) return false;
  }
  if (turn.job.brings) {
    bring_all(window, turn.job, {0, 1});
    __syncthreads();
  }
  const schedule::ReadyTag tag{turn.epoch(), turn.job.name.tag()};
  if (peer < window.ranks) turn.flags(fences).store_ready(peer, tag.word());
  if (!writes) write();
  return true;
}

/// What blocks do before they read: write(), each warp of the first one with what is brought;
/// prepare(), before they wait; and take(), by some warps meanwhile, whether they may go on.
template <class Write, class Prepare, class Take>
struct BeforeReading {
  Write write;
  Prepare prepare;
  Take take;
};
template <class Write, class Prepare, class Take>
BeforeReading(Write, Prepare, Take) -> BeforeReading<Write, Prepare, Take>;

/// Waits for all ranks; whether none of them failed.
template <class Before>
__device__ bool bring_and_wait(const Turn& turn, Before&& before) {
  const bool leads = blockIdx.x == 0;
  if (leads && !bring(turn, before.write)) return false;
  before.prepare();
  Way way = turn.way(Step::kAwaitReady, leads);
  way.go_to(Step::kRead, before.take);
  return !way.any_stopped();
}

/// `read` returns whether its numbers are none, in all blocks or in none.
template <class Before, class Read>
__device__ void go_through(const Turn& turn, Before&& before, Read&& read) {
  const WindowTable& window = turn.window;
  const bool is_stopped = !bring_and_wait(turn, before);
  launch_dependents();
  const bool overflows = !is_stopped && read();
  // Who has failed may have written since what was read.
  const Arrival arrival = arrive(window, is_stopped, [&] { return has_failed(window); });
  if (!arrival.is_last) return;
  if (arrival.any || overflows) spoil(turn.job, {0, 1});
  if (arrival.any) return;
  if (int(threadIdx.x) < window.ranks) turn.flags().store_read(int(threadIdx.x), turn.epoch());
  if (threadIdx.x == 0) window.home().epoch = turn.epoch();
}
__device__ inline void do_nothing() {}
__device__ inline bool take_nothing() { return true; }

}  // namespace cadre::cuda
