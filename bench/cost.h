#pragma once
#include <string_view>

#include "bench/measure.h"

namespace cadre::bench {

/// What a problem makes work of: products of its plain loops, elements of its tensors, and rows
/// that fall to experts one by one.
struct Cost {
  double products = 0, elements = 0, routed = 0;
};

/// Of a problem of any operation or layer. `only`: its implementation, where the problem may be one
/// that no other takes.
/// Errors    InvalidArgument from parsing and planning; Unsupported of ranks.
Cost cost_of(std::string_view problem, std::string_view only = {});

/// About how many seconds this machine needs, from the cost alone: nothing is drawn.
double seconds_to_check(std::string_view problem, std::string_view only = {});
double seconds_to_measure(std::string_view problem, const MeasureOptions&);
double seconds_to_time_host(std::string_view problem, const Device&);

/// Refuses what would take longer than a limit; 0 is none. `verb` is what the error begins with.
/// Errors    InvalidArgument.
void require_within(std::string_view verb, std::string_view problem, double seconds, int limit);

}  // namespace cadre::bench
