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
// reads and writes the same places, so dz may be z and h may be dh. A warp takes 512 features of a
// row, backward the whole row; dprob is a tree over 256 partial sums, in a fixed order.
namespace cadre::cuda::portable {
namespace {

constexpr int kRounds = 2;  // chunks that a thread has in flight

/// Blocks of backward an SM, at least: of one type as many as registers allow, whose warps then
/// take many rows each.
constexpr int backward_blocks(ActivationKind kind, bool one_dtype) {
  if (!one_dtype) return 1;
  return kind == ActivationKind::kClampedSwiGlu ? 2 : 3;
}

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
__device__ void assume_dtypes(const Job& job) {
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

template <class Config>
__device__ void write(const Features& x, const Glu& z, int64_t row, int64_t f) {
  if constexpr (Config::kPairs) {
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
  if constexpr (Config::kGated) store<Config::kWide>(encode(x.up, z.up.dtype), z.up, {row, column});
}

/// h of eight features, zero in the tail.
template <class Config>
__device__ Chunk forward_chunk(const Job& job, const Stored& stored, bool tail, float prob) {
  float h[kChunk] = {};
  const Features x = decoded<Config>(job.z, stored);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (!tail) h[i] = Config::Activation::forward(x.gate[i], x.up[i], job.constants) * prob;
  return encode(h, job.h.dtype);
}

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kOneDType ? 5 : 1)
    forward_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used(), first = first_column(kRounds);
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    const bool tail = row >= used;
    Stored stored[kRounds] = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (!tail && first + i * kRound < job.features)
        stored[i] = read<Config>(job.z, row, first + i * kRound);
    const float prob = tail ? 0.0f : job.prob_of(row);
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (first + i * kRound < job.features)
        store<Config::kWide>(forward_chunk<Config>(job, stored[i], tail, prob), job.h,
                             {row, first + i * kRound});
  });
}

/// What backward reads of eight features.
struct StoredBackward {
  Stored z;
  Chunk dh;
  float prob;
};

template <class Config>
__device__ StoredBackward read_backward(const Job& job, int64_t row, int64_t f) {
  if (f >= job.features) return {};
  return {read<Config>(job.z, row, f), load<Config::kWide>(job.dh, {row, f}), job.prob_of(row)};
}

/// Gradients of eight features; adds their terms of dprob to `sums`.
template <class Config>
__device__ void backward_chunk(const Job& job, const StoredBackward& stored, Place at,
                               float (&sums)[kChunk]) {
  const float prob = stored.prob;
  Features x = decoded<Config>(job.z, stored.z);
  float dh[kChunk], h[kChunk];
  decode(stored.dh, job.dh.dtype, dh);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const auto gradient =
        Config::Activation::backward(x.gate[i], x.up[i], dh[i] * prob, job.constants);
    x.gate[i] = gradient.dgate;
    x.up[i] = gradient.dup;
    h[i] = gradient.value * prob;
    sums[i] += dh[i] * gradient.value;  // both are zero beyond the end of a row
  }
  write<Config>(x, job.dz, at.row, at.column);
  if (job.h.data != nullptr) store<Config::kWide>(encode(h, job.h.dtype), job.h, at);
}

/// Rows of gradients. The next chunk, of this row or of the warp's next, is read before this one is
/// computed, so that loads overlap with the arithmetic.
template <class Config>
class BackwardRows {
 public:
  __device__ BackwardRows(const Job& job, int64_t used) : job_(job), used_(used) {}

  /// A row, and the one that the warp takes next.
  __device__ void take(int64_t row, int64_t later) {
    const int64_t first = first_column(kWholeRows);
    if (row != read_) next_ = read_backward<Config>(job_, row, first);
    float sums[kChunk] = {};
    for (int64_t f = first; f < first + job_.features; f += kRound) {
      const StoredBackward here = next_;
      if (f + kRound < first + job_.features)
        next_ = read_backward<Config>(job_, row, f + kRound);
      else if (later < used_)
        next_ = read_backward<Config>(job_, later, first), read_ = later;
      if (f < job_.features) backward_chunk<Config>(job_, here, {row, f}, sums);
    }
    const float sum = total<kLanes>(sums);
    if (threadIdx.x == 0 && job_.dprob != nullptr) job_.dprob[row] = sum;
  }

 private:
  const Job& job_;
  const int64_t used_;
  StoredBackward next_{};
  int64_t read_ = -1;  ///< the row that `next_` begins
};

template <class Config>
__device__ void zero_row(const Job& job, int64_t row) {
  for_chunks(job.features, [&](int64_t f) {
    write<Config>(Features{}, job.dz, row, f);
    if (job.h.data != nullptr) store<Config::kWide>(Chunk{}, job.h, {row, f});
  });
  if (threadIdx.x == 0 && job.dprob != nullptr) job.dprob[row] = 0;
}

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBackwardBlocks)
    backward_kernel(const Job job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used(), step = int64_t(gridDim.y) * blockDim.z;
  BackwardRows<Config> rows(job, used);
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    row < used ? rows.take(row, row + step) : zero_row<Config>(job, row);
  });
}

/// An activation, the chunks of all matrices, and whether gate and up of a feature are neighbours.
template <class Row, class OfRows, bool kNeighbours>
struct Config : OfRows {
  using Activation = Row;
  static constexpr bool kGated = Row::kInfo.gated, kPairs = kNeighbours;
  static constexpr int kBackwardBlocks = backward_blocks(Row::kInfo.kind, OfRows::kOneDType);
};

template <class Config>
void launch(const ActivationPlan& plan, const Job& job, cudaStream_t stream) {
  const ActivationProblem& p = plan.problem;
  if (!p.backward) {
    const RowGrid grid = RowGrid::of(p.rows, p.features, kRounds);
    return cuda::launch(forward_kernel<Config>, grid.on(stream), job);
  }
  RowGrid grid = RowGrid::of(p.rows, p.features, kWholeRows);
  if constexpr (Config::kOneDType)
    grid.blocks.y = std::min(grid.blocks.y, unsigned(plan.device.units * Config::kBackwardBlocks));
  cuda::launch(backward_kernel<Config>, grid.on(stream), job);
}

}  // namespace

void activation(const ActivationPlan& plan, const ActivationArgs& args, Workspace, Stream stream) {
  const ActivationProblem& p = plan.problem;
  const Job job{.z = Glu(args.z, p),
                .dz = Glu(args.dz, p),
                .h = Matrix(args.h, p.h),
                .dh = Matrix(args.dh, p.h),
                .offsets = args.offsets.data,
                .prob = args.prob,
                .dprob = args.dprob,
                .bound = p.rows,
                .features = p.features,
                .experts = p.experts,
                .zero_tail = p.tail == Tail::kZero,
                .constants = p.constants};
  const bool wide = job.z.is_wide() && job.dz.is_wide() && job.h.is_wide() && job.dh.is_wide();
  const bool pairs = p.layout == GluLayout::kInterleave1;
  activations::All::visit(p.kind, [&]<class Row>(Row) {
    visit_chunks(wide, {p.z, p.h}, [&]<class OfRows>(OfRows) {
      pairs ? launch<Config<Row, OfRows, Row::kInfo.gated>>(plan, job, stream_of(stream))
            : launch<Config<Row, OfRows, false>>(plan, job, stream_of(stream));
    });
  });
}

}  // namespace cadre::cuda::portable
