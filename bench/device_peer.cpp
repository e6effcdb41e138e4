#include "bench/device_peer.h"

#include <algorithm>

#include "cadre/error.h"

namespace cadre::bench {
DevicePeers device_copy_peer(const Work& work, Accelerator& accelerator) {
  const auto bytes = std::max<int64_t>(1, int64_t(work.bytes / 2));  // half read, half written
  const auto from = std::make_shared<DeviceMemory>(accelerator, bytes);
  const auto to = std::make_shared<DeviceMemory>(accelerator, bytes);
  return {
      {{"copy", text("a copy of ", bytes, " bytes"),
        [&accelerator, from, to, bytes] { accelerator.copy(to->data(), from->data(), bytes); }}},
      {}};
}

}  // namespace cadre::bench
