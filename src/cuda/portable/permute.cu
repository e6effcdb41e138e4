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
// all. A warp takes a segment of a token, which it writes to all of its rows or sums from them, or
// a whole row whose dot product is wanted. Each sum over j is one thread's, in the order of j; a
// dot product has 256 partial sums, as on the CPU.
namespace cadre::cuda::portable {
namespace {

constexpr int kRounds = 4;  // chunks that a thread has in flight
constexpr int kAtOnce = 4;  // choices whose rows a thread has in flight

/// The parameters of the kernels.
struct Job {
  Matrix tokens, rows, y;
  const int32_t *row_of, *slot_of, *offsets;
  const float *prob, *drow_prob, *drow_scale;
  float *row_prob, *dprob;
  int64_t bound, slots, hidden;  ///< bound: R
  int experts, top_k;
  bool zero_tail, weighted;

  __device__ int64_t used() const { return schedule::rows_used(offsets, experts, bound); }
  /// Of a row's probability, and of the same where it scales a bias.
  __device__ float row_gradient(int64_t row) const {
    return drow_scale == nullptr ? drow_prob[row] : drow_prob[row] + drow_scale[row];
  }
  __device__ bool is_slot(int64_t slot) const { return slot >= 0 && slot < slots; }
  /// Whether a slot and a row point at each other. With a map of offsets.h all do that are kept.
  __device__ bool is_pair(int64_t slot, int64_t row, int64_t used) const {
    return row >= 0 && row < used && slot_of[row] == slot;
  }
};

/// Kernels call it first.
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

/// The chunks of a thread in its segment of one token.
struct Chunks {
  Chunk of[kRounds];
};

template <class Config>
__device__ Chunks read_token(const Job& job, int64_t token) {
  Chunks chunks{};
  const int64_t first = first_column(kRounds);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (first + i * kRound < job.hidden)
      chunks.of[i] = load<Config::kWide>(job.tokens, {token, first + i * kRound});
  return chunks;
}

template <class Config>
__device__ void write_row(const Job& job, int64_t row, const Chunks& chunks, float p) {
  const int64_t first = first_column(kRounds);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const Chunk chunk = job.weighted ? scaled(chunks.of[i], job.rows.dtype, p) : chunks.of[i];
    if (first + i * kRound < job.hidden)
      store<Config::kWide>(chunk, job.rows, {row, first + i * kRound});
  }
  if (first == 0 && job.row_prob != nullptr) job.row_prob[row] = p;
}

/// rows[row] from the token of its slot, or zero.
template <class Config>
__device__ void make_row(const Job& job, int64_t row, int64_t used) {
  const int slot = row < used ? job.slot_of[row] : -1;
  const bool known = job.is_slot(slot);
  const float p = known && job.prob != nullptr ? job.prob[slot] : 0.0f;
  write_row<Config>(job, row, known ? read_token<Config>(job, slot / job.top_k) : Chunks{}, p);
}

/// Without row_of: each row reads its token.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks) rows_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used();
  for_rows(job.zero_tail ? job.bound : used,
           [&](int64_t row) { make_row<Config>(job, row, used); });
}

/// Calls work(row) with those of 32 rows that no slot points back at: the tail, and rows of a map
/// that does not come from offsets.h.
template <class Work>
__device__ void for_unpaired_rows(const Job& job, int64_t first, int64_t used, Work&& work) {
  const int64_t row = first + threadIdx.x, last = job.zero_tail ? job.bound : used;
  const int64_t slot = row < used ? job.slot_of[row] : -1;
  const bool paired = job.is_slot(slot) && job.row_of[slot] == row;
  for (unsigned rest = __ballot_sync(~0u, row < last && !paired); rest != 0; rest &= rest - 1)
    work(first + __ffs(int(rest)) - 1);
}

/// With row_of: each token is read once and written to all of its rows. Warps beyond those of the
/// tokens write the remaining rows.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks)
    scatter_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used(), tokens = job.slots / job.top_k;
  for_rows(tokens + (job.bound + kLanes - 1) / kLanes, [&](int64_t item) {
    if (item >= tokens)
      return for_unpaired_rows(job, (item - tokens) * kLanes, used,
                               [&](int64_t row) { make_row<Config>(job, row, used); });
    const Chunks chunks = read_token<Config>(job, item);
    for (int first = 0; first < job.top_k; first += kLanes) {
      const int choice = first + int(threadIdx.x);
      const int64_t slot = item * job.top_k + choice;
      const int row = choice < job.top_k ? job.row_of[slot] : -1;
      const bool paired = job.is_pair(slot, row, used);
      const float p = paired && job.prob != nullptr ? job.prob[slot] : 0.0f;
      for (unsigned rest = __ballot_sync(~0u, paired); rest != 0; rest &= rest - 1) {
        const int lane = __ffs(int(rest)) - 1;
        write_row<Config>(job, __shfl_sync(~0u, row, lane), chunks, __shfl_sync(~0u, p, lane));
      }
    }
  });
}

/// <tokens[token], y[row]>, in the first thread of the warp. With `write`, also rows[row] =
/// p tokens[token] in the same pass.
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

/// A row that no slot points back at, as a whole.
template <class Config>
__device__ void make_whole_row(const Job& job, int64_t row, int64_t used) {
  const int slot = row < used ? job.slot_of[row] : -1;
  const bool known = job.is_slot(slot);
  const float p = known ? job.prob[slot] : 0.0f;
  for_chunks(job.hidden, [&](int64_t column) {
    Chunk chunk{};
    if (known) chunk = load<Config::kWide>(job.tokens, {slot / job.top_k, column});
    store<Config::kWide>(scaled(chunk, job.rows.dtype, p), job.rows, {row, column});
  });
}

/// Combine backward with dprob: a warp takes a slot and its row. The slots of a token are
/// adjacent, so that it is read from L2 once. Warps beyond those of the slots write the remaining
/// rows.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks)
    rows_and_products_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used();
  for_rows(job.slots + (job.bound + kLanes - 1) / kLanes, [&](int64_t slot) {
    if (slot >= job.slots)
      return for_unpaired_rows(job, (slot - job.slots) * kLanes, used,
                               [&](int64_t row) { make_whole_row<Config>(job, row, used); });
    const int row = job.row_of[slot];
    float sum = 0;
    if (row >= 0 && row < used)
      sum = product<Config>(job, int(slot) / job.top_k, row, job.is_pair(slot, row, used),
                            job.prob[slot]);
    if (threadIdx.x == 0) job.dprob[slot] = sum;
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
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks)
    tokens_kernel(const Job job) {
  assume_dtypes<Config>(job);
  const int64_t used = job.used();
  for_rows(job.slots / job.top_k, [&](int64_t token) {
    for_chunks<1>(job.hidden,
                  [&](int64_t column) { sum_choices<Config>(job, token, used, column); });
    if (job.dprob == nullptr || segment_index() != 0) return;
    for (int choice = int(threadIdx.x); choice < job.top_k; choice += kLanes) {
      const int64_t slot = token * job.top_k + choice, row = job.row_of[slot];
      job.dprob[slot] = row >= 0 && row < used ? job.row_gradient(row) : 0.0f;
    }
  });
}

/// Whether chunks are wide, whether all dtypes are bf16 or f16, and the least blocks an SM, for
/// __launch_bounds__.
struct WideHalves {
  static constexpr bool kWide = true, kHalves = true;
  static constexpr int kBlocks = 4;
};
struct Wide {
  static constexpr bool kWide = true, kHalves = false;
  static constexpr int kBlocks = 1;
};
struct Narrow {
  static constexpr bool kWide = false, kHalves = false;
  static constexpr int kBlocks = 1;
};

template <class Config>
void launch(const PermuteProblem& p, const Job& job, cudaStream_t stream) {
  const int64_t groups = (p.rows + kLanes - 1) / kLanes;
  if (p.pass == PermutePass::kPermuteBackward || p.pass == PermutePass::kCombine) {
    const RowGrid grid = RowGrid::of(p.tokens, p.hidden, 1);
    cuda::launch(tokens_kernel<Config>, grid.on(stream), job);
  } else if (job.dprob != nullptr) {
    const RowGrid grid = RowGrid::of(job.slots + groups, p.hidden, kWholeRows);
    cuda::launch(rows_and_products_kernel<Config>, grid.on(stream), job);
  } else if (job.row_of != nullptr) {
    const RowGrid grid = RowGrid::of(p.tokens + groups, p.hidden, kRounds);
    cuda::launch(scatter_kernel<Config>, grid.on(stream), job);
  } else {
    const RowGrid grid = RowGrid::of(p.rows, p.hidden, kRounds);
    cuda::launch(rows_kernel<Config>, grid.on(stream), job);
  }
}

}  // namespace

void permute(const PermutePlan& plan, const PermuteArgs& args, Workspace, Stream stream) {
  const PermuteProblem& p = plan.problem;
  const bool combines = p.pass == PermutePass::kCombine || p.pass == PermutePass::kCombineBackward;
  const Job job{.tokens = Matrix(args.tokens),
                .rows = Matrix(args.rows),
                .y = Matrix(args.y),
                .row_of = args.map.row_of,
                .slot_of = args.map.slot_of,
                .offsets = args.offsets.data,
                .prob = args.prob,
                .drow_prob = args.drow_prob,
                .drow_scale = args.drow_scale,
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
