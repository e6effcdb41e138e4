#include "backend/poison.h"

#include <cstring>

namespace cadre::backend {
namespace {
#if defined(CADRE_POISON)
constexpr bool kPoison = true;
#else
constexpr bool kPoison = false;
#endif
}  // namespace

void poison(const Device& device, Workspace memory, Stream) {
  if (kPoison && device.kind == DeviceKind::kCpu && memory.data != nullptr)
    std::memset(memory.data, 0xff, size_t(memory.bytes));
}

}  // namespace cadre::backend
