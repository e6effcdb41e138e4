#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/stream.h"

#pragma GCC visibility push(default)
namespace cadre {

enum class DeviceKind : uint8_t { kCpu, kCuda };

/// What a plan needs to know of a device. A value: filled from the machine by `this_cpu()` and
/// `cuda_devices()`, or by hand, so that planning for a GPU works on a machine without one.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;           ///< CUDA ordinal; 0 for the CPU
  int sm = 0;              ///< compute capability, 90 for Hopper; 0 for the CPU
  int units = 0;           ///< SMs of a GPU, or threads of the CPU
  int64_t smem_bytes = 0;  ///< shared memory a block may opt in to; 0 for the CPU

  bool operator==(const Device&) const = default;
};

/// The CPU of this machine; `units` is the number of threads that OpenMP would use.
Device this_cpu();

/// All CUDA devices that the driver shows; empty without one, or in a build without CUDA.
std::vector<Device> cuda_devices();

/// The number of the graph that work on a stream of a device is recorded into now; 0 if it runs, as
/// on a CPU.
uint64_t recorded_graph(const Device&, Stream);

/// "cpu", or "sm_90".
std::string to_string(const Device&);

/// Takes "cpu", "cuda", "cuda:1" (devices of this machine) and "sm_80", "sm_90", "sm_100" (a
/// typical device of that architecture, for planning only).
/// Errors    InvalidArgument with the words it takes.
Device parse_device(std::string_view);

}  // namespace cadre
#pragma GCC visibility pop
