#pragma once
#include <cstdint>

#include "cuda/device/barrier.h"
#include "cuda/device/chunk.h"
#include "cuda/device/copy.h"
#include "cuda/device/launch.h"
#include "cuda/device/mma.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/operand.h"
#include "schedule/tiles.h"

// What the portable kernels of grouped_gemm share: a block computes a tile of 128 rows and 128
// columns in stages along the contraction. Both operands of a stage lie in shared memory in lines
// along the contraction or across it, in swizzled chunks of 16 bytes. Where the lines of global
// memory are aligned to 16 bytes, cp.async copies chunks while other stages are multiplied;
// anything else is read element by element into the same places.
namespace cadre::cuda::portable {

constexpr int kTileThreads = 256;
constexpr int kSide = 128;                         // rows and columns of a tile
constexpr int kStages = 4;                         // in shared memory
constexpr int kBytesDeep = 64;                     // of a stage along the contraction
constexpr int kAccumulatorPitch = kSide + 8;       // of a line; padded, for fewer bank conflicts
constexpr int kLoadBytes = 16;                     // of a chunk
constexpr int kOperandBytes = kSide * kBytesDeep;  // of a stage
constexpr int kLoads = kOperandBytes / kLoadBytes / kTileThreads;  // of a thread

/// How one operand of a stage lies in shared memory.
struct StageLayout {
  bool along;         ///< lines run along the contraction: one for each row of the tile
  int element_bytes;  ///< 2 or 4

  constexpr int depth() const { return kBytesDeep / element_bytes; }
  constexpr int lines() const { return along ? kSide : depth(); }
  constexpr int chunks() const { return kOperandBytes / lines() / kLoadBytes; }  ///< of a line
  constexpr int elements() const { return kLoadBytes / element_bytes; }          ///< of a chunk

  /// Where a chunk begins. Swizzled, so that eight lines read at once have no bank conflict.
  CADRE_HD constexpr uint32_t place(int line, int chunk) const {
    const int swizzled = along                ? chunk ^ (line >> 1 & 3)
                         : element_bytes == 2 ? chunk ^ (line & 7)
                                              : chunk;
    return uint32_t((line * chunks() + swizzled) * kLoadBytes);
  }
};

/// Rows, columns, or elements along the contraction: [first, last).
struct Range {
  int64_t first, last;

  __device__ int64_t count() const { return last - first; }
};

/// The range from `first` on, at most a tile's side long, that ends by `all`.
__device__ inline Range side_of(int64_t first, int64_t all) {
  return {first, first + kSide < all ? first + kSide : all};
}

/// A part of an operand.
struct Part {
  Range across, deep;
};

/// A part as the lines that its stages are loaded from.
struct Source {
  const char* data;
  int64_t pitch, step;    ///< strides in bytes of lines and of elements
  int64_t lines, length;  ///< beyond these elements are zero
  DType dtype;
  bool wide;     ///< cp.async can copy its chunks
  bool strided;  ///< elements of a line are not adjacent

  __device__ Source(const char* first, const Operand& o, const Part& part, StageLayout layout)
      : data(first + part.across.first * o.across + part.deep.first * o.deep),
        pitch(layout.along ? o.across : o.deep),
        step(layout.along ? o.deep : o.across),
        lines(layout.along ? part.across.count() : part.deep.count()),
        length(layout.along ? part.deep.count() : part.across.count()),
        dtype(o.dtype) {
    strided = step != element_bytes(dtype);
    wide = step == layout.element_bytes && !strided && pitch % kLoadBytes == 0 &&
           reinterpret_cast<uintptr_t>(data) % kLoadBytes == 0;
  }
};

/// A rectangle of the output.
struct Area {
  Range rows, cols;
};

/// What a block works on. One thread computes it and shares it with the others through shared
/// memory, which saves their registers.
struct Tile {
  int expert;  ///< -1: there are no more
  Area area;
  int64_t deep;  ///< length of the contraction
  Source a, b;
};

/// Both operands of the stages in flight.
struct Stages {
  uint8_t a[kStages][kOperandBytes];
  uint8_t b[kStages][kOperandBytes];
};

struct alignas(128) TileShared {
  union {
    Stages stages;                                  ///< in the main loop
    float accumulators[kSide * kAccumulatorPitch];  ///< in the epilogue
  };
  Tile tile;
  schedule::RaggedTiles tiles;  ///< where rows are ragged: state of the thread that finds tiles
};

/// `count` elements, up to 16 bytes, as a stage holds them: 16-bit ones unchanged, others as fp32.
/// The rest is zero.
template <StageLayout kLayout>
__device__ inline uint4 gather(const char* from, const Source& source, int count) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kLayout.elements(); ++i) {
    if (i >= count) continue;
    const char* at = from + i * source.step;
    if (source.dtype == DType::kF32) {
      words[i % 4] = *reinterpret_cast<const uint32_t*>(at);
      continue;
    }
    const uint32_t code = *reinterpret_cast<const uint16_t*>(at);
    if constexpr (kLayout.element_bytes == 2)
      words[i / 2] |= code << (i % 2 * 16);
    else
      words[i] = __float_as_uint(pair_of(source.dtype, code).x);
  }
  return {words[0], words[1], words[2], words[3]};
}

/// Loads one stage of an operand, or starts the copy: cp_async_wait() completes it.
template <StageLayout kLayout>
__device__ inline void load_operand(uint8_t* to, const Source& source, int64_t stage) {
  const int64_t first_line = kLayout.along ? 0 : stage * kLayout.depth();
  const int64_t first_place = kLayout.along ? stage * kLayout.depth() : 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    // Adjacent threads read adjacent addresses.
    const int number = int(threadIdx.x) + i * kTileThreads;
    const int line = source.strided ? number % kLayout.lines() : number / kLayout.chunks();
    const int chunk = source.strided ? number / kLayout.lines() : number % kLayout.chunks();
    const int64_t place = first_place + chunk * kLayout.elements();
    const int64_t left = first_line + line < source.lines ? source.length - place : 0;
    const int count = int(left < 0 ? 0 : left < kLayout.elements() ? left : kLayout.elements());
    const char* from = source.data + (first_line + line) * source.pitch + place * source.step;
    uint8_t* where = to + kLayout.place(line, chunk);
    if (source.wide)
      cp_async(shared_address(where), count == 0 ? source.data : from,
               count * kLayout.element_bytes);
    else
      *reinterpret_cast<uint4*>(where) = gather<kLayout>(from, source, count);
  }
}

}  // namespace cadre::cuda::portable
