#include "cadre/device.h"

#include "cuda/check.h"

namespace cadre {
namespace {

int attribute(int index, cudaDeviceAttr which) {
  int value = 0;
  cuda::check(cudaDeviceGetAttribute(&value, which, index),
              text("read attribute ", int(which), " of device ", index));
  return value;
}

}  // namespace

std::vector<Device> cuda_devices() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (cuda::means_no_device(code)) return {};
  cuda::check(code, "count the CUDA devices");
  std::vector<Device> devices;
  for (int i = 0; i < count; ++i) {
    const int sm = 10 * attribute(i, cudaDevAttrComputeCapabilityMajor) +
                   attribute(i, cudaDevAttrComputeCapabilityMinor);
    const int smem_bytes = attribute(i, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    devices.push_back(
        {DeviceKind::kCuda, i, sm, attribute(i, cudaDevAttrMultiProcessorCount), smem_bytes});
  }
  return devices;
}

uint64_t recorded_graph(const Device& device, Stream stream) {
  if (device.kind == DeviceKind::kCpu) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long graph = 0;
  cuda::check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream.handle), &status, &graph),
              "ask whether a graph is recorded");
  return status == cudaStreamCaptureStatusNone ? 0 : graph;
}

}  // namespace cadre
