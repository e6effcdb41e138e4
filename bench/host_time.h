#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "bench/draw.h"
#include "bench/timer.h"
#include "cadre/device.h"

namespace cadre::bench {

/// How long the host takes for one call that enqueues work on a device. On the CPU a call is the
/// work itself.
struct HostTime {
  std::string problem, plan;
  std::string call;  ///< run, forward or backward
  Quantiles us;
  int calls = 0;  ///< that were timed
};

struct HostTimeOptions {
  Device device = this_cpu();
  Draw draw{};
  int batches = 20, batch = 50;  ///< calls are timed one by one, in batches
};

/// Times the calls of an operation (run), or of grouped_linear, grouped_mlp and moe (forward,
/// backward), on random data. The device may finish between batches, so that its queue is never
/// full.
/// Errors    InvalidArgument and Unsupported from parsing and planning.
std::vector<HostTime> host_times(std::string_view problem, const HostTimeOptions&);

}  // namespace cadre::bench
