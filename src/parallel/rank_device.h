#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/device.h"
#include "parallel/shared_memory.h"
#include "parallel/window.h"
#include "schedule/rank_rows.h"

// What ranks on one kind of device do in their own way: share memory, and go through an exchange.
namespace cadre::parallel {

/// Rows that a rank brings to an exchange: they are copied to `to` in its window, one after
/// another, unless they lie there. Behind them all bits are set, up to `filled` rows in all. What
/// is for all is copied to the same place in the window of every rank.
struct BroughtRows {
  const void* from = nullptr;  ///< null: nothing is brought
  char* to = nullptr;
  int64_t row_bytes = 0, step = 0;  ///< of a row; from one to the next
  int64_t rows = 0;                 ///< at most
  const int32_t* used = nullptr;    ///< how many there are, where the device has it; null: all
  int64_t filled = 0;
  bool to_all = false;
  /// Words to as many places as each rank has: where each goes, numbered through the ranks. `to` is
  /// this rank's first.
  const int32_t* place_of = nullptr;
  int64_t places = 0;

  /// Whether anything is to be done for it.
  CADRE_HD bool is_written() const { return to != nullptr && (from != to || filled > 0); }
  int64_t all() const { return rows > filled ? rows : filled; }
};

/// What an exchange writes: NaN in all of it where the exchange fails. A number, an 8-bit code or a
/// scale all of whose bits are set is NaN in each of our types.
struct Outcome {
  void* data = nullptr;  ///< null: nothing is written
  int64_t row_bytes = 0, step = 0, rows = 0;
};

/// An exchange, but for what it reads.
struct ExchangeJob {
  ExchangeName name{};
  std::array<BroughtRows, 5> brought{};
  std::array<Outcome, 3> outcomes{};
  const int32_t* verdict = nullptr;  ///< one word on the device; not 0: the outcomes become NaN
};

/// Blocks of a GPU that sort choices by rank, at most: each counts those of every expert.
constexpr int kMostSortBlocks = 64;

/// The choices of all ranks, to be sorted, and what a rank makes of them.
struct MapJob {
  uint32_t problem = 0;                  ///< ExpertParallelPlan::tag
  int ranks = 1, rank = 0, experts = 1;  ///< P, this rank, E
  int64_t bound = 0;                     ///< R
  int64_t choices = 0, own = 0;          ///< T * top_k of a rank; t * top_k of this one
  int top_k = 1;
  bool overflow_is_error = true;
  const int32_t* chosen = nullptr;  ///< [P, T, top_k] experts
  const OffsetsPlan* sort = nullptr;
  int32_t* sorted = nullptr;       ///< [P * E + 1] offsets
  int32_t* slot_sorted = nullptr;  ///< [P * T * top_k] slots in that order
  int32_t* row_sorted = nullptr;   ///< [P, T, top_k] rows in that order
  Workspace scratch{};             ///< of the sort
  ExchangeMap map{};
  int32_t* routed = nullptr;  ///< [P]

  /// With sum=rank: of an own choice whose row is at that rank, or -1, of nobody, without room.
  CADRE_HD void note_sum(int64_t own_choice, int at_rank, int32_t row) const {
    if (map.sum_of == nullptr || row < 0) return;
    const int64_t token = own_choice / top_k;
    map.sum_of[token * ranks + at_rank] =
        schedule::RankRows::sum_at(at_rank, ranks, rank, token, choices / top_k);
  }
};

/// Rows that are moved or summed.
struct RowsMove {
  const PermutePlan& plan;
  PermuteArgs args{};
};

/// What is read between begin and end: dispatch makes its map, all of them move rows.
struct ExchangeRead : RowsMove {
  const MapJob* map = nullptr;
  std::optional<RowsMove> before{};  ///< writes into the own window, before anything is brought
  std::optional<RowsMove> behind{};
};

/// Rows that had no room, where that is an error.
struct OverflowNote {
  uint32_t problem = 0;
  int32_t rank = -1;  ///< that had most of them; -1: there was none
  int32_t routed = 0;
};

/// Memory of ranks: that of the first, and how far it is to the next.
struct SideBySide {
  char* first = nullptr;
  int64_t step = 0;
};

class RankDevice {
 public:
  RankDevice() = default;
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;
  virtual ~RankDevice() = default;

  /// Where it is, in words that ranks on one device have alike.
  virtual std::string place() const = 0;
  /// So many bytes as memory can be made of.
  virtual int64_t whole_bytes(int64_t bytes) const = 0;
  /// Memory that other ranks can map; its first bytes, Control, are zero once all have mapped it.
  virtual File make_memory(int64_t bytes) = 0;
  /// Maps that of each rank, side by side; it lives as long as this.
  virtual char* map(std::span<const File> files, int64_t bytes_each, int rank) = 0;

  /// The same of memory that is mapped at these addresses, one a rank; no flags are zero yet.
  virtual SideBySide map_again(const std::vector<void*>& addresses, int64_t bytes) = 0;
  /// The first word of a window, by any address of it; and its first bytes, Control, as zeros.
  virtual void write_word(void* window, uint64_t word) = 0;
  virtual uint64_t word(const void* window) = 0;
  virtual void clear_flags(void* window) = 0;

  /// Waits until the window may be written, for that exchange or none.
  virtual void await_readers(const Window::State&, const ExchangeName&, Stream) = 0;
  /// The same, brings what the job says, and waits until all have.
  virtual void begin(const Window::State&, const ExchangeJob&, Stream) = 0;
  /// Says that this rank has read; the outcomes become NaN if something failed.
  virtual void end(const Window::State&, const ExchangeJob&, Stream) = 0;
  /// Where an exception ends an exchange.
  virtual void spoil(const ExchangeJob&) = 0;

  /// All of an exchange at once, of a plan that says few_tokens.
  virtual void run_few(const Window::State&, const ExchangeJob&, const ExchangeRead&, Stream) = 0;

  virtual void make_map(const Window::State&, const MapJob&, Stream) = 0;

  /// What the device has noted so far: a failure, and an overflow, which is told once.
  virtual Failure failure(const Window::State&) const = 0;
  virtual OverflowNote take_overflow() = 0;
};

/// Of that device.
/// Errors    Unsupported in a build without it.
std::unique_ptr<RankDevice> rank_device(const Device&);

}  // namespace cadre::parallel

namespace cadre::cuda {
std::unique_ptr<parallel::RankDevice> rank_device(const Device&);
}
