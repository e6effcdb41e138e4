// Memory, stream and clock of a CUDA device.
#include "bench/accelerator.h"

#include "bench/cuda/check.h"
#include "bench/cuda/graph.h"
#include "bench/cuda/nvml.h"

namespace cadre::bench {
namespace {

class CudaAccelerator final : public Accelerator {
 public:
  explicit CudaAccelerator(const Device& device) : device_(device) {
    check_cuda(cudaSetDevice(device.index), "choose the device");
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream");
  }
  ~CudaAccelerator() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }

  std::string name() const override {
    cudaDeviceProp all;
    check_cuda(cudaGetDeviceProperties(&all, device_.index), "read the device's name");
    return text(all.name, ", ", device_.units, " SMs");
  }
  Stream stream() const override { return {stream_}; }

  void* take(int64_t bytes) override {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, size_t(bytes)), text("take ", bytes, " bytes of the device"));
    return data;
  }
  void give_back(void* data) override { cudaFree(data); }

  // The host waits before it copies: a copy of pageable memory that waits for its stream holds what
  // the driver copies all others through, which ranks that share a GPU would wait for.
  void upload(void* to, const void* from, int64_t bytes) override {
    finish();
    check_cuda(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
    finish();
  }
  void download(void* to, const void* from, int64_t bytes) override {
    finish();
    check_cuda(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToHost, stream_),
               "download");
    finish();
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    check_cuda(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, stream_), "copy");
  }

  std::function<void()> record(const std::function<void()>& work) override {
    return [graph = std::make_shared<Graph>(stream_, work)] { graph->launch(); };
  }

  void mark() override {
    if (marks_ == events_.size()) {
      cudaEvent_t event{};
      check_cuda(cudaEventCreate(&event), "make an event");
      events_.push_back(event);
    }
    check_cuda(cudaEventRecord(events_[marks_++], stream_), "record an event");
  }
  std::vector<double> us_between_marks() override {
    finish();
    std::vector<double> us;
    for (size_t i = 1; i < marks_; ++i) {
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, events_[i - 1], events_[i]), "read an event");
      us.push_back(double(ms) * 1000);
    }
    marks_ = 0;
    return us;
  }

  std::optional<PowerReading> power() override { return read_power(device_.index); }

 private:
  void finish() { check_cuda(cudaStreamSynchronize(stream_), "finish"); }

  Device device_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
  size_t marks_ = 0;
};

}  // namespace

std::unique_ptr<Accelerator> open_accelerator(const Device& device) {
  if (device.kind == DeviceKind::kCpu) return nullptr;
  return std::make_unique<CudaAccelerator>(device);
}

std::string why_no_accelerator() {
  return "the CUDA driver shows no GPU on this machine; run on one that has a GPU";
}

}  // namespace cadre::bench
