#include "cuda/portable/offsets.h"

#include <algorithm>

#include "cuda/portable/row_map.cuh"

// offsets[e + 1] = min(R, sum of the counts up to e), or min(R, largest end up to e); of routing
// the stable sort of the choices by expert, too.
//
// counts, ends [E]; routing [T, top_k]; offsets [E + 1]; row_of [T, top_k]; slot_of [R], whose tail
// is not written. Counts and ends are scanned by one block. Choices are cut into pieces, one a
// block, which row_map.cuh sorts.
namespace cadre::cuda::portable {
namespace {

constexpr int kScanThreads = 1024;

Pieces pieces_of(const OffsetsProblem& p, const Device& device) {
  return {p.tokens * p.top_k, p.experts, device};
}

/// One block; Config says what is scanned.
template <class Config>
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const OffsetsJob job) {
  __shared__ int64_t partial[kLanes];
  begin_dependent();
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

template <class Config>
__global__ void __launch_bounds__(kMostSortWarps* kLanes, 1) routing_kernel(const OffsetsJob job) {
  begin_dependent();
  make_row_map<typename Config::Index>(job, dynamic_shared());
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
void launch(const OffsetsPlan& plan, OffsetsJob job, cudaStream_t stream) {
  const OffsetsProblem& p = plan.problem;
  const Grid one{.blocks = 1, .threads = kScanThreads, .stream = stream, .dependent = true};
  if (p.source == OffsetsSource::kCounts) return cuda::launch(scan_kernel<Counts<Index>>, one, job);
  if (p.source == OffsetsSource::kEnds) return cuda::launch(scan_kernel<Ends<Index>>, one, job);
  const Pieces pieces = pieces_of(p, plan.device);
  const unsigned blocks = unsigned(pieces.count), threads = unsigned(pieces.warps * kLanes);
  job.slots = p.tokens * p.top_k;
  job.run = run_length(job.slots, pieces.warps * pieces.count);
  cuda::launch(routing_kernel<Counts<Index>>,
               {.blocks = blocks,
                .threads = threads,
                .shared_bytes = row_map_bytes(pieces.warps, p.experts),
                .stream = stream,
                .cooperative = blocks > 1,
                .dependent = true},
               job);
}

}  // namespace

std::string refuses_offsets(const OffsetsProblem& p, const Device& device) {
  constexpr int kMostExperts = kFreeSharedBytes / int(sizeof(int32_t));
  if (p.source == OffsetsSource::kRouting && p.experts > kMostExperts)
    return text("routing takes at most ", kMostExperts, " experts; their counters are in shared ",
                "memory");
  return needs_sm80(p, device);
}

int64_t offsets_workspace_bytes(const OffsetsProblem& p, const Device& device) {
  if (p.source != OffsetsSource::kRouting) return 0;
  return row_map_workspace_bytes(pieces_of(p, device).count, p.experts);
}

void offsets(const OffsetsPlan& plan, const OffsetsArgs& args, Workspace workspace, Stream stream) {
  const OffsetsProblem& p = plan.problem;
  const OffsetsJob job{.source = args.source,
                       .offsets = args.offsets,
                       .row_of = args.map.row_of,
                       .slot_of = args.map.slot_of,
                       .status = args.status,
                       .prob = args.prob,
                       .row_prob = args.row_prob,
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
