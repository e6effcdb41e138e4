#pragma once
#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cuda/sm90/gated_rows.h"
#include "cuda/sm90/ragged_rows.cuh"

// h[r, f] = act(gate, up) * prob[r], where z = [gate, up] of row r and feature f is
//
//   z[r, c] = round(sum_d x[r, d] * w_e[c, d] + bias_e[c])
//
// x [R, D], h [R, F] and z [R, 2F] row-major; w [E, 2F, D], K-major, in any layout of gate and up.
// z is stored only if it is kept. The rows of w come in turns of eight, so that a thread, whose
// accumulators are of rows r and r + 8 of its warp's sixteen, holds gate and up of one feature: a
// consumer's 64 rows are 32 features. z is rounded as if it were stored and read again, so that h
// has the bits of a product and an activation that run one after the other.
namespace cadre::cuda::sm90 {

/// As RaggedRowsLoad, with the rows of w in turns.
template <Tile kTile>
class GatedRowsLoad : RaggedRowsLoad<kTile> {
 public:
  using Base = RaggedRowsLoad<kTile>;
  using Base::kArrivals, Base::kWarps;

  __device__ GatedRowsLoad(const GatedRowsParams& params, const TileRecord& tile)
      : Base(params, tile),
        turn_(params.in_blocks ? 0 : tile.row / 16),
        last_(params.in_blocks ? tile.row / 64 : this->expert_) {}

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    this->expect(full);
    tma_load(stage.a, *this->w_, Box5{depth, 0, 0, turn_, last_}, full);
    this->load_batch(stage, full, depth);
  }

 private:
  int turn_, last_;  ///< coordinates of glu_map()
};

/// The bias of a thread's feature, read while the last products of a tile run.
struct GluBias {
  float gate = -0.0f, up = -0.0f;  ///< minus zero changes no sum

  __device__ void read_of(const GatedRowsParams& params, const auto& /*memory*/,
                          const TileRecord& tile, int consumer) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    const int features = params.cols / 2;
    const int feature = (tile.row + kConsumerRows * consumer) / 2 + 8 * warp + lane / 4;
    if (!params.bias.is_there() || feature >= features) return;
    const void* bias = of_expert(params.bias, tile.expert);
    const auto at = activations::glu_columns(params.layout, feature, features);
    gate = read(bias, params.bias.dtype, at.gate);
    up = read(bias, params.bias.dtype, at.up);
  }
};

/// A thread's share of a tile's z, as it is stored, on its way out in parts of 16 rows of the
/// batch: h is computed part by part, while the next tile is multiplied.
template <DType kType, class Activation, int kCols>
class GatedRowsHeld {
 public:
  static constexpr int kBoxBytes = kGatedPartCols * 64;
  static constexpr int kAllTurns = kCols / kGatedPartCols;  ///< of a tile, at most

  /// Probabilities of a tile's rows, for each warp.
  struct Memory {
    alignas(16) float probs[kConsumers * kWarpgroup / kWarp][kCols];
  };

  __device__ GatedRowsHeld(const GatedRowsParams& params, Memory& memory)
      : params_(params), probs_(memory.probs[threadIdx.x / kWarp]) {}

  __device__ bool is_empty() const { return parts_.is_empty(); }

  __device__ void take(const float* s, const TileRecord& tile, const GluBias& bias) {
    constexpr int kProbs = kCols / kWarp;
    const int lane = int(threadIdx.x) % kWarp;
    float prob[kProbs];
#pragma unroll
    for (int i = 0; i < kProbs; ++i) {
      const int row = tile.begin + kWarp * i + lane;
      prob[i] = params_.prob != nullptr && row < tile.end ? params_.prob[row] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kAllTurns * kHalves; ++i, s += 4) {
      StoredGlu& z = parts_.of[i / kHalves];
      z.gate[i % kHalves] = pack<kType>(s[0] + bias.gate, s[1] + bias.gate);
      z.up[i % kHalves] = pack<kType>(s[2] + bias.up, s[3] + bias.up);
    }
    parts_.begin(unsigned(tile.cols() + kGatedPartCols - 1) / kGatedPartCols);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kProbs; ++i) probs_[kWarp * i + lane] = prob[i];
    __syncwarp();
  }

  template <OutputShape kShape>
  __device__ void write_turn(OutputRing<kShape>& out, Barrier (&empty)[kShape.buffers]) {
    const StoredGlu z = parts_.present();
    const int lane = int(threadIdx.x) % kWarp;
    const float* probs = probs_ + kGatedPartCols * parts_.number() + lane % 4 * 2;
    uint32_t h[kHalves];
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
      h[i] = activated(z.gate[i], z.up[i], *reinterpret_cast<const Pair*>(probs + 8 * i));
    out.wait_empty(empty);
    put(z, h, out.buffer());
    parts_.next();
    out.pass_on();
  }

 private:
  static constexpr int kHalves = kGatedPartCols / 8;  ///< of a part

  /// Gate and up of one feature and four rows, as they are stored.
  struct StoredGlu {
    uint32_t gate[kHalves], up[kHalves];
  };
  __device__ uint32_t activated(uint32_t gates, uint32_t ups, const Pair& prob) const {
    const Pair gate = unpack<kType>(gates), up = unpack<kType>(ups);
    const auto& constants = params_.constants;
    return pack<kType>(Activation::forward(gate.first, up.first, constants) * prob.first,
                       Activation::forward(gate.second, up.second, constants) * prob.second);
  }
  __device__ void put(const StoredGlu& z, const uint32_t (&h)[kHalves], uint32_t to) const {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    stmatrix_trans(to + swizzled_64(lane % 16, warp), h[0], h[1]);
    if (!params_.keeps_z) return;
    if (params_.in_pairs) return put_pairs(z, to + kBoxBytes);
    to += uint32_t((1 + lane / 8 % 2) * kBoxBytes);
    stmatrix_trans(to + swizzled_64(lane / 16 * 8 + lane % 8, warp),
                   Matrices{z.gate[0], z.up[0], z.gate[1], z.up[1]});
  }
  /// Gate and up in turns of one: the second box is the second half of the columns.
  __device__ static void put_pairs(const StoredGlu& z, uint32_t to) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    const int feature = 8 * (warp % 2) + lane / 4;
    to += uint32_t(warp / 2 * kBoxBytes + feature % 4 * 4);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int row = 8 * i + 2 * (lane % 4);
      st_shared(to + swizzled_64(row, feature / 4), (z.gate[i] & 0xffff) | z.up[i] << 16);
      st_shared(to + swizzled_64(row + 1, feature / 4), z.gate[i] >> 16 | (z.up[i] & 0xffff0000));
    }
  }

  const GatedRowsParams& params_;
  float* probs_;
  Turns<StoredGlu, kAllTurns> parts_;
};

/// Parts of h, gate and up of 32 features, three boxes in a buffer; of tiles of so many columns.
template <DType kType, class Activation, int kCols>
class GatedRowsStore {
 public:
  static constexpr OutputShape kShape{.dtype = kType,
                                      .part_rows = 96,
                                      .part_cols = kGatedPartCols,
                                      .buffers = kBuffersOfGatedRows,
                                      .one_ring = false};
  using Held = GatedRowsHeld<kType, Activation, kCols>;
  using Memory = typename Held::Memory;
  using Bias = GluBias;

  __device__ GatedRowsStore(const GatedRowsParams& params, const TileRecord& tile)
      : params_(params), tile_(tile) {}

  __device__ Parts parts() const {
    return {(tile_.cols() + kShape.part_cols - 1) / kShape.part_cols, 0};
  }
  __device__ void open() const {}
  __device__ void load(int, int, uint8_t*, Barrier&) const {}
  __device__ void store(int row_of_w, int part, const uint8_t* from) const {
    const int row = kRaggedOrigin - tile_.cols() + kShape.part_cols * part, feature = row_of_w / 2;
    const Box4 at{feature, row, tile_.end, kRaggedOrigin};
    tma_store(params_.y, at, from);
    if (!params_.keeps_z) return;
    const Box4 at_z{feature * params_.z_step, row, tile_.end, kRaggedOrigin};
    tma_store(params_.z[0], at_z, from + Held::kBoxBytes);
    tma_store(params_.z[1], at_z, from + 2 * Held::kBoxBytes);
  }
  __device__ static void finish(const GatedRowsParams& params) {
    zero_tail(params, params.tail);
    zero_tail(params, params.z_tail);
  }

 private:
  const GatedRowsParams& params_;
  const TileRecord& tile_;
};

/// The kernel of fprop with that activation. Of few rows as RaggedRows.
template <DType kType, class Activation, bool kFew>
struct GatedRows {
  static constexpr Tile kTile{.cols = kFew ? kColsOfFewRows : kMostCols,
                              .col_step = kGatedColStep,
                              .stages = kFew ? kStagesOfFewRows : kStages,
                              .a = {kType, true},
                              .b = {kType, true},
                              .gated = true};
  using Params = GatedRowsParams;
  using Schedule = RaggedRowsSchedule<kTile>;
  using Load = GatedRowsLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = GatedRowsStore<kType, Activation, kTile.cols>;
};

template <DType kType>
void launch_gated_rows(const GatedRowsParams& params, int blocks, cudaStream_t stream) {
  activations::All::visit(params.kind, [&]<class Activation>(Activation) {
    if constexpr (Activation::kInfo.gated) {
      if (params.has_few_rows())
        launch_kernel<GatedRows<kType, Activation, true>>(params, blocks, stream);
      else
        launch_kernel<GatedRows<kType, Activation, false>>(params, blocks, stream);
    }
  });
}

}  // namespace cadre::cuda::sm90
