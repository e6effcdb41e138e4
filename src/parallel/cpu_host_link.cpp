// On the CPU the host is the device.
#include <cstddef>
#include <cstring>
#include <vector>

#include "parallel/host_link.h"

namespace cadre::parallel {
namespace {

class CpuHostLink final : public HostLink {
 public:
  explicit CpuHostLink(int64_t bytes) : memory_(size_t(bytes)) {}

  char* memory() const override { return const_cast<char*>(memory_.data()); }
  void copy(void* to, const void* from, int64_t bytes, Stream) override {
    if (bytes > 0) std::memcpy(to, from, size_t(bytes));
  }
  void await() override {}
  void fill(const TensorView& rows, int byte, Stream) override {
    for (int64_t r = 0; r < rows[0]; ++r)
      std::memset(static_cast<char*>(rows.data) + bytes_for(rows.dtype, r * rows.stride[0]), byte,
                  size_t(bytes_for(rows.dtype, rows[1])));
  }

 private:
  std::vector<char> memory_;
};

}  // namespace

std::unique_ptr<HostLink> host_link(const Device& device, int64_t bytes) {
  if (device.kind == DeviceKind::kCuda) return cuda::host_link(device, bytes);
  return std::make_unique<CpuHostLink>(bytes);
}

}  // namespace cadre::parallel
