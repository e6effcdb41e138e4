#pragma once
#include <string>
#include <string_view>

#include "bench/digest.h"
#include "bench/draw.h"
#include "cadre/device.h"

namespace cadre::bench {

/// How an implementation compares with the reference on one random case.
struct CheckReport {
  std::string problem{};      ///< as it prints back
  std::string plan{};         ///< the implementation that was checked
  double error_of_bound = 0;  ///< the largest |got - want| / bound over all outputs
  std::string fault{};        ///< what is wrong, in words; empty if nothing is
  Digest digest{};            ///< of what was computed

  bool good() const { return fault.empty(); }
  /// True where there is no other implementation, so that nothing was compared with the reference.
  bool is_reference() const { return plan == "cpu_reference"; }
};

/// Runs the implementation that planning chooses (or `only`) and the reference on equal random
/// data and compares outputs, tails and canaries; then runs the implementation again and compares
/// the bits of both runs, if its plan promises them. All of it twice: with rows that touch, and
/// with gaps between them. The reference runs on the CPU, the implementation on `device`, over
/// copies of the same bytes.
/// Errors    InvalidArgument and Unsupported from parsing and planning.
CheckReport check(std::string_view problem, const Draw&, std::string_view only = {},
                  const Device& device = this_cpu());

}  // namespace cadre::bench
