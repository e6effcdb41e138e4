#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/expert_parallel.h"
#include "parallel/shared_memory.h"

namespace cadre::parallel {

constexpr int kMostRanks = 64;

/// Flags lie in memory that processes share.
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free &&
              std::atomic_ref<uint32_t>::is_always_lock_free);

/// What an exchange is, in errors and in flags.
enum class ExchangeKind : uint8_t {
  kNone,  ///< between two
  kDispatch,
  kCollect,
  kCollectBackward,
  kDispatchBackward,
};
std::string_view name(ExchangeKind);

/// An exchange of a layer.
struct ExchangeName {
  ExchangeKind kind = ExchangeKind::kNone;
  uint32_t problem = 0;  ///< ExpertParallelPlan::tag

  uint32_t tag() const { return uint32_t(kind) << 24 | problem; }
};

/// Why a window is of no more use, as one word that any rank may write at any other.
struct Failure {
  enum class Why : uint8_t { kNone, kLate, kOutOfStep };
  Why why = Why::kNone;
  ExchangeKind call = ExchangeKind::kDispatch;
  uint16_t rank = 0;   ///< that did not come, or is out of step
  uint32_t epoch = 0;  ///< of the exchange

  uint64_t word() const;
  static Failure of(uint64_t word);
};

/// The first bytes of every rank's window.
struct Control {
  uint64_t ready[kMostRanks] = {};  ///< by peers: schedule::ReadyTag
  uint32_t read[kMostRanks] = {};   ///< by peers
  uint32_t epoch = 0;               ///< at home
  uint64_t failure = 0;             ///< by anybody, once
};

WindowLayout layout_of(const ExpertParallelProblem&);

}  // namespace cadre::parallel

namespace cadre {

struct Window::State {
  int rank = 0, ranks = 1;
  std::chrono::milliseconds limit{};
  parallel::SharedMemory memory{};  ///< of all ranks, one after another
  std::string overflow{};           ///< what had no room, until somebody asks

  char* of(int rank_of) const { return memory.data() + rank_of * memory.bytes_each(); }
  parallel::Control& control(int rank_of) const {
    return *reinterpret_cast<parallel::Control*>(of(rank_of));
  }
  /// Throws if the window can be used no more.
  void check_failure() const;
  /// Tells every rank, and throws.
  [[noreturn]] void fail(const parallel::Failure&) const;
  /// Throws once what overflowed.
  void check_overflow();
};

}  // namespace cadre
