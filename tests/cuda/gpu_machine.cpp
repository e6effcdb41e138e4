// The first GPU as a machine.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "cuda/check.h"
#include "tests/judge/machine.h"

namespace cadre::test {
namespace {

using cuda::check;

/// A stream that waits for the legacy one: so a copy without a stream in a capture is an error.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamDefault), "make a stream"); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(stream_); }

  Stream get() const { return {stream_}; }
  cudaStream_t handle() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "wait"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Throws unless all that a graph does is kernels and fills.
void check_nodes(cudaGraph_t graph) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "count the nodes of a graph");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count), "list the nodes of a graph");
  int kernels = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type), "read the type of a node");
    require(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset, "graph: a node is ",
            "of type ", int(type), ", must be a kernel or a fill");
    kernels += type == cudaGraphNodeTypeKernel;
  }
  require(kernels > 0, "graph: no node is a kernel, must be one or more");
}

// What a graph and its executable hold, also where making one of them throws.
struct Graph {
  cudaGraph_t handle = nullptr;
  ~Graph() {
    if (handle != nullptr) cudaGraphDestroy(handle);
  }
};
struct Executable {
  cudaGraphExec_t handle = nullptr;
  ~Executable() {
    if (handle != nullptr) cudaGraphExecDestroy(handle);
  }
};

class GpuGraph final : public Recorded {
 public:
  GpuGraph(const OwnStream& stream, const Work& work) : stream_(stream) {
    check(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeGlobal), "begin a capture");
    try {
      work(stream.get());
    } catch (...) {
      end_capture();
      throw;
    }
    check(end_capture(), "end a capture");
    check_nodes(graph_.handle);
    check(cudaGraphInstantiate(&executable_.handle, graph_.handle, 0), "instantiate a graph");
  }

  void replay() override {
    check(cudaGraphLaunch(executable_.handle, stream_.handle()), "launch a graph");
    stream_.wait();
  }

 private:
  cudaError_t end_capture() {
    const cudaError_t code = cudaStreamEndCapture(stream_.handle(), &graph_.handle);
    cudaGetLastError();
    return code;
  }

  const OwnStream& stream_;
  Graph graph_;
  Executable executable_;
};

class GpuMachine final : public Machine {
 public:
  explicit GpuMachine(const Device& device) : device_(device) {}

  Device device() const override { return device_; }
#ifdef CADRE_EMULATED
  int ranks() const override { return 1 << 10; }  // its copies wait for nobody
#else
  int ranks() const override { return int(cuda_devices().size()); }
#endif
  int draws(int most) const override {
    const int units = std::min(device_.units, kUnitsOfAllDraws);
    const int share = most * units * units / (kUnitsOfAllDraws * kUnitsOfAllDraws);
    return std::min(most, std::max(kFewestDraws, share));
  }

  void* take(int64_t bytes) override {
    void* data = nullptr;
    check(cudaMalloc(&data, size_t(bytes)), text("take ", bytes, " bytes"));
    return data;
  }
  void give_back(void* data) override { cudaFree(data); }
  void upload(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyHostToDevice), "upload");
  }
  void download(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyDeviceToHost), "download");
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyDeviceToDevice), "copy");
  }
  int64_t free_bytes() const override {
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "ask for the free memory");
    return int64_t(free);
  }

  void run(const Work& work) override {
    check(cudaDeviceSynchronize(), "wait for uploads");
    work(stream_.get());
    stream_.wait();
  }
  void run_at_once(std::span<const Work> works) override {
    check(cudaDeviceSynchronize(), "wait for uploads");
    std::vector<std::unique_ptr<OwnStream>> streams;
    for (size_t i = 0; i < works.size(); ++i) streams.push_back(std::make_unique<OwnStream>());
    for (size_t i = 0; i < works.size(); ++i) works[i](streams[i]->get());
    for (const auto& stream : streams) stream->wait();
  }
  std::unique_ptr<Recorded> record(const Work& work) override {
    return std::make_unique<GpuGraph>(stream_, work);
  }

 private:
  // A lesser GPU, or one that is emulated, is not given as much to do.
  static constexpr int kUnitsOfAllDraws = 100, kFewestDraws = 3;

  Device device_;
  OwnStream stream_;
};

}  // namespace

std::unique_ptr<Machine> open_machine(int number) {
  const std::vector<Device> devices = cuda_devices();
  if (devices.empty()) return nullptr;
  const Device& device = devices[size_t(number) % devices.size()];
  check(cudaSetDevice(device.index), "choose the device");
  return std::make_unique<GpuMachine>(device);
}
std::string why_no_machine() { return "no GPU here"; }

}  // namespace cadre::test
