#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cadre/device.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"
#include "cuda/check.h"
#include "tests/judge/tensor.h"

namespace cadre::test {

/// As many as a test takes on a GPU, or fewer on the emulator, whose threads share one of the CPU.
template <class Size>
constexpr Size sized([[maybe_unused]] Size on_gpu, [[maybe_unused]] Size on_emulator) {
#ifdef CADRE_EMULATED
  return on_emulator;
#else
  return on_gpu;
#endif
}

/// A test that needs a GPU, and is skipped where there is none.
struct OnDevice : testing::Test {
  void SetUp() override {
    if (cuda_devices().empty()) GTEST_SKIP() << "no GPU here";
  }
};

/// Copies of host memory on the GPU, canaries and poison included; what a run changed comes back.
class Mirror {
 public:
  Mirror() = default;
  Mirror(const Mirror&) = delete;
  ~Mirror() {
    for (const Copy& copy : copies_) cudaFree(copy.device);
  }

  /// The tensor's view, in device memory.
  TensorView view(const Tensor& tensor) {
    TensorView v = tensor.view();
    const char* host = tensor.bytes().data();
    v.data = add(const_cast<char*>(host), tensor.bytes().size()) +
             (static_cast<const char*>(v.data) - host);
    return v;
  }
  template <class Element>
  Element* data(const Tensor& tensor) {
    return static_cast<Element*>(view(tensor).data);
  }
  template <class Element>
  Element* data(const std::vector<Element>& list) {
    auto* host = const_cast<Element*>(list.data());
    return reinterpret_cast<Element*>(
        add(reinterpret_cast<char*>(host), list.size() * sizeof(Element)));
  }
  /// Poison of exactly these bytes, with canaries behind.
  Workspace workspace(int64_t bytes) {
    scratch_.assign(size_t(bytes + kGuard), '\xff');
    scratch_bytes_ = bytes;
    return {bytes == 0 ? nullptr : add(scratch_.data(), scratch_.size()), bytes};
  }

  /// Records what `work(Stream)` launches in a graph, which shows that it neither waits nor
  /// allocates, replays it `times` times, and copies everything back. Returns how many launches
  /// the graph has.
  template <class Work>
  size_t replay(int times, Work&& work) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cuda::check(cudaStreamCreate(&stream), "make a stream");
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    work(Stream{stream});
    cuda::check(cudaStreamEndCapture(stream, &graph), "end the capture");
    size_t launches = 0;
    cuda::check(cudaGraphGetNodes(graph, nullptr, &launches), "count the nodes");
    cuda::check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (int i = 0; i < times; ++i) cuda::check(cudaGraphLaunch(executable, stream), "replay");
    cuda::check(cudaStreamSynchronize(stream), "wait");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    for (const Copy& copy : copies_)
      cuda::check(cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost), "fetch");
    for (size_t i = size_t(scratch_bytes_); i < scratch_.size(); ++i)
      EXPECT_EQ(scratch_[i], '\xff') << "byte " << i << " is behind the workspace";
    return launches;
  }

 private:
  struct Copy {
    char* host;
    char* device;
    size_t bytes;
  };
  static constexpr int64_t kGuard = 256;

  char* add(char* host, size_t bytes) {
    void* device = nullptr;
    if (bytes == 0) return nullptr;
    cuda::check(cudaMalloc(&device, bytes), "allocate");
    cuda::check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy");
    copies_.push_back({host, static_cast<char*>(device), bytes});
    return static_cast<char*>(device);
  }

  std::vector<Copy> copies_;
  std::vector<char> scratch_;
  int64_t scratch_bytes_ = 0;
};

/// The first GPU.
inline Device first_gpu() { return cuda_devices().front(); }

}  // namespace cadre::test
