#pragma once
#include "cuda/portable/activation_codes_job.h"
#include "cuda/portable/row_codes.cuh"

// Activations whose result leaves as codes and scales along K, and as it is where it is wanted.
//
// What a thread has computed it rounds to bf16, as if it were stored and read again, and quantises
// in registers. Forward a warp takes 256 features of four rows at a time, all loads first; backward
// whole rows, whose dprob it sums, each chunk read ahead of the arithmetic of the one before.
namespace cadre::cuda::portable {

constexpr int kActivatedRows = 4;                                  // of a warp at a time, forward
constexpr int kForwardCodesBlocks = 3, kBackwardCodesBlocks = 2;   // of an SM, at least
constexpr int kForwardCodesStream = 24, kBackwardCodesStream = 8;  // of an SM, at most

/// Of bf16, whose rows are read element by element where they do not begin at wide chunks.
template <bool kWideRows>
struct Bf16Rows : WideChunksOf<DType::kBf16> {
  static constexpr bool kWide = kWideRows;
};

template <class Codes>
struct ActivationCodes {
  ActivationJob act;
  Codes to;
  int64_t ahead;  ///< columns from the gate of a feature to its up
};

/// Where gate and up of eight features begin among the columns of a row.
template <bool kInOneBlock>
struct GluPlaces {
  static constexpr bool kTogether = kInOneBlock;
  Place first;
  int64_t ahead;
  int rows;  ///< chunks that are there: both or none

  __device__ Place place(int i) const { return {first.row, first.column + i * ahead}; }
  __device__ int64_t step(int64_t, int bits) const { return ahead * bits / 8; }
};

/// The same, of bf16 as constants: what the compiler may assume of a parameter it forgets behind a
/// store.
__device__ inline ActivationJob all_bf16(const ActivationJob& job) {
  ActivationJob known = job;
  for (Matrix* m : {&known.z.gate, &known.z.up, &known.dz.gate, &known.dz.up, &known.h, &known.dh})
    m->dtype = DType::kBf16;
  return known;
}

/// h of so many rows, and its codes. Beyond the last row, and of wide chunks the last feature, that
/// one is read again, so that no load has a condition.
template <class Config, class Codes>
__device__ void forward_rows(const ActivationJob& act, const Codes& to, ChunkColumn at, int count) {
  const int64_t last = act.features - kChunk;
  const int64_t column = Config::kWide ? min(at.first.column, last) : at.first.column;
  Stored stored[kActivatedRows];
  float prob[kActivatedRows];
#pragma unroll
  for (int i = 0; i < kActivatedRows; ++i)
    stored[i] = read<Config>(act.z, at.first.row + min(i, count - 1), column);
#pragma unroll
  for (int i = 0; i < kActivatedRows; ++i) prob[i] = act.prob_of(at.first.row + min(i, count - 1));
  __syncwarp();  // all loads stand before it
  const bool none = !Config::kWide && at.rows == 0;
  Chunk h[kActivatedRows];
#pragma unroll
  for (int i = 0; i < kActivatedRows; ++i) {
    h[i] = forward_chunk<Config>(act, stored[i], none, prob[i]);
    if (act.h.data != nullptr && i < at.rows) store<Config::kWide>(h[i], act.h, at.place(i));
  }
  to.template write<DType::kBf16>(h, at);
}

template <class Config, class Codes>
__global__ void __launch_bounds__(kGridWarps* kLanes, kForwardCodesBlocks)
    forward_codes_kernel(const __grid_constant__ ActivationCodes<Codes> job) {
  begin_dependent();
  const ActivationJob act = all_bf16(job.act);
  const int64_t used = act.used(), column = first_column(1);
  const bool inside = column < act.features;
  const int64_t warp = int64_t(blockIdx.y) * blockDim.z + threadIdx.z;
  const int64_t step = int64_t(gridDim.y) * blockDim.z * kActivatedRows;
  for (int64_t row = warp * kActivatedRows; row < used; row += step) {
    const int count = int(min(used - row, int64_t(kActivatedRows)));
    forward_rows<Config>(act, job.to, {{row, column}, inside ? count : 0}, count);
  }
  if (!act.zero_tail || act.h.data == nullptr || !inside) return;
  for (int64_t row = used + warp; row < act.bound; row += step / kActivatedRows)
    store<Config::kWide>(Chunk{}, act.h, {row, column});
}

/// Where gradients go: to dz, if it is wanted, and to codes. With kTogether gate and up of a thread
/// lie in one block.
template <class Config, class Codes, bool kTogether>
struct CodedGradients {
  static constexpr bool kWholeWarps = true;

  const ActivationCodes<Codes>& to;

  __device__ void write(const ActivationJob& job, const Features& x, Place at) const {
    constexpr DType kBf16 = DType::kBf16;
    const Stored dz = encoded<Config>(x, kBf16);
    const bool there = at.column < job.features;
    if (there && job.dz.gate.data != nullptr)
      portable::write<Config>(dz, job.dz, at.row, at.column);
    if constexpr (Config::kGated) {
      const Chunk chunks[2] = {dz.first, dz.second};
      const int64_t column = Config::kPairs ? 2 * at.column : job.z.column(at.column);
      const GluPlaces<kTogether> places{
          {at.row, column}, Config::kPairs ? kChunk : to.ahead, there ? 2 : 0};
      to.to.template write<kBf16>(chunks, places);
    } else {
      const Chunk chunks[1] = {dz.first};
      to.to.template write<kBf16>(chunks, ChunkColumn{at, there ? 1 : 0});
    }
  }
};

template <class Config, class Codes, bool kTogether>
__global__ void __launch_bounds__(kGridWarps* kLanes, kBackwardCodesBlocks)
    backward_codes_kernel(const __grid_constant__ ActivationCodes<Codes> job) {
  begin_dependent();
  const ActivationJob act = all_bf16(job.act);
  const int64_t used = act.used(), step = int64_t(gridDim.y) * blockDim.z;
  using Out = CodedGradients<Config, Codes, kTogether>;
  const Out out{job};
  BackwardRows<Config, Out> rows(act, used, out);
  for_rows(act.zero_tail ? act.bound : used, [&](int64_t row) {
    row < used ? rows.take(row, row + step) : zero_row<Config>(act, row);
  });
}

/// Launches for one activation, in one format.
template <class Config, class Codes>
struct ActivationLauncher {
  const ActivationCodes<Codes>& job;
  unsigned units;
  cudaStream_t stream;

  void forward() const {
    const int64_t rows = job.act.bound;
    RowGrid grid = RowGrid::of((rows + kActivatedRows - 1) / kActivatedRows, job.act.features, 1);
    const unsigned most = units * kForwardCodesStream;
    grid.blocks.y = std::clamp(most / grid.blocks.x, 1u, grid.blocks.y);
    launch(forward_codes_kernel<Config, Codes>, grid.on(stream), job);
  }
  template <bool kTogether>
  void backward() const {
    RowGrid grid = RowGrid::of(job.act.bound, job.act.features, kWholeRows);
    grid.blocks.y = std::min(grid.blocks.y, units * kBackwardCodesStream);
    launch(backward_codes_kernel<Config, Codes, kTogether>, grid.on(stream), job);
  }
};

template <class Row, class Element>
void launch_activation_codes(const ActivationPlan& plan, const ActivationCodesJob& job,
                             cudaStream_t stream) {
  using Codes = RowCodes<Row, Element, false>;
  constexpr bool kWideBlocks = Row::kInfo.block > 32;  // wider than those of interleave32
  const ActivationProblem& p = plan.problem;
  const auto ahead = activations::glu_columns(p.layout, 0, p.features).up;
  const ActivationCodes<Codes> codes{job.act, Codes(job.copy), ahead};
  const auto units = unsigned(std::max(plan.device.units, 1));
  activations::All::visit(p.kind, [&]<class Activation>(Activation) {
    constexpr bool kGated = Activation::kInfo.gated;
    const auto with = [&]<bool kPairs, bool kWide>() {
      using Config = ActivationConfig<Activation, Bf16Rows<kWide>, kPairs>;
      const ActivationLauncher<Config, Codes> launcher{codes, units, stream};
      if (!p.backward) return launcher.forward();
      if constexpr (kPairs) return launcher.template backward<true>();
      if constexpr (kGated && kWideBlocks)
        if (p.layout == GluLayout::kInterleave32) return launcher.template backward<true>();
      if constexpr (!kPairs) launcher.template backward<false>();
    };
    const bool wide = job.act.is_wide();
    if constexpr (kGated)
      if (p.layout == GluLayout::kInterleave1)
        return wide ? with.template operator()<true, true>()
                    : with.template operator()<true, false>();
    wide ? with.template operator()<false, true>() : with.template operator()<false, false>();
  });
}

}  // namespace cadre::cuda::portable
