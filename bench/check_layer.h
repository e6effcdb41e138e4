#pragma once
#include <string_view>

#include "bench/check.h"

namespace cadre::bench {

/// Runs forward, backward and what they defer of a layer twice on equal random data. A layer has no
/// reference, its steps have: the bits of both runs are compared, and hashed. With cached weights a
/// run is two microbatches, of which the second reads the cache. All memory is poisoned before.
/// Errors    InvalidArgument and Unsupported from parsing and planning.
CheckReport check_layer(std::string_view problem, const Draw&, const Device& device = this_cpu());

}  // namespace cadre::bench
