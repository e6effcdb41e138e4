// Memory and streams of a GPU as benchmarks and checks use them.
#include "bench/accelerator.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "cadre/device.h"

namespace cadre {
namespace {

using bench::Accelerator;

/// Keeps a stream from going on.
struct Gate {
  std::promise<void> closed, opened;
  std::future_status end = std::future_status::deferred;

  /// No longer than a test may take.
  static void wait(void* gate) {
    auto& self = *static_cast<Gate*>(gate);
    self.closed.set_value();
    self.end = self.opened.get_future().wait_for(std::chrono::seconds(20));
  }
};

/// Whether a thread can copy with a stream of its own while another's copy waits.
bool goes_on_beside(void (*copy)(Accelerator&, void*, std::vector<char>&), int64_t bytes) {
  const Device device = cuda_devices()[0];
  const auto first = bench::open_accelerator(device), second = bench::open_accelerator(device);
  const bench::DeviceMemory memory(*first, bytes), other_memory(*second, bytes);
  std::vector<char> host(bytes), other_host(bytes);
  Gate gate;
  const auto stream = static_cast<cudaStream_t>(first->stream().handle);
  if (cudaLaunchHostFunc(stream, Gate::wait, &gate) != cudaSuccess) return false;
  std::thread waits([&] { copy(*first, memory.data(), host); });
  gate.closed.get_future().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until it is in the driver
  for (int i = 0; i < 10; ++i) copy(*second, other_memory.data(), other_host);
  gate.opened.set_value();
  waits.join();
  return gate.end == std::future_status::ready;
}

class AcceleratorOnDevice : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

TEST_P(AcceleratorOnDevice, DownloadsBesideOneThatWaits) {
  EXPECT_TRUE(goes_on_beside(
      [](Accelerator& a, void* memory, std::vector<char>& host) {
        a.download(host.data(), memory, int64_t(host.size()));
      },
      GetParam()));
}

TEST_P(AcceleratorOnDevice, UploadsBesideOneThatWaits) {
  EXPECT_TRUE(goes_on_beside(
      [](Accelerator& a, void* memory, std::vector<char>& host) {
        a.upload(memory, host.data(), int64_t(host.size()));
      },
      GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Bytes, AcceleratorOnDevice, testing::Values(4096, 1 << 20));

}  // namespace
}  // namespace cadre
