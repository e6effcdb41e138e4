#include <algorithm>

#include "cuda/device/chunk.h"
#include "cuda/device/launch.h"
#include "cuda/parallel/exchange.cuh"

// Exchanges of few tokens, each in one kernel. The first block brings what the rank has and says
// so; every block waits for all ranks, then reads its share; the last one to have read says that.
// Of a dispatch every block sorts all choices for itself, which takes less than to be told.
namespace cadre::cuda {
namespace {

using parallel::ExchangeJob;
using parallel::ExchangeRead;
using portable::kLanes;

constexpr int kThreads = 512, kSumThreads = 320;  // of a block

/// Waits for all ranks; whether one of them failed.
__device__ bool bring_and_wait(const WindowTable& window, const ExchangeJob& job, uint32_t epoch) {
  const bool leads = blockIdx.x == 0;
  Way way(window, job.name, epoch, leads ? Step::kAwaitReaders : Step::kAwaitReady);
  if (leads) {
    way.go_to(Step::kWrite);
    if (!way.any_stopped()) bring_all(window, job, {0, 1});
    way.go_to(Step::kAwaitReady);
  }
  way.go_to(Step::kRead);
  return way.is_stopped();
}

/// `read` returns whether its numbers are none, in all blocks or in none.
template <class Read>
__device__ void go_through(const WindowTable& window, const ExchangeJob& job, Read&& read) {
  const uint32_t epoch = next_epoch(window);
  const bool is_stopped = bring_and_wait(window, job, epoch);
  launch_dependents();
  const bool overflows = read();
  // Who has failed may have written since what was read.
  const Arrival arrival = arrive(window, is_stopped || (threadIdx.x == 0 && has_failed(window)));
  if (!arrival.is_last) return;
  if (arrival.any || overflows) spoil(job, {0, 1});
  if (arrival.any) return;
  Way(window, job.name, epoch, Step::kRead).go_to(Step::kDone);
  if (threadIdx.x == 0) window.home().epoch = epoch;
}

/// Some of all warps of a grid, or of all threads, that share work: calls work(item).
template <class Work>
__device__ void for_items(unsigned items, unsigned first, unsigned step, Work&& work) {
  for (unsigned item = first; item < items; item += step) work(item);
}
template <class Work>
__device__ void for_warps(int64_t items, Work&& work) {
  const unsigned warps = blockDim.x / kLanes;
  for_items(unsigned(items), blockIdx.x * warps + threadIdx.x / kLanes, gridDim.x * warps, work);
}
template <class Work>
__device__ void for_threads(int64_t items, Work&& work) {
  for_items(unsigned(items), blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, work);
}

/// Rows of this rank from tokens of all.
struct RowsJob {
  const char* tokens;
  int64_t rank_step, row_bytes;  ///< bytes from one rank's tokens to the next one's; of a token
  char* rows;
  int64_t pitch, bound;  ///< bytes from row to row; R
  int ranks, tokens_each, top_k;
  bool zero_tail;
  const int32_t *row_here, *offset_of_tail;  ///< but for dispatch, which finds them
  const float* prob;
  float* row_prob;

  __device__ int64_t token_count() const { return int64_t(ranks) * tokens_each; }
  __device__ const char* token(unsigned number) const {
    const unsigned each = unsigned(tokens_each);
    return tokens + number / each * rank_step + number % each * row_bytes;
  }
};

/// Words of a warp at a time.
constexpr int kInFlight = 2, kPart = kInFlight * kLanes;

/// A part of a token, to all of its rows: the words from the one of this lane on.
template <class Word>
__device__ void deliver_part(const RowsJob& job, const int32_t* rows, int64_t used,
                             const Word* token, int64_t first) {
  const int64_t words = job.row_bytes / int64_t(sizeof(Word));
  Word part[kInFlight] = {};
#pragma unroll
  for (int i = 0; i < kInFlight; ++i)
    if (token != nullptr && first + i * kLanes < words) part[i] = token[first + i * kLanes];
  for (int j = 0; j < (token == nullptr ? 1 : job.top_k); ++j) {
    const int32_t row = rows[j];
    if (row < 0 || row >= used) continue;
    auto* to = reinterpret_cast<Word*>(job.rows + row * job.pitch);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kLanes < words) to[first + i * kLanes] = part[i];
  }
}

__device__ bool has_row(const int32_t* rows, int top_k) {
  int32_t any = -1;
  for (int j = 0; j < top_k; ++j) any = max(any, rows[j]);
  return any >= 0;
}

/// A warp takes a part of a token, or of a row of the tail.
template <class Word>
__device__ void deliver_words(const RowsJob& job, const int32_t* row_here, int64_t used) {
  const int64_t words = job.row_bytes / int64_t(sizeof(Word));
  const unsigned parts = unsigned((words + kPart - 1) / kPart);
  const int64_t tokens = job.token_count(), tail = job.zero_tail ? job.bound - used : 0;
  for_warps((tokens + tail) * parts, [&](unsigned item) {
    const unsigned number = item / parts;
    const int64_t first = item % parts * kPart + threadIdx.x % kLanes;
    if (number >= tokens) {
      const auto row = int32_t(used + number - tokens);
      return deliver_part<Word>(job, &row, job.bound, nullptr, first);
    }
    const int32_t* rows = row_here + int64_t(number) * job.top_k;
    if (!has_row(rows, job.top_k)) return;
    deliver_part<Word>(job, rows, used, reinterpret_cast<const Word*>(job.token(number)), first);
  });
}

__device__ void deliver(const RowsJob& job, const int32_t* row_here, int64_t used) {
  const auto bits = reinterpret_cast<uintptr_t>(job.tokens) | uintptr_t(job.rank_step) |
                    uintptr_t(job.row_bytes) | reinterpret_cast<uintptr_t>(job.rows) |
                    uintptr_t(job.pitch);
  with_words_of(bits, [&]<class Word>(Word) { deliver_words<Word>(job, row_here, used); });
  if (job.row_prob == nullptr) return;
  for_threads(job.token_count() * job.top_k, [&](unsigned slot) {
    const int32_t row = row_here[slot];
    if (row >= 0 && row < used) job.row_prob[row] = job.prob[slot];
  });
  for_threads(job.zero_tail ? job.bound - used : 0,
              [&](unsigned row) { job.row_prob[used + row] = 0; });
}

__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const WindowTable window, const __grid_constant__ ExchangeJob exchange,
                    const parallel::MapJob of_map, const RowsJob job, const int sort_bytes) {
  wait_for_predecessors();
  go_through(window, exchange, [&] {
    auto* firsts = reinterpret_cast<int32_t*>(dynamic_shared() + sort_bytes);
    const bool is_first = blockIdx.x == 0;
    const RankMap map{of_map, firsts, firsts + window.ranks + 1, is_first, is_first};
    sort_choices_of_ranks(map, {0, 1});
    __syncthreads();
    if (is_first) map.finish(window);
    deliver(job, map.rows_here, map.used());
    return map.overflows();
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const WindowTable window, const __grid_constant__ ExchangeJob exchange,
                const RowsJob job) {
  wait_for_predecessors();
  const bool overflows = *exchange.verdict != 0;
  const int64_t used = schedule::clamp_row(*job.offset_of_tail, 0, job.bound);
  go_through(window, exchange, [&] {
    deliver(job, job.row_here, used);
    return overflows;
  });
}

/// Tokens of this rank, sums of rows of all.
struct SumsJob {
  Matrix rows, tokens;
  int64_t rank_step, bound, token_count;  ///< bound: P * R
  int rows_each, top_k;
  const int32_t* row_of;
  const float* drow_prob;
  float* dprob;

  /// The row of a choice, or -1.
  __device__ int32_t row(int64_t token, int choice) const {
    const int32_t row = choice < top_k ? row_of[token * top_k + choice] : -1;
    return row < bound ? row : -1;
  }
  /// One rank's rows, and which of them.
  __device__ Matrix of_rank(int32_t& row) const {
    Matrix of = rows;
    of.data += row / rows_each * rank_step;
    row %= rows_each;
    return of;
  }
};

/// A chunk of a token, in the order of its choices, some of which are in flight.
template <class Chunks>
__device__ void sum_chunk(const SumsJob& job, const Place& at) {
  constexpr int kAtOnce = Chunks::kOneDType ? 8 : 4;
  float sum[kChunk] = {};
  for (int first = 0; first < job.top_k; first += kAtOnce) {
    Chunk chunks[kAtOnce] = {};
    int32_t rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows[i] = job.row(at.row, first + i);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      int32_t row = rows[i];
      const Matrix of = job.of_rank(row);
      Chunks::assume(of);
      chunks[i] = load<Chunks::kWide>(of, {row, at.column});
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      float x[kChunk];
      decode(chunks[i], job.rows.dtype, x);
      for (int k = 0; k < kChunk; ++k) sum[k] += x[k];
    }
  }
  store<Chunks::kWide>(encode(sum, job.tokens.dtype), job.tokens, at);
}

/// A thread takes a chunk of a token.
template <class Chunks>
__global__ void __launch_bounds__(kSumThreads, 2)
    sums_kernel(const WindowTable window, const __grid_constant__ ExchangeJob exchange,
                const SumsJob job) {
  wait_for_predecessors();
  const bool overflows = *exchange.verdict != 0;
  go_through(window, exchange, [&] {
    Chunks::assume(job.rows);
    Chunks::assume(job.tokens);
    const auto chunks = unsigned((job.tokens.columns + kChunk - 1) / kChunk);
    for_threads(job.token_count * chunks, [&](unsigned item) {
      sum_chunk<Chunks>(job, {item / chunks, int64_t(item % chunks) * kChunk});
    });
    if (job.dprob != nullptr)
      for_threads(job.token_count * job.top_k, [&](unsigned slot) {
        const int32_t row = job.row(slot / unsigned(job.top_k), int(slot % unsigned(job.top_k)));
        job.dprob[slot] = row >= 0 ? job.drow_prob[row] : 0.0f;
      });
    return overflows;
  });
}

/// Blocks that wait, for so many items of a thread each.
Grid grid_of(const WindowTable& window, int64_t items, int threads, const Lane& lane) {
  const int64_t blocks = (items + threads - 1) / threads;
  return {.blocks = unsigned(std::clamp<int64_t>(blocks, 1, lane.most_waiting(window.ranks))),
          .threads = unsigned(threads),
          .stream = lane.stream,
          .dependent = true};
}

/// Bytes from one rank's rows to the next one's, and the first rank's.
int64_t rank_step(const TensorView& v) { return v.rank == 2 ? 0 : bytes_for(v.dtype, v.stride[0]); }
TensorView of_first_rank(const TensorView& v) {
  if (v.rank == 2) return v;
  return view(v.data, v.dtype, {v.shape[1], v.shape[2]}, {v.stride[1], v.stride[2]});
}

void launch_rows(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                 const Lane& lane) {
  const PermuteProblem& p = read.plan.problem;
  const PermuteArgs& args = read.args;
  const RowsJob rows{.tokens = static_cast<const char*>(args.tokens.data),
                     .rank_step = rank_step(args.tokens),
                     .row_bytes = bytes_for(p.dtype, p.hidden),
                     .rows = static_cast<char*>(args.rows.data),
                     .pitch = bytes_for(p.dtype, args.rows.stride[0]),
                     .bound = p.rows,
                     .ranks = p.ranks,
                     .tokens_each = int(p.tokens),
                     .top_k = p.top_k,
                     .zero_tail = p.tail == Tail::kZero,
                     .row_here = args.map.row_of,
                     .offset_of_tail = args.offsets.data + p.experts,
                     .prob = args.prob,
                     .row_prob = args.row_prob};
  const int64_t items = p.ranks * p.tokens + (rows.zero_tail ? p.rows : 0);
  Grid grid = grid_of(window, items * (rows.row_bytes / 16 / kInFlight + 1), kThreads, lane);
  if (read.map == nullptr) return launch(rows_kernel, grid, window, job, rows);
  constexpr int kManyExperts = 512;  // whose counters would take too much of an SM
  const int warps = kThreads / kLanes / (p.ranks * p.experts > kManyExperts ? 2 : 1);
  const MapShape shape(*read.map, warps, true);
  grid.threads = unsigned(warps * kLanes);
  grid.shared_bytes = shape.bytes;
  launch(dispatch_kernel, grid, window, job, *read.map, rows, shape.sort_bytes);
}

void launch_sums(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                 const Lane& lane) {
  const PermuteProblem& p = read.plan.problem;
  const PermuteArgs& args = read.args;
  const SumsJob sums{.rows = Matrix(of_first_rank(args.rows), p.dtype),
                     .tokens = Matrix(args.tokens, p.dtype),
                     .rank_step = rank_step(args.rows),
                     .bound = p.ranks * p.rows,
                     .token_count = p.tokens,
                     .rows_each = int(p.rows),
                     .top_k = p.top_k,
                     .row_of = args.map.row_of,
                     .drow_prob = args.drow_prob,
                     .dprob = args.dprob};
  const int64_t chunks = (p.hidden + kChunk - 1) / kChunk;
  const Grid grid = grid_of(window, p.tokens * chunks, kSumThreads, lane);
  const bool wide = sums.rows.is_wide() && sums.tokens.is_wide() && sums.rank_step % 16 == 0;
  visit_chunks(wide, {p.dtype},
               [&]<class Chunks>(Chunks) { launch(sums_kernel<Chunks>, grid, window, job, sums); });
}

}  // namespace

void exchange_few(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                  const Lane& lane) {
  const ExchangeJob rest = bring_large(window, job, lane);
  const PermutePass pass = read.plan.problem.pass;
  if (pass == PermutePass::kPermute || pass == PermutePass::kCombineBackward)
    launch_rows(window, rest, read, lane);
  else
    launch_sums(window, rest, read, lane);
}

}  // namespace cadre::cuda
