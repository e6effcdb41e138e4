#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cadre/device.h"
#include "cadre/stream.h"

namespace cadre::test {

/// What a test launches on a stream.
using Work = std::function<void(Stream)>;

/// Work that was recorded and can be run again.
class Recorded {
 public:
  Recorded() = default;
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
  virtual ~Recorded() = default;

  /// Runs it once more and waits for it.
  virtual void replay() = 0;
};

/// A device that tests run on, with memory of its own: the CPU, or a GPU. A test that takes its
/// memory and its streams from here is written once for both. Which one it is the test is linked
/// with: cadre_device_test() in tests/CMakeLists.txt.
class Machine {
 public:
  Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  virtual ~Machine() = default;

  virtual Device device() const = 0;
  /// Threads that may open it and wait for each other's work: GPUs.
  virtual int ranks() const = 0;
  /// How many of so many random draws a test should make here to be done in seconds.
  virtual int draws(int most) const = 0;

  /// Memory of the device, 256-byte aligned.
  virtual void* take(int64_t bytes) = 0;
  virtual void give_back(void*) = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  /// Within the device.
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  /// How much can be taken; on the CPU how much a test should.
  virtual int64_t free_bytes() const = 0;

  /// Runs the work and waits for it.
  virtual void run(const Work&) = 0;
  /// Runs all of it at once, each work on a stream (on the CPU: a thread) of its own, and waits.
  virtual void run_at_once(std::span<const Work>) = 0;

  /// Records what the work launches. Throws where the work waits, allocates, frees, or launches
  /// anything but kernels and fills: copies to the host among them. The CPU calls the work again.
  virtual std::unique_ptr<Recorded> record(const Work&) = 0;
};

/// The machine that the test is linked with; null where it is not here. Of several GPUs that with
/// this number, or, where there are fewer, one of them; the thread that opens it keeps to it.
std::unique_ptr<Machine> open_machine(int number = 0);
/// Why it is not here.
std::string why_no_machine();

}  // namespace cadre::test
