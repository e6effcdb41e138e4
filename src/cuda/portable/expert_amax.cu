#include "cuda/device/magnitude.h"
#include "cuda/portable/source_tile.cuh"

// The largest magnitude of an expert's rows, as bits: of the values, or of the transformed ones. A
// maximum comes out the same in any order, so blocks raise it by atomics.
namespace cadre::cuda::portable {
namespace {

constexpr int kAmaxBlocks = 3;  // of an SM at once

struct AmaxShared {
  TileQueue queue;
  alignas(128) SourcePlanes source;
};

__global__ void clear_amax_kernel(const __grid_constant__ QuantizeJob job) {
  const int64_t expert = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  for (const QuantizeCopy& copy : job.copies)
    if (copy.amax != nullptr && expert < job.of.experts) copy.amax[expert] = 0;
}

/// That of this thread's chunks of a tile.
template <DType kSource>
__device__ uint32_t largest_of_tile(const SourcePlanes& source) {
  ColumnMagnitudes<kSource> columns;
#pragma unroll 4
  for (int i = 0; i < kPlaneChunks / kQuantizeThreads; ++i) {
    const int number = int(threadIdx.x) + i * kQuantizeThreads;
    columns.add(read_chunk<kSource>(source, number));
  }
  return columns.of_all();
}

/// Those of one expert, of each copy, kept in registers while tiles are of that expert.
struct ThreadAmax {
  uint32_t of_copy[2] = {};
  int expert = -1;

  __device__ void start(const QuantizeJob& job, int of_expert) {
    if (of_expert == expert) return;
    for (int i = 0; i < job.count && expert >= 0; ++i) {
      const uint32_t largest = __reduce_max_sync(~0u, of_copy[i]);
      if (threadIdx.x % kLanes == 0 && largest != 0)
        atomicMax(&job.copies[i].amax[expert], largest);
    }
    of_copy[0] = of_copy[1] = 0;
    expert = of_expert;
  }
  /// The last copy may be transformed, in place.
  template <DType kSource>
  __device__ void add(const QuantizeJob& job, SourcePlanes& source) {
    for (int i = 0; i < job.count; ++i) {
      const QuantizeCopy& copy = job.copies[i];
      if (copy.amax == nullptr) continue;
      __syncthreads();
      if (copy.to.transformed) {
        transform_tile<kSource>(source);
        __syncthreads();
      }
      const uint32_t largest = copy.to.transformed ? largest_of_tile<DType::kBf16>(source)
                                                   : largest_of_tile<kSource>(source);
      of_copy[i] = max(of_copy[i], largest);
    }
  }
};

template <DType kSource>
__global__ void __launch_bounds__(kQuantizeThreads, kAmaxBlocks)
    expert_amax_kernel(const __grid_constant__ QuantizeJob job) {
  auto& shared = *reinterpret_cast<AmaxShared*>(dynamic_shared());
  ThreadAmax amax;
  walk_tiles<kSource>(job, shared, [&](const ExpertTile& tile) {
    amax.start(job, tile.expert);
    amax.add<kSource>(job, shared.source);
  });
  amax.start(job, -1);
}

}  // namespace

void launch_expert_amax(const QuantizeJob& job, const QuantizeStream& on) {
  const int64_t blocks = (job.of.experts + kQuantizeThreads - 1) / kQuantizeThreads;
  launch(clear_amax_kernel, {unsigned(blocks), kQuantizeThreads, 0, on.stream}, job);
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    launch(expert_amax_kernel<kSource>,
           on.grid(job.of, kAmaxBlocks, kSharedBytes<AmaxShared, kSource>), job);
  });
}

}  // namespace cadre::cuda::portable
