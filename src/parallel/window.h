#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "cadre/host_device.h"
namespace cadre::parallel {

class RankDevice;

constexpr int kMostRanks = 64;              ///< of a window
constexpr int kMostCollectiveRanks = 4096;  ///< of an engine

/// Routes. Of few tokens the whole of an exchange is one kernel.
constexpr std::string_view kFewTokens = "few_tokens", kWindow = "window",
                           kWindowSumRank = "window_sum_rank", kCollective = "collective";
constexpr int64_t kFewChoices = 4096, kFewExperts = 1024;  ///< of all ranks

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

  CADRE_HD constexpr uint32_t tag() const { return uint32_t(kind) << 24 | problem; }
};

/// Why a window is of no more use, as one word that any rank may write at any other.
struct Failure {
  enum class Why : uint8_t { kNone, kLate, kOutOfStep };
  Why why = Why::kNone;
  ExchangeKind call = ExchangeKind::kDispatch;
  uint16_t rank = 0;   ///< that did not come, or is out of step
  uint32_t epoch = 0;  ///< of the exchange

  CADRE_HD constexpr uint64_t word() const {
    return uint64_t(why) << 56 | uint64_t(call) << 48 | uint64_t(rank) << 32 | epoch;
  }
  CADRE_HD static constexpr Failure of(uint64_t word) {
    return {.why = Why(word >> 56),
            .call = ExchangeKind(word >> 48 & 0xff),
            .rank = uint16_t(word >> 32),
            .epoch = uint32_t(word)};
  }
};

/// The first bytes of every rank's window.
struct Control {
  uint64_t ready[kMostRanks] = {};  ///< by peers: schedule::ReadyTag
  uint32_t read[kMostRanks] = {};   ///< by peers
  uint32_t epoch = 0;               ///< at home: of the last exchange that is over
  uint32_t blocks = 0;              ///< at home: of a GPU's kernel, that are through
  uint64_t failure = 0;             ///< by anybody
  /// By peers, of a dispatch of few tokens: [P, T, top_k], each word behind its epoch as
  /// schedule::ReadyTag has it. Nothing else is ever written here.
  uint64_t experts[kFewChoices] = {}, prob[kFewChoices] = {};
};

WindowLayout layout_of(const ExpertParallelProblem&);

/// Of a wait; ten years at most.
inline void check_limit(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kMost = std::chrono::hours(24 * 365 * 10);
  require(limit.count() >= 0 && limit <= kMost, "limit is ", limit.count(), " ms, must be 0 to ",
          kMost.count());
}

/// A plan whose rows travel by the caller's engine is of no window.
void check_is_of_window(std::string_view op, const ExpertParallelPlan&);
/// Whether a window has room for what the plan has in it.
void check_fits(std::string_view op, const ExpertParallelPlan&, const Window&);

/// What is thrown where rows overflowed and that is an error.
DeviceError overflow_error(const ExpertParallelProblem&, int rank, int64_t routed);

}  // namespace cadre::parallel

namespace cadre {

struct Window::State {
  State();
  ~State();

  int rank = 0, ranks = 1;
  int ranks_here = 1;  ///< on this rank's device
  std::chrono::milliseconds limit{};
  Device planned{};  ///< whose memory it is
  std::unique_ptr<parallel::RankDevice> device{};
  char* memory = nullptr;  ///< of all ranks, one after another
  int64_t bytes_each = 0;  ///< from one to the next
  int64_t bytes = 0;       ///< of each, for plans
  std::vector<std::pair<uint32_t, ExpertParallelProblem>> dispatched{};  ///< by their tags

  char* of(int rank_of) const { return memory + rank_of * bytes_each; }
  parallel::Control& control(int rank_of) const {
    return *reinterpret_cast<parallel::Control*>(of(rank_of));
  }
  /// Throws if the window can be used no more.
  void check_failure() const;
  /// Throws once what overflowed.
  void check_overflow();
  /// Of whose rows an overflow may be noted.
  void remember(const ExpertParallelPlan&);
};

}  // namespace cadre
