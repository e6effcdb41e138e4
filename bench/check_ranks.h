#pragma once
#include <string_view>

#include "bench/check.h"

namespace cadre::bench {

struct RanksReport {
  CheckReport check{};
  int routings = 0;   ///< that were checked
  int overflows = 0;  ///< of these, those without room for all rows, which is an error
};

/// Runs dispatch, collect and both backward of `expert_parallel` in a process for each rank, and in
/// one that has all tokens and experts, with routings that follow one another by one window or
/// engine. The bits of both are compared; of rows that overflow all must be NaN, and the route must
/// say so. `only`: by this route, not the planned one; "collective" is by mailboxes between
/// processes, and by NCCL between GPUs.
/// Errors    InvalidArgument and Unsupported from parsing and planning, or without an engine;
///           DeviceError if a rank fails.
RanksReport check_ranks(std::string_view problem, const Draw&, const Device& device = this_cpu(),
                        std::string_view only = {});

/// What that compares the bits of ranks with, in words.
const char* compared_with(std::string_view problem);

}  // namespace cadre::bench
