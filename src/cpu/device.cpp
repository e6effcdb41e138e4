#include "cadre/device.h"

#include <omp.h>

namespace cadre {

Device this_cpu() {
  return {.kind = DeviceKind::kCpu,
          .index = 0,
          .sm = 0,
          .units = omp_get_max_threads(),
          .smem_bytes = 0};
}

}  // namespace cadre
