// Bandwidths of TMA: boxes as the grouped GEMM kernels load and store them.
#include "bench/cuda/check.h"
#include "bench/cuda/facts.h"
#include "cuda/device/launch.h"
#include "cuda/device/tensor_map.h"
#include "cuda/device/tma.h"

namespace cadre::bench {
namespace {

using cuda::Barrier;
using cuda::Box3;

constexpr int kBoxRows = 128, kBoxBytes = kBoxRows * 128, kStages = 8, kStoresInFlight = 4;
constexpr int64_t kRowBytes = 8192, kBoxesAcross = kRowBytes / 128;
constexpr int64_t kLarge = int64_t(2) << 30, kCached = int64_t(24) << 20;

struct Boxes {
  int64_t count;
  int passes, columns;  ///< of a box
};

struct Shared {
  uint8_t boxes[kStages][kBoxBytes];
  Barrier full[kStages];
};

__device__ Box3 box(const Boxes& boxes, int64_t number) {
  const int64_t i = number % boxes.count;
  return {int(i % kBoxesAcross) * boxes.columns, int(i / kBoxesAcross) * kBoxRows, 0};
}

__global__ void load_kernel(const __grid_constant__ CUtensorMap map,
                            const __grid_constant__ Boxes boxes) {
  auto& shared = *reinterpret_cast<Shared*>(cuda::dynamic_shared());
  if (threadIdx.x != 0) return;
  for (Barrier& barrier : shared.full) cuda::init(barrier, 1);
  cuda::fence_mbarrier_init();
  int64_t loads = 0;
  for (int64_t i = blockIdx.x; i < boxes.count * boxes.passes; i += gridDim.x, ++loads) {
    const int stage = int(loads % kStages);
    if (loads >= kStages) cuda::wait(shared.full[stage], uint32_t(loads / kStages - 1) & 1);
    cuda::arrive_expect_tx(shared.full[stage], kBoxBytes);
    cuda::tma_load(shared.boxes[stage], map, box(boxes, i), shared.full[stage]);
  }
  for (int64_t last = loads < kStages ? 0 : loads - kStages; last < loads; ++last)
    cuda::wait(shared.full[last % kStages], uint32_t(last / kStages) & 1);
}

template <bool kAdds>
__global__ void store_kernel(const __grid_constant__ CUtensorMap map,
                             const __grid_constant__ Boxes boxes) {
  auto* memory = reinterpret_cast<float*>(cuda::dynamic_shared());
  for (int i = int(threadIdx.x); i < kBoxBytes / 4; i += int(blockDim.x))
    memory[i] = float(i) * 0x1p-12f;
  cuda::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int64_t i = blockIdx.x; i < boxes.count * boxes.passes; i += gridDim.x) {
    if constexpr (kAdds)
      cuda::tma_reduce_add(map, box(boxes, i), memory);
    else
      cuda::tma_store(map, box(boxes, i), memory);
    cuda::tma_commit();
    cuda::tma_wait_read<kStoresInFlight>();
  }
  cuda::tma_wait();
}

using Kernel = void (*)(CUtensorMap, Boxes);

/// A kernel that moves boxes, and its shared memory.
struct Mover {
  Kernel kernel;
  int shared_bytes;
};

double gb_s(const FactRun& run, const Mover& mover, const TensorView& matrix, int passes) {
  const CUtensorMap map = cuda::expert_map(matrix, kBoxRows);
  const Boxes boxes{bytes_for(matrix.dtype, elements(matrix)) / kBoxBytes, passes,
                    int(cuda::box_columns(matrix.dtype))};
  const double us = device_us(run.accelerator, [&] {
    const unsigned blocks = unsigned(run.device.units);
    cuda::launch(mover.kernel, {blocks, 128, mover.shared_bytes, run.stream()}, map, boxes);
  });
  return double(boxes.count * passes * kBoxBytes) / us / 1e3;
}

}  // namespace

void add_tma_facts(const FactRun& run) {
  const DeviceMemory memory(run.accelerator, kLarge);
  fill_random_bf16(memory.as<void>(), kLarge / 2, run.stream());
  const auto matrix = [&](DType dtype, int64_t bytes) {
    return view(memory.as<void>(), dtype, {bytes / kRowBytes, kRowBytes * 8 / bits(dtype)});
  };
  const Mover load{&load_kernel, int(sizeof(Shared))}, store{&store_kernel<false>, kBoxBytes},
      add{&store_kernel<true>, kBoxBytes};
  const TensorView numbers = matrix(DType::kBf16, kLarge), floats = matrix(DType::kF32, kLarge);
  const char* how = "boxes of 128 rows of 128 bytes, one block an SM; ";
  const auto fact = [&](const char* name, double value, const char* counted) {
    run.add(name, value, "GB/s", text(how, counted));
  };
  fact("load by TMA", gb_s(run, load, numbers, 1), "bytes read");
  fact("load by TMA from L2", gb_s(run, load, matrix(DType::kBf16, kCached), 64), "bytes read");
  fact("store by TMA, fp32", gb_s(run, store, floats, 1), "bytes written");
  fact("add by TMA, fp32", 2 * gb_s(run, add, floats, 1), "bytes read and written");
}

}  // namespace cadre::bench
