#pragma once
#include <string_view>
#include <vector>

#include "bench/measure.h"

namespace cadre::bench {

/// Times dispatch and collect of `expert_parallel` in a process for each rank, beside a copy of as
/// many bytes in each, after a smaller problem was checked (check_ranks.h). A launch takes until
/// the last rank is through. On GPUs also beside itself from a graph, which by collective may have
/// blocks alone, and by a window beside the DMA engines.
/// Errors    as those of check_ranks.
std::vector<Measurement> measure_ranks(std::string_view problem, const MeasureOptions&);

}  // namespace cadre::bench
