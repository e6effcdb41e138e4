#pragma once
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/ragged_contraction.h"
#include "schedule/tiles.h"

// dw_e[m, c] (+)= alpha_e * sum_r a[r, m] * b[r, c] over the rows r of every expert: wgrad.
//
// a [R, M] and b [R, C] row-major: both operands are MN-major; dw [E, M, C] row-major. The last
// rows of an expert's last stage are zeros that TMA makes. An expert without rows gets the product
// of one row of zeros, or is left alone when accumulating.
namespace cadre::cuda::sm90 {

/// Tiles expert by expert, the columns of dw cut evenly; the blocks of a cluster take neighbouring
/// rows of dw.
template <Tile kTile>
class RaggedContractionSchedule {
 public:
  static constexpr bool kByWarp = false;

  __device__ explicit RaggedContractionSchedule(const RaggedContractionParams& params)
      : params_(params),
        width_(schedule::TileHeight{kTile.cols, kTile.col_step}.of(params.cols)),
        grid_{(params.out_rows + kClusterRows - 1) / kClusterRows,
              (params.cols + width_ - 1) / width_},
        tiles_(grid_.count()),
        end_(tiles_ * params.expert_count),
        used_(schedule::rows_used(params.offsets, params.expert_count, params.rows)) {}

  __device__ TileRecord tile(int64_t number) const {
    if (number >= end_) return {};
    const int expert = int(number / tiles_);
    // Loaded here, used below: the place is found meanwhile, since short experts wait for this.
    const int32_t offsets[2] = {params_.offsets[expert], params_.offsets[expert + 1]};
    const schedule::TilePlace place = banded(number % tiles_, grid_, params_.band);
    const schedule::ExpertRows rows = schedule::rows_of(offsets, 0, used_);
    const int count = int(rows.count());
    if (count == 0 && params_.accumulates(expert)) return {.expert = expert};
    constexpr int kStep = kTile.col_step;
    const int64_t begin = place.across * width_;
    const int64_t left = (params_.cols - begin + kStep - 1) / kStep * kStep;
    const BlockRows mine = block_rows(int(place.down), params_.out_rows);
    return {.expert = expert,
            .row = mine.first,
            .row_limit = mine.limit,
            .begin = int(begin),
            .end = int(begin + (left < width_ ? left : width_)),
            .depth = count == 0 ? 1 : count,
            .rows = count,
            .rows_end = int(rows.last)};
  }

 private:
  const RaggedContractionParams& params_;
  int64_t width_;
  schedule::TileGrid grid_;
  int64_t tiles_, end_;  ///< of an expert, of all
  int64_t used_;
};

/// Boxes of rows of the batch: two of a, and half of the columns of b for both blocks. An expert
/// without rows gets one stage, which lies behind its end: zeros.
template <Tile kTile>
class RaggedContractionLoad {
 public:
  static constexpr int kWarps = 1, kArrivals = 1;

  __device__ RaggedContractionLoad(const RaggedContractionParams& params, const TileRecord& tile)
      : params_(params), tile_(tile) {}

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    const Box4 at = box(tile_.row, depth);
    arrive_expect_tx(full, uint32_t(kTile.a_bytes() + bytes_of_b()));
    tma_load(stage.a, params_.a, at, full);
    tma_load(stage.a + kBytes, params_.a, Box4{at.x + kPanel, at.y, at.z, at.w}, full);
    load_b(stage, full, depth);
  }

 protected:
  __device__ int bytes_of_b() const { return tile_.cols() / kPanel * kBytes; }
  __device__ void load_b(const Stage& stage, Barrier& full, int depth) const {
    const Box4 at = box(tile_.begin, depth);
    for (int panel = int(cluster_ctarank()); panel < tile_.cols() / kPanel; panel += kCluster)
      tma_load(stage.b + panel * kBytes, params_.b, Box4{at.x + kPanel * panel, at.y, at.z, at.w},
               full, kAllBlocks);
  }

 private:
  static constexpr int kPanel = kTile.a.atom_elements(), kBytes = kTile.panel_bytes();

  __device__ Box4 box(int column, int depth) const {
    return {column, kRaggedOrigin - (tile_.rows - depth), tile_.rows_end, kRaggedOrigin};
  }

  const RaggedContractionParams& params_;
  const TileRecord& tile_;
};

/// Parts of dw. What it held is added to by the consumers where it has been loaded: 16-bit numbers
/// always, since TMA would round twice. To floats TMA may add (reduce-add), which is slower, but
/// costs nothing where many rows hide it. Transposed: rows of dw are columns of the accumulators.
template <Tile kTile, DType kOut, bool kTransposed = false>
class RaggedContractionStore {
 public:
  struct Memory {};
  static constexpr bool kFloats = kOut == DType::kF32;
  static constexpr OutputShape kShape{.dtype = kOut,
                                      .part_cols = cols_of_upright_part(kOut),
                                      .buffers = kFloats ? kBuffersOfFloats : kBuffers,
                                      .one_ring = !kFloats};
  static_assert(!kFloats || !kTransposed);

  __device__ RaggedContractionStore(const RaggedContractionParams& params, const TileRecord& tile)
      : params_(params),
        tile_(tile),
        has_alpha_(params.alpha != nullptr),
        alpha_(alpha_of(params, tile.expert)),
        parts_(parts_of(params, tile)) {}

  __device__ Parts parts() const { return parts_; }
  __device__ void write(const TilePart& part, uint32_t to) const {
    const bool is_loaded = part.number < parts_.loaded;
    if (!is_loaded && !has_alpha_) return write_accumulators(part.accumulators, to);
    float finished[kShape.part_cols / 2];
#pragma unroll
    for (int i = 0; i < kShape.part_cols / 2; ++i) finished[i] = part.accumulators[i] * alpha_;
    if (is_loaded) add_old(to, finished);
    write_accumulators(finished, to);
  }
  /// Finds the map of the expert's dw.
  __device__ void open() {
    const bool packed = params_.experts == nullptr;
    dw_ = packed ? &params_.dw : params_.experts + tile_.expert;
    expert_ = packed ? tile_.expert : 0;
    if (!packed) tensormap_acquire(*dw_);
    if constexpr (kFloats)
      first_added_ = params_.accumulates(tile_.expert) ? parts_.loaded : parts_.count;
  }
  __device__ void load(int row, int part, uint8_t* to, Barrier& loaded) const {
    tma_load(to, *dw_, place(row, part), loaded);
  }
  __device__ void store(int row, int part, const uint8_t* from) const {
    if constexpr (kFloats)
      if (part >= first_added_) return tma_reduce_add(*dw_, place(row, part), from);
    tma_store(*dw_, place(row, part), from);
  }
  __device__ static void finish(const RaggedContractionParams&) {}

 private:
  __device__ static void write_accumulators(const float* accumulators, uint32_t to) {
    if constexpr (kTransposed)
      write_halves_transposed<kOut, kShape.part_cols>(accumulators, to);
    else
      write_upright<kOut>(accumulators, to);
  }
  /// Of what has been loaded there.
  __device__ static void add_old(uint32_t from, float (&to)[kShape.part_cols / 2]) {
    if constexpr (kFloats) {
      float old[kShape.part_cols / 2];
      read_floats(from, old);
#pragma unroll
      for (int i = 0; i < kShape.part_cols / 2; ++i) to[i] = add_rounded(to[i], old[i]);
    } else if constexpr (kTransposed) {
      add_halves_transposed<kOut, kShape.part_cols>(1.0f, from, to);
    } else {
      add_halves<kOut>(1.0f, from, to);
    }
  }
  __device__ static Parts parts_of(const RaggedContractionParams& params, const TileRecord& tile) {
    const int end = tile.end < params.cols ? tile.end : params.cols;
    const int count = (end - tile.begin + kShape.part_cols - 1) / kShape.part_cols;
    const bool loads =
        (!kFloats || tile.depth <= kMostLoadedRows) && params.accumulates(tile.expert);
    return {count, loads ? count : 0};
  }
  __device__ Box3 place(int row, int part) const {
    const int col = tile_.begin + kShape.part_cols * part;
    return kTransposed ? Box3{row, col, expert_} : Box3{col, row, expert_};
  }

  const RaggedContractionParams& params_;
  const TileRecord& tile_;
  const bool has_alpha_;  ///< looked up once a tile, as alpha: no part waits for it
  const float alpha_;
  const Parts parts_;
  const CUtensorMap* dw_ = nullptr;
  int expert_ = 0;       ///< its coordinate in dw_
  int first_added_ = 0;  ///< of floats: the first part that TMA adds
};

/// The kernel of wgrad.
template <RaggedContractionKind kKind>
struct RaggedContraction {
  static constexpr bool kFloats = kKind.out == DType::kF32;
  static constexpr Tile kTile{.cols = kMostCols,
                              .col_step = 64,
                              .depth = kDepthOfGradients,
                              .any_depth = true,
                              .stages = kFloats ? kStagesOfFloats : kStagesOfGradients,
                              .ahead = kAheadOfGradients,
                              .a = {kKind.in, false},
                              .b = {kKind.in, false}};
  using Params = RaggedContractionParams;
  using Schedule = RaggedContractionSchedule<kTile>;
  using Load = RaggedContractionLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = RaggedContractionStore<kTile, kKind.out>;
};

template <RaggedContractionKind kKind>
void launch_ragged_contraction(const RaggedContractionParams& params, int blocks,
                               cudaStream_t stream) {
  launch_kernel<RaggedContraction<kKind>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
