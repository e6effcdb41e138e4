#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/expert_parallel.h"

namespace cadre::bench {

struct RankBoard;

/// One of several processes that work together, as it sees itself.
class Rank {
 public:
  Rank(RankBoard& board, int number) : board_(board), number_(number) {}

  int number() const { return number_; }
  /// Says what this rank does from now on, for the error if it does not come through.
  void enter(std::string_view phase);
  /// Waits until every rank is here.
  void meet();
  AllGather all_gather();

 private:
  RankBoard& board_;
  int number_;
};

/// Calls `work` in a process for each rank, with a share of the threads, and returns what each
/// returned (some kilobytes at most). When one throws or dies all end; none outlives the caller.
/// What a rank writes is seen by others only in Buffers that are for processes.
/// Errors    DeviceError that names the rank and its phase.
std::vector<std::string> run_ranks(int ranks, const std::function<std::string(Rank&)>& work);

}  // namespace cadre::bench
