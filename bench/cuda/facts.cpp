#include "bench/cuda/facts.h"

#include "bench/cuda/check.h"

namespace cadre::bench {
namespace {

/// An attribute of the device, in `unit`, which is `size` of the driver's units.
void add_attribute(const FactRun& run, const char* name, cudaDeviceAttr which, int size = 1,
                   const char* unit = "") {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, run.device.index), "read an attribute");
  run.add(name, double(value) / size, unit, "as the driver says");
}

}  // namespace

std::vector<Fact> measure_facts(const Device& device) {
  std::vector<Fact> list;
  const auto accelerator = open_accelerator(device);
  const FactRun run{device, *accelerator, list};
  add_attribute(run, "SMs", cudaDevAttrMultiProcessorCount);
  add_attribute(run, "L2 cache", cudaDevAttrL2CacheSize, 1 << 20, "MiB");
  add_attribute(run, "shared memory of a block", cudaDevAttrMaxSharedMemoryPerBlockOptin, 1 << 10,
                "KiB");
  add_memory_facts(run);
  add_tma_facts(run);
  add_launch_facts(run);
  add_product_facts(*accelerator, list);
  return list;
}

}  // namespace cadre::bench
