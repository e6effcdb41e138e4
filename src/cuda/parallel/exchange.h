#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "parallel/rank_device.h"

// An exchange between GPUs that have mapped each other's windows, as kernels on a stream of each.
// Blocks that wait are few enough never to fill a GPU, and the kernels behind them start when they
// end: nobody's waiting keeps another stream from what it waits for.
namespace cadre::cuda {

/// What the kernels of a rank tell its host, in memory of that.
struct HostNotes {
  uint64_t failure = 0;   ///< parallel::Failure, of any rank
  uint64_t overflow = 0;  ///< see overflow_word()
};

/// An overflow as one word; 0: none.
constexpr int kRoutedBits = 31, kRankBits = 6;
static_assert(parallel::kMostRanks <= 1 << kRankBits);
CADRE_HD constexpr uint64_t overflow_word(const parallel::OverflowNote& note) {
  return uint64_t(1) << 63 | uint64_t(note.problem) << (kRoutedBits + kRankBits) |
         uint64_t(note.rank) << kRoutedBits | uint64_t(note.routed);
}
constexpr parallel::OverflowNote overflow_of(uint64_t word) {
  if (word == 0) return {};
  return {.problem = uint32_t(word >> (kRoutedBits + kRankBits)) & 0xffffff,
          .rank = int32_t(word >> kRoutedBits & ((1 << kRankBits) - 1)),
          .routed = int32_t(word & ((uint64_t(1) << kRoutedBits) - 1))};
}

/// The windows of all ranks, as kernels see them.
struct WindowTable {
  char* memory;
  int64_t bytes_each;
  int rank, ranks;
  uint64_t limit;  ///< nanoseconds; 0: none
  HostNotes* notes;

  CADRE_HD char* of(int rank_of) const { return memory + rank_of * bytes_each; }
  CADRE_HD parallel::Control& control(int rank_of) const {
    return *reinterpret_cast<parallel::Control*>(of(rank_of));
  }
  CADRE_HD parallel::Control& home() const { return control(rank); }
};

/// Where kernels go: a stream, the SMs of its GPU, and how many ranks that GPU has.
struct Lane {
  cudaStream_t stream;
  int units, ranks_here = 1;

  /// Blocks of a kernel that may wait: no more than one for every second SM, and so few that those
  /// of all ranks of the GPU are resident at once.
  int most_waiting() const { return std::max(1, units / std::max(2, ranks_here)); }
};

/// The steps of an exchange; see schedule::Exchange.
void await_readers(const WindowTable&, const parallel::ExchangeName&, cudaStream_t);
void begin_exchange(const WindowTable&, const parallel::ExchangeJob&, const Lane&);
void end_exchange(const WindowTable&, const parallel::ExchangeJob&, const Lane&);
void make_map(const WindowTable&, const parallel::MapJob&, const Lane&);

/// All of them, of few tokens. What a block alone would take long to bring is brought before, by
/// bring_large, which returns the rest.
void exchange_few(const WindowTable&, const parallel::ExchangeJob&, const parallel::ExchangeRead&,
                  const Lane&);
parallel::ExchangeJob bring_large(const WindowTable&, const parallel::ExchangeJob&, const Lane&);

}  // namespace cadre::cuda
