#pragma once
#include <string>
#include <vector>

#include "bench/accelerator.h"

namespace cadre::bench {

/// One measured property of a device.
struct Fact {
  std::string name;
  double value;
  std::string unit;
  std::string how;  ///< what was timed, and what is counted
};

/// Measures what the kernels for a device are designed by: bandwidths, the rate of dense products,
/// and what launches cost. Takes seconds, and gigabytes of the device.
/// Errors    DeviceError.
std::vector<Fact> measure_facts(const Device&);

/// Those that need cuBLAS; none where it is missing.
void add_product_facts(Accelerator&, std::vector<Fact>&);

}  // namespace cadre::bench
