#include "cuda/portable/offsets.h"

#include <algorithm>

#include "cuda/device/grid.h"
#include "cuda/device/scan.h"
#include "cuda/portable/launch.h"

// offsets[e + 1] = min(R, sum of the counts up to e), or min(R, largest end up to e); of routing
// the stable sort of the choices by expert, too.
//
// counts, ends [E]; routing [T, top_k]; offsets [E + 1]; row_of [T, top_k]; slot_of [R], whose tail
// is not written. Counts and ends are scanned by one block. Choices are cut into pieces, one a
// block, and each piece into runs of neighbours, one a warp. Each block counts the choices of its
// runs and writes the counts of its piece to the workspace; after a grid-wide barrier, the counts
// of all pieces give the first row of every expert in every run, and each warp assigns rows to its
// choices. Atomic additions are of integers, and ranks among equals follow the order of the
// choices, so nothing depends on the order of threads, or on the number of pieces.
namespace cadre::cuda::portable {
namespace {

constexpr int kScanThreads = 1024;
constexpr int kMostWarps = 16;
constexpr int kMostPieces = 64;
constexpr int kCounterBytes = 47 * 1024;  // of the 48 KiB that need no opt-in
constexpr int64_t kSlotsOfWarp = 64;      // at least; for fewer a block costs more than it saves

/// How routing is cut: into no more blocks than are resident at once, since they meet in a barrier.
struct Pieces {
  int warps = 1;  ///< of a block, each with E counters
  int count = 1;

  Pieces(const OffsetsProblem& p, const Device& device) {
    while (warps < kMostWarps && 2 * warps * int64_t(p.experts) * 4 <= kCounterBytes) warps *= 2;
    const int64_t slots = p.tokens * p.top_k, piece = warps * kSlotsOfWarp;
    const int most = std::clamp(device.units, 1, kMostPieces);
    count = int(std::clamp<int64_t>((slots + piece - 1) / piece, 1, most));
  }
};

/// The parameters of the kernels.
struct Job {
  const void* source;
  int32_t *offsets, *row_of, *slot_of, *status;
  int32_t* counts;           ///< [pieces, E] of routing
  int64_t rows, slots, run;  ///< run: choices of a warp, a multiple of 32
  int experts;
};

__device__ void write_status(const Job& job, bool decreasing, bool beyond) {
  const bool any_decreasing = __syncthreads_or(decreasing), any_beyond = __syncthreads_or(beyond);
  if (threadIdx.x == 0 && job.status != nullptr)
    *job.status = (any_decreasing ? kOffsetsDecreasing : 0) | (any_beyond ? kOffsetsBeyondRows : 0);
}

/// One block; Config says what is scanned.
template <class Config>
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const Job job) {
  __shared__ int64_t partial[kLanes];
  const auto* numbers = static_cast<const typename Config::Index*>(job.source);
  bool decreasing = false, beyond = false;
  int64_t carry = 0;
  if (threadIdx.x == 0) job.offsets[0] = 0;
  for (int first = 0; first < job.experts; first += kScanThreads) {
    const int e = first + int(threadIdx.x);
    int64_t number = 0;
    if (e < job.experts) {
      number = numbers[e];
      decreasing |= number < (Config::kEnds && e > 0 ? int64_t(numbers[e - 1]) : 0);
    }
    // Clamped to R + 1, which is beyond the rows like anything above it, so that sums do not
    // overflow.
    number = number < 0 ? 0 : number > job.rows ? job.rows + 1 : number;
    const typename Config::Join join;
    const Scanned scanned = block_scan(number, partial, join);
    const int64_t end = join(carry, scanned.upto);
    beyond |= end > job.rows;
    if (e < job.experts) job.offsets[e + 1] = int32_t(end < job.rows ? end : job.rows);
    carry = join(carry, scanned.all);
  }
  write_status(job, decreasing, beyond);
}

/// The choices of this warp: [first, last).
struct Run {
  int64_t first, last;

  __device__ explicit Run(const Job& job) {
    const int64_t number = int64_t(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    first = min(number * job.run, job.slots);
    last = min((number + 1) * job.run, job.slots);
  }
};

/// The expert of a choice, -1 where there is none.
template <class Index>
__device__ int expert_of(const Job& job, int64_t slot, int64_t last) {
  if (slot >= last) return -1;
  const Index e = static_cast<const Index*>(job.source)[slot];
  return e >= 0 && e < Index(job.experts) ? int(e) : -1;
}

/// Adds one to the counter of each choice of the warp's run. Integers: the order does not matter.
template <class Index>
__device__ void count_run(const Job& job, int32_t* counters) {
  const Run run(job);
#pragma unroll 4
  for (int64_t slot = run.first + threadIdx.x % kLanes; slot < run.last; slot += kLanes) {
    const int e = expert_of<Index>(job, slot, run.last);
    if (e >= 0) atomicAdd(&counters[e], 1);
  }
}

__device__ void clear(int32_t* counters, int count) {
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) counters[i] = 0;
  __syncthreads();
}

/// Writes the counts of the block's piece, and makes those of all blocks visible to each.
__device__ void publish_counts(const Job& job, const int32_t* counters) {
  for (int e = int(threadIdx.x); e < job.experts; e += int(blockDim.x)) {
    int32_t count = 0;
    for (int warp = 0; warp < int(blockDim.x / kLanes); ++warp)
      count += counters[warp * job.experts + e];
    job.counts[int64_t(blockIdx.x) * job.experts + e] = count;
  }
  grid_barrier();
}

/// Choices of one expert in the pieces before this block's, and in all.
struct Count {
  int before, all;
};

__device__ Count count_of(const Job& job, const int32_t* counters, int e) {
  Count count{0, 0};
  if (gridDim.x == 1) {
    for (int warp = 0; warp < int(blockDim.x / kLanes); ++warp)
      count.all += counters[warp * job.experts + e];
    return count;
  }
#pragma unroll 8
  for (int piece = 0; piece < int(gridDim.x); ++piece) {
    const int here = job.counts[int64_t(piece) * job.experts + e];
    count.before += piece < int(blockIdx.x) ? here : 0;
    count.all += here;
  }
  return count;
}

/// Shared memory of a block.
struct Shared {
  int64_t partial[kLanes];

  __device__ int32_t* counters() { return reinterpret_cast<int32_t*>(this + 1); }  ///< [warps, E]
};

/// Turns the counters into the row of each warp's next choice. Block 0 writes offsets.
__device__ void find_rows(const Job& job, Shared& shared) {
  int32_t* const counters = shared.counters();
  int64_t carry = 0;
  for (int first = 0; first < job.experts; first += int(blockDim.x)) {
    const int e = first + int(threadIdx.x);
    const Count count = e < job.experts ? count_of(job, counters, e) : Count{0, 0};
    const Scanned scanned = block_scan(count.all, shared.partial, Sum{});
    const int64_t end = carry + scanned.upto;
    carry += scanned.all;
    if (e >= job.experts) continue;
    if (blockIdx.x == 0) job.offsets[e + 1] = int32_t(end < job.rows ? end : job.rows);
    int next = int(end) - count.all + count.before;
    for (int warp = 0; warp < int(blockDim.x / kLanes); ++warp) {
      const int here = counters[warp * job.experts + e];
      counters[warp * job.experts + e] = next;
      next += here;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) job.offsets[0] = 0;
  if (blockIdx.x == 0) write_status(job, false, carry > job.rows);
  __syncthreads();
}

/// Assigns rows to the choices of the warp's run, 32 at a time; equal experts in the order of
/// lanes.
template <class Index>
__device__ void assign_rows(const Job& job, int32_t* next_row) {
  const Run run(job);
  const int lane = int(threadIdx.x % kLanes);
  int e = expert_of<Index>(job, run.first + lane, run.last);
  for (int64_t first = run.first; first < run.last; first += kLanes) {
    const int64_t slot = first + lane;
    const int later = expert_of<Index>(job, slot + kLanes, run.last);
    const unsigned equals = __match_any_sync(~0u, e);
    const int rank = __popc(equals & ((1u << lane) - 1));
    const int row = e >= 0 ? next_row[e] + rank : 0;
    __syncwarp();
    if (e >= 0 && rank == 0) next_row[e] += __popc(equals);
    __syncwarp();
    const bool kept = e >= 0 && row < job.rows;
    if (slot < run.last && job.row_of != nullptr) job.row_of[slot] = kept ? row : -1;
    if (kept && job.slot_of != nullptr) job.slot_of[row] = int32_t(slot);
    e = later;
  }
}

template <class Config>
__global__ void __launch_bounds__(kMostWarps* kLanes) routing_kernel(const Job job) {
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  int32_t* const mine = shared.counters() + int(threadIdx.x / kLanes) * job.experts;
  clear(shared.counters(), int(blockDim.x / kLanes) * job.experts);
  count_run<typename Config::Index>(job, mine);
  __syncthreads();
  if (gridDim.x > 1) publish_counts(job, shared.counters());
  find_rows(job, shared);
  assign_rows<typename Config::Index>(job, mine);
}

template <class Number>
struct Counts {
  using Index = Number;
  using Join = Sum;
  static constexpr bool kEnds = false;
};
template <class Number>
struct Ends {
  using Index = Number;
  using Join = Largest;
  static constexpr bool kEnds = true;
};

template <class Index>
void launch(const OffsetsPlan& plan, Job job, cudaStream_t stream) {
  const OffsetsProblem& p = plan.problem;
  if (p.source == OffsetsSource::kCounts)
    return cuda::launch(scan_kernel<Counts<Index>>, {1, kScanThreads, 0, stream}, job);
  if (p.source == OffsetsSource::kEnds)
    return cuda::launch(scan_kernel<Ends<Index>>, {1, kScanThreads, 0, stream}, job);
  const Pieces pieces(p, plan.device);
  const unsigned blocks = unsigned(pieces.count), threads = unsigned(pieces.warps * kLanes);
  const int runs = pieces.warps * pieces.count;
  job.slots = p.tokens * p.top_k;
  job.run = ((job.slots + runs - 1) / runs + kLanes - 1) / kLanes * kLanes;
  cuda::launch(
      routing_kernel<Counts<Index>>,
      {.blocks = blocks,
       .threads = threads,
       .shared_bytes = int(sizeof(Shared)) + pieces.warps * p.experts * int(sizeof(int32_t)),
       .stream = stream,
       .cooperative = blocks > 1},
      job);
}

}  // namespace

std::string refuses_offsets(const OffsetsProblem& p, const Device& device) {
  constexpr int kMostExperts = kCounterBytes / int(sizeof(int32_t));
  if (p.source == OffsetsSource::kRouting && p.experts > kMostExperts)
    return text("routing takes at most ", kMostExperts, " experts; their counters are in shared ",
                "memory");
  return needs_sm80(p, device);
}

int64_t offsets_workspace_bytes(const OffsetsProblem& p, const Device& device) {
  if (p.source != OffsetsSource::kRouting) return 0;
  const int pieces = Pieces(p, device).count;
  return pieces == 1 ? 0 : int64_t(pieces) * p.experts * int64_t(sizeof(int32_t));
}

void offsets(const OffsetsPlan& plan, const OffsetsArgs& args, Workspace workspace, Stream stream) {
  const OffsetsProblem& p = plan.problem;
  const Job job{.source = args.source,
                .offsets = args.offsets,
                .row_of = args.map.row_of,
                .slot_of = args.map.slot_of,
                .status = args.status,
                .counts = static_cast<int32_t*>(workspace.data),
                .rows = p.rows,
                .slots = 0,
                .run = 0,
                .experts = p.experts};
  if (p.index == DType::kI32)
    launch<int32_t>(plan, job, stream_of(stream));
  else
    launch<int64_t>(plan, job, stream_of(stream));
}

}  // namespace cadre::cuda::portable
