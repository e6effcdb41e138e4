#include "bench/device_peer.h"

#include <algorithm>

#include "cadre/error.h"

namespace cadre::bench {
namespace {

struct Memory {
  Accelerator& accelerator;
  void* data;
  Memory(Accelerator& a, int64_t bytes) : accelerator(a), data(a.take(bytes)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { accelerator.give_back(data); }
};

}  // namespace

DevicePeers device_copy_peer(const Work& work, Accelerator& accelerator) {
  const auto bytes = std::max<int64_t>(1, int64_t(work.bytes / 2));  // half read, half written
  const auto from = std::make_shared<Memory>(accelerator, bytes);
  const auto to = std::make_shared<Memory>(accelerator, bytes);
  return {{{"copy", text("a copy of ", bytes, " bytes"),
            [from, to, bytes] { to->accelerator.copy(to->data, from->data, bytes); }}},
          {}};
}

}  // namespace cadre::bench
