#pragma once
#include "cuda/device/flag.h"
#include "cuda/parallel/exchange.h"
#include "cuda/portable/row_map.cuh"
#include "schedule/exchange.h"
#include "schedule/expert_rows.h"

// What the kernels of exchanges are made of: a way past the flags, and copies into windows.
namespace cadre::cuda {

using parallel::Failure;
using portable::BlockShare;
using Step = schedule::Exchange::Step;

/// The flags of the windows as the state machine sees them. What a rank writes and reads is the
/// kernels'.
struct WindowFlags {
  const WindowTable& window;
  bool is_fenced = false;  ///< what the thread says is ready came before a fence of its own

  __device__ uint32_t load_read(int peer) const {
    return load_acquire_system(&window.home().read[peer]);
  }
  __device__ uint64_t load_ready(int peer) const {
    return load_acquire_system(&window.home().ready[peer]);
  }
  __device__ void store_ready(int peer, uint64_t tag) const {
    uint64_t* word = &window.control(peer).ready[window.rank];
    is_fenced ? store_relaxed_system(word, tag) : store_release_system(word, tag);
  }
  __device__ void store_read(int peer, uint32_t epoch) const {
    store_release_system(&window.control(peer).read[window.rank], epoch);
  }
  __device__ void write() const {}
  __device__ void read() const {}
};

/// Whether a rank has failed, which this one's host is told.
__device__ inline bool has_failed(const WindowTable& window) {
  const uint64_t failure = load_acquire_system(&window.home().failure);
  if (failure != 0) store_release_system(&window.notes->failure, failure);
  return failure != 0;
}

__device__ inline void tell_all(const WindowTable& window, const Failure& failure) {
  for (int p = 0; p < window.ranks; ++p)
    store_release_system(&window.control(p).failure, failure.word());
  has_failed(window);
}

/// The epoch of the exchange that comes next, or is under way.
__device__ inline uint32_t next_epoch(const WindowTable& window) { return window.home().epoch + 1; }

/// Of a thread that asks for something of a rank, again and again.
class Waiting {
 public:
  /// `limits`: how many it has patience for.
  __device__ Waiting(const WindowTable& window, parallel::ExchangeKind kind, uint32_t epoch,
                     unsigned limits)
      : window_(window), kind_(kind), epoch_(epoch), limits_(limits) {}

  __device__ void renew() { since_ = 0; }
  /// Whether to ask no more, since a rank has failed, or this one is late or out of step, of which
  /// all are told.
  __device__ bool gives_up(int rank, bool is_out_of_step) {
    constexpr unsigned kAsks = 16;  // before it looks at anything else
    if (!is_out_of_step && ++asks_ % kAsks != 0) return false;
    if (has_failed(window_)) return true;
    const uint64_t now = nanoseconds();
    if (since_ == 0) since_ = now;
    const bool is_late = window_.limit != 0 && (now - since_) / limits_ >= window_.limit;
    if (!is_out_of_step && !is_late) {
      rest();
      return false;
    }
    const auto why = is_out_of_step ? Failure::Why::kOutOfStep : Failure::Why::kLate;
    tell_all(window_, {why, kind_, uint16_t(rank), epoch_});
    return true;
  }

 private:
  const WindowTable& window_;
  parallel::ExchangeKind kind_;
  uint32_t epoch_;
  unsigned limits_, asks_ = 0;
  uint64_t since_ = 0;
};

/// The way of a block through an exchange: some thread goes past each peer, one behind them asks
/// whether a rank had failed before a wait, and all come to a step together. What a block has read
/// or written before a step is so for all.
class Way {
 public:
  /// Of that epoch. Whoever begins it says which rank is late; blocks that come later leave when it
  /// has said so: that one may take a limit for each of two waits, so others wait for four.
  __device__ Way(const WindowTable& window, const parallel::ExchangeName& name, uint32_t epoch,
                 Step from = Step::kAwaitReaders, bool begins = true)
      : flags_{window},
        waiting_(window, name.kind, epoch, begins ? 1 : 4),
        exchange_({int(threadIdx.x), 1}, {epoch, name.tag()}, from) {}

  /// Goes on up to a step, or until a rank has failed, is late or at another call. All threads of
  /// the block must call it.
  __device__ void go_to(Step end) {
    go_to(end, [] { return true; });
  }
  /// Warps that have no peers do meanwhile what is given, and say whether it was done.
  template <class Work>
  __device__ void go_to(Step end, Work&& meanwhile) {
    const WindowTable& window = flags_.window;
    const int number = int(threadIdx.x);
    const bool waits = end == Step::kWrite || end == Step::kRead;
    __syncthreads();
    if (number < window.ranks) run_to(end);
    if (number == window.ranks && waits) is_stopped_ = has_failed(window);
    if (number >= warps_of_peers(window) * portable::kLanes) is_stopped_ = !meanwhile();
    any_stopped_ = __syncthreads_or(is_stopped_);
  }
  /// Whether some thread of the block did not come to its last step.
  __device__ bool any_stopped() const { return any_stopped_; }

  /// Those of the peers, and of who asks for failures.
  __device__ static int warps_of_peers(const WindowTable& window) {
    return window.ranks / portable::kLanes + 1;
  }

 private:
  __device__ void run_to(Step end) {
    is_stopped_ = true;
    waiting_.renew();
    while (exchange_.step() != end) {
      if (exchange_.advance(flags_))
        waiting_.renew();
      else if (waiting_.gives_up(exchange_.peer(), exchange_.step() == Step::kOutOfStep))
        return;
    }
    is_stopped_ = false;
  }

  WindowFlags flags_;
  Waiting waiting_;
  schedule::Exchange exchange_;
  bool is_stopped_ = false, any_stopped_ = false;
};

/// Of the blocks of a grid that have come here, and whether one of them says so.
struct Arrival {
  bool is_last, any;
};

/// All threads of each block must call it. The last block to come sees what all have written, and
/// `asks()`, of which one thread is asked behind all that the block has read, takes no time of its
/// own: the fence is another thread's.
template <class Ask>
__device__ Arrival arrive(const WindowTable& window, bool says_so, Ask&& asks) {
  constexpr uint32_t kSays = 1 << 16;  // beyond the number of blocks
  const bool is_alone = gridDim.x == 1;
  __syncthreads();
  if (threadIdx.x == portable::kLanes) says_so |= asks();
  if (threadIdx.x == 0 && !is_alone) fence_device();
  const bool says = __syncthreads_or(says_so);
  if (is_alone) return {true, says};
  uint32_t all = 0;
  if (threadIdx.x == 0) {
    const uint32_t mine = 1 + (says ? kSays : 0);
    all = mine + add_acquire(&window.home().blocks, mine);
    if (all % kSays == gridDim.x) window.home().blocks = 0;
  }
  if (!__syncthreads_or(all % kSays == gridDim.x)) return {false, says};
  return {true, bool(__syncthreads_or(all >= kSays))};
}

/// Some of several threads that share work.
struct Team {
  int64_t first, count;

  __device__ static Team block() { return {int64_t(threadIdx.x), int64_t(blockDim.x)}; }
  __device__ static Team of(const BlockShare& share) {
    return {int64_t(share.index) * blockDim.x + threadIdx.x, int64_t(share.count) * blockDim.x};
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

/// The widest of uint4, uint32_t and uint16_t of which these addresses and lengths are multiples:
/// calls visit(Word()).
template <class Visit>
CADRE_HD void with_words_of(uint64_t bits, Visit&& visit) {
  if (bits % 16 == 0) return visit(uint4());
  if (bits % 4 == 0) return visit(uint32_t());
  visit(uint16_t());
}

__device__ inline void copy_bytes(const char* from, char* to, int64_t bytes, const Team& team) {
  const auto bits =
      reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes);
  with_words_of(bits, [&]<class Word>(Word) {
    copy_words<Word>(from, to, bytes / int64_t(sizeof(Word)), team);
  });
}

__device__ inline void set_bits(char* to, int64_t bytes, const Team& team) {
  for (int64_t i = team.first; i < bytes / 2; i += team.count)
    reinterpret_cast<uint16_t*>(to)[i] = 0xffff;
}

/// Calls work(row) for rows, each of which a block takes.
template <class Work>
__device__ void for_rows_by_blocks(int64_t rows, const BlockShare& share, Work&& work) {
  for (int64_t row = share.index; row < rows; row += share.count) work(row);
}

/// A call of its own, since its registers are more than those of its callers.
__device__ inline __noinline__ void bring_rows(const parallel::BroughtRows& b, char* to,
                                               const BlockShare& share) {
  const int64_t used = b.used == nullptr ? b.rows : schedule::clamp_row(*b.used, 0, b.rows);
  const auto* from = static_cast<const char*>(b.from);
  const Team team = Team::of(share);
  if (b.row_bytes == b.step && from != to)
    copy_bytes(from, to, used * b.row_bytes, team);
  else if (from != to)
    for_rows_by_blocks(used, share, [&](int64_t row) {
      copy_bytes(from + row * b.step, to + row * b.row_bytes, b.row_bytes, Team::block());
    });
  if (b.filled > used) set_bits(to + used * b.row_bytes, (b.filled - used) * b.row_bytes, team);
}

/// A list, to all ranks: each word is read once.
__device__ inline void bring_list(const WindowTable& window, const parallel::BroughtRows& b,
                                  const BlockShare& share) {
  constexpr int kInFlight = 4;
  const int64_t used = b.used == nullptr ? b.rows : schedule::clamp_row(*b.used, 0, b.rows);
  const auto* from = static_cast<const uint32_t*>(b.from);
  const Team team = Team::of(share);
  for (int64_t first = team.first; first < max(used, b.filled); first += kInFlight * team.count) {
    uint32_t words[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      words[k] = first + k * team.count < used ? from[first + k * team.count] : ~0u;
    for (int p = 0; p < window.ranks; ++p) {
      auto* to = reinterpret_cast<uint32_t*>(b.to + (p - window.rank) * window.bytes_each);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (const int64_t i = first + k * team.count; i < max(used, b.filled)) to[i] = words[k];
    }
  }
}

/// Words, each to its place.
__device__ inline void bring_to_places(const WindowTable& window, const parallel::BroughtRows& b,
                                       const BlockShare& share) {
  constexpr int kInFlight = 4;
  const auto* from = static_cast<const uint32_t*>(b.from);
  const int64_t used = schedule::clamp_row(*b.used, 0, b.rows), all = window.ranks * b.places;
  const Team team = Team::of(share);
  for (int64_t first = team.first; first < used; first += kInFlight * team.count) {
    uint32_t words[kInFlight] = {};
    int32_t places[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = first + k * team.count;
      places[k] = i < used ? b.place_of[i] : -1;
      if (i < used) words[k] = from[i];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (places[k] < 0 || places[k] >= all) continue;
      const auto each = unsigned(b.places), rank = unsigned(places[k]) / each;
      char* to = b.to + (int(rank) - window.rank) * window.bytes_each;
      reinterpret_cast<uint32_t*>(to)[unsigned(places[k]) % each] = words[k];
    }
  }
}

/// What a rank brings, by these blocks.
__device__ inline void bring_all(const WindowTable& window, const parallel::ExchangeJob& job,
                                 const BlockShare& share) {
  for (const parallel::BroughtRows& b : job.brought) {
    if (!b.is_written()) continue;
    if (b.place_of != nullptr)
      bring_to_places(window, b, share);
    else
      b.to_all ? bring_list(window, b, share) : bring_rows(b, b.to, share);
  }
}

/// Makes all that an exchange writes NaN.
__device__ inline void spoil(const parallel::ExchangeJob& job, const BlockShare& share) {
  for (const parallel::Outcome& o : job.outcomes)
    if (o.data != nullptr)
      for_rows_by_blocks(o.rows, share, [&](int64_t row) {
        set_bits(static_cast<char*>(o.data) + row * o.step, o.row_bytes, Team::block());
      });
}

}  // namespace cadre::cuda
