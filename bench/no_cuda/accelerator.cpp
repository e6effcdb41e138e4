// The symbols of bench/cuda in a build without CUDA: no device but the CPU is ever open.
#include "bench/accelerator.h"

namespace cadre::bench {

std::unique_ptr<Accelerator> open_accelerator(const Device&) { return nullptr; }

std::string why_no_accelerator() {
  return "this build has no CUDA backend; configure with the preset cuda";
}

}  // namespace cadre::bench
