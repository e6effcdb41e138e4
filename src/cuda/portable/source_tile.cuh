#pragma once
#include "cuda/device/barrier.h"
#include "cuda/device/chunk.h"
#include "cuda/device/launch.h"
#include "cuda/device/mma.h"
#include "cuda/portable/quantized_tile.cuh"
#include "formats/hadamard.h"

// A tile of what is quantised, in shared memory: elements as they are stored, in chunks of eight.
// Of fp32 the second halves of chunks lie in a plane of their own. Swizzled, so that neither eight
// chunks of a row nor those of eight rows that are eight apart have bank conflicts.
namespace cadre::cuda::portable {

constexpr int kPlaneChunks = kTileSide * kAcross;

struct SourcePlanes {
  uint4 low[kPlaneChunks];
  uint4 high[kPlaneChunks];  ///< fp32 only
};

/// Bytes of shared memory that a tile takes.
constexpr int source_bytes(DType dtype) {
  return (dtype == DType::kF32 ? 2 : 1) * kPlaneChunks * int(sizeof(uint4));
}

CADRE_HD constexpr int source_place(int row, int chunk) {
  return row * kAcross + (chunk ^ (row / kChunk & 7));
}

__device__ inline Chunk read_chunk(const SourcePlanes& planes, DType dtype, int row, int chunk) {
  const int place = source_place(row, chunk);
  Chunk read{planes.low[place], {}};
  if (dtype == DType::kF32) read.high = planes.high[place];
  return read;
}

/// Loads a tile; what is not there is zero. All threads must call it, and see it all behind the
/// next __syncthreads().
__device__ inline void load_tile(SourcePlanes& planes, const Matrix& from, const ExpertTile& tile) {
  const bool wide = from.is_wide(), whole = from.dtype == DType::kF32;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kPlaneChunks; i += kQuantizeThreads) {
    const int row = i / kAcross, chunk = i % kAcross, place = source_place(row, chunk);
    const bool inside = row < tile.rows && chunk * kChunk < tile.cols;
    const Place at{tile.first + tile.row + row, tile.col + chunk * kChunk};
    if (wide) {
      const char* source = inside ? address(from, at) : from.data;
      const int bytes = inside ? 16 : 0;
      cp_async(shared_address(&planes.low[place]), source, bytes);
      if (whole) cp_async(shared_address(&planes.high[place]), source + bytes, bytes);
    } else {
      const Chunk read = inside ? load<false>(from, at) : Chunk{};
      planes.low[place] = read.low;
      if (whole) planes.high[place] = read.high;
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
}

/// Element k of a chunk.
__device__ inline float read_element(const SourcePlanes& planes, DType dtype, int row, int chunk,
                                     int k) {
  const int place = source_place(row, chunk);
  if (dtype != DType::kF32)
    return pair_of(dtype, reinterpret_cast<const uint16_t*>(&planes.low[place])[k]).x;
  return reinterpret_cast<const float*>(k < 4 ? &planes.low[place] : &planes.high[place])[k % 4];
}

/// Elements 2 * pair and the next of a chunk.
__device__ inline float2 read_pair(const SourcePlanes& planes, DType dtype, int place, int pair) {
  if (dtype != DType::kF32)
    return pair_of(dtype, reinterpret_cast<const uint32_t*>(&planes.low[place])[pair]);
  const uint4& half = pair < 2 ? planes.low[place] : planes.high[place];
  return reinterpret_cast<const float2*>(&half)[pair % 2];
}

/// Transforms every sixteen rows, in place, to bf16. A thread takes two columns at a time; the
/// threads that share a chunk are in one warp, so nobody writes what another has yet to read.
__device__ inline void transform_tile(SourcePlanes& planes, DType dtype) {
  constexpr int kPoints = formats::Hadamard16::kPoints, kPairs = kTileSide / 2;
  for (int i = int(threadIdx.x); i < kTileSide / kPoints * kPairs; i += kQuantizeThreads) {
    const int first = i / kPairs * kPoints, chunk = i % kPairs / 4, pair = i % 4;
    float x[kPoints], y[kPoints];
    for (int p = 0; p < kPoints; ++p) {
      const float2 both = read_pair(planes, dtype, source_place(first + p, chunk), pair);
      x[p] = both.x, y[p] = both.y;
    }
    formats::Hadamard16::apply(x);
    formats::Hadamard16::apply(y);
    __syncwarp();
    for (int p = 0; p < kPoints; ++p)
      reinterpret_cast<uint32_t*>(&planes.low[source_place(first + p, chunk)])[pair] =
          bits_of_pair(DType::kBf16, x[p], y[p]);
  }
}

}  // namespace cadre::cuda::portable
