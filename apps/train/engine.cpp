#include "apps/train/engine.h"

namespace cadre::train {

std::unique_ptr<Engine> open_engine(const Device& device) {
  return device.kind == DeviceKind::kCpu ? open_cpu_engine() : open_cuda_engine(device);
}

}  // namespace cadre::train
