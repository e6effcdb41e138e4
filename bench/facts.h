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

/// Measures what exchanges between two GPUs of a host are designed by: DMA engines, kernels that
/// read and write memory of the other, by SMs and by bytes of a row, and how long a word takes.
/// Errors    DeviceError, also where one cannot read memory of the other.
std::vector<Fact> measure_link_facts(const Device&, const Device&);

/// Those that need cuBLAS; none where it is missing.
void add_product_facts(Accelerator&, std::vector<Fact>&);

}  // namespace cadre::bench
