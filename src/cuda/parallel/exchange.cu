#include "cuda/parallel/exchange.h"

#include <algorithm>

#include "cuda/device/flag.h"
#include "cuda/device/launch.h"
#include "schedule/exchange.h"
#include "schedule/expert_rows.h"
#include "schedule/rank_rows.h"

namespace cadre::cuda {
namespace {

using parallel::ExchangeName;
using parallel::Failure;
using schedule::Exchange;
using Step = Exchange::Step;

/// The flags of the windows as the state machine sees them. What a rank writes and reads is other
/// kernels'.
struct WindowFlags {
  const WindowTable& window;

  __device__ uint32_t epoch() const { return window.home().epoch; }
  __device__ void set_epoch(uint32_t epoch) const { window.home().epoch = epoch; }
  __device__ uint32_t load_read(int peer) const {
    return load_acquire_system(&window.home().read[peer]);
  }
  __device__ uint64_t load_ready(int peer) const {
    return load_acquire_system(&window.home().ready[peer]);
  }
  __device__ void store_ready(int peer, uint64_t tag) const {
    store_release_system(&window.control(peer).ready[window.rank], tag);
  }
  __device__ void store_read(int peer, uint32_t epoch) const {
    store_release_system(&window.control(peer).read[window.rank], epoch);
  }
  __device__ void write() const {}
  __device__ void read() const {}
};

/// Whether a rank has failed, which this one's host is told.
__device__ bool has_failed(const WindowTable& window) {
  const uint64_t failure = load_acquire_system(&window.home().failure);
  if (failure != 0) store_release_system(&window.notes->failure, failure);
  return failure != 0;
}

__device__ void tell_all(const WindowTable& window, const Failure& failure) {
  for (int p = 0; p < window.ranks; ++p)
    replace_zero_system(&window.control(p).failure, failure.word());
  has_failed(window);
}

/// Goes through an exchange up to a step, or until a rank has failed, is late or at another call.
__device__ void run_to(Step end, Exchange exchange, const ExchangeName& name,
                       const WindowTable& window) {
  const WindowFlags flags{window};
  uint64_t since = nanoseconds();
  while (exchange.step() != end) {
    if (exchange.advance(flags)) {
      since = nanoseconds();
      continue;
    }
    if (has_failed(window)) return;
    const bool out_of_step = exchange.step() == Step::kOutOfStep;
    if (out_of_step || (window.limit != 0 && nanoseconds() - since >= window.limit)) {
      const auto why = out_of_step ? Failure::Why::kOutOfStep : Failure::Why::kLate;
      const uint32_t ahead = exchange.step() == Step::kAwaitReaders ? 1 : 0;
      tell_all(window, {why, name.kind, uint16_t(exchange.peer()), flags.epoch() + ahead});
      return;
    }
    rest();
  }
}

/// Its one thread waits, so the kernel behind it is let go when that is over.
__global__ void wait_kernel(const WindowTable window, const ExchangeName name, Step from,
                            Step end) {
  wait_for_predecessors();
  if (!has_failed(window))
    run_to(end, {window.rank, window.ranks, {0, name.tag()}, from}, name, window);
  launch_dependents();
}

void wait(const WindowTable& window, const ExchangeName& name, Step from, Step end,
          cudaStream_t stream) {
  launch(wait_kernel, {.blocks = 1, .threads = 1, .stream = stream, .dependent = true}, window,
         name, from, end);
}

/// Some of several threads that share work.
struct Team {
  int64_t first, count;

  __device__ static Team grid() {
    return {int64_t(blockIdx.x) * blockDim.x + threadIdx.x, int64_t(gridDim.x) * blockDim.x};
  }
};

template <class Word>
__device__ void copy_words(const char* from, char* to, int64_t count, const Team& team) {
  constexpr int kInFlight = 4;
  const auto* source = reinterpret_cast<const Word*>(from);
  auto* target = reinterpret_cast<Word*>(to);
  for (int64_t i = team.first; i < count; i += kInFlight * team.count) {
    Word words[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * team.count < count) words[k] = source[i + k * team.count];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * team.count < count) target[i + k * team.count] = words[k];
  }
}

__device__ void copy_bytes(const char* from, char* to, int64_t bytes, const Team& team) {
  const auto bits =
      reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes);
  if (bits % 16 == 0) return copy_words<uint4>(from, to, bytes / 16, team);
  if (bits % 4 == 0) return copy_words<uint32_t>(from, to, bytes / 4, team);
  copy_words<uint16_t>(from, to, bytes / 2, team);
}

__device__ void set_bits(char* to, int64_t bytes, const Team& team) {
  for (int64_t i = team.first; i < bytes / 2; i += team.count)
    reinterpret_cast<uint16_t*>(to)[i] = 0xffff;
}

constexpr int kThreads = 256, kBlocksOfUnit = 4;

/// Calls work(row, team) for rows, each of which a block takes.
template <class Work>
__device__ void for_rows_by_blocks(int64_t rows, Work&& work) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    work(row, Team{int64_t(threadIdx.x), int64_t(blockDim.x)});
}

__device__ void bring_rows(const parallel::BroughtRows& b) {
  const int64_t used = b.used == nullptr ? b.rows : schedule::clamp_row(*b.used, 0, b.rows);
  const auto* from = static_cast<const char*>(b.from);
  if (b.row_bytes == b.step && from != b.to)
    copy_bytes(from, b.to, used * b.row_bytes, Team::grid());
  else if (from != b.to)
    for_rows_by_blocks(used, [&](int64_t row, const Team& team) {
      copy_bytes(from + row * b.step, b.to + row * b.row_bytes, b.row_bytes, team);
    });
  if (b.filled > used)
    set_bits(b.to + used * b.row_bytes, (b.filled - used) * b.row_bytes, Team::grid());
}

__device__ void bring_all(const parallel::ExchangeJob& job) {
  for (const parallel::BroughtRows& brought : job.brought)
    if (brought.to != nullptr) bring_rows(brought);
}

__global__ void bring_kernel(const parallel::ExchangeJob job) {
  begin_dependent();
  bring_all(job);
}

/// All of it by one block, where little is brought.
__global__ void begin_kernel(const WindowTable window, const parallel::ExchangeJob job) {
  wait_for_predecessors();
  const bool leads = threadIdx.x == 0;
  const bool failed = __syncthreads_or(leads && has_failed(window));
  if (leads && !failed)
    run_to(Step::kWrite, {window.rank, window.ranks, job.name.tag()}, job.name, window);
  __syncthreads();
  bring_all(job);
  __syncthreads();
  if (leads && !has_failed(window))
    run_to(Step::kRead, {window.rank, window.ranks, {0, job.name.tag()}, Step::kWrite}, job.name,
           window);
  launch_dependents();
}

/// Makes outcomes NaN where they are none, and says that this rank has read.
__global__ void end_kernel(const WindowTable window, const parallel::ExchangeJob job) {
  begin_dependent();
  const bool failed = load_acquire_system(&window.home().failure) != 0;
  if (failed || *job.verdict != 0)
    for (const parallel::Outcome& o : job.outcomes)
      if (o.data != nullptr)
        for_rows_by_blocks(o.rows, [&](int64_t row, const Team& team) {
          set_bits(static_cast<char*>(o.data) + row * o.step, o.row_bytes, team);
        });
  if (blockIdx.x != 0 || threadIdx.x != 0 || has_failed(window)) return;
  const schedule::ReadyTag tag{window.home().epoch, job.name.tag()};
  run_to(Step::kDone, {window.rank, window.ranks, tag, Step::kRead}, job.name, window);
}

struct Lists {
  parallel::ListOfRanks of[2];
};

__global__ void gather_kernel(const WindowTable window, const Lists lists) {
  begin_dependent();
  for (const parallel::ListOfRanks& list : lists.of)
    for (int p = 0; p < window.ranks && list.to != nullptr; ++p)
      copy_bytes(window.of(p) + list.part, static_cast<char*>(list.to) + p * list.count * 4,
                 list.count * 4, Team::grid());
}

__device__ void write_verdict(const WindowTable& window, const parallel::MapJob& job) {
  const schedule::RankRows rows{job.sorted, job.experts, job.bound};
  const int worst = rows.fullest(job.ranks);
  const bool overflows = job.overflow_is_error && rows.routed(worst) > job.bound;
  *job.map.verdict = overflows;
  if (overflows)
    store_release_system(&window.notes->overflow,
                         overflow_word({job.problem, worst, int32_t(rows.routed(worst))}));
}

__global__ void map_kernel(const WindowTable window, const parallel::MapJob job) {
  begin_dependent();
  const schedule::RankRows rows{job.sorted, job.experts, job.bound};
  const Team team = Team::grid();
  const int64_t mine = job.rank * job.choices;
  for (int64_t i = team.first; i < job.ranks * job.choices; i += team.count) {
    const int32_t row = job.row_sorted[i];
    job.map.row_here[i] = rows.row_of_rank(row, job.rank);
    if (i >= mine && i < mine + job.own)
      job.map.row_of[i - mine] = rows.row_at_rank_of(row, job.chosen[i]);
  }
  const int64_t first = rows.first(job.rank), used = rows.offset(job.rank, job.experts);
  for (int64_t r = team.first; r < used; r += team.count)
    job.map.slot_of[r] = job.slot_sorted[first + r];
  for (int64_t e = team.first; e <= job.experts; e += team.count)
    job.map.offsets[e] = rows.offset(job.rank, int(e));
  for (int64_t q = team.first; q < job.ranks && job.routed != nullptr; q += team.count)
    job.routed[q] = int32_t(rows.routed(int(q)));
  if (team.first == 0) write_verdict(window, job);
}

/// A grid for so many threads' work.
Grid grid_of(int64_t threads, const Lane& lane) {
  const int64_t blocks = std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1,
                                             int64_t(kBlocksOfUnit) * lane.units);
  return {
      .blocks = unsigned(blocks), .threads = kThreads, .stream = lane.stream, .dependent = true};
}

}  // namespace

void await_readers(const WindowTable& window, const ExchangeName& name, cudaStream_t stream) {
  wait(window, name, Step::kAwaitReaders, Step::kWrite, stream);
}

void begin_exchange(const WindowTable& window, const parallel::ExchangeJob& job, const Lane& lane) {
  constexpr int64_t kLittle = 64 << 10;  // bytes
  int64_t bytes = 0;
  for (const parallel::BroughtRows& b : job.brought)
    if (b.to != nullptr && (b.from != b.to || b.filled > 0)) bytes += b.all() * b.row_bytes;
  if (bytes == 0) return wait(window, job.name, Step::kAwaitReaders, Step::kRead, lane.stream);
  if (bytes <= kLittle) {
    const Grid one{.blocks = 1, .threads = kThreads, .stream = lane.stream, .dependent = true};
    return launch(begin_kernel, one, window, job);
  }
  await_readers(window, job.name, lane.stream);
  launch(bring_kernel, grid_of(bytes / 16 + 1, lane), job);
  wait(window, job.name, Step::kWrite, Step::kRead, lane.stream);
}

void end_exchange(const WindowTable& window, const parallel::ExchangeJob& job, const Lane& lane) {
  int64_t rows = 0;
  for (const parallel::Outcome& o : job.outcomes) rows += o.rows;
  // A block an SM: where nothing failed they look at two words.
  const int64_t blocks = std::clamp<int64_t>(rows, 1, lane.units);
  launch(end_kernel, grid_of(blocks * kThreads, lane), window, job);
}

void gather_lists(const WindowTable& window, std::span<const parallel::ListOfRanks> lists,
                  const Lane& lane) {
  Lists all{};
  std::copy(lists.begin(), lists.end(), all.of);
  launch(gather_kernel, grid_of(window.ranks * lists[0].count, lane), window, all);
}

void make_map(const WindowTable& window, const parallel::MapJob& job, const Lane& lane) {
  launch(map_kernel, grid_of(job.ranks * job.choices, lane), window, job);
}

}  // namespace cadre::cuda
