// Energy and clock of a GPU, from NVML.
#include "bench/cuda/nvml.h"

#include <dlfcn.h>

#include "bench/cuda/check.h"

namespace cadre::bench {
namespace {

constexpr const char* kLibrary = "libnvidia-ml.so.1";
constexpr int kGood = 0, kSmClock = 1;  // NVML_SUCCESS, NVML_CLOCK_SM

struct Symbols {
  int (*init)() = nullptr;
  int (*device)(const char* pci_bus_id, void** handle) = nullptr;
  int (*energy)(void* handle, unsigned long long* millijoules) = nullptr;
  int (*clock)(void* handle, int which, unsigned* mhz) = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Stays open until the process ends.
const Symbols* symbols() {
  static const Symbols all = [] {
    Symbols s;
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return Symbols{};
    const bool found = find(library, "nvmlInit_v2", s.init) &&
                       find(library, "nvmlDeviceGetHandleByPciBusId_v2", s.device) &&
                       find(library, "nvmlDeviceGetTotalEnergyConsumption", s.energy) &&
                       find(library, "nvmlDeviceGetClockInfo", s.clock);
    return found && s.init() == kGood ? s : Symbols{};
  }();
  return all.clock ? &all : nullptr;
}

}  // namespace

std::optional<PowerReading> read_power(int device_index) {
  const Symbols* nvml = symbols();
  if (nvml == nullptr) return {};
  char bus[32];
  check_cuda(cudaDeviceGetPCIBusId(bus, sizeof bus, device_index), "read the device's place");
  void* handle = nullptr;
  unsigned long long millijoules = 0;
  unsigned mhz = 0;
  const bool good = nvml->device(bus, &handle) == kGood &&
                    nvml->energy(handle, &millijoules) == kGood &&
                    nvml->clock(handle, kSmClock, &mhz) == kGood;
  if (!good) return {};
  return PowerReading{.joules = double(millijoules) / 1000, .sm_mhz = double(mhz)};
}

}  // namespace cadre::bench
