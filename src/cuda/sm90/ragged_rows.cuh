#pragma once
#include <type_traits>

#include "cuda/device/tensor_map.h"
#include "cuda/gemm/expert_search.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/ragged_rows.h"
#include "cuda/sm90/short_product.h"
#include "schedule/tiles.h"

// y[r, c] = alpha_e * sum_d x[r, d] * w_e[c, d] (+ beta_e * c[r, c]) (+ bias_e[c] * bias_scale[r])
// for the rows r of every expert: fprop and dgrad.
//
// x [R, D] and y [R, C] row-major; w [E, C, D], K-major or MN-major. The weight is the first
// operand of the product and the batch the second, so that a tile is as wide as an expert's rows
// ask for, in steps of sixteen: what would be padding is not multiplied. Rows beyond a tile's last
// are neither read nor written: TMA reads zeros there and writes nothing.
namespace cadre::cuda::sm90 {

/// Tiles expert by expert, an expert's rows cut evenly; the blocks of a cluster take neighbouring
/// columns of y.
template <Tile kTile>
class RaggedRowsSchedule {
 public:
  static constexpr bool kByWarp = true;
  static_assert(kTile.cols % kTile.col_step == 0);

  __device__ explicit RaggedRowsSchedule(const RaggedRowsParams& params)
      : params_(params),
        tiles_({params.offsets, params.expert_count, params.rows}, {kTile.cols, kTile.col_step},
               (params.cols + kTile.cluster_rows() - 1) / kTile.cluster_rows()) {}

  __device__ TileRecord tile(int64_t number) {
    if (!tiles_.seek(number)) return {};
    const schedule::TilePlace place = tiles_.place(params_.band);
    const schedule::ExpertRows rows = tiles_.rows(place);
    const BlockRows mine = block_rows<kTile.rows()>(int(place.across), params_.cols);
    return {.expert = tiles_.expert(),
            .row = mine.first,
            .row_limit = mine.limit,
            .begin = int(rows.first),
            .end = int(rows.last),
            .depth = params_.depth};
  }

 private:
  const RaggedRowsParams& params_;
  schedule::RaggedTilesBy<gemm::WarpExpertSearch> tiles_;
};

/// Boxes of the expert's weight, one or two a block, and of the batch: one a block, for both, of
/// the lowest height that holds the tile's rows.
template <Tile kTile>
class RaggedRowsLoad {
 public:
  static constexpr int kWarps = 1, kArrivals = 1;

  __device__ RaggedRowsLoad(const RaggedRowsParams& params, const TileRecord& tile) : tile_(tile) {
    constexpr int kUnit = kCluster * kBoxRows;
    const int units = (tile.cols() + kUnit - 1) / kUnit;
    const bool packed = params.experts == nullptr;
    w_ = packed ? &params.w : params.experts + tile.expert;
    expert_ = packed ? tile.expert : 0;
    x_ = params.x + units - 1;
    box_rows_ = units * kBoxRows;
    if (!packed) tensormap_acquire(*w_);
  }

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    expect(full);
    load_operands(stage, full, depth);
  }

 protected:
  __device__ void load_operands(const Stage& stage, Barrier& full, int depth) const {
    constexpr int kPanel = kTile.a.atom_elements();
    if constexpr (kTile.a.k_major) {
      tma_load(stage.a, *w_, Box3{depth, tile_.row, expert_}, full);
    } else {
      tma_load(stage.a, *w_, Box3{tile_.row, depth, expert_}, full);
      tma_load(stage.a + kTile.panel_bytes(), *w_, Box3{tile_.row + kPanel, depth, expert_}, full);
    }
    load_batch(stage, full, depth);
  }
  __device__ void expect(Barrier& full) const {
    arrive_expect_tx(full, uint32_t(kTile.a_bytes() + kAtoms * kCluster * box_rows_ * kAtomBytes));
  }
  __device__ void load_batch(const Stage& stage, Barrier& full, int depth) const {
    const int mine = int(cluster_ctarank()) * box_rows_;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom)
      tma_load(stage.b + atom * kTile.atom_bytes() + mine * kAtomBytes, *x_,
               Box4{depth + atom * kTile.b.atom_elements(), kRaggedOrigin - tile_.cols() + mine,
                    tile_.end, kRaggedOrigin},
               full, kAllBlocks);
  }

  static_assert(kTile.cols % (kCluster * kBoxRows) == 0);  // else boxes end behind the columns
  static constexpr int kAtoms = kTile.depth / kTile.b.atom_elements();  ///< of a row of x
  const TileRecord& tile_;
  const CUtensorMap *w_, *x_;
  int expert_;    ///< its coordinate in w_
  int box_rows_;  ///< of x, one box a block
};

constexpr OutputShape output_of_rows(DType out) {
  return {.dtype = out,
          .part_cols = rows_of_part(out),
          .buffers = out == DType::kF32 ? kBuffersOfFloatRows : kBuffers,
          .one_ring = out != DType::kF32};
}

/// The same where consumers hold it: each has its own ring.
constexpr OutputShape held_output_of_rows(DType out) {
  return {.dtype = out, .buffers = kBuffersOfHeldRows, .one_ring = false};
}

/// Parts of y, transposed on the way: rows of y are columns of the accumulators.
template <OutputShape kOutput>
class RaggedRowsStore {
 public:
  struct Memory {};
  static constexpr OutputShape kShape = kOutput;
  static constexpr DType kOut = kShape.dtype;

  __device__ RaggedRowsStore(const RaggedRowsParams& params, const TileRecord& tile)
      : params_(params),
        tile_(tile),
        has_epilogue_(params.has_epilogue()),
        beta_(beta_of(params, tile.expert)) {}

  __device__ Parts parts() const {
    const int count = (tile_.cols() + kShape.part_cols - 1) / kShape.part_cols;
    return {count, beta_ == 0 ? 0 : count};
  }
  __device__ void write(const TilePart& part, uint32_t to) const {
    if (!has_epilogue_) return write_accumulators(part.accumulators, to);
    float finished[kShape.part_cols / 2];
    finish_rows<true>(params_, tile_, part, finished, [&](float* sums) {
      if (beta_ != 0) add_c(to, sums);
    });
    write_accumulators(finished, to);
  }
  __device__ void open() const {}
  /// A part of c.
  __device__ void load(int col, int part, uint8_t* to, Barrier& loaded) const {
    tma_load(to, params_.c, box(col, part), loaded);
    if constexpr (kOut == DType::kF32)
      tma_load(to + kShape.part_bytes() / 2, params_.c, box(col + kConsumerRows / 2, part), loaded);
  }
  __device__ void store(int col, int part, const uint8_t* from) const {
    tma_store(params_.y, box(col, part), from);
    if constexpr (kOut == DType::kF32)
      tma_store(params_.y, box(col + kConsumerRows / 2, part), from + kShape.part_bytes() / 2);
  }
  __device__ static void finish(const RaggedRowsParams& params) { zero_tail(params, params.tail); }

 private:
  __device__ static void write_accumulators(const float* accumulators, uint32_t to) {
    if constexpr (kOut == DType::kF32)
      write_floats_transposed<kShape.part_cols>(accumulators, to);
    else
      write_halves_transposed<kOut, kShape.part_cols>(accumulators, to);
  }
  /// Of what has been loaded there.
  __device__ void add_c(uint32_t from, float* to) const {
    if constexpr (kOut == DType::kF32)
      add_floats_transposed<kShape.part_cols>(beta_, from, to);
    else
      add_halves_transposed<kOut, kShape.part_cols>(beta_, from, to);
  }
  __device__ Box4 box(int col, int part) const {
    return {col, kRaggedOrigin - tile_.cols() + kShape.part_cols * part, tile_.end, kRaggedOrigin};
  }

  const RaggedRowsParams& params_;
  const TileRecord& tile_;
  const bool has_epilogue_;  ///< looked up once a tile, as beta: no part waits for it
  const float beta_;
};

/// Nothing is added to what is held.
struct NoBias {
  __device__ void read_of(const auto&...) {}
};

/// What multiplies the sums of a tile.
struct TileAlpha {
  const float* alpha = nullptr;  ///< of the problem
  float value = 1.0f;

  __device__ void read_of(const RaggedRowsParams& params, const auto& /*memory*/,
                          const TileRecord& tile, int /*consumer*/) {
    alpha = params.alpha, value = alpha_of(params, tile.expert);
  }
};

/// A thread's share of a tile's 16-bit y, as it is stored, on its way out part by part: they leave
/// while the next tile is multiplied. Transposed: rows of y are columns of the accumulators.
template <DType kOut, bool kTransposed>
class HeldRows {
 public:
  static constexpr int kPartRows = rows_of_part(kOut), kAllTurns = kMostCols / kPartRows;

  __device__ HeldRows(const auto& /*params*/, const auto& /*memory*/) {}

  __device__ bool is_empty() const { return parts_.is_empty(); }

  __device__ __forceinline__ void take(const float* s, const TileRecord& tile, NoBias) {
#pragma unroll
    for (int i = 0; i < kAllTurns * kSteps; ++i)
      parts_.of[i / kSteps].step[i % kSteps] = packed<kOut>(s + 8 * i);
    begin(tile);
  }

  __device__ __forceinline__ void take(const float* s, const TileRecord& tile,
                                       const TileAlpha& by) {
    if (by.alpha == nullptr) return take(s, tile, NoBias());
#pragma unroll
    for (int i = 0; i < kAllTurns * kSteps; ++i) {
      float scaled[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) scaled[k] = s[8 * i + k] * by.value;
      parts_.of[i / kSteps].step[i % kSteps] = packed<kOut>(scaled);
    }
    begin(tile);
  }

  template <OutputShape kShape>
  __device__ __forceinline__ void write_turn(OutputRing<kShape>& out,
                                             Barrier (&empty)[kShape.buffers]) {
    out.wait_empty(empty);
    parts_.with_present([&](const Part& part) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        kTransposed ? write_turn_transposed(part.step[i], i, out.buffer())
                    : write_turn_upright(part.step[i], i, out.buffer());
    });
    parts_.next();
    out.pass_on();
  }

 private:
  static constexpr int kSteps = kPartRows / 16;

  __device__ __forceinline__ void begin(const TileRecord& tile) {
    parts_.begin(unsigned(tile.cols() + kPartRows - 1) / kPartRows);
  }

  struct Part {
    Matrices step[kSteps];
  };

  Turns<Part, kAllTurns> parts_;
};

/// Parts of 16-bit y that the consumers hold.
template <DType kOut>
class HeldRowsStore : public RaggedRowsStore<held_output_of_rows(kOut)> {
 public:
  using Held = HeldRows<kOut, true>;
  using Bias = TileAlpha;
  using RaggedRowsStore<held_output_of_rows(kOut)>::RaggedRowsStore;
};

/// The kernel of fprop and dgrad. Holding, consumers hold 16-bit output, as it is summed. Of few
/// rows tiles are narrow, which leaves room for more stages.
template <RaggedRowsKind kKind, bool kHolds, bool kFew = false>
struct RaggedRows {
  static constexpr Tile kTile{.cols = kFew ? kColsOfFewRows : kMostCols,
                              .stages = kFew ? kStagesOfFewRows : kStages,
                              .records = kHolds ? kRecordsOfHeldRows : kRecords,
                              .a = {kKind.in, kKind.k_major},
                              .b = {kKind.in, true}};
  using Params = RaggedRowsParams;
  using Schedule = RaggedRowsSchedule<kTile>;
  using Load = RaggedRowsLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = std::conditional_t<kHolds, HeldRowsStore<kKind.out>,
                                   RaggedRowsStore<output_of_rows(kKind.out)>>;
};

template <RaggedRowsKind kKind>
void launch_ragged_rows(const RaggedRowsParams& params, int blocks, cudaStream_t stream) {
  if (has_narrow_tiles(params.rows, params.expert_count, params.cols))
    return launch_kernel<RaggedRows<kKind, false, true>>(params, blocks, stream);
  if constexpr (kKind.out != DType::kF32)
    if (params.holds_output())
      return launch_kernel<RaggedRows<kKind, true>>(params, blocks, stream);
  launch_kernel<RaggedRows<kKind, false>>(params, blocks, stream);
}

}  // namespace cadre::cuda::sm90
