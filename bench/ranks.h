#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/expert_parallel.h"

namespace cadre::bench {

/// Where ranks meet.
class RankGroup {
 public:
  RankGroup() = default;
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  virtual ~RankGroup() = default;

  virtual void enter(int rank, std::string_view phase) = 0;
  virtual void meet() = 0;
  virtual std::vector<std::string> gather(int rank, const std::string& own) = 0;
};

/// One of several processes, or threads, that work together, as it sees itself.
class Rank {
 public:
  Rank(RankGroup& group, int number) : group_(group), number_(number) {}

  int number() const { return number_; }
  /// Says what this rank does from now on, for the error if it does not come through.
  void enter(std::string_view phase) { group_.enter(number_, phase); }
  /// Waits until every rank is here.
  void meet() { group_.meet(); }
  AllGather all_gather() {
    return [this](const std::string& own) { return group_.gather(number_, own); };
  }

 private:
  RankGroup& group_;
  int number_;
};

/// Where a rank works: with fewer GPUs than ranks all share one.
Device device_of_rank(const Device&, int rank, int ranks);

/// Calls `work` in a process for each rank, with a share of the threads, and returns what each
/// returned (some kilobytes at most). When one throws or dies all end; none outlives the caller.
/// What a rank writes is seen by others only in Buffers that are for processes.
/// Errors    DeviceError that names the rank and its phase.
std::vector<std::string> run_ranks(int ranks, const std::function<std::string(Rank&)>& work);

/// The same in threads, for GPUs: CUDA does not work in the copy of a process that has used it.
/// When one throws, those who meet it end too.
std::vector<std::string> run_rank_threads(int ranks, const std::function<std::string(Rank&)>& work);

/// Lets CUDA load all kernels at its start, since one that is loaded later waits for its GPU, and
/// so for ranks of other threads that share it; and gives their streams queues of their own, since
/// a kernel waits for whatever stands before it in a queue. To be called before CUDA is; what the
/// user has set does not stay.
void let_ranks_share_a_gpu();

/// Whichever suits the device.
std::vector<std::string> run_ranks_on(const Device&, int ranks,
                                      const std::function<std::string(Rank&)>& work);

}  // namespace cadre::bench
