#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/device.h"
#include "cadre/stream.h"

namespace cadre::bench {

/// What a device has drawn since it was switched on, and its clock.
struct PowerReading {
  double joules = 0;
  double sm_mhz = 0;
};

/// A device with memory, a stream and a clock of its own. All work of a case goes to `stream`.
class Accelerator {
 public:
  Accelerator() = default;
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;
  virtual ~Accelerator() = default;

  /// "NVIDIA H200, 132 SMs".
  virtual std::string name() const = 0;
  virtual Stream stream() const = 0;

  /// Memory of the device, 256-byte aligned.
  virtual void* take(int64_t bytes) = 0;
  virtual void give_back(void*) = 0;

  /// Between the host and the device, behind all work of the stream. Done when they return.
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;

  /// Enqueues a copy within the device.
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;

  /// What `work` enqueues, as something that enqueues all of it anew: a graph, if there are any.
  virtual std::function<void()> record(const std::function<void()>& work) { return work; }

  /// Enqueues a time stamp.
  virtual void mark() = 0;
  /// Waits for the stream. Microseconds of the device between neighbouring marks since the last
  /// call.
  virtual std::vector<double> us_between_marks() = 0;

  /// Empty where the device does not measure it. Does not wait for the stream.
  virtual std::optional<PowerReading> power() { return {}; }
};

/// Memory of an accelerator, of at least one byte, for the length of a scope.
class DeviceMemory {
 public:
  DeviceMemory(Accelerator& accelerator, int64_t bytes)
      : accelerator_(accelerator), data_(accelerator.take(bytes > 0 ? bytes : 1)) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { accelerator_.give_back(data_); }

  void* data() const { return data_; }
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(data_);
  }

 private:
  Accelerator& accelerator_;
  void* data_;
};

/// The accelerator of a device; null for the CPU, whose memory is the host's.
std::unique_ptr<Accelerator> open_accelerator(const Device&);

/// Why cuda_devices() is empty, and what to do.
std::string why_no_accelerator();

/// A device of this machine: takes "cpu", "cuda" and "cuda:1".
/// Errors    InvalidArgument with the words it takes, or with what to do where there is no GPU.
Device running_device(std::string_view word);

/// The same for what wants a GPU: takes "cuda" and "cuda:1".
Device running_gpu(std::string_view word);

}  // namespace cadre::bench
