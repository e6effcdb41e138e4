#pragma once
#include <string>
#include <vector>

#include "bench/accelerator.h"
#include "bench/peer.h"
#include "bench/timer.h"

namespace cadre::bench {

/// One contestant: ours is "cadre", the others are peers.
struct Timing {
  std::string name, what;
  Quantiles us;
  double speed = 1;  ///< of ours: the median of (its time / our time), launch by launch
  /// Of a GPU that measures its energy, over load_s / 2 of launches behind one another; else 0.
  double joules = 0;  ///< of one launch
  double watts = 0, sm_mhz = 0;
};

struct ContestOptions {
  int repeat = 20;  ///< launches of each contestant
  /// Of a GPU: seconds of launches before any is timed, so that it is warm; above 0 at least one of
  /// each contestant.
  double load_s = 0;
};

/// Times launches that alternate: each takes the next copy of the case, so that nobody finds in
/// the cache what the one before has read. `copies[i]` are the contestants on the i-th copy, ours
/// first. On an accelerator times are those of the device; null: the CPU.
std::vector<Timing> contest(const std::vector<std::vector<Peer>>& copies, const ContestOptions&,
                            Accelerator*);

}  // namespace cadre::bench
