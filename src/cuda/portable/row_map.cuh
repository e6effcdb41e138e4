#pragma once
#include <algorithm>
#include <cstdint>

#include "cadre/device.h"
#include "cadre/host_device.h"
#include "cadre/offsets.h"
#include "cuda/device/grid.h"
#include "cuda/device/scan.h"
#include "cuda/portable/launch.h"

// The stable sort of the choices by expert, with the offsets, by all warps of a grid.
//
// Choices are cut into runs of neighbours, one a warp. Each block counts the choices of its runs
// and writes the counts to the workspace; after a grid-wide barrier, the counts of all blocks give
// the first row of every expert in every run, and each warp assigns rows to its choices. Atomic
// additions are of integers, and ranks among equals follow the order of the choices, so nothing
// depends on the order of threads, or on how the choices are cut.
namespace cadre::cuda::portable {

constexpr int kFreeSharedBytes = 47 * 1024;  // 48 KiB need no opt-in; RowMapShared has the rest

/// No more blocks than are resident at once, since they meet in a barrier, and few, since each
/// reads the counts of all.
constexpr int kMostRowMapBlocks = 64;
inline int most_row_map_blocks(const Device& device) {
  return std::clamp(device.units, 1, kMostRowMapBlocks);
}

constexpr int kMostSortWarps = 16;
constexpr int64_t kSlotsOfWarp = 64;  // at least; for fewer a block costs more than it saves

/// How choices are cut.
struct Pieces {
  int warps = 1;  ///< of a block, each with E counters
  int count = 1;

  /// Of each of so many equal sections of the choices, whose blocks have no other.
  Pieces(int64_t slots, int experts, const Device& device, int sections = 1) {
    while (warps < kMostSortWarps && 2 * warps * int64_t(experts) * 4 <= kFreeSharedBytes)
      warps *= 2;
    const int64_t piece = warps * kSlotsOfWarp, each = slots / sections;
    const int most = std::max(most_row_map_blocks(device) / sections, 1);
    count = sections * int(std::clamp<int64_t>((each + piece - 1) / piece, 1, most));
  }
};

/// Which of the blocks that share some work this one is.
struct BlockShare {
  int index, count;

  __device__ static BlockShare of_grid() { return {int(blockIdx.x), int(gridDim.x)}; }
};

/// Choices of a warp, of so many warps.
CADRE_HD constexpr int64_t run_length(int64_t slots, int warps) {
  return ((slots + warps - 1) / warps + kLanes - 1) / kLanes * kLanes;
}

/// The parameters of the kernels that make offsets.
struct OffsetsJob {
  const void* source;
  int32_t *offsets, *row_of, *slot_of, *status;
  const float* prob;         ///< [slots], for row_prob
  float* row_prob;           ///< [rows]; null: not wanted
  int32_t* counts;           ///< [blocks, E] of routing
  int64_t rows, slots, run;  ///< run: choices of a warp
  int experts;
  int sections = 1;  ///< equal parts of the choices, each with as many blocks
};

/// The section of a block's choices, and the blocks that it has.
struct Section {
  int index, first_block, blocks;

  __device__ Section(const OffsetsJob& job, const BlockShare& all)
      : blocks(all.count / job.sections) {
    index = all.index / blocks;
    first_block = index * blocks;
  }
  __device__ bool has(int block) const {
    return block >= first_block && block < first_block + blocks;
  }
};

__device__ inline void write_status(const OffsetsJob& job, bool decreasing, bool beyond) {
  if (job.status == nullptr) return;
  const bool any_decreasing = __syncthreads_or(decreasing), any_beyond = __syncthreads_or(beyond);
  if (threadIdx.x == 0)
    *job.status = (any_decreasing ? kOffsetsDecreasing : 0) | (any_beyond ? kOffsetsBeyondRows : 0);
}

/// The choices of this warp: [first, last).
struct Run {
  int64_t first, last;

  __device__ Run(const OffsetsJob& job, const BlockShare& all) {
    const Section section(job, all);
    const int64_t each = job.slots / job.sections, begin = section.index * each;
    const int64_t number =
        int64_t(all.index - section.first_block) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    first = begin + min(number * job.run, each);
    last = begin + min((number + 1) * job.run, each);
  }
};

/// The expert of a choice, -1 where there is none.
template <class Index>
__device__ int expert_of(const OffsetsJob& job, int64_t slot, int64_t last) {
  if (slot >= last) return -1;
  const Index e = static_cast<const Index*>(job.source)[slot];
  return e >= 0 && e < Index(job.experts) ? int(e) : -1;
}

/// What row_prob has of a choice, where it is wanted.
__device__ inline float prob_of(const OffsetsJob& job, int64_t slot, int64_t last) {
  return job.row_prob != nullptr && slot < last ? job.prob[slot] : 0;
}

/// Adds one to the counter of each choice of the warp's run. Integers: the order does not matter.
template <class Index>
__device__ void count_run(const OffsetsJob& job, const BlockShare& all, int32_t* counters) {
  const Run run(job, all);
#pragma unroll 4
  for (int64_t slot = run.first + threadIdx.x % kLanes; slot < run.last; slot += kLanes) {
    const int e = expert_of<Index>(job, slot, run.last);
    if (e >= 0) atomicAdd(&counters[e], 1);
  }
}

__device__ inline void clear(int32_t* counters, int count) {
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) counters[i] = 0;
  __syncthreads();
}

/// Choices of an expert in the runs of this block.
__device__ inline int32_t count_of_block(const OffsetsJob& job, const int32_t* counters, int e) {
  int32_t count = 0;
  for (int warp = 0; warp < int(blockDim.x / kLanes); ++warp)
    count += counters[warp * job.experts + e];
  return count;
}

/// Writes the counts of the block, and makes those of all blocks visible to each.
__device__ inline void publish_counts(const OffsetsJob& job, const BlockShare& all,
                                      const int32_t* counters) {
  for (int e = int(threadIdx.x); e < job.experts; e += int(blockDim.x))
    job.counts[int64_t(all.index) * job.experts + e] = count_of_block(job, counters, e);
  grid_barrier();
}

/// Choices of one expert in the blocks before this one, and in all; those before its section, and
/// in that.
struct Count {
  int before, all, before_section, in_section;
};

__device__ inline Count count_of(const OffsetsJob& job, const BlockShare& all,
                                 const int32_t* counters, int e) {
  Count count{0, 0, 0, 0};
  if (all.count == 1) {
    count.all = count.in_section = count_of_block(job, counters, e);
    return count;
  }
  const Section section(job, all);
  constexpr int kAtOnce = 32;  // counts in flight
  for (int first = 0; first < all.count; first += kAtOnce) {
    int here[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      here[i] = first + i < all.count ? job.counts[int64_t(first + i) * job.experts + e] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      count.before += first + i < all.index ? here[i] : 0;
      count.all += here[i];
      count.before_section += first + i < section.first_block ? here[i] : 0;
      count.in_section += section.has(first + i) ? here[i] : 0;
    }
  }
  return count;
}

/// Shared memory of a block.
struct RowMapShared {
  int64_t partial[kLanes];

  __device__ int32_t* counters() { return reinterpret_cast<int32_t*>(this + 1); }  ///< [warps, E]
};

/// What becomes of the sorted choices: offsets and a map in global memory.
struct OffsetsAndMap {
  static constexpr bool kBySection = false;
  const OffsetsJob& job;
  bool is_first;  ///< of the blocks

  /// Of each expert, in some thread of every block: where its rows end.
  __device__ void end_expert(int e, int64_t end) const {
    if (is_first) job.offsets[e + 1] = int32_t(end < job.rows ? end : job.rows);
  }
  /// Of each choice, in the thread that sorts it: its row, or -1 of no expert; and its probability,
  /// if the job wants those of rows.
  __device__ void place(int64_t slot, int, int64_t row, float prob) const {
    const bool kept = row >= 0 && row < job.rows;
    if (job.row_of != nullptr) job.row_of[slot] = kept ? int32_t(row) : -1;
    if (kept && job.slot_of != nullptr) job.slot_of[row] = int32_t(slot);
    if (kept && job.row_prob != nullptr) job.row_prob[row] = prob;
  }
};

/// Turns the counters into the row of each warp's next choice, and tells where experts end.
template <class Sorted>
__device__ void find_rows(const OffsetsJob& job, const BlockShare& all, RowMapShared& shared,
                          const Sorted& sorted) {
  int32_t* const counters = shared.counters();
  int64_t carry = 0, carry_of_section = 0;
  for (int first = 0; first < job.experts; first += int(blockDim.x)) {
    const int e = first + int(threadIdx.x);
    const Count count = e < job.experts ? count_of(job, all, counters, e) : Count{0, 0, 0, 0};
    const Scanned scanned = block_scan(count.all, shared.partial, Sum{});
    const int64_t end = carry + scanned.upto;
    carry += scanned.all;
    if constexpr (Sorted::kBySection) {
      const Scanned own = block_scan(count.in_section, shared.partial, Sum{});
      const int64_t begin = carry_of_section + own.upto - count.in_section;
      carry_of_section += own.all;
      if (e < job.experts) sorted.begin_section(e, end - count.all + count.before_section, begin);
    }
    if (e >= job.experts) continue;
    sorted.end_expert(e, end);
    int next = int(end) - count.all + count.before;
    for (int warp = 0; warp < int(blockDim.x / kLanes); ++warp) {
      const int here = counters[warp * job.experts + e];
      counters[warp * job.experts + e] = next;
      next += here;
    }
  }
  if (all.index == 0 && threadIdx.x == 0 && job.offsets != nullptr) job.offsets[0] = 0;
  if (all.index == 0) write_status(job, false, carry > job.rows);
  __syncthreads();
}

/// Assigns rows to the choices of the warp's run, 32 at a time; equal experts in the order of
/// lanes.
template <class Index, class Sorted>
__device__ void assign_rows(const OffsetsJob& job, const BlockShare& all, int32_t* next_row,
                            const Sorted& sorted) {
  const Run run(job, all);
  const int lane = int(threadIdx.x % kLanes);
  int e = expert_of<Index>(job, run.first + lane, run.last);
  for (int64_t first = run.first; first < run.last; first += kLanes) {
    const int64_t slot = first + lane;
    const int later = expert_of<Index>(job, slot + kLanes, run.last);
    const float prob = prob_of(job, slot, run.last);  // on its way while the row is found
    const unsigned equals = __match_any_sync(~0u, e);
    const int rank = __popc(equals & ((1u << lane) - 1));
    const int row = e >= 0 ? next_row[e] + rank : -1;
    __syncwarp();
    if (e >= 0 && rank == 0) next_row[e] += __popc(equals);
    __syncwarp();
    if (slot < run.last) sorted.place(slot, e, row, prob);
    e = later;
  }
}

/// All warps of these blocks must call it, of one block or of a cooperative grid; `memory` is
/// shared: RowMapShared and a counter for each warp and expert. `sorted` is told what is found, as
/// OffsetsAndMap is; ends come before places, with a barrier of the block between them.
template <class Index, class Sorted>
__device__ void sort_choices(const OffsetsJob& job, const BlockShare& all, uint8_t* memory,
                             const Sorted& sorted) {
  auto& shared = *reinterpret_cast<RowMapShared*>(memory);
  int32_t* const mine = shared.counters() + int(threadIdx.x / kLanes) * job.experts;
  clear(shared.counters(), int(blockDim.x / kLanes) * job.experts);
  count_run<Index>(job, all, mine);
  __syncthreads();
  if (all.count > 1) publish_counts(job, all, shared.counters());
  find_rows(job, all, shared, sorted);
  assign_rows<Index>(job, all, mine, sorted);
}

/// The same by all blocks of the grid, to offsets and a map.
template <class Index>
__device__ void make_row_map(const OffsetsJob& job, uint8_t* memory) {
  const BlockShare all = BlockShare::of_grid();
  sort_choices<Index>(job, all, memory, OffsetsAndMap{job, all.index == 0});
}

/// Of a block of so many warps.
inline int row_map_bytes(int warps, int experts) {
  return int(sizeof(RowMapShared)) + warps * experts * int(sizeof(int32_t));
}

/// What blocks write to the workspace; one block has nobody to tell.
inline int64_t row_map_workspace_bytes(int64_t blocks, int experts) {
  return blocks <= 1 ? 0 : blocks * experts * int64_t(sizeof(int32_t));
}

}  // namespace cadre::cuda::portable
