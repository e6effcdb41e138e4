#pragma once
#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cadre/activation.h"
#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// What the kernels of activations have in common: eight features of z, as they are stored and as
// numbers, and rows of gradients.
//
// z, dz [R, 2F] gated, in any layout, else [R, F]; h, dh [R, F]; prob, dprob [R]. A thread takes
// eight features: it reads and writes the same places, so dz may be z and h may be dh.
namespace cadre::cuda::portable {

/// z or dz. Interleaved by one, `gate` has all columns; else gate and up are two matrices, each
/// with its own end of a row.
struct Glu {
  Matrix gate, up;
  GluLayout layout = GluLayout::kConcat;

  Glu(const TensorView& z, const ActivationProblem& p)
      : gate(z, p.z), up(z, p.z), layout(p.layout) {
    if (!info(p.kind).gated || z.data == nullptr || p.layout == GluLayout::kInterleave1) return;
    const int64_t ahead = activations::glu_columns(p.layout, 0, p.features).up;
    up.data += ahead * (z.dtype == DType::kF32 ? 4 : 2);
    up.columns -= ahead;
    if (p.layout == GluLayout::kConcat) gate.columns = p.features;
  }
  bool is_wide() const { return gate.is_wide() && up.is_wide(); }

  /// The column of gate, and of up behind its own first column, of feature `f`.
  __device__ int64_t column(int64_t f) const {
    return layout == GluLayout::kInterleave32 ? f / 32 * 64 + f % 32 : f;
  }
};

/// The parameters of the kernels.
struct ActivationJob {
  Glu z, dz;
  Matrix h, dh;
  const int32_t* offsets;
  const float* prob;
  float* dprob;
  int64_t bound, features;  ///< bound: R
  int experts;
  bool zero_tail;
  ActivationConstants constants;

  ActivationJob(const ActivationProblem& p, const ActivationArgs& args)
      : z(args.z, p),
        dz(args.dz, p),
        h(args.h, p.h),
        dh(args.dh, p.h),
        offsets(args.offsets.data),
        prob(args.prob),
        dprob(args.dprob),
        bound(p.rows),
        features(p.features),
        experts(p.experts),
        zero_tail(p.tail == Tail::kZero),
        constants(p.constants) {}
  bool is_wide() const { return z.is_wide() && dz.is_wide() && h.is_wide() && dh.is_wide(); }
  __device__ int64_t used() const { return schedule::rows_used(offsets, experts, bound); }
  __device__ float prob_of(int64_t row) const { return prob == nullptr ? 1.0f : prob[row]; }
};

/// Eight features: what is read of them, and what is written.
struct Features {
  float gate[kChunk], up[kChunk];
};

template <class Config>
__device__ void assume_dtypes(const ActivationJob& job) {
  Config::assume(job.z.gate);
  Config::assume(job.z.up);
  Config::assume(job.dz.gate);
  Config::assume(job.dz.up);
  Config::assume(job.h);
  Config::assume(job.dh);
}

/// Gate and up of eight features as they are stored; interleaved by one, the first and the second
/// half of both.
struct Stored {
  Chunk first, second;
};

template <class Config>
__device__ Stored read(const Glu& z, int64_t row, int64_t f) {
  Stored stored{};
  constexpr bool pairs = Config::kPairs;
  const int64_t column = pairs ? 2 * f : Config::kGated ? z.column(f) : f;
  stored.first = load<Config::kWide>(z.gate, {row, column});
  if (pairs)
    stored.second = load<Config::kWide>(z.gate, {row, column + kChunk});
  else if (Config::kGated)
    stored.second = load<Config::kWide>(z.up, {row, column});
  return stored;
}

template <class Config>
__device__ Features decoded(const Glu& z, const Stored& stored) {
  Features x{};
  decode(stored.first, z.gate.dtype, x.gate);
  if constexpr (!Config::kGated) return x;
  decode(stored.second, z.gate.dtype, x.up);
  if constexpr (!Config::kPairs) return x;
  const Features low_high = x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    x.gate[i] = i < 4 ? low_high.gate[2 * i % 8] : low_high.up[2 * i % 8];
    x.up[i] = i < 4 ? low_high.gate[2 * i % 8 + 1] : low_high.up[2 * i % 8 + 1];
  }
  return x;
}

/// Gate and up, or their gradients, as they are stored.
template <class Config>
__device__ Stored encoded(const Features& x, DType dtype) {
  if constexpr (Config::kPairs) {
    float low[kChunk], high[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      low[i] = i % 2 == 0 ? x.gate[i / 2] : x.up[i / 2];
      high[i] = i % 2 == 0 ? x.gate[4 + i / 2] : x.up[4 + i / 2];
    }
    return {encode(low, dtype), encode(high, dtype)};
  }
  Stored stored{encode(x.gate, dtype), {}};
  if constexpr (Config::kGated) stored.second = encode(x.up, dtype);
  return stored;
}

template <class Config>
__device__ void write(const Stored& stored, const Glu& z, int64_t row, int64_t f) {
  constexpr bool pairs = Config::kPairs;
  const int64_t column = pairs ? 2 * f : Config::kGated ? z.column(f) : f;
  store<Config::kWide>(stored.first, z.gate, {row, column});
  if (pairs)
    store<Config::kWide>(stored.second, z.gate, {row, column + kChunk});
  else if (Config::kGated)
    store<Config::kWide>(stored.second, z.up, {row, column});
}

/// h of eight features, zero in the tail.
template <class Config, class Activation = typename Config::Activation>
__device__ Chunk forward_chunk(const ActivationJob& job, const Stored& stored, bool tail,
                               float prob) {
  float h[kChunk] = {};
  const Features x = decoded<Config>(job.z, stored);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (!tail) h[i] = Activation::forward(x.gate[i], x.up[i], job.constants) * prob;
  return encode(h, job.h.dtype);
}

/// What backward reads of eight features.
struct StoredBackward {
  Stored z;
  Chunk dh;
  float prob = 0;  ///< 0 beyond the end of a row
};

template <class Config>
__device__ StoredBackward read_backward(const ActivationJob& job, int64_t row, int64_t f) {
  if (f >= job.features) return {};
  return {read<Config>(job.z, row, f), load<Config::kWide>(job.dh, {row, f})};
}

/// Where gradients go: to dz.
template <class Config>
struct PlainGradients {
  static constexpr bool kWholeWarps = false;

  /// Calls work(activation, z).
  __device__ void with_activation(const Stored& z, auto&& work) const {
    work(typename Config::Activation(), z);
  }
  __device__ void write(const ActivationJob& job, const Features& x, Place at) const {
    portable::write<Config>(encoded<Config>(x, job.dz.gate.dtype), job.dz, at.row, at.column);
  }
};

/// Gradients of eight features; adds their terms of dprob to `sums`.
template <class Config, class Out>
__device__ void backward_chunk(const ActivationJob& job, const Out& out,
                               const StoredBackward& stored, Place at, float (&sums)[kChunk]) {
  const float prob = stored.prob;
  Features x;
  float dh[kChunk], h[kChunk];
  decode(stored.dh, job.dh.dtype, dh);
  out.with_activation(stored.z, [&]<class Activation>(Activation, const Stored& z) {
    x = decoded<Config>(job.z, z);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const auto gradient = Activation::backward(x.gate[i], x.up[i], dh[i] * prob, job.constants);
      x.gate[i] = gradient.dgate;
      x.up[i] = gradient.dup;
      h[i] = gradient.value;
      sums[i] += dh[i] * gradient.value;  // both are zero beyond the end of a row
    }
  });
  out.write(job, x, at);
  if (job.h.data == nullptr || at.column >= job.features) return;
#pragma unroll
  for (float& value : h) value *= prob;
  store<Config::kWide>(encode(h, job.h.dtype), job.h, at);
}

/// Rows of gradients. The next chunk, of this row or of the warp's next, is read before this one is
/// computed, so that loads overlap with the arithmetic.
template <class Config, class Out>
class BackwardRows {
 public:
  __device__ BackwardRows(const ActivationJob& job, int64_t used, const Out& out)
      : job_(job), out_(out), used_(used) {}

  /// A row, and the one that the warp takes next.
  __device__ void take(int64_t row, int64_t later) {
    const int64_t first = first_column(kWholeRows);
    if (row != read_) begin(row, first);
    const float prob = prob_;
    float sums[kChunk] = {};
    for (int64_t round = 0; round < job_.features; round += kRound) {
      const int64_t f = round + first;
      StoredBackward here = next_;
      here.prob = f < job_.features ? prob : 0.0f;
      if (round + kRound < job_.features)
        next_ = read_backward<Config>(job_, row, f + kRound);
      else if (later < used_)
        begin(later, first);
      if (Out::kWholeWarps || f < job_.features)
        backward_chunk<Config>(job_, out_, here, {row, f}, sums);
    }
    const float sum = total<kLanes>(sums);
    if (threadIdx.x == 0 && job_.dprob != nullptr) job_.dprob[row] = sum;
  }

 private:
  __device__ void begin(int64_t row, int64_t first) {
    next_ = read_backward<Config>(job_, row, first);
    prob_ = job_.prob_of(row);
    read_ = row;
  }

  const ActivationJob& job_;
  const Out& out_;
  const int64_t used_;
  StoredBackward next_{};
  float prob_ = 0;     ///< of that row
  int64_t read_ = -1;  ///< the row that `next_` begins
};

template <class Config>
__device__ void zero_row(const ActivationJob& job, int64_t row) {
  for_chunks(job.features, [&](int64_t f) {
    if (job.dz.gate.data != nullptr) write<Config>(Stored{}, job.dz, row, f);
    if (job.h.data != nullptr) store<Config::kWide>(Chunk{}, job.h, {row, f});
  });
  if (threadIdx.x == 0 && job.dprob != nullptr) job.dprob[row] = 0;
}

/// An activation, the chunks of all matrices, and whether gate and up of a feature are neighbours.
template <class Row, class OfRows, bool kNeighbours>
struct ActivationConfig : OfRows {
  using Activation = Row;
  static constexpr bool kGated = Row::kInfo.gated, kPairs = kNeighbours;
};

}  // namespace cadre::cuda::portable
