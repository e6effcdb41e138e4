#include <algorithm>

#include "cuda/device/chunk.h"
#include "cuda/device/launch.h"
#include "cuda/parallel/choice_bits.cuh"
#include "cuda/parallel/delivery.cuh"
#include "cuda/parallel/few_turn.cuh"
#include "cuda/parallel/rank_map.cuh"
#include "cuda/parallel/routing.cuh"
#include "cuda/portable/permute_codes.cuh"

// Exchanges of few tokens, each in one kernel. The first block brings what the rank has and says
// so; every block waits for all ranks, then reads its share; the last one to have read says that.
// Of a dispatch every block sorts all choices for itself, which takes less than to be told, while
// the first tokens that it reads are on their way.
namespace cadre::cuda {
namespace {

using parallel::BroughtRows;
using parallel::ExchangeJob;
using parallel::ExchangeRead;
using portable::kLanes;

constexpr int kThreads = 512, kSumThreads = 448;  // of a block
constexpr int kMostSharedBytes = 98 << 10;        // on each GPU since sm_80, and what is static

/// A list into shared memory.
__device__ const int32_t* kept(const int32_t* list, int64_t count) {
  auto* to = reinterpret_cast<int32_t*>(dynamic_shared());
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = list[i];
  return to;
}

/// row_prob of the choices that have rows here.
template <class RowOf>
__device__ void deliver_prob(const RowsJob& job, const float* prob, int64_t used, RowOf&& row_of) {
  for_threads(job.token_count() * job.top_k, [&](unsigned slot) {
    const int32_t row = row_of(int(slot));
    if (row >= 0 && row < used) job.row_prob[row] = prob[slot];
  });
  for_threads(job.zero_tail ? job.bound - used : 0,
              [&](unsigned row) { job.row_prob[used + row] = 0; });
}

/// What is left of the map, in global memory, by the first block.
__device__ void finish_map(const WindowTable& window, const RankMap& map, const ChoiceBits& bits,
                           const int32_t* chosen) {
  const bool is_placed = map.rows_here != nullptr;
  const int choices = is_placed ? 0 : int(map.job.ranks * map.job.choices);
  for (int slot = int(threadIdx.x); slot < choices; slot += int(blockDim.x)) {
    const int row = bits.row_of(slot, chosen[slot]);
    map.place(slot, row < 0 ? -1 : chosen[slot], row, 0);
  }
  map.finish(window);
}

template <class Word, class Scales>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const WindowTable window, const __grid_constant__ FewJob exchange,
                    const parallel::MapJob of_map, const RowsJob job, const RoutingJob routing) {
  wait_for_predecessors();
  const Turn turn(window, exchange);
  OwnRouting own(routing);
  auto* firsts = reinterpret_cast<int32_t*>(dynamic_shared() + routing.sort_bytes);
  int32_t *ends = firsts + window.ranks + 1, *experts = ends + of_map.experts;
  auto* prob = reinterpret_cast<float*>(experts + window.ranks * routing.each);
  const SharedRouting all{experts, job.row_prob == nullptr ? nullptr : prob};
  const ChoiceBits bits(of_map, dynamic_shared());
  Delivery<Word, Scales> delivery(job);
  const unsigned first = GridWarp().number;
  const auto write = [&] { own.write(window, turn.epoch()); };
  const auto prepare = [&] {
    delivery.aim(first);
    if (routing.by_bits) bits.clear();
  };
  const auto take = [&] { return await_routing(window, routing, turn.epoch(), all); };
  go_through(turn, BeforeReading{write, prepare, take}, [&] {
    int32_t* rows_here = routing.by_bits ? nullptr : all.experts;
    const RankMap map{of_map, firsts, ends, rows_here, blockIdx.x == 0};
    const int32_t mine = of_map.rank * of_map.experts;
    delivery.take(all.experts, {mine, mine + of_map.experts});
    if (routing.by_bits)
      bits.sort(all.experts, map);
    else
      sort_choices_of_ranks(map, all.experts, {0, 1});
    __syncthreads();
    // A choice, or the row that has taken its place.
    const auto row_of = [&](int slot) {
      const int32_t there = all.experts[slot];
      return routing.by_bits ? map.here(bits.row_of(slot, there)) : there;
    };
    if (map.writes) finish_map(window, map, bits, all.experts);
    delivery.run(first, row_of, map.used());
    if (all.prob != nullptr) deliver_prob(job, all.prob, map.used(), row_of);
    return map.overflows();
  });
}

template <class Word>
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const WindowTable window, const __grid_constant__ FewJob exchange,
                const RowsJob job) {
  wait_for_predecessors();
  const Turn turn(window, exchange);
  const bool overflows = *exchange.verdict != 0;
  const int64_t used = schedule::clamp_row(*job.offset_of_tail, 0, job.bound);
  const int32_t* row_here = nullptr;
  Delivery<Word> delivery(job);
  const unsigned first = GridWarp().number;
  const auto prepare = [&] {
    delivery.aim(first);
    row_here = kept(job.row_here, job.token_count() * job.top_k);
  };
  go_through(turn, BeforeReading{do_nothing, prepare, take_nothing}, [&] {
    delivery.take(row_here, {0, INT32_MAX});
    delivery.run(
        first, [&](int slot) { return row_here[slot]; }, used);
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
__global__ void __launch_bounds__(kSumThreads, 1)
    sums_kernel(const WindowTable window, const __grid_constant__ FewJob exchange,
                const SumsJob given) {
  wait_for_predecessors();
  const Turn turn(window, exchange);
  const bool overflows = *exchange.verdict != 0;
  SumsJob job = given;
  const auto prepare = [&] { job.row_of = kept(given.row_of, job.token_count * job.top_k); };
  go_through(turn, BeforeReading{do_nothing, prepare, take_nothing}, [&] {
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

/// Blocks that wait, for so many items of a warp each, and the one that brings.
Grid grid_of(int64_t items, int threads, const Lane& lane) {
  return {.blocks = unsigned(std::clamp<int64_t>(items + 1, 1, lane.most_waiting())),
          .threads = unsigned(threads),
          .stream = lane.stream,
          .dependent = true};
}

/// Bytes from one rank's rows to the next one's.
int64_t rank_step(const TensorView& v) { return v.rank == 2 ? 0 : bytes_for(v.dtype, v.stride[0]); }

/// The lists that the job brings are written otherwise.
template <class Word, class Scales>
void launch_dispatch(Grid grid, const WindowTable& window, const ExchangeJob& job,
                     const parallel::MapJob& map, const RowsJob& rows) {
  constexpr int kManyExperts = 512;  // whose counters would take too much of an SM
  const int warps = kThreads / kLanes / (map.ranks * map.experts > kManyExperts ? 2 : 1);
  const int prob_bytes = int(sizeof(float) * map.ranks * map.choices);
  const MapShape bits(map, warps, ChoiceBits::bytes(map), true), counters(map, warps, true);
  const bool by_bits = bits.bytes + prob_bytes <= kMostSharedBytes;
  const MapShape& shape = by_bits ? bits : counters;
  const BroughtRows &x = job.brought[0], &experts = job.brought[1], &prob = job.brought[2],
                    &scales = job.brought[3];
  const RoutingJob routing{.experts = static_cast<const int32_t*>(experts.from),
                           .prob = static_cast<const float*>(prob.from),
                           .has_prob = prob.to != nullptr,
                           .own = int(map.own),
                           .each = int(map.choices),
                           .by_bits = by_bits,
                           .sort_bytes = shape.sort_bytes};
  ExchangeJob rest = job;
  rest.brought = {x, scales};
  grid.threads = unsigned(warps * kLanes);
  grid.shared_bytes = shape.bytes + prob_bytes;
  launch(dispatch_kernel<Word, Scales>, grid, window, FewJob(rest), map, rows, routing);
}

/// In so many parts.
portable::ScalesJob scales_of(const PermuteArgs& args, const Format& format, int parts) {
  portable::ScalesJob scales = portable::scales_job(args, info(format.kind).block);
  scales.words_of_segment = (scales.words + parts - 1) / parts;
  return scales;
}

void launch_rows(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                 const Lane& lane) {
  const PermuteProblem& p = read.plan.problem;
  const PermuteArgs& args = read.args;
  const DType moved = args.tokens.dtype;  // codes, or numbers
  RowsJob rows{.tokens = static_cast<const char*>(args.tokens.data),
               .rank_step = rank_step(args.tokens),
               .row_bytes = bytes_for(moved, p.hidden),
               .rows = static_cast<char*>(args.rows.data),
               .pitch = bytes_for(moved, args.rows.stride[0]),
               .bound = p.rows,
               .ranks = p.ranks,
               .tokens_each = int(p.tokens),
               .top_k = p.top_k,
               .zero_tail = p.tail == Tail::kZero,
               .row_here = args.map.row_of,
               .offset_of_tail = args.offsets.data + p.experts,
               .row_prob = args.row_prob};
  const int64_t items = rows.token_count() + (rows.zero_tail ? p.rows : 0);
  with_words_of(rows.address_bits(), [&]<class Word>(Word) {
    Grid grid = grid_of(items * parts_of<Word>(rows), kThreads, lane);
    if (p.format) {
      rows.scales = scales_of(args, *p.format, int(parts_of<Word>(rows)));
      return launch_dispatch<Word, PartOfScales>(grid, window, job, *read.map, rows);
    }
    if (read.map != nullptr)
      return launch_dispatch<Word, NoScales>(grid, window, job, *read.map, rows);
    grid.shared_bytes = int(sizeof(int32_t) * rows.token_count()) * p.top_k;
    launch(rows_kernel<Word>, grid, window, FewJob(job), rows);
  });
}

void launch_sums(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                 const Lane& lane) {
  const PermuteProblem& p = read.plan.problem;
  const PermuteArgs& args = read.args;
  const SumsJob sums{.rows = Matrix(portable::one_rank(args.rows), p.dtype),
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
  Grid grid = grid_of((p.tokens * chunks + kLanes - 1) / kLanes, kSumThreads, lane);
  grid.shared_bytes = int(sizeof(int32_t) * p.tokens) * p.top_k;
  const bool wide = sums.rows.is_wide() && sums.tokens.is_wide() && sums.rank_step % 16 == 0;
  visit_chunks(wide, {p.dtype}, [&]<class Chunks>(Chunks) {
    launch(sums_kernel<Chunks>, grid, window, FewJob(job), sums);
  });
}

}  // namespace

void exchange_few(const WindowTable& window, const ExchangeJob& job, const ExchangeRead& read,
                  const Lane& lane) {
  const ExchangeJob rest = bring_large(window, job, lane);
  if (reads_tokens(read.plan.problem.pass))
    launch_rows(window, rest, read, lane);
  else
    launch_sums(window, rest, read, lane);
}

}  // namespace cadre::cuda
