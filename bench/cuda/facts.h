#pragma once
#include <cuda_runtime_api.h>

#include <vector>

#include "bench/accelerator.h"
#include "bench/facts.h"
#include "bench/timer.h"

// The parts of measure_facts().
namespace cadre::bench {

/// The device with its stream; facts are gathered in `list`.
struct FactRun {
  const Device& device;
  Accelerator& accelerator;
  std::vector<Fact>& list;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(accelerator.stream().handle); }
  void add(std::string name, double value, std::string unit, std::string how) const {
    list.push_back({std::move(name), value, std::move(unit), std::move(how)});
  }
};

/// The median time of the device, in microseconds, of what `enqueue` enqueues.
template <class Enqueue>
double device_us(Accelerator& accelerator, Enqueue&& enqueue) {
  constexpr int kWarm = 3, kTimes = 15;
  for (int i = 0; i < kWarm; ++i) enqueue();
  accelerator.mark();
  for (int i = 0; i < kTimes; ++i) {
    enqueue();
    accelerator.mark();
  }
  return quantiles(accelerator.us_between_marks()).median;
}

/// Writes numbers of bf16 between -1 and 1 that no compression or power saving would like.
void fill_random_bf16(void* data, int64_t count, cudaStream_t);

void add_memory_facts(const FactRun&);
void add_tma_facts(const FactRun&);
void add_launch_facts(const FactRun&);

}  // namespace cadre::bench
