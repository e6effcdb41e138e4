#pragma once
#include <cstdint>
#include <memory>

#include "cadre/device.h"
#include "cadre/tensor.h"
#include "schedule/row_blocks.h"
#include "schedule/token_messages.h"

// What exchanges by an engine do in a device's own way: numbers cross between it and the host, and
// kernels fill blocks of rows, whose sizes the host knows, or find out which token a row is of.
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
  /// Marks how far the stream is now, as each copy does.
  virtual void mark(Stream) = 0;
  /// Waits on the host until the last mark is passed; or for all that the device has to do.
  virtual void await() = 0;
  virtual void await_device() = 0;
  /// Sets every byte of the rows of a matrix, on the stream.
  virtual void fill(const TensorView& rows, int byte, Stream) = 0;

  /// All steps of make_places(); the verdict; and NaN in a matrix where that is not 0. `note` is in
  /// memory() of this.
  virtual void make_places(const schedule::RowBlocks&, Stream) = 0;
  virtual void judge(const schedule::RowBlocks&, Stream) = 0;
  virtual void spoil(const TensorView& rows, const int32_t* verdict, Stream) = 0;

  /// All steps of each: find_first(), number(), find().
  virtual void find_first_choices(const schedule::LeavingTokens&, Stream) = 0;
  virtual void number_tokens(const schedule::LeavingTokens&, Stream) = 0;
  virtual void find_tokens(const schedule::ComingTokens&, Stream) = 0;
};

/// Of that device.
/// Errors    Unsupported in a build without it.
std::unique_ptr<HostLink> host_link(const Device&, int64_t bytes);

}  // namespace cadre::parallel

namespace cadre::cuda {
std::unique_ptr<parallel::HostLink> host_link(const Device&, int64_t bytes);
}
