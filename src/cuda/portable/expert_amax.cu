#include "cuda/portable/quantize_job.h"
#include "cuda/portable/source_tile.cuh"

// The largest magnitude of an expert's rows, as bits: of the values, or of the transformed ones. A
// maximum comes out the same in any order, so blocks raise it by atomics.
namespace cadre::cuda::portable {
namespace {

constexpr int kAmaxBlocks = 4;  // of an SM at once

struct AmaxShared {
  TileFinder finder;
  ExpertTile tile;
  alignas(128) SourcePlanes source;
};

__global__ void clear_amax_kernel(const __grid_constant__ QuantizeJob job) {
  const int64_t expert = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x;
  for (const QuantizeCopy& copy : job.copies)
    if (copy.amax != nullptr && expert < job.of.experts) copy.amax[expert] = 0;
}

/// Those of this thread's chunks of a tile.
__device__ uint32_t largest_of_tile(const SourcePlanes& source, DType dtype) {
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = int(threadIdx.x); i < kPlaneChunks; i += kQuantizeThreads) {
    float x[kChunk];
    decode(read_chunk(source, dtype, i / kAcross, i % kAcross), dtype, x);
    for (const float value : x) largest = max(largest, formats::magnitude(value));
  }
  return largest;
}

/// One copy's, kept in registers while tiles are of the same expert.
struct ThreadAmax {
  uint32_t largest = 0;

  __device__ void flush(uint32_t* amax, int expert) {
    const uint32_t of_warp = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % kLanes == 0 && of_warp != 0) atomicMax(&amax[expert], of_warp);
    largest = 0;
  }
};

/// Those of the tile in shared memory, which the last copy may transform.
__device__ void add_tile(ThreadAmax (&amax)[2], const QuantizeJob& job, SourcePlanes& source) {
  DType dtype = job.source.first.dtype;
  for (int i = 0; i < job.count; ++i) {
    const QuantizeCopy& copy = job.copies[i];
    if (copy.amax == nullptr) continue;
    if (copy.to.transformed) {
      __syncthreads();
      transform_tile(source, dtype);
      dtype = DType::kBf16;
      __syncthreads();
    }
    amax[i].largest = max(amax[i].largest, largest_of_tile(source, dtype));
  }
}

__global__ void __launch_bounds__(kQuantizeThreads, kAmaxBlocks)
    expert_amax_kernel(const __grid_constant__ QuantizeJob job) {
  auto& shared = *reinterpret_cast<AmaxShared*>(dynamic_shared());
  ThreadAmax amax[2];
  int expert = -1;
  if (threadIdx.x == 0) shared.finder.start(job.of);
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    if (threadIdx.x == 0) shared.tile = shared.finder.find(job.of, number);
    __syncthreads();
    const ExpertTile tile = shared.tile;
    for (int i = 0; i < job.count && expert >= 0 && tile.expert != expert; ++i)
      if (job.copies[i].amax != nullptr) amax[i].flush(job.copies[i].amax, expert);
    expert = tile.expert;
    if (expert < 0) return;
    load_tile(shared.source, job.source.of(expert), tile);
    __syncthreads();
    add_tile(amax, job, shared.source);
  }
}

}  // namespace

void launch_expert_amax(const QuantizeJob& job, const QuantizeStream& on) {
  const int64_t blocks = (job.of.experts + kQuantizeThreads - 1) / kQuantizeThreads;
  launch(clear_amax_kernel, {unsigned(blocks), kQuantizeThreads, 0, on.stream}, job);
  const int ahead = sizeof(AmaxShared) - sizeof(SourcePlanes);
  launch(expert_amax_kernel,
         on.grid(job.of, kAmaxBlocks, ahead + source_bytes(job.source.first.dtype)), job);
}

}  // namespace cadre::cuda::portable
