#pragma once
#include "cuda/device/word.h"
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
  int64_t ahead;         ///< columns from the gate of a feature to its up
  uint32_t small_gates;  ///< bits of what Activation::small_gates() gives, or 0
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

/// Of bf16 as constants: what the compiler may assume of a parameter it forgets behind a
/// store. Gate and up are of one matrix.
__device__ inline ActivationJob all_bf16(const ActivationJob& job) {
  ActivationJob known = job;
  for (Matrix* m : {&known.z.gate, &known.z.up, &known.dz.gate, &known.dz.up, &known.h, &known.dh})
    m->dtype = DType::kBf16;
  known.z.up.pitch = known.z.gate.pitch;
  known.dz.up.pitch = known.dz.gate.pitch;
  return known;
}

/// What a warp reads of its rows, forward.
struct StoredForward {
  Stored z[kActivatedRows];
  float prob;  ///< lane i has that of row i
};

/// Beyond the last row that one is read again, so that no load has a condition.
template <class Config>
__device__ StoredForward read_forward(const ActivationJob& act, Place at, int count) {
  Glu z = act.z;
  z.gate.data += at.row * z.gate.pitch;
  z.up.data += at.row * z.gate.pitch;
  const auto row = [&](unsigned i) { return i == 0 ? 0 : min(i, unsigned(count - 1)); };
  StoredForward stored;
#pragma unroll
  for (unsigned i = 0; i < kActivatedRows; ++i) stored.z[i] = read<Config>(z, row(i), at.column);
  stored.prob = act.prob_of(at.row + min(threadIdx.x % kActivatedRows, unsigned(count - 1)));
  return stored;
}

/// The largest magnitude of so many gates, as bits of an fp32.
template <class Config, int kChunks>
__device__ uint32_t largest_gate(const Stored (&z)[kChunks]) {
  LineMagnitudes<DType::kBf16> all(z[0].first);
#pragma unroll
  for (int i = 1; i < kChunks; ++i) all.add(z[i].first);
  if constexpr (Config::kPairs) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) all.add(z[i].second);
    return all.magnitude(all.folded(), 0);
  }
  return all.of_all();
}

/// Calls work(activation, z) with the activation itself, or with one that is less work where all
/// gates of a warp are small.
template <class Config, int kChunks>
__device__ void with_activation(const Stored (&z)[kChunks], uint32_t small_gates, auto&& work) {
  using Activation = typename Config::Activation;
  if constexpr (requires { typename Activation::Small; }) {
    if (__all_sync(~0u, largest_gate<Config>(z) < small_gates))
      return work(typename Activation::Small(), z);
    Stored again[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      again[i] = {{words_anew(z[i].first.low), {}}, {words_anew(z[i].second.low), {}}};
    return work(Activation(), again);
  }
  work(Activation(), z);
}

/// h of so many rows, and its codes.
template <class Config, class Codes>
__device__ void forward_rows(const ActivationJob& act, const ActivationCodes<Codes>& job,
                             ChunkColumn at, int count) {
  const StoredForward stored = read_forward<Config>(act, at.first, count);
  __syncwarp();  // all loads stand before it
  const bool none = !Config::kWide && at.rows == 0;
  Chunk h[kActivatedRows];
  with_activation<Config>(stored.z, job.small_gates,
                          [&]<class Activation>(Activation, const auto& z) {
#pragma unroll
                            for (int i = 0; i < kActivatedRows; ++i) {
                              const float prob = __shfl_sync(~0u, stored.prob, i);
                              h[i] = forward_chunk<Config, Activation>(act, z[i], none, prob);
                            }
                          });
  if (act.h.data != nullptr) {
#pragma unroll
    for (int i = 0; i < kActivatedRows; ++i)
      if (i < at.rows) store<Config::kWide>(h[i], act.h, at.place(i));
  }
  job.to.template write<DType::kBf16>(h, at);
}

template <class Config, class Codes>
__global__ void __launch_bounds__(kGridWarps* kLanes, kForwardCodesBlocks)
    forward_codes_kernel(const __grid_constant__ ActivationCodes<Codes> job) {
  begin_dependent();
  const ActivationJob act = all_bf16(job.act);
  const int64_t own = first_column(1), last = act.features - kChunk;
  const bool inside = own < act.features;
  const int64_t column = Config::kWide ? min(own, last) : own;  // beyond the last, as of rows
  const auto used = unsigned(act.used());  // as offsets are of 32 bits, and a step is far less
  const unsigned warp = blockIdx.y * blockDim.z + threadIdx.z, warps = gridDim.y * blockDim.z;
  // The tail first, so that nothing that it needs is live in the other loop.
  if (act.zero_tail && act.h.data != nullptr && inside)
    for (int64_t row = int64_t(used) + warp; row < act.bound; row += warps)
      store<Config::kWide>(Chunk{}, act.h, {row, column});
  const int rows = inside ? kActivatedRows : 0;
  for (unsigned row = warp * kActivatedRows; row < used; row += warps * kActivatedRows) {
    const int left = int(used - row), count = min(left, kActivatedRows);
    forward_rows<Config>(act, job, {{row, column}, min(left, rows)}, count);
  }
}

/// Where gradients go: to dz, if it is wanted, and to codes. With kTogether gate and up of a thread
/// lie in one block.
template <class Config, class Codes, bool kTogether>
struct CodedGradients {
  static constexpr bool kWholeWarps = true;

  const ActivationCodes<Codes>& to;

  __device__ void with_activation(const Stored& z, auto&& work) const {
    const Stored one[1] = {z};
    portable::with_activation<Config>(
        one, to.small_gates, [&](auto activation, const auto& only) { work(activation, only[0]); });
  }
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
      __syncwarp();  // as the compiler does not know of warps that have rows of their own
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
  ActivationCodes<Codes> codes{job.act, Codes(job.copy), ahead, 0};
  const auto units = unsigned(std::max(plan.device.units, 1));
  activations::All::visit(p.kind, [&]<class Activation>(Activation) {
    constexpr bool kGated = Activation::kInfo.gated;
    if constexpr (requires { typename Activation::Small; })
      codes.small_gates = formats::bits_of(Activation::small_gates(p.constants));
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
