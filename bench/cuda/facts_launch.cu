// What launches cost the host, and the device between kernels.
#include "bench/cuda/check.h"
#include "bench/cuda/facts.h"
#include "bench/cuda/graph.h"
#include "cuda/device/launch.h"
#include "cuda/device/tensor_map.h"

namespace cadre::bench {
namespace {

constexpr int kBatch = 100, kBatches = 20, kShared = 200 << 10, kNodes = 1000;

/// As large as the arguments of a grouped GEMM kernel.
struct Params {
  CUtensorMap maps[3];
  int64_t words[24];
};

__global__ void empty_kernel() {}
__global__ void __cluster_dims__(2) cluster_kernel(const __grid_constant__ Params) {}

/// The median time of the host for one call. What it enqueues is finished between batches.
template <class Call>
double host_us(const FactRun& run, Call&& call) {
  std::vector<double> us;
  for (int batch = 0; batch < kBatches; ++batch) {
    const double all = time_us([&] {
      for (int i = 0; i < kBatch; ++i) call();
    });
    if (batch > 0) us.push_back(all / kBatch);
    check_cuda(cudaStreamSynchronize(run.stream()), "finish");
  }
  return quantiles(std::move(us)).median;
}

void add_host_times(const FactRun& run) {
  const cudaStream_t stream = run.stream();
  const DeviceMemory memory(run.accelerator, 1 << 20);
  const TensorView rows = view(memory.as<void>(), DType::kBf16, {256, 512});
  const TensorView experts = view(memory.as<void>(), DType::kBf16, {4, 64, 512});
  const Params params{};
  const auto fact = [&](const char* name, double us, const char* how) {
    run.add(name, us, "us of the host", how);
  };
  fact("launch", host_us(run, [&] { empty_kernel<<<1, 32, 0, stream>>>(); }), "an empty kernel");
  fact("launch of a cluster",
       host_us(run,
               [&] {
                 const unsigned blocks = unsigned(run.device.units) / 2 * 2;
                 cuda::launch(cluster_kernel, {blocks, 384, kShared, stream, 2}, params);
               }),
       "a block an SM in pairs, 200 KiB of shared memory, allowed anew for each launch");
  fact("allow shared memory",
       host_us(run,
               [&] {
                 cudaFuncSetAttribute(cluster_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kShared);
               }),
       "cudaFuncSetAttribute");
  fact("encode a ragged map", host_us(run, [&] { cuda::ragged_map(rows, 64); }),
       "cuTensorMapEncodeTiled, 4 dimensions");
  fact("encode a map of experts", host_us(run, [&] { cuda::expert_map(experts, 64); }),
       "cuTensorMapEncodeTiled, 3 dimensions");
}

void add_device_times(const FactRun& run) {
  const auto enqueue = [&] {
    for (int i = 0; i < kNodes; ++i) empty_kernel<<<run.device.units, 128, 0, run.stream()>>>();
  };
  run.add("empty kernel, launched", device_us(run.accelerator, enqueue) / kNodes, "us",
          "of the device, kernel after kernel in a stream");
  const Graph graph(run.stream(), enqueue),
      one(run.stream(), [&] { empty_kernel<<<1, 32, 0, run.stream()>>>(); });
  run.add("empty kernel, in a graph", device_us(run.accelerator, [&] { graph.launch(); }) / kNodes,
          "us", "of the device, kernel after kernel in a graph");
  run.add("launch of a graph", host_us(run, [&] { one.launch(); }), "us of the host",
          "a graph of one empty kernel");
}

}  // namespace

void add_launch_facts(const FactRun& run) {
  add_host_times(run);
  add_device_times(run);
}

}  // namespace cadre::bench
