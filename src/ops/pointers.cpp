#include "cadre/pointers.h"

#include <algorithm>
#include <cstdint>

#include "backend/pointers.h"
#include "cadre/error.h"

namespace cadre {

void write_pointers(std::span<const void* const> pointers, const void** table, const Device& device,
                    Stream stream) {
  require(pointers.empty() || table != nullptr,
          "write_pointers: table is null, must have room for ", pointers.size(), " pointers");
  require(reinterpret_cast<uintptr_t>(table) % alignof(void*) == 0, "write_pointers: table is at ",
          table, ", must be aligned to ", alignof(void*), " bytes");
  if (device.kind == DeviceKind::kCuda)
    cuda::write_pointers(pointers, table, stream);
  else
    std::copy(pointers.begin(), pointers.end(), table);
}

}  // namespace cadre
