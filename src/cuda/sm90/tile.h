#pragma once
#include "cuda/device/wgmma.h"
#include "cuda/gemm/element.h"
#include "cuda/gemm/roles.h"
#include "cuda/gemm/tile_record.h"
#include "cuda/sm90/tuning.h"

// Tile: the shape of a tile, of its stages and of its output; what every part of a kernel knows.
namespace cadre::cuda::sm90 {

using gemm::element_bits;
using gemm::element_bytes;
using gemm::kWarp;
using gemm::kWarpgroup;
using gemm::TileRecord;

constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;  // of a cluster, one bit each

/// How an operand lies in shared memory: in swizzle atoms, whose rows have kAtomBytes. K-major:
/// they run along the contraction; MN-major: across it.
struct Operand {
  DType dtype = DType::kBf16;
  bool k_major = true;

  constexpr int atom_elements() const { return kAtomBytes / element_bytes(dtype); }
};

/// The shape of a tile and of its stages.
struct Tile {
  int cols = kMostCols;    ///< at most
  int col_step = 16;       ///< widths of a tile are multiples of it
  int depth = kDepth;      ///< of a stage
  bool any_depth = false;  ///< the contraction ends anywhere in a stage, not at a multiple of it
  int stages = kStages;    ///< of the ring
  int records = kRecords;  ///< of the ring of tiles
  int ahead = kAhead;      ///< what is left of the contraction when the next tile is taken
  Operand a{}, b{};
  int scales = 0;              ///< floats that come with a stage: scales of the tile's rows
  int consumers = kConsumers;  ///< warpgroups that multiply
  bool gated = false;          ///< two of them, which compute activations, too

  /// Of a thread of a consumer, and of the others.
  constexpr int consumer_registers() const {
    if (gated) return kConsumerRegistersOfGated;
    return consumers == kConsumers ? kConsumerRegisters : kRegistersOfManyConsumers;
  }
  constexpr int producer_registers() const {
    if (gated) return kProducerRegistersOfGated;
    return consumers == kConsumers ? kProducerRegisters : kRegistersBesideManyConsumers;
  }

  constexpr int rows() const { return consumers * kConsumerRows; }
  constexpr int cluster_rows() const { return kCluster * rows(); }
  constexpr int a_bytes() const { return consumers * consumer_bytes(); }
  constexpr int b_bytes() const { return cols * depth * element_bytes(b.dtype); }
  /// One atom's width of an MN-major operand, of the whole depth of a stage.
  constexpr int panel_bytes() const { return depth * kAtomBytes; }
  /// One atom's width of a K-major B, of all its columns.
  constexpr int atom_bytes() const { return cols * kAtomBytes; }
  /// From one consumer's rows of A to the next's.
  constexpr int consumer_bytes() const { return kConsumerRows * depth * element_bits(a.dtype) / 8; }
};

/// How the output of a tile leaves: in parts of so many columns of a consumer's rows, through rings
/// of buffers.
struct OutputShape {
  DType dtype = DType::kBf16;
  int part_rows = kConsumerRows;  ///< of everything that a part writes
  int part_cols = 64;
  int buffers = kBuffers;  ///< of a ring, each for a part
  bool one_ring = true;    ///< consumers take turns with one ring; else each has its own
  bool one_warp = false;   ///< stores from both rings, where each consumer has its own

  constexpr int rings() const { return one_ring ? 1 : kConsumers; }
  constexpr int store_warps() const { return one_warp ? 1 : rings(); }
  constexpr int part_bytes() const { return part_rows * part_cols * element_bytes(dtype); }
};

/// A part of a tile's output: a thread's accumulators of it, its number, and its first row of A and
/// first column.
struct TilePart {
  const float* accumulators;
  int number, row, col;
};

/// How many parts of a tile are stored, and into how many of their buffers old output is loaded.
struct Parts {
  int count, loaded;
};

/// Whether the tile has rows for that consumer.
__device__ inline bool has_rows(const TileRecord& tile, int consumer) {
  return tile.row + kConsumerRows * consumer < tile.row_limit;
}

/// The rows of A that a block takes of a pair of tiles: half of them, and of the last pair a half
/// of what is left, in whole consumers.
struct BlockRows {
  int first, limit;
};
template <int kRows = kTileRows>
__device__ inline BlockRows block_rows(int pair, int rows) {
  constexpr int kUnit = kCluster * kConsumerRows;
  const int begin = pair * kCluster * kRows;
  const int left = (rows - begin + kUnit - 1) / kUnit * kConsumerRows;
  const int height = left < kRows ? left : kRows;
  const int first = begin + int(cluster_ctarank()) * height;
  return {first, first + height < rows ? first + height : rows};
}

}  // namespace cadre::cuda::sm90
