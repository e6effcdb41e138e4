#pragma once
#include <string_view>
#include <vector>

#include "bench/measure.h"

namespace cadre::bench {

/// Times dispatch and collect of `expert_parallel` in a process for each rank, beside a copy of as
/// many bytes in each, after a smaller problem was checked (check_ranks.h). A launch takes until
/// the last rank is through. On GPUs also beside the DMA engines, and beside itself from a graph.
/// Errors    InvalidArgument and Unsupported from parsing and planning; DeviceError if a rank
///           fails.
std::vector<Measurement> measure_ranks(std::string_view problem, const MeasureOptions&);

}  // namespace cadre::bench
