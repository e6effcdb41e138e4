#include "cadre/pointers.h"

#include <algorithm>

#include "backend/pointers.h"

namespace cadre {

void write_pointers(std::span<const void* const> pointers, const void** table, const Device& device,
                    Stream stream) {
  if (device.kind == DeviceKind::kCuda)
    cuda::write_pointers(pointers, table, stream);
  else
    std::copy(pointers.begin(), pointers.end(), table);
}

}  // namespace cadre
