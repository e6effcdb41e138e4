#include <algorithm>
#include <utility>

#include "cuda/device/launch.h"
#include "cuda/parallel/rank_map.cuh"

namespace cadre::cuda {
namespace {

using parallel::ExchangeJob;
using parallel::ExchangeName;

constexpr int kThreads = 256, kBlocksOfUnit = 4;
static_assert(kThreads > parallel::kMostRanks);
static_assert(parallel::kMostSortBlocks >= portable::kMostRowMapBlocks &&
              parallel::kMostSortBlocks >= parallel::kMostRanks);

/// The kernel behind one that waits is let go when that is over.
__global__ void await_kernel(const WindowTable window, const ExchangeName name) {
  wait_for_predecessors();
  Way(window, name, next_epoch(window)).go_to(Step::kWrite);
  launch_dependents();
}

/// Every block waits until it may write, and the last one to have done so for the other ranks.
__global__ void begin_kernel(const WindowTable window, const __grid_constant__ ExchangeJob job) {
  wait_for_predecessors();
  Way way(window, job.name, next_epoch(window));
  way.go_to(Step::kWrite);
  if (!way.any_stopped()) bring_all(window, job, BlockShare::of_grid());
  // Where a block was stopped, nobody may be told that all has been brought.
  const Arrival arrival = arrive(window, way.any_stopped(), [] { return false; });
  if (!arrival.is_last || arrival.any) return;
  way.go_to(Step::kAwaitReady);
  way.go_to(Step::kRead);
  launch_dependents();
}

/// Only what it brings.
__global__ void bring_kernel(const WindowTable window, const __grid_constant__ ExchangeJob job) {
  wait_for_predecessors();
  Way way(window, job.name, next_epoch(window));
  way.go_to(Step::kWrite);
  launch_dependents();
  if (!way.any_stopped()) bring_all(window, job, BlockShare::of_grid());
}

/// Makes outcomes NaN where they are none, and says that this rank has read.
__global__ void end_kernel(const WindowTable window, const __grid_constant__ ExchangeJob job) {
  begin_dependent();
  const bool failed = load_acquire_system(&window.home().failure) != 0;
  if (failed || *job.verdict != 0) spoil(job, BlockShare::of_grid());
  if (blockIdx.x != 0) return;
  const uint32_t epoch = next_epoch(window);
  if (__syncthreads_or(threadIdx.x == 0 && has_failed(window))) return;
  Way(window, job.name, epoch, Step::kRead).go_to(Step::kDone);
  if (threadIdx.x == 0) window.home().epoch = epoch;
}

template <bool kPushes>
__global__ void __launch_bounds__(portable::kMostSortWarps* portable::kLanes, 1)
    map_kernel(const WindowTable window, const parallel::MapJob job, const int sort_bytes) {
  begin_dependent();
  auto* firsts = reinterpret_cast<int32_t*>(dynamic_shared() + sort_bytes);
  int32_t* ends = firsts + job.ranks + 1;
  const BlockShare share = BlockShare::of_grid();
  const RankMap map{job, firsts, ends, nullptr, true};
  if constexpr (kPushes)
    sort_choices_of_ranks(
        MapWithPlaces{map, share.index / (share.count / job.ranks), ends + job.experts}, job.chosen,
        share);
  else
    sort_choices_of_ranks(map, job.chosen, share);
  if (share.index == 0) map.finish(window);
}

/// A grid of so many blocks, at most some an SM.
Grid grid_of(int64_t blocks, const Lane& lane) {
  const auto most = int64_t(kBlocksOfUnit) * lane.units;
  return {.blocks = unsigned(std::clamp<int64_t>(blocks, 1, most)),
          .threads = kThreads,
          .stream = lane.stream,
          .dependent = true};
}

/// A grid that copies so many bytes. One whose blocks are too many to wait has that done before.
Grid grid_of_bytes(const WindowTable& window, const ExchangeName& name, int64_t bytes,
                   const Lane& lane) {
  constexpr int64_t kBytesOfBlock = 16 << 10;
  const Grid grid = grid_of((bytes + kBytesOfBlock - 1) / kBytesOfBlock, lane);
  if (grid.blocks.x > unsigned(lane.most_waiting())) await_readers(window, name, lane.stream);
  return grid;
}

/// Bytes that it copies.
int64_t bytes_of(const parallel::BroughtRows& b, int ranks) {
  if (!b.is_written()) return 0;
  return b.all() * b.row_bytes * (b.to_all ? ranks : 1);
}

}  // namespace

void await_readers(const WindowTable& window, const ExchangeName& name, cudaStream_t stream) {
  launch(await_kernel, {.blocks = 1, .threads = kThreads, .stream = stream, .dependent = true},
         window, name);
}

void begin_exchange(const WindowTable& window, const ExchangeJob& job, const Lane& lane) {
  int64_t bytes = 0;
  for (const parallel::BroughtRows& b : job.brought) bytes += bytes_of(b, window.ranks);
  launch(begin_kernel, grid_of_bytes(window, job.name, bytes, lane), window, job);
}

ExchangeJob bring_large(const WindowTable& window, const ExchangeJob& job, const Lane& lane) {
  constexpr int64_t kLittle = 64 << 10;  // bytes, for which a block does not take long
  ExchangeJob large{.name = job.name}, rest = job;
  int64_t bytes = 0;
  for (size_t i = 0; i < job.brought.size(); ++i) {
    const int64_t here = bytes_of(job.brought[i], window.ranks);
    if (job.brought[i].to_all || here <= kLittle) continue;
    large.brought[i] = std::exchange(rest.brought[i], {});
    bytes += here;
  }
  if (bytes > 0) launch(bring_kernel, grid_of_bytes(window, job.name, bytes, lane), window, large);
  return rest;
}

void end_exchange(const WindowTable& window, const ExchangeJob& job, const Lane& lane) {
  int64_t rows = 0;
  for (const parallel::Outcome& o : job.outcomes) rows += o.rows;
  // A block an SM: where nothing failed they look at two words.
  launch(end_kernel, grid_of(std::min<int64_t>(rows, lane.units), lane), window, job);
}

void make_map(const WindowTable& window, const parallel::MapJob& job, const Lane& lane) {
  const bool pushes = job.map.place_of != nullptr;
  const portable::Pieces pieces(job.ranks * job.choices, job.ranks * job.experts, job.sort->device,
                                pushes ? job.ranks : 1);
  const MapShape shape(job, pieces.warps, false);
  launch(pushes ? map_kernel<true> : map_kernel<false>,
         {.blocks = unsigned(pieces.count),
          .threads = unsigned(pieces.warps * portable::kLanes),
          .shared_bytes = shape.bytes,
          .stream = lane.stream,
          .cooperative = pieces.count > 1,
          .dependent = true},
         window, job, shape.sort_bytes);
}

}  // namespace cadre::cuda
