#include "cuda/portable/activation.h"

#include "activations/glu_layout.h"
#include "activations/list.h"
#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// h = act(z) * prob; dz = dh * prob * act'(z), dprob[r] = sum_f dh[r, f] act(z)[r, f], h again if
// wanted.
//
// z, dz [R, 2F] gated, in any layout, else [R, F]; h, dh [R, F]; prob, dprob [R]. Rows at or beyond
// offsets[E] are not read, and written as zero or not at all. A thread takes eight features: it
// reads and writes the same places, so dz may be z and h may be dh. A warp takes 256 features of a
// row, or with dprob the whole row, whose 256 sums are added up in a fixed order.
namespace cadre::cuda::portable {
namespace {

using activations::GluColumns;

/// z or dz. Interleaved by one, `gate` has all columns; else gate and up are looked at apart, so
/// that each ends where it ends.
struct Glu {
  Matrix gate, up;
  GluLayout layout = GluLayout::kConcat;

  Glu(const TensorView& z, const ActivationProblem& p) : gate(z), up(z), layout(p.layout) {
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

/// What the kernels know.
struct Job {
  Glu z, dz;
  Matrix h, dh;
  const int32_t* offsets;
  const float* prob;
  float* dprob;
  int64_t bound, features;  ///< bound: R
  int experts;
  bool zero_tail;
  ActivationConstants constants;

  __device__ int64_t used() const { return schedule::rows_used(offsets, experts, bound); }
  __device__ float prob_of(int64_t row) const { return prob == nullptr ? 1.0f : prob[row]; }
};

/// Eight features: what is read of them, and what is written.
struct Features {
  float gate[kChunk], up[kChunk];
};

template <class Config>
__device__ Features read(const Glu& z, int64_t row, int64_t f) {
  Features x{};
  if (Config::kGated && z.layout == GluLayout::kInterleave1) {
    const Chunk first = load<Config::kWide>(z.gate, {row, 2 * f});
    const Chunk second = load<Config::kWide>(z.gate, {row, 2 * f + kChunk});
    float low[kChunk], high[kChunk];
    decode(first, z.gate.dtype, low);
    decode(second, z.gate.dtype, high);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x.gate[i] = i < 4 ? low[2 * i % 8] : high[2 * i % 8];
      x.up[i] = i < 4 ? low[2 * i % 8 + 1] : high[2 * i % 8 + 1];
    }
    return x;
  }
  const int64_t column = Config::kGated ? z.column(f) : f;
  const Chunk gate = load<Config::kWide>(z.gate, {row, column});
  if constexpr (Config::kGated)
    decode(load<Config::kWide>(z.up, {row, column}), z.up.dtype, x.up);
  decode(gate, z.gate.dtype, x.gate);
  return x;
}

template <class Config>
__device__ void write(const Features& x, const Glu& z, int64_t row, int64_t f) {
  if (Config::kGated && z.layout == GluLayout::kInterleave1) {
    float low[kChunk], high[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      low[i] = i % 2 == 0 ? x.gate[i / 2] : x.up[i / 2];
      high[i] = i % 2 == 0 ? x.gate[4 + i / 2] : x.up[4 + i / 2];
    }
    store<Config::kWide>(encode(low, z.gate.dtype), z.gate, {row, 2 * f});
    store<Config::kWide>(encode(high, z.gate.dtype), z.gate, {row, 2 * f + kChunk});
    return;
  }
  const int64_t column = Config::kGated ? z.column(f) : f;
  store<Config::kWide>(encode(x.gate, z.gate.dtype), z.gate, {row, column});
  if constexpr (Config::kGated)
    store<Config::kWide>(encode(x.up, z.up.dtype), z.up, {row, column});
}

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes) forward_kernel(const Job job) {
  const int64_t used = job.used();
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    const float prob = row < used ? job.prob_of(row) : 0.0f;
    for_chunks(job.features, false, [&](int64_t f) {
      float h[kChunk] = {};
      if (row < used) {
        const Features x = read<Config>(job.z, row, f);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          h[i] = Config::Activation::forward(x.gate[i], x.up[i], job.constants) * prob;
      }
      store<Config::kWide>(encode(h, job.h.dtype), job.h, {row, f});
    });
  });
}

/// Gradients of eight features; adds to `sums` what dprob sums.
template <class Config>
__device__ void backward_chunk(const Job& job, Place at, float prob, float (&sums)[kChunk]) {
  const Chunk dh_chunk = load<Config::kWide>(job.dh, at);
  Features x = read<Config>(job.z, at.row, at.column);
  float dh[kChunk], h[kChunk];
  decode(dh_chunk, job.dh.dtype, dh);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const auto gradient =
        Config::Activation::backward(x.gate[i], x.up[i], dh[i] * prob, job.constants);
    x.gate[i] = gradient.dgate;
    x.up[i] = gradient.dup;
    h[i] = gradient.value * prob;
    // Beyond the end of a row dh is 0, and so must the product be.
    if (Config::kWide || at.column + i < job.features) sums[i] += dh[i] * gradient.value;
  }
  write<Config>(x, job.dz, at.row, at.column);
  if (job.h.data != nullptr) store<Config::kWide>(encode(h, job.h.dtype), job.h, at);
}

template <class Config>
__device__ void zero_chunk(const Job& job, Place at) {
  write<Config>(Features{}, job.dz, at.row, at.column);
  if (job.h.data != nullptr) store<Config::kWide>(Chunk{}, job.h, at);
}

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes) backward_kernel(const Job job) {
  const int64_t used = job.used();
  const bool whole_rows = job.dprob != nullptr;
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    float sums[kChunk] = {};
    const float prob = row < used ? job.prob_of(row) : 0.0f;
    for_chunks(job.features, whole_rows, [&](int64_t f) {
      if (row < used)
        backward_chunk<Config>(job, {row, f}, prob, sums);
      else
        zero_chunk<Config>(job, {row, f});
    });
    if (!whole_rows) return;
    const float sum = total<kLanes>(sums);
    if (threadIdx.x == 0) job.dprob[row] = sum;
  });
}

template <class Row, bool kWideRows>
struct Config {
  using Activation = Row;
  static constexpr bool kGated = Row::kInfo.gated, kWide = kWideRows;
};

template <class Config>
void launch(const ActivationProblem& p, const Job& job, cudaStream_t stream) {
  const RowGrid grid = RowGrid::of(p.rows, p.features, job.dprob != nullptr);
  if (p.backward)
    backward_kernel<Config><<<grid.blocks, grid.threads, 0, stream>>>(job);
  else
    forward_kernel<Config><<<grid.blocks, grid.threads, 0, stream>>>(job);
  check_launch("activation");
}

}  // namespace

void activation(const ActivationPlan& plan, const ActivationArgs& args, Workspace, Stream stream) {
  const ActivationProblem& p = plan.problem;
  const Job job{.z = Glu(args.z, p),
                .dz = Glu(args.dz, p),
                .h = Matrix(args.h),
                .dh = Matrix(args.dh),
                .offsets = args.offsets.data,
                .prob = args.prob,
                .dprob = args.dprob,
                .bound = p.rows,
                .features = p.features,
                .experts = p.experts,
                .zero_tail = p.tail == Tail::kZero,
                .constants = p.constants};
  const bool wide = job.z.is_wide() && job.dz.is_wide() && job.h.is_wide() && job.dh.is_wide();
  activations::All::visit(p.kind, [&]<class Row>(Row) {
    if (wide)
      launch<Config<Row, true>>(p, job, stream_of(stream));
    else
      launch<Config<Row, false>>(p, job, stream_of(stream));
  });
}

}  // namespace cadre::cuda::portable
