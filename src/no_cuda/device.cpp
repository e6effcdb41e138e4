#include "cadre/device.h"

namespace cadre {

std::vector<Device> cuda_devices() { return {}; }

}  // namespace cadre
