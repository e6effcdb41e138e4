#include "cuda/portable/permute.h"

#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// permute            rows[row] = tokens[t]              row_prob[row] = prob[t, j]
// permute backward   tokens[t] = sum_j rows[row]        dprob[t, j] = drow_prob[row]
// combine            tokens[t] = sum_j p rows[row]
// combine backward   rows[row] = p tokens[t]            dprob[t, j] = <tokens[t], y[row]>
//
// tokens [T, H], rows, y [R, H], with t, j the token and the choice of slot_of[row] and, the other
// way, row = row_of[t, j]. Rows at or beyond offsets[E] are not read, and written as zero or not at
// all. A warp takes a segment of a row or token; of a row whose product is wanted all of it. Each
// sum over j is one thread's, in the order of j; the 256 sums of a product are those of the CPU.
namespace cadre::cuda::portable {
namespace {

constexpr int kRounds = 4;  // chunks of a thread that are under way together
constexpr int kAtOnce = 4;  // choices whose rows are

/// What the kernels know.
struct Job {
  Matrix tokens, rows, y;
  const int32_t *row_of, *slot_of, *offsets;
  const float *prob, *drow_prob;
  float *row_prob, *dprob;
  int64_t bound, slots, hidden;  ///< bound: R
  int experts, top_k;
  bool zero_tail, weighted;

  __device__ int64_t used() const { return schedule::rows_used(offsets, experts, bound); }
  __device__ bool is_slot(int64_t slot) const { return slot >= 0 && slot < slots; }
};

/// Kernels begin with it.
template <class Config>
__device__ void assume_dtypes(const Job& job) {
  if constexpr (!Config::kHalves) return;
  assume_halves(job.tokens);
  assume_halves(job.rows);
  assume_halves(job.y);
}

/// The stored element times p.
__device__ Chunk scaled(const Chunk& chunk, DType dtype, float p) {
  float x[kChunk];
  decode(chunk, dtype, x);
  for (float& value : x) value *= p;
  return encode(x, dtype);
}

/// rows[row] from the token of its slot, or zero.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes) rows_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used();
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    const int slot = row < used ? job.slot_of[row] : -1;
    const bool known = job.is_slot(slot);
    const float p = known && job.prob != nullptr ? job.prob[slot] : 0.0f;
    const int64_t token = slot / job.top_k, first = first_column(kRounds);
    Chunk chunks[kRounds] = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (known && first + i * kRound < job.hidden)
        chunks[i] = load<Config::kWide>(job.tokens, {token, first + i * kRound});
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (known && job.weighted) chunks[i] = scaled(chunks[i], job.tokens.dtype, p);
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (first + i * kRound < job.hidden)
        store<Config::kWide>(chunks[i], job.rows, {row, first + i * kRound});
    if (first == 0 && job.row_prob != nullptr) job.row_prob[row] = p;
  });
}

/// <tokens[token], y[row]>, in the first thread of the warp; with `write` on the way also
/// rows[row] = p tokens[token].
template <class Config>
__device__ float product(const Job& job, int64_t token, int64_t row, bool write, float p) {
  float sums[kChunk] = {};
  for_chunks(job.hidden, [&](int64_t column) {
    const Chunk token_chunk = load<Config::kWide>(job.tokens, {token, column});
    const Chunk row_chunk = load<Config::kWide>(job.y, {row, column});
    float x[kChunk], y[kChunk];
    decode(token_chunk, job.tokens.dtype, x);
    decode(row_chunk, job.y.dtype, y);
    for (int i = 0; i < kChunk; ++i) sums[i] += x[i] * y[i];
    if (!write) return;
    for (float& value : x) value *= p;
    store<Config::kWide>(encode(x, job.rows.dtype), job.rows, {row, column});
  });
  return total<kLanes>(sums);
}

/// dprob of 32 slots whose row does not point back at them. With a map of offsets.h those are the
/// dropped ones, and their gradient is zero; any others are worked out one by one.
template <class Config>
__device__ void dropped_slots(const Job& job, int64_t first, int64_t used) {
  const int64_t slot = first + threadIdx.x;
  const int64_t row = slot < job.slots ? job.row_of[slot] : -1;
  const bool has_row = row >= 0 && row < used;
  if (slot < job.slots && !has_row) job.dprob[slot] = 0;
  for (unsigned odd = __ballot_sync(~0u, has_row && job.slot_of[row] != slot); odd != 0;
       odd &= odd - 1) {
    const int lane = __ffs(int(odd)) - 1;
    const int64_t its_row = __shfl_sync(~0u, row, lane);
    const float sum = product<Config>(job, (first + lane) / job.top_k, its_row, false, 0.0f);
    if (threadIdx.x == 0) job.dprob[first + lane] = sum;
  }
}

/// Combine backward with dprob.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes) rows_and_products_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used(), last = job.zero_tail ? job.bound : used;
  const int64_t groups = (job.slots + kLanes - 1) / kLanes;
  for_rows(last + groups, [&](int64_t item) {
    if (item >= last) return dropped_slots<Config>(job, (item - last) * kLanes, used);
    const int64_t slot = item < used ? job.slot_of[item] : -1;
    if (!job.is_slot(slot)) {
      return for_chunks(job.hidden, [&](int64_t column) {
        store<Config::kWide>(Chunk{}, job.rows, {item, column});
      });
    }
    const float sum = product<Config>(job, slot / job.top_k, item, true, job.prob[slot]);
    if (threadIdx.x == 0 && job.row_of[slot] == item) job.dprob[slot] = sum;
  });
}

/// The sum over the choices of one token in one chunk.
template <class Config>
__device__ void sum_choices(const Job& job, int64_t token, int64_t used, int64_t column) {
  float sum[kChunk] = {};
  for (int first = 0; first < job.top_k; first += kAtOnce) {
    Chunk chunks[kAtOnce];
    int64_t row[kAtOnce];
    float p[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t slot = token * job.top_k + first + i;
      row[i] = first + i < job.top_k ? job.row_of[slot] : -1;
      if (row[i] >= used) row[i] = -1;
      if (row[i] >= 0) chunks[i] = load<Config::kWide>(job.rows, {row[i], column});
      p[i] = row[i] >= 0 && job.weighted ? job.prob[slot] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row[i] < 0) continue;
      float x[kChunk];
      decode(chunks[i], job.rows.dtype, x);
      for (int k = 0; k < kChunk; ++k) sum[k] += p[i] * x[k];
    }
  }
  store<Config::kWide>(encode(sum, job.tokens.dtype), job.tokens, {token, column});
}

/// Combine and permute backward.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes) tokens_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used();
  for_rows(job.slots / job.top_k, [&](int64_t token) {
    for_chunks<1>(job.hidden,
                  [&](int64_t column) { sum_choices<Config>(job, token, used, column); });
    if (job.dprob == nullptr || segment_index() != 0) return;
    for (int choice = int(threadIdx.x); choice < job.top_k; choice += kLanes) {
      const int64_t slot = token * job.top_k + choice, row = job.row_of[slot];
      job.dprob[slot] = row >= 0 && row < used ? job.drow_prob[row] : 0.0f;
    }
  });
}

/// Whether chunks are wide, and all dtypes bf16 or f16.
struct WideHalves {
  static constexpr bool kWide = true, kHalves = true;
};
struct Wide {
  static constexpr bool kWide = true, kHalves = false;
};
struct Narrow {
  static constexpr bool kWide = false, kHalves = false;
};

template <class Config>
void launch(const PermuteProblem& p, const Job& job, cudaStream_t stream) {
  if (p.pass == PermutePass::kPermuteBackward || p.pass == PermutePass::kCombine) {
    const RowGrid grid = RowGrid::of(p.tokens, p.hidden, 1);
    tokens_kernel<Config><<<grid.blocks, grid.threads, 0, stream>>>(job);
  } else if (job.dprob != nullptr) {
    const int64_t items = p.rows + (job.slots + kLanes - 1) / kLanes;
    const RowGrid grid = RowGrid::of(items, p.hidden, kWholeRows);
    rows_and_products_kernel<Config><<<grid.blocks, grid.threads, 0, stream>>>(job);
  } else {
    const RowGrid grid = RowGrid::of(p.rows, p.hidden, kRounds);
    rows_kernel<Config><<<grid.blocks, grid.threads, 0, stream>>>(job);
  }
  check_launch("permute");
}

}  // namespace

void permute(const PermutePlan& plan, const PermuteArgs& args, Workspace, Stream stream) {
  const PermuteProblem& p = plan.problem;
  const bool combines =
      p.pass == PermutePass::kCombine || p.pass == PermutePass::kCombineBackward;
  const Job job{.tokens = Matrix(args.tokens),
                .rows = Matrix(args.rows),
                .y = Matrix(args.y),
                .row_of = args.map.row_of,
                .slot_of = args.map.slot_of,
                .offsets = args.offsets.data,
                .prob = args.prob,
                .drow_prob = args.drow_prob,
                .row_prob = args.row_prob,
                .dprob = args.dprob,
                .bound = p.rows,
                .slots = p.tokens * p.top_k,
                .hidden = p.hidden,
                .experts = p.experts,
                .top_k = p.top_k,
                .zero_tail = p.tail == Tail::kZero,
                .weighted = p.prob && combines};
  const bool wide = job.tokens.is_wide() && job.rows.is_wide() && job.y.is_wide();
  if (!wide)
    launch<Narrow>(p, job, stream_of(stream));
  else if (p.dtype == DType::kF32)
    launch<Wide>(p, job, stream_of(stream));
  else
    launch<WideHalves>(p, job, stream_of(stream));
}

}  // namespace cadre::cuda::portable
