#include "cadre/device.h"

namespace cadre {

std::vector<Device> cuda_devices() { return {}; }
uint64_t recorded_graph(const Device&, Stream) { return 0; }

}  // namespace cadre
