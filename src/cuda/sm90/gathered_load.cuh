#pragma once
#include "cuda/device/copy.h"
#include "cuda/device/tensor_map.h"
#include "cuda/device/word.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/token_order.h"

// Loads of rows that lie in the order of tokens: row r is token slot_of[r] / top_k of x [T, D].
//
// TMA loads no rows from here and there, so two warps copy them, sixteen bytes a thread (cp.async).
// Rows are the first operand, since a block then copies 128 of them, and not 256; w is the second,
// and the blocks of a cluster share it.
namespace cadre::cuda::sm90 {

/// Each warp copies one consumer's rows. A warp issues one instruction after the other and each
/// costs, beside the products, several cycles: addresses come from shared memory four at a time.
template <Tile kTile, class Params>
class GatheredLoad {
 public:
  static constexpr int kWarps = kConsumers, kArrivals = 1 + kWarps;
  static constexpr int kLanes = kAtomBytes / 16;  ///< that copy a row's part of a stage
  static constexpr int kAtOnce = kWarp / kLanes;  ///< rows
  static_assert(kTile.depth * element_bytes(kTile.a.dtype) == kAtomBytes && kAtOnce == 4);

  /// Where a warp's rows begin, in units of sixteen bytes, those of every fourth one after another.
  struct Memory {
    alignas(16) uint32_t places[kWarps][kAtOnce][kConsumerRows / kAtOnce];
  };

  __device__ GatheredLoad(const Params& params, const TileRecord& tile)
      : params_(params), tile_(tile), rank_(int(cluster_ctarank())) {
    const bool packed = params.experts == nullptr;
    w_ = packed ? &params.w : params.experts + tile.expert;
    expert_ = packed ? tile.expert : 0;
    if (!packed) tensormap_acquire(*w_);
  }

  /// Finds the rows of the tile. Behind its last there is that one, once more.
  __device__ void begin(Memory& memory) {
    constexpr int kMany = kConsumerRows / kWarp;
    uint32_t places[kMany];
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      const int row = tile_.row + kConsumerRows * warp() + kWarp * i + lane();
      places[i] = params_.order.place_of(params_.slot_of[min(row, tile_.rows_end - 1)]);
      lacks = lacks || places[i] == kNoPlace;
    }
    lacks_ = __any_sync(~0u, lacks);
#pragma unroll
    for (int i = 0; i < kMany; ++i)
      memory.places[warp()][lane() % kAtOnce][kWarp / kAtOnce * i + lane() / kAtOnce] = places[i];
    __syncwarp();
  }
  /// Copies the stage's part of them.
  __device__ void gather(const Stage& stage, const Memory& memory, int depth) const {
    const bool is_whole = !lacks_ && depth + kTile.depth <= params_.depth;
    is_whole ? gather<true>(stage, memory, depth) : gather<false>(stage, memory, depth);
  }

 protected:
  /// A box of w, of which there are several: the blocks take turns where they share them.
  __device__ void load_box(int number, uint8_t* to, const auto& at, Barrier& full) const {
    if (tile_.same_rows != 0)
      tma_load(to, *w_, at, full);
    else if (number % kCluster == rank_)
      tma_load(to, *w_, at, full, kAllBlocks);
  }

  const Params& params_;
  const TileRecord& tile_;
  int expert_;  ///< its coordinate in w

 private:
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  __device__ static int warp() { return int(threadIdx.x) / kWarp % kWarps; }

  template <bool kWhole>
  __device__ void gather(const Stage& stage, const Memory& memory, int depth) const {
    constexpr int kMany = 8;
    const int row = lane() / kLanes, sixteen = lane() % kLanes;
    const uint32_t even = shared_address(stage.a) + uint32_t(warp() * kTile.consumer_bytes()) +
                          swizzled(row, sixteen);
    const uint32_t odd = (even + kAtOnce * kAtomBytes) ^ (kAtOnce << 4);
    const char* from = as_one_number(static_cast<const char*>(params_.tokens) +
                                     depth * element_bytes(kTile.a.dtype) + sixteen * 16);
    const auto& places = memory.places[warp()][row];
    const bool is_inside = depth + sixteen * (16 / element_bytes(kTile.a.dtype)) < params_.depth;
    const auto copy = [&](uint32_t to, uint32_t at) {  // of nothing: zeros
      cp_async_line(to, from + uint64_t(at) * 16, kWhole || (is_inside && at != kNoPlace) ? 16 : 0);
    };
#pragma unroll
    for (int i = 0; i < kConsumerRows / kAtOnce; i += kMany) {
      const uint4 four[2] = {*reinterpret_cast<const uint4*>(places + i),
                             *reinterpret_cast<const uint4*>(places + i + 4)};
#pragma unroll
      for (int j = 0; j < kMany; j += 4) {
        const uint4& at = four[j / 4];
        constexpr uint32_t kNext = 2 * kAtOnce * kAtomBytes;
        const auto to = uint32_t((i + j) * kAtOnce * kAtomBytes);
        copy(even + to, at.x), copy(odd + to, at.y);
        copy(even + to + kNext, at.z), copy(odd + to + kNext, at.w);
      }
    }
  }

  const int rank_;  ///< of this block
  const CUtensorMap* w_;
  bool lacks_ = false;  ///< a row of the tile
};

}  // namespace cadre::cuda::sm90
