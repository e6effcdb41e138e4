#pragma once
#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cuda/device/tensor_map.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/gathered_load.cuh"
#include "cuda/sm90/gathered_rows.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/paired_rows.cuh"

// As gated_rows.cuh, of rows that lie in the order of tokens, see gathered_load.cuh. The rows of w,
// in turns of eight, are the second operand: a thread has gate and up of two features and two rows
// in eight neighbouring accumulators.
namespace cadre::cuda::sm90 {

/// Two boxes of rows of w a stage.
template <Tile kTile>
class GatheredRowsLoad : public GatheredLoad<kTile, GatheredRowsParams> {
 public:
  using GatheredLoad<kTile, GatheredRowsParams>::GatheredLoad;

  __device__ void load(const Stage& stage, Barrier& full, int depth) const {
    arrive_expect_tx(full, uint32_t(kTile.b_bytes()));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->tile_.begin + half * (kTile.cols / 2);
      const bool in_blocks = this->params_.in_blocks != 0;
      const Box5 at{depth, 0, 0, in_blocks ? 0 : row / 16, in_blocks ? row / 64 : this->expert_};
      this->load_box(half, stage.b + half * (kTile.b_bytes() / 2), at, full);
    }
  }
};

/// The bias of the tile's columns, read by each warp while the tile's last products run, as its
/// accumulators have them: eight of gate, eight of up.
struct GatheredRowsBias {
  struct Memory {
    alignas(16) float bias[kConsumers * kWarpgroup / kWarp][kMostCols];

    __device__ float* mine() { return bias[threadIdx.x / kWarp]; }
  };

  __device__ void read_of(const GatheredRowsParams& params, Memory& memory, const TileRecord& tile,
                          int /*consumer*/) const {
    if (!params.bias.is_there()) return;
    const int features = params.cols / 2;
    const void* bias = of_expert(params.bias, tile.expert);
    for (int i = int(threadIdx.x) % kWarp; i < kMostCols; i += kWarp) {
      const int feature = tile.begin / 2 + i / 16 * 8 + i % 8;
      if (feature >= features) break;
      const auto at = activations::glu_columns(params.layout, feature, features);
      memory.mine()[i] = read(bias, params.bias.dtype, i / 8 % 2 == 0 ? at.gate : at.up);
    }
  }
};

/// A thread's share of a tile's z, as it is stored, on its way out in turns of eight features.
template <DType kType, class Activation>
class GatheredRowsHeld {
 public:
  static constexpr int kBoxBytes = kConsumerRows * kGatheredPartFeatures * element_bytes(kType);
  static constexpr int kAllTurns = kMostCols / 16;  ///< of a tile, at most
  using Memory = GatheredRowsBias::Memory;

  __device__ GatheredRowsHeld(const GatheredRowsParams& params, Memory& memory)
      : params_(params), memory_(memory) {}

  __device__ bool is_empty() const { return turns_.is_empty(); }

  __device__ void take(const float* s, const TileRecord& tile, const GatheredRowsBias&) {
    const ThreadPlace place = ThreadPlace::mine();
    const int row = tile.row + int(threadIdx.x) / kWarpgroup * kConsumerRows + place.row;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      prob_[half] = params_.prob != nullptr && row + 8 * half < tile.row_limit
                        ? params_.prob[row + 8 * half]
                        : 1.0f;
    if (params_.bias.is_there())
      round<true>(s, memory_.mine() + place.col);
    else
      round<false>(s, nullptr);
    const auto parts = unsigned(tile.cols() + kGatheredPartCols - 1) / kGatheredPartCols;
    turns_.begin(parts * kTurns);
  }

  template <OutputShape kShape>
  __device__ void write_turn(OutputRing<kShape>& out, Barrier (&empty)[kShape.buffers]) {
    const StoredGlu z = turns_.present();
    const uint32_t upper = activated(z.gate[0], z.up[0], prob_[0]);
    const uint32_t lower = activated(z.gate[1], z.up[1], prob_[1]);
    const int in_part = int(turns_.number() % kTurns);
    if (in_part == 0) out.wait_empty(empty);
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    const uint32_t place = swizzled_32(16 * warp + lane % 16, in_part);
    stmatrix(out.buffer() + place, upper, lower);
    if (params_.keeps_z && params_.in_pairs)
      put_pairs(z, out.buffer() + uint32_t((1 + in_part) * kBoxBytes));
    else if (params_.keeps_z)
      stmatrix(out.buffer() + uint32_t((1 + lane / 16) * kBoxBytes) + place,
               {z.gate[0], z.gate[1], z.up[0], z.up[1]});
    turns_.next();
    if (turns_.number() % kTurns == 0) out.pass_on();
  }

  static constexpr int kGatheredPartCols = 2 * kGatheredPartFeatures;

 private:
  static constexpr unsigned kTurns = kGatheredPartFeatures / 8;  ///< of a part

  /// Gate and up of two features, as they are stored, of a row and of the one eight below.
  struct StoredGlu {
    uint32_t gate[2], up[2];
  };

  template <bool kBias>
  __device__ void round(const float* s, const float* bias) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAllTurns; ++i, s += 8) {
      Pair gate{0, 0}, up{0, 0};
      if constexpr (kBias) {
        gate = *reinterpret_cast<const Pair*>(bias + 16 * i);
        up = *reinterpret_cast<const Pair*>(bias + 16 * i + 8);
      }
      const auto sum = [](float a, float b) { return kBias ? a + b : a; };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        turns_.of[i].gate[half] =
            pack<kType>(sum(s[2 * half], gate.first), sum(s[2 * half + 1], gate.second));
        turns_.of[i].up[half] =
            pack<kType>(sum(s[4 + 2 * half], up.first), sum(s[5 + 2 * half], up.second));
      }
    }
    __syncwarp();
  }
  __device__ uint32_t activated(uint32_t gates, uint32_t ups, float prob) const {
    const Pair gate = unpack<kType>(gates), up = unpack<kType>(ups);
    const auto& constants = params_.constants;
    return pack<kType>(Activation::forward(gate.first, up.first, constants) * prob,
                       Activation::forward(gate.second, up.second, constants) * prob);
  }
  /// Gate and up in turns of one: a turn fills the rows of a box.
  __device__ static void put_pairs(const StoredGlu& z, uint32_t to) {
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) % kWarpgroup / kWarp;
    to += uint32_t(lane % 2 * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = to + swizzled_32(16 * warp + lane / 4 + 8 * half, lane % 4 / 2);
      st_shared(at, (z.gate[half] & 0xffff) | z.up[half] << 16);
      st_shared(at + 4, z.gate[half] >> 16 | (z.up[half] & 0xffff0000));
    }
  }

  const GatheredRowsParams& params_;
  Memory& memory_;
  float prob_[2] = {1, 1};  ///< of the thread's rows
  Turns<StoredGlu, kAllTurns> turns_;
};

/// Parts of h, gate and up of 16 features, three boxes in a buffer.
template <DType kType, class Activation>
class GatheredRowsStore {
 public:
  using Held = GatheredRowsHeld<kType, Activation>;
  using Memory = typename Held::Memory;
  using Bias = GatheredRowsBias;
  static constexpr OutputShape kShape{.dtype = kType,
                                      .part_rows = kConsumerRows * 3 / 2,
                                      .part_cols = Held::kGatheredPartCols,
                                      .buffers = kBuffersOfGatheredRows,
                                      .one_ring = false,
                                      .one_warp = true};

  __device__ GatheredRowsStore(const GatheredRowsParams& params, const TileRecord& tile)
      : params_(params), tile_(tile) {}

  __device__ Parts parts() const {
    return {(tile_.cols() + kShape.part_cols - 1) / kShape.part_cols, 0};
  }
  __device__ void store(int row, int part, const uint8_t* from) const {
    const int end = tile_.row_limit, feature = tile_.begin / 2 + kGatheredPartFeatures * part;
    const Box4 at{feature, kRaggedOrigin - (end - row), end, kRaggedOrigin};
    tma_store(params_.y, at, from);
    if (!params_.keeps_z) return;
    const int col = params_.in_blocks ? feature + feature / 32 * 32 : feature * params_.z_step;
    const Box4 at_z{col, at.y, at.z, at.w};
    tma_store(params_.z[0], at_z, from + Held::kBoxBytes);
    tma_store(params_.z[1], at_z, from + 2 * Held::kBoxBytes);
  }
  __device__ static void finish(const GatheredRowsParams& params) {
    zero_tail(params, params.tail);
    zero_tail(params, params.z_tail);
  }

 private:
  const GatheredRowsParams& params_;
  const TileRecord& tile_;
};

/// The kernel of fprop with that activation, from tokens.
template <DType kType, class Activation>
struct GatheredRows {
  static constexpr Tile kTile{.col_step = kGatheredColStep, .a = {kType, true}, .b = {kType, true}};
  using Params = GatheredRowsParams;
  using Schedule = PairedRowsSchedule<kTile>;
  using Load = GatheredRowsLoad<kTile>;
  using Multiply = Multiply16<kTile>;
  using Store = GatheredRowsStore<kType, Activation>;
};

template <DType kType>
void launch_gathered_rows(const GatheredRowsParams& params, int blocks, cudaStream_t stream) {
  activations::All::visit(params.kind, [&]<class Activation>(Activation) {
    if constexpr (Activation::kInfo.gated)
      launch_kernel<GatheredRows<kType, Activation>>(params, blocks, stream);
  });
}

}  // namespace cadre::cuda::sm90
