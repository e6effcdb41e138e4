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

void poison(const Device& device, Workspace memory, Stream stream) {
  if (!kPoison || memory.data == nullptr || memory.bytes == 0) return;
  if (device.kind == DeviceKind::kCuda)
    cuda::poison(memory, stream);
  else
    std::memset(memory.data, 0xff, size_t(memory.bytes));
}

}  // namespace cadre::backend
