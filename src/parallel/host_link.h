#pragma once
#include <cstdint>
#include <memory>

#include "cadre/device.h"
#include "cadre/tensor.h"

// How numbers cross between a device and the host, for exchanges whose sizes the host must know.
namespace cadre::parallel {

class HostLink {
 public:
  HostLink() = default;
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;
  virtual ~HostLink() = default;

  /// Memory of the host, of the bytes that were asked for.
  virtual char* memory() const = 0;
  /// Copies between that and the device, on the stream.
  virtual void copy(void* to, const void* from, int64_t bytes, Stream) = 0;
  /// Waits on the host until all copies are over.
  virtual void await() = 0;
  /// Sets every byte of the rows of a matrix, on the stream.
  virtual void fill(const TensorView& rows, int byte, Stream) = 0;
};

/// Of that device. Errors    Unsupported in a build without it.
std::unique_ptr<HostLink> host_link(const Device&, int64_t bytes);

}  // namespace cadre::parallel

namespace cadre::cuda {
std::unique_ptr<parallel::HostLink> host_link(const Device&, int64_t bytes);
}
