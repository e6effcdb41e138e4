#pragma once
#include "cuda/device/copy.h"
#include "cuda/device/word.h"
#include "cuda/sm90/gathered_contraction.h"
#include "cuda/sm90/ragged_contraction.cuh"
#include "cuda/sm90/token_places.h"

// As ragged_contraction.cuh, of an operand a whose rows lie in the order of tokens: row r of it is
// token slot_of[r] / top_k of [T, M].
//
// Two warps copy its rows, sixteen bytes a thread (cp.async), each the columns of one consumer; the
// blocks of a cluster share what TMA loads of b. Where b is dy, accumulators are dw transposed, and
// are turned on their way out.
namespace cadre::cuda::sm90 {

/// Each warp copies the places of a stage's rows too, to shared memory, two stages ahead.
template <Tile kTile>
class GatheredContractionLoad : public RaggedContractionLoad<kTile> {
 public:
  static constexpr int kWarps = kConsumers, kArrivals = 1 + kWarps;
  static constexpr int kLanes = kAtomBytes / 16;  ///< that copy a row's part
  static constexpr int kAtOnce = kWarp / kLanes;  ///< rows
  static constexpr int kTurns = kTile.depth / kAtOnce;
  static_assert(kTile.consumer_bytes() == kTile.panel_bytes() && kAtOnce == 4);

  /// Of the present stage and the next ones: places of every fourth row one after another.
  struct Memory {
    static constexpr int kStages = 4;

    alignas(16) uint32_t places[kWarps][kStages][kAtOnce][kTurns];
  };

  __device__ GatheredContractionLoad(const GatheredContractionParams& params,
                                     const TileRecord& tile)
      : RaggedContractionLoad<kTile>(params, tile), params_(params), rows_(tile.rows) {
    first_ = tile.rows_end - tile.rows + lane();
    column_ = tile.row + kConsumerRows * warp();
  }

  __device__ void begin(Memory& memory) {
    copy_places(memory, 0);
    copy_places(memory, kTile.depth);
    cp_async_commit();
    const uint4 lacks = reinterpret_cast<const uint4*>(params_.lacks)[lane()];
    const bool none = (lacks.x | lacks.y | lacks.z | lacks.w) == 0;
    is_whole_ = __all_sync(~0u, none && column_ + kConsumerRows <= params_.out_rows);
    cp_async_wait<0>();
    __syncwarp();
  }
  /// Copies the rows of a stage.
  __device__ void gather(const Stage& stage, Memory& memory, int depth) {
    const auto& places = of_stage(memory, depth);
    const bool is_whole = is_whole_ && depth + kTile.depth <= rows_;
    is_whole ? copy<true>(stage, places, depth) : copy<false>(stage, places, depth);
    copy_places(memory, depth + 2 * kTile.depth);
  }
  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    arrive_expect_tx(full, uint32_t(this->bytes_of_b()));
    this->load_b(stage, full, depth);
  }

 private:
  static_assert(kPlaceBlocks == 4 * kWarp);

  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  __device__ static int warp() { return int(threadIdx.x) / kWarp % kWarps; }
  __device__ static auto& of_stage(auto& memory, int depth) {
    return memory.places[warp()][depth / kTile.depth % Memory::kStages];
  }

  /// Of the expert's rows alone.
  __device__ void copy_places(Memory& memory, int depth) const {
    auto& to = of_stage(memory, depth);
#pragma unroll
    for (int i = 0; i < kTile.depth; i += kWarp)
      if (depth + i + lane() < rows_)
        cp_async_word(shared_address(&to[lane() % kAtOnce][(i + lane()) / kAtOnce]),
                      params_.places + (first_ + depth + i));
  }
  /// The loop is that of GatheredLoad. In one function for both, the compiler has no registers
  /// left for more than one address, for which each copy then waits.
  template <bool kWhole>
  __device__ void copy(const Stage& stage, const uint32_t (&places)[kAtOnce][kTurns],
                       int depth) const {
    const int row = lane() / kLanes, sixteen = lane() % kLanes;
    const int column = column_ + sixteen * (16 / element_bytes(kTile.a.dtype));
    const uint32_t even = shared_address(stage.a) + uint32_t(warp() * kTile.consumer_bytes()) +
                          swizzled(row, sixteen);
    const uint32_t odd = (even + kAtOnce * kAtomBytes) ^ (kAtOnce << 4);
    const char* from = as_one_number(static_cast<const char*>(params_.tokens) +
                                     column * element_bytes(kTile.a.dtype));
    const int left = column < params_.out_rows ? rows_ - depth - row : 0;
    const auto copy = [&](uint32_t to, uint32_t at, int turn) {  // of nothing: zeros
      const bool is_there = kWhole || (at != kNoPlace && turn * kAtOnce < left);
      cp_async_line(to, from + uint64_t(at) * 16, is_there ? 16 : 0);
    };
    const auto* mine = reinterpret_cast<const uint4*>(places[row]);
#pragma unroll
    for (int i = 0; i < kTurns; i += 8) {
      const uint4 four[2] = {mine[i / 4], mine[i / 4 + 1]};
#pragma unroll
      for (int j = i; j < i + 8; j += 4) {
        const uint4& at = four[(j - i) / 4];
        constexpr uint32_t kNext = 2 * kAtOnce * kAtomBytes;
        const auto to = uint32_t(j * kAtOnce * kAtomBytes);
        copy(even + to, at.x, j), copy(odd + to, at.y, j + 1);
        copy(even + to + kNext, at.z, j + 2), copy(odd + to + kNext, at.w, j + 3);
      }
    }
  }

  const GatheredContractionParams& params_;
  const int rows_;         ///< of the expert
  int first_;              ///< the lane's first row, of the batch
  int column_;             ///< the warp's first
  bool is_whole_ = false;  ///< no row and no column is lacking
};

/// The kernel of wgrad of rows of tokens.
template <GatheredContractionKind kKind>
struct GatheredContraction {
  static constexpr Tile kTile{.col_step = 64,
                              .any_depth = true,
                              .ahead = kAheadOfGradients,
                              .a = {kKind.type, false},
                              .b = {kKind.type, false}};
  using Params = GatheredContractionParams;
  using Schedule = RaggedContractionSchedule<kTile>;
  using Load = GatheredContractionLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = RaggedContractionStore<kTile, kKind.type, kKind.transposed>;
};

template <GatheredContractionKind kKind>
void launch_gathered_contraction(const GatheredContractionParams& params, int blocks,
                                 cudaStream_t stream) {
  launch_kernel<GatheredContraction<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
