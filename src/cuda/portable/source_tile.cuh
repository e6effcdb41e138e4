#pragma once
#include "cuda/device/barrier.h"
#include "cuda/device/chunk.h"
#include "cuda/device/copy.h"
#include "cuda/device/launch.h"
#include "cuda/portable/quantize_job.h"
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

/// Of shared memory that a tile takes.
template <DType kSource>
constexpr int kSourceBytes = (kSource == DType::kF32 ? 2 : 1) * kPlaneChunks* int(sizeof(uint4));

CADRE_HD constexpr int source_place(int row, int chunk) {
  return row * kAcross + (chunk ^ (row / kChunk & 7));
}

template <DType kSource>
__device__ Chunk read_chunk(const SourcePlanes& planes, int place) {
  Chunk read{planes.low[place], {}};
  if constexpr (kSource == DType::kF32) read.high = planes.high[place];
  return read;
}

/// Rare and long, so not inlined eight times.
__device__ __noinline__ inline Chunk load_narrow(const Matrix& from, Place at) {
  return load<false>(from, at);
}

/// Starts to load a tile; what is not there is zero. All threads must call it, and cp_async_wait();
/// behind the next __syncthreads() all of them see it all.
template <DType kSource>
__device__ void start_tile(SourcePlanes& planes, const Matrix& from, const ExpertTile& tile) {
  constexpr int kRowsAtOnce = kQuantizeThreads / kAcross, kBytes = kSource == DType::kF32 ? 4 : 2;
  const int first = int(threadIdx.x / kAcross), chunk = int(threadIdx.x % kAcross);
  const bool inside = chunk * kChunk < tile.cols, wide = from.is_wide();
  const int rows = inside ? tile.rows : 0;
  const int64_t row = tile.first + tile.row + first, column = tile.col + chunk * kChunk;
  const char* source = inside ? from.data + row * from.pitch + column * kBytes : from.data;
  if (wide) {
#pragma unroll
    for (int i = 0; i < kTileSide; i += kRowsAtOnce) {
      const bool there = first + i < rows;
      const int bytes = there ? 16 : 0, place = source_place(first + i, chunk);
      const char* at = there ? source + i * from.pitch : from.data;
      cp_async(shared_address(&planes.low[place]), at, bytes);
      if (kSource == DType::kF32) cp_async(shared_address(&planes.high[place]), at + bytes, bytes);
    }
  } else {
#pragma unroll 1
    for (int i = first; i < kTileSide; i += kRowsAtOnce) {
      const Chunk read = i < rows ? load<false>(from, {row + i - first, column}) : Chunk{};
      planes.low[source_place(i, chunk)] = read.low;
      if (kSource == DType::kF32) planes.high[source_place(i, chunk)] = read.high;
    }
  }
  cp_async_commit();
}

/// The same of rows that are gathered: a row whose slot is none is zero.
template <DType kSource>
__device__ void start_gathered_tile(SourcePlanes& planes, const Matrix& tokens,
                                    const schedule::RowTokens& rows, const ExpertTile& tile) {
  constexpr int kRowsAtOnce = kQuantizeThreads / kAcross, kBytes = kSource == DType::kF32 ? 4 : 2;
  const int first = int(threadIdx.x / kAcross), chunk = int(threadIdx.x % kAcross);
  const bool inside = chunk * kChunk < tile.cols, wide = tokens.is_wide();
  const int64_t column = tile.col + chunk * kChunk;
  int token[kTileSide / kRowsAtOnce];  // of all rows first, since they wait for memory together
#pragma unroll
  for (int i = 0; i < kTileSide; i += kRowsAtOnce)
    token[i / kRowsAtOnce] =
        inside && first + i < tile.rows ? rows.token_of(tile.first + tile.row + first + i) : -1;
#pragma unroll
  for (int i = 0; i < kTileSide; i += kRowsAtOnce) {
    const int64_t row = token[i / kRowsAtOnce];
    const int place = source_place(first + i, chunk);
    if (wide) {
      const int bytes = row >= 0 ? 16 : 0;
      const char* at = row >= 0 ? tokens.data + row * tokens.pitch + column * kBytes : tokens.data;
      cp_async(shared_address(&planes.low[place]), at, bytes);
      if (kSource == DType::kF32) cp_async(shared_address(&planes.high[place]), at + bytes, bytes);
    } else {
      const Chunk read = row >= 0 ? load_narrow(tokens, {row, column}) : Chunk{};
      planes.low[place] = read.low;
      if (kSource == DType::kF32) planes.high[place] = read.high;
    }
  }
  cp_async_commit();
}

/// Starts to bring a tile of the job's source into shared memory: the one place where a kernel
/// reads what is quantised. All threads must call it, see start_tile().
template <DType kSource>
__device__ void start_source(SourcePlanes& planes, const QuantizeJob& job, const ExpertTile& tile) {
  const Matrix from = job.source.of(tile.expert);
  job.tokens.gather() ? start_gathered_tile<kSource>(planes, from, job.tokens, tile)
                      : start_tile<kSource>(planes, from, tile);
}

/// Bytes of a block's shared memory, whose last part is the tile.
template <class Shared, DType kSource>
constexpr int kSharedBytes = int(sizeof(Shared) - sizeof(SourcePlanes)) + kSourceBytes<kSource>;

/// The tile that a block has, and the next one.
struct TileQueue {
  TileFinder finder;
  ExpertTile tiles[2];
};

/// Calls work(tile) for every tile of a block, which is in shared memory behind the next
/// __syncthreads(). One thread looks for the next tile while this one is loaded.
template <DType kSource, class Shared, class Work>
__device__ void walk_tiles(const QuantizeJob& job, Shared& shared, Work&& work) {
  if (threadIdx.x == 0) {
    shared.queue.finder.start(job.of);
    shared.queue.finder.next(job.of, shared.queue.tiles[0]);
  }
  for (int turn = 0;; turn ^= 1) {
    __syncthreads();
    const ExpertTile& tile = shared.queue.tiles[turn];
    if (tile.expert < 0) return;
    start_source<kSource>(shared.source, job, tile);
    if (threadIdx.x == 0) shared.queue.finder.next(job.of, shared.queue.tiles[turn ^ 1]);
    cp_async_wait<0>();
    work(tile);
  }
}

/// Element k of a chunk.
template <DType kSource>
__device__ float read_element(const SourcePlanes& planes, int row, int chunk, int k) {
  const int place = source_place(row, chunk);
  if constexpr (kSource == DType::kF32)
    return reinterpret_cast<const float*>(k < 4 ? &planes.low[place] : &planes.high[place])[k % 4];
  return pair_of(kSource, reinterpret_cast<const uint16_t*>(&planes.low[place])[k]).x;
}

/// Elements 2 * pair and the next of a chunk.
template <DType kSource>
__device__ float2 read_pair(const SourcePlanes& planes, int row, int chunk, int pair) {
  const int place = source_place(row, chunk);
  if constexpr (kSource == DType::kF32)
    return reinterpret_cast<const float2*>(pair < 2 ? &planes.low[place]
                                                    : &planes.high[place])[pair % 2];
  return pair_of(kSource, reinterpret_cast<const uint32_t*>(&planes.low[place])[pair]);
}

/// Transforms every sixteen rows, in place, to bf16. A thread takes two columns at a time; the
/// threads that share a chunk are in one warp, so nobody writes what another has yet to read.
template <DType kSource>
__device__ __noinline__ void transform_tile(SourcePlanes& planes) {
  constexpr int kPoints = formats::Hadamard16::kPoints, kPairs = kTileSide / 2;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kTileSide / kPoints * kPairs; i += kQuantizeThreads) {
    const int first = i / kPairs * kPoints, chunk = i % kPairs / 4, pair = i % 4;
    float x[kPoints], y[kPoints];
    for (int p = 0; p < kPoints; ++p) {
      const float2 both = read_pair<kSource>(planes, first + p, chunk, pair);
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
