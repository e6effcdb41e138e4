#include "cuda/portable/permute.h"

#include "cuda/portable/launch.h"
#include "cuda/portable/permute_codes.cuh"

// permute            rows[row] = tokens[t]              row_prob[row] = prob[t, j]
// permute backward   tokens[t] = sum_j rows[row]        dprob[t, j] = drow_prob[row]
// combine            tokens[t] = sum_j p rows[row]      both: + addend[t], if there is one
// combine backward   rows[row] = p tokens[t]            dprob[t, j] = <tokens[t], y[row]>
//
// tokens [T, H], rows, y [R, H], with t, j the token and the choice of slot_of[row] and, the other
// way, row = row_of[t, j]. Rows at or beyond offsets[E] are not read, and written as zero or not at
// all. A warp takes a segment of a token, which it writes to all of its rows or sums from them, or
// a whole row whose dot product is wanted; a thread takes a whole row of a few columns. Each sum
// over j is one thread's, in the order of j; a dot product has 256 partial sums, as on the CPU.
namespace cadre::cuda::portable {
namespace {

constexpr int kPair = 2;  // chunks of a token, and of a row, that are multiplied at once

template <class Config>
__device__ Segment read_token(const Job& job, int64_t token) {
  Segment chunks{};
  chunks.scale = read_scale<Config>(job, token);
  const auto& tokens = job.with_row<Config>(job.tokens, token);
  const int64_t first = first_column(kRounds);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (first + i * kRound < job.hidden)
      chunks.of[i] = load<Config::kWide>(tokens, {token, first + i * kRound});
  return chunks;
}

template <class Config>
__device__ void write_row(const Job& job, int64_t row, const Segment& chunks, float p) {
  const int64_t first = first_column(kRounds);
  write_scale<Config>(job, row, chunks.scale);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const bool weighted = are_weighted<Config>(job);
    const Chunk chunk = weighted ? scaled(chunks.of[i], job.rows.dtype, p) : chunks.of[i];
    if (first + i * kRound < job.hidden)
      store<Config::kWide>(chunk, job.rows, {row, first + i * kRound});
  }
  if (first == 0 && job.row_prob != nullptr) job.row_prob[row] = p;
}

/// rows[row] from the token of its slot, or zero.
template <class Config>
__device__ void make_row(const Job& job, int64_t row, int64_t used) {
  const Source from(job, row, used);
  write_row<Config>(job, row, from.is_there() ? read_token<Config>(job, from.token) : Segment{},
                    from.p);
}

/// Without row_of: each row reads its token.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks) rows_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used<Config>();
  for_rows(job.zero_tail ? job.bound : used,
           [&](int64_t row) { make_row<Config>(job, row, used); });
}

/// The same of rows of a few columns, with row_of too.
template <class Config>
__global__ void __launch_bounds__(kNarrowThreads, Config::kBlocks)
    narrow_rows_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used<Config>();
  for_narrow_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    const Source from(job, row, used);
    Chunk chunk{};
    if (from.is_there())
      chunk = load<Config::kWide>(job.with_row<Config>(job.tokens, from.token), {from.token, 0});
    if (job.weighted) chunk = scaled(chunk, job.rows.dtype, from.p);
    store<Config::kWide>(chunk, job.rows, {row, 0});
    if (job.row_prob != nullptr) job.row_prob[row] = from.p;
  });
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
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used<Config>(), tokens = job.token_count;
  for_rows(tokens + (job.bound + kLanes - 1) / kLanes, [&](int64_t item) {
    if (item >= tokens)
      return for_unpaired_rows(job, (item - tokens) * kLanes, used,
                               [&](int64_t row) { make_row<Config>(job, row, used); });
    const int64_t token = token_of<Config>(job, item);
    if (Config::kMemory == Memory::kRanks && !is_needed(job, token)) return;
    const Segment chunks = read_token<Config>(job, token);
    for (int first = 0; first < job.top_k; first += kLanes) {
      const int choice = first + int(threadIdx.x);
      const int64_t slot = token * job.top_k + choice;
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
  for (int64_t first = first_column(kWholeRows); first < job.hidden; first += kPair * kRound) {
    Chunk of_token[kPair], of_row[kPair];
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      const int64_t column = first + i * kRound;
      if (column >= job.hidden) continue;
      of_token[i] = load<Config::kWide>(job.tokens, {token, column});
      of_row[i] = load<Config::kWide>(job.y, {row, column});
    }
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      const int64_t column = first + i * kRound;
      if (column >= job.hidden) continue;
      float x[kChunk], y[kChunk];
      decode(of_token[i], job.tokens.dtype, x);
      decode(of_row[i], job.y.dtype, y);
      for (int k = 0; k < kChunk; ++k) sums[k] += x[k] * y[k];
      if (!write) continue;
      for (float& value : x) value *= p;
      store<Config::kWide>(encode(x, job.rows.dtype), job.rows, {row, column});
    }
  }
  return total<kLanes>(sums);
}

/// A row that no slot points back at, as a whole.
template <class Config>
__device__ void make_whole_row(const Job& job, int64_t row, int64_t used) {
  const Source from(job, row, used);
  for_chunks(job.hidden, [&](int64_t column) {
    Chunk chunk{};
    if (from.is_there()) chunk = load<Config::kWide>(job.tokens, {from.token, column});
    store<Config::kWide>(scaled(chunk, job.rows.dtype, from.p), job.rows, {row, column});
  });
}

/// Combine backward with dprob: a warp takes a slot and its row. The slots of a token are
/// adjacent, so that it is read from L2 once. Warps beyond those of the slots write the remaining
/// rows.
template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBlocks)
    rows_and_products_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used<Config>();
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

/// The sum over the rows of a token, of which a thread has that many in flight: two chunks of each
/// where they are two, one where they are more.
template <class Config, int kRows>
struct Sum : Config {
  static constexpr int kAtOnce = kRows, kRounds = kRows == 2 ? 2 : 1;
  float of[kRounds][kChunk] = {};

  /// Adds p times a row, whose chunks these are.
  __device__ void add(const Chunk (&chunks)[kRounds], DType dtype, float p) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      float x[kChunk];
      decode(chunks[round], dtype, x);
      for (int k = 0; k < kChunk; ++k) of[round][k] += p * x[k];
    }
  }
};

template <class Sum>
__device__ void load_row(const Job& job, int row, Chunk (&chunks)[Sum::kRounds]) {
  const int64_t first = first_column(Sum::kRounds);
  const auto& rows = job.with_row<Sum>(job.rows, row);
#pragma unroll
  for (int round = 0; round < Sum::kRounds; ++round)
    if (first + round * kRound < job.hidden)
      chunks[round] = load<Sum::kWide>(rows, {row, first + round * kRound});
}

/// Adds 32 choices of a token in a segment, in their order. Each lane has the row of one, negative
/// for none, and its p.
template <class Sum>
__device__ void add_choices(const Job& job, int row, float p, Sum& sum) {
  for (unsigned rest = __ballot_sync(~0u, row >= 0); rest != 0;) {
    Chunk chunks[Sum::kAtOnce][Sum::kRounds] = {};
    int lanes[Sum::kAtOnce];
#pragma unroll
    for (int i = 0; i < Sum::kAtOnce; ++i, rest &= rest - 1) {
      lanes[i] = __ffs(int(rest)) - 1;
      if (lanes[i] >= 0) load_row<Sum>(job, __shfl_sync(~0u, row, lanes[i]), chunks[i]);
    }
#pragma unroll
    for (int i = 0; i < Sum::kAtOnce; ++i)
      if (lanes[i] >= 0) sum.add(chunks[i], job.rows.dtype, __shfl_sync(~0u, p, lanes[i]));
  }
}

/// The sum over the choices of a token, and the addend, which is read before it is written over.
template <class Sum>
__device__ void write_sum(const Job& job, const Place& at, float (&sum)[kChunk]) {
  if (job.addend.data != nullptr) {
    float x[kChunk];
    decode(load<Sum::kWide>(job.addend, at), job.addend.dtype, x);
    for (int i = 0; i < kChunk; ++i) sum[i] += x[i];
  }
  store<Sum::kWide>(encode(sum, job.tokens.dtype), job.tokens, at);
}

template <class Sum>
__device__ void sum_token(const Job& job, int64_t token, int64_t used) {
  Sum sum;
  for (int first = 0; first < job.top_k; first += kLanes) {
    const int choice = first + int(threadIdx.x);
    const int64_t slot = token * job.top_k + choice;
    const bool known = choice < job.top_k;
    const int row_there = known ? job.row_of[slot] : -1;
    const float p = known && job.weighted ? job.prob[slot] : 1.0f;
    const int row = row_there < used ? row_there : -1;
    add_choices(job, row, p, sum);
    if (known && job.dprob != nullptr && segment_index() == 0)
      job.dprob[slot] = row >= 0 ? job.row_gradient(row) : 0.0f;
  }
  const int64_t column = first_column(Sum::kRounds);
#pragma unroll
  for (int round = 0; round < Sum::kRounds; ++round)
    if (column + round * kRound < job.hidden)
      write_sum<Sum>(job, {token, column + round * kRound}, sum.of[round]);
}

/// Combine and permute backward.
template <class Sum>
__global__ void __launch_bounds__(kGridWarps* kLanes, Sum::kBlocks) tokens_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Sum>(job);
  const int64_t used = job.used<Sum>();
  for_rows(job.token_count, [&](int64_t token) { sum_token<Sum>(job, token, used); });
}

/// Chunks of tokens and rows, where those that are read lie, and the least blocks an SM, for
/// __launch_bounds__.
template <class OfRows, Memory kOfRows>
struct Config : OfRows {
  static constexpr Memory kMemory = kOfRows;
  static constexpr int kBlocks = !OfRows::kOneDType ? 1 : kMemory == Memory::kRanks ? 2 : 4;
};

/// The same of codes, beside which scales move.
template <class OfRows, Memory kOfRows>
struct CodesConfig : Config<OfRows, kOfRows> {
  using Beside = ScalesJob;
};

template <class Sum>
void launch_sums(const PermuteProblem& p, const Job& job, cudaStream_t stream) {
  const RowGrid grid = RowGrid::of(job.token_count, p.hidden, Sum::kRounds);
  cuda::launch(tokens_kernel<Sum>, grid.on(stream), job);
}

/// The passes that sum.
template <class Config>
void launch_all_sums(const PermuteProblem& p, const Job& job, cudaStream_t stream) {
  constexpr int kMost = Config::kOneDType ? 8 : 4;
  if (p.top_k <= 2)
    launch_sums<Sum<Config, 2>>(p, job, stream);
  else if (p.top_k <= 4)
    launch_sums<Sum<Config, 4>>(p, job, stream);
  else
    launch_sums<Sum<Config, kMost>>(p, job, stream);
}

template <class Config>
void launch(const PermuteProblem& p, const Job& job, cudaStream_t stream) {
  const int64_t groups = (p.rows + kLanes - 1) / kLanes;
  if constexpr (Config::kMemory != Memory::kRanks)  // of several ranks it takes no prob
    if (job.dprob != nullptr && p.pass == PermutePass::kCombineBackward) {
      const RowGrid grid = RowGrid::of(job.slots + groups, p.hidden, kWholeRows);
      return cuda::launch(rows_and_products_kernel<Config>, grid.on(stream), job);
    }
  if (p.pass == PermutePass::kPermuteBackward || p.pass == PermutePass::kCombine) {
    launch_all_sums<Config>(p, job, stream);
  } else if (p.hidden <= kNarrow) {
    cuda::launch(narrow_rows_kernel<Config>, narrow_grid(p.rows, stream), job);
  } else if (job.row_of != nullptr) {
    const RowGrid grid = RowGrid::of(job.token_count + groups, p.hidden, kRounds);
    cuda::launch(scatter_kernel<Config>, grid.on(stream), job);
  } else {
    const RowGrid grid = RowGrid::of(p.rows, p.hidden, kRounds);
    cuda::launch(rows_kernel<Config>, grid.on(stream), job);
  }
}

/// Rows of codes and their scales, in one launch.
template <class Config>
void launch_codes(const Job& job, cudaStream_t stream) {
  const bool by_token = job.row_of != nullptr;
  const int64_t groups = (job.bound + kLanes - 1) / kLanes;
  const int64_t items = by_token ? job.token_count + groups : job.bound;
  cuda::launch(by_token ? scatter_kernel<Config> : rows_kernel<Config>,
               RowGrid::of(items, job.hidden, kRounds).on(stream), job);
}

void permute_codes(const Job& job, bool spread, bool wide, cudaStream_t stream) {
  const auto visit = [&]<class OfRows>(OfRows) {
    spread ? launch_codes<CodesConfig<OfRows, Memory::kRanks>>(job, stream)
           : launch_codes<CodesConfig<OfRows, Memory::kHere>>(job, stream);
  };
  wide ? visit(WideChunksOf<DType::kBf16>()) : visit(AnyChunks());
}

void launch_pass(const PermuteProblem& p, const PermuteArgs& args, cudaStream_t stream) {
  const bool combines = p.pass == PermutePass::kCombine || p.pass == PermutePass::kCombineBackward;
  const bool by_row = reads_tokens(p.pass);
  const TensorView& read = by_row ? args.tokens : args.rows;
  const bool spread = p.ranks > 1;  // over the memories of the ranks
  const int64_t rank_rows = spread ? read.shape[1] : 0;
  Job job{.tokens = Matrix(by_row ? one_rank(args.tokens) : args.tokens, p.dtype),
          .rows = Matrix(by_row ? args.rows : one_rank(args.rows), p.dtype),
          .y = Matrix(args.y, p.dtype),
          .addend = Matrix(args.addend, p.dtype),
          .row_of = args.map.row_of,
          .slot_of = args.map.slot_of,
          .offsets = args.offsets.data,
          .prob = args.prob,
          .drow_prob = args.drow_prob,
          .drow_scale = args.drow_scale,
          .row_prob = args.row_prob,
          .dprob = args.dprob,
          .bound = by_row ? p.rows : p.ranks * p.rows,
          .slots = (by_row ? p.ranks : 1) * p.tokens * p.top_k,
          .token_count = (by_row ? p.ranks : 1) * p.tokens,
          .hidden = p.hidden,
          .experts = p.experts,
          .top_k = p.top_k,
          .zero_tail = p.tail == Tail::kZero,
          .weighted = p.prob && combines};
  const int64_t rank_step = spread ? bytes_for(read.dtype, read.stride[0]) : 0;
  job.rank_rows = rank_rows;
  job.rank_gap = rank_step - rank_rows * (by_row ? job.tokens : job.rows).pitch;
  const bool wide = job.tokens.is_wide() && job.rows.is_wide() && job.y.is_wide() &&
                    job.addend.is_wide() && rank_step % 16 == 0;
  if (p.format) {
    job.scales = scales_job(args, info(p.format->kind).block);
    return permute_codes(job, spread, wide, stream);
  }
  visit_chunks(wide, {p.dtype}, [&]<class OfRows>(OfRows) {
    spread           ? launch<Config<OfRows, Memory::kRanks>>(p, job, stream)
    : p.experts == 0 ? launch_all_sums<Config<OfRows, Memory::kWhole>>(p, job, stream)
                     : launch<Config<OfRows, Memory::kHere>>(p, job, stream);
  });
}

}  // namespace

void permute(const PermutePlan& plan, const PermuteArgs& args, Workspace, Stream stream) {
  PermuteProblem p = plan.problem;
  if (!p.format) return launch_pass(p, args, stream_of(stream));
  p.dtype = DType::kBf16, p.hidden /= 2;
  PermuteArgs pairs = args;
  pairs.tokens = in_pairs(args.tokens), pairs.rows = in_pairs(args.rows);
  launch_pass(p, pairs, stream_of(stream));
}

}  // namespace cadre::cuda::portable
