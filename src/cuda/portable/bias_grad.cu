#include "cuda/portable/bias_grad.h"

#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// dbias[e, n] (+)= sum_r dy[r, n] bias_scale[r]      over the rows of expert e
// dbias_scale[r] = sum_n dy[r, n] bias[e, n]
//
// dy [R, N]; dbias, bias [E, N], or E pointers to [N]; bias_scale, dbias_scale [R]. Rows at or
// beyond offsets[E] are not read; their dbias_scale is written as zero or not at all. The first
// blocks compute dbias: 64 columns of one expert each, in which row i of the expert goes to partial
// sum i % 32; a tree adds those. The blocks behind them compute dbias_scale, of 16 rows each: half
// a warp takes a row, which has 128 partial sums, as on the CPU.
namespace cadre::cuda::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kAcross = 8;                    // threads of a row, a chunk each
constexpr int kSums = kThreads / kAcross;     // partial sums of a column
constexpr int kColumns = kAcross * kChunk;    // of a block
constexpr int kHalf = 16;                     // threads of a row of dbias_scale
constexpr int kRowsAtOnce = 4;                // in flight
constexpr int kScaleRows = kThreads / kHalf;  // of a block

/// [E, N], packed or discrete: the matrix of one expert has one row.
struct PerExpert {
  Matrix packed;
  void* const* discrete = nullptr;

  PerExpert(const TensorView& v, void* const* pointers, DType dtype, int64_t columns)
      : packed(v), discrete(pointers) {
    packed.dtype = dtype;
    packed.columns = columns;
  }
  __device__ Matrix of(int expert) const {
    Matrix m = packed;
    m.data = discrete != nullptr ? static_cast<char*>(discrete[expert])
                                 : packed.data + expert * packed.pitch;
    return m;
  }
};

/// The parameters of the kernel.
struct Job {
  Matrix dy;
  PerExpert dbias, bias;
  const int32_t *offsets, *words;
  const float* bias_scale;
  float* dbias_scale;
  int64_t bound;  ///< R
  int experts, column_blocks;
  Accumulate accumulate;
  bool zero_tail;

  __device__ bool adds(int expert) const {
    if (accumulate == Accumulate::kDevice) return words[0] != 0;
    if (accumulate == Accumulate::kPerExpert) return words[expert] != 0;
    return accumulate == Accumulate::kYes;
  }
};

/// The rows of one expert as ExpertWalk gives them: after those of all experts before it. All
/// threads of the block must call it.
__device__ schedule::ExpertRows walked_rows(const Job& job, int expert) {
  __shared__ int highest;
  if (threadIdx.x == 0) highest = 0;
  __syncthreads();
  int mine = 0;
  for (int e = int(threadIdx.x); e <= expert; e += kThreads)
    mine = max(mine, int(schedule::clamp_row(job.offsets[e], 0, job.bound)));
  atomicMax(&highest, mine);
  __syncthreads();
  const int64_t first = highest;
  __syncthreads();
  return {first, schedule::clamp_row(job.offsets[expert + 1], first, job.bound)};
}

/// The sum of the rows first, first + 32, ... in one chunk of columns.
template <class Config>
__device__ void sum_rows(const Job& job, schedule::ExpertRows rows, int64_t column,
                         float (&sum)[kChunk]) {
  for (int64_t first = rows.first + threadIdx.x / kAcross; first < rows.last;
       first += kRowsAtOnce * kSums) {
    Chunk chunks[kRowsAtOnce];
    float scale[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t row = first + i * kSums;
      if (row >= rows.last) continue;
      chunks[i] = load<Config::kWide>(job.dy, {row, column});
      scale[i] = job.bias_scale == nullptr ? 1.0f : job.bias_scale[row];
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i * kSums >= rows.last) continue;
      float x[kChunk];
      decode(chunks[i], job.dy.dtype, x);
      for (int k = 0; k < kChunk; ++k) sum[k] += scale[i] * x[k];
    }
  }
}

/// A tree over the partial sums of the block's threads, into those of its first eight.
__device__ void add_partial_sums(float (&sum)[kChunk]) {
  __shared__ float sums[kSums][kColumns + kAcross];
  const int row = int(threadIdx.x / kAcross), at = int(threadIdx.x % kAcross) * (kChunk + 1);
  for (int k = 0; k < kChunk; ++k) sums[row][at + k] = sum[k];
  for (int half = kSums / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row >= half) continue;
    for (int k = 0; k < kChunk; ++k) {
      sum[k] += sums[row + half][at + k];
      sums[row][at + k] = sum[k];
    }
  }
}

/// dbias of one expert in 64 columns.
template <class Config>
__device__ void make_dbias(const Job& job, int64_t block) {
  const int expert = int(block / job.column_blocks);
  const int64_t column = block % job.column_blocks * kColumns + threadIdx.x % kAcross * kChunk;
  const schedule::ExpertRows rows = walked_rows(job, expert);
  const bool add = job.adds(expert), inside = column < job.dy.columns;
  if (add && rows.count() == 0) return;
  float sum[kChunk] = {};
  if (inside) sum_rows<Config>(job, rows, column, sum);
  add_partial_sums(sum);
  if (threadIdx.x >= kAcross || !inside) return;
  const Matrix dbias = job.dbias.of(expert);
  if (add) {
    float before[kChunk];
    decode(load<false>(dbias, {0, column}), dbias.dtype, before);
    for (int k = 0; k < kChunk; ++k) sum[k] += before[k];
  }
  store<false>(encode(sum, dbias.dtype), dbias, {0, column});
}

/// The first expert whose rows end behind `row`, E if there is none: the one that ExpertWalk gives
/// that row to. All threads of the block must call it.
__device__ int expert_ending_behind(const Job& job, int64_t row) {
  __shared__ int lowest;
  if (threadIdx.x == 0) lowest = job.experts;
  __syncthreads();
  int mine = job.experts;
  for (int e = job.experts - 1 - int(threadIdx.x); e >= 0; e -= kThreads)
    if (job.offsets[e + 1] > row) mine = e;
  atomicMin(&lowest, mine);
  __syncthreads();
  return lowest;
}

/// <dy[row], bias>, in the first thread of the half warp.
template <class Config>
__device__ float product(const Job& job, const Matrix& bias, int64_t row) {
  float sums[kChunk] = {};
#pragma unroll 2
  for (int64_t column = threadIdx.x % kHalf * kChunk; column < job.dy.columns;
       column += kHalf * kChunk) {
    const Chunk dy_chunk = load<Config::kWide>(job.dy, {row, column});
    const Chunk bias_chunk = load<Config::kWideBias>(bias, {0, column});
    float x[kChunk], b[kChunk];
    decode(dy_chunk, job.dy.dtype, x);
    decode(bias_chunk, bias.dtype, b);
    for (int k = 0; k < kChunk; ++k) sums[k] += x[k] * b[k];
  }
  return total<kHalf>(sums);
}

/// dbias_scale of 16 rows. All lanes take part in the warp shuffles, so a half warp whose row has
/// no expert repeats the row of the other half.
template <class Config>
__device__ void make_dbias_scale(const Job& job, int64_t block) {
  const int64_t used = schedule::rows_used(job.offsets, job.experts, job.bound);
  const int64_t first = block * kScaleRows, row = first + threadIdx.x / kHalf;
  int expert = expert_ending_behind(job, first);
  while (expert < job.experts && job.offsets[expert + 1] <= row) ++expert;
  const bool zero = row < job.bound && row >= used && job.zero_tail;
  const bool owned = row < job.bound && !zero && expert < job.experts && job.offsets[0] <= row;
  float sum = 0;
  if (__any_sync(~0u, owned)) {
    // A row without an expert may lie beyond the matrix; the other half's is readable.
    const int owner = __ffs(int(__ballot_sync(~0u, owned))) - 1;
    const int there = owned ? int(threadIdx.x % kLanes) : owner;
    const int its_expert = __shfl_sync(~0u, expert, there);
    const int64_t its_row = __shfl_sync(~0u, row, there);
    sum = product<Config>(job, job.bias.of(its_expert), its_row);
  }
  if (threadIdx.x % kHalf == 0 && (owned || zero)) job.dbias_scale[row] = zero ? 0.0f : sum;
}

template <class Config>
__global__ void __launch_bounds__(kThreads) bias_grad_kernel(const Job job) {
  if constexpr (Config::kHalves) {
    assume_halves(job.dy);
    assume_halves(job.bias.packed);
  }
  const int64_t dbias_blocks = int64_t(job.experts) * job.column_blocks;
  if (blockIdx.x < dbias_blocks)
    make_dbias<Config>(job, blockIdx.x);
  else
    make_dbias_scale<Config>(job, blockIdx.x - dbias_blocks);
}

/// Whether chunks are wide, of dy and of the bias; whether both are bf16 or f16.
struct WideHalves {
  static constexpr bool kWide = true, kWideBias = true, kHalves = true;
};
struct Wide {
  static constexpr bool kWide = true, kWideBias = true, kHalves = false;
};
struct WideRows {
  static constexpr bool kWide = true, kWideBias = false, kHalves = false;
};
struct Narrow {
  static constexpr bool kWide = false, kWideBias = false, kHalves = false;
};

template <class Config>
void launch(const BiasGradProblem& p, const Job& job, cudaStream_t stream) {
  const int64_t scale_blocks = p.bias_scale ? (p.rows + kScaleRows - 1) / kScaleRows : 0;
  const int64_t blocks = int64_t(p.experts) * job.column_blocks + scale_blocks;
  cuda::launch(bias_grad_kernel<Config>, {unsigned(blocks), kThreads, 0, stream}, job);
}

}  // namespace

void bias_grad(const BiasGradPlan& plan, const BiasGradArgs& args, Workspace, Stream stream) {
  const BiasGradProblem& p = plan.problem;
  const Job job{
      .dy = Matrix(args.dy),
      .dbias = PerExpert(args.dbias, args.discrete_dbias, p.dbias, p.n),
      .bias = PerExpert(args.bias, const_cast<void* const*>(args.discrete_bias), p.bias, p.n),
      .offsets = args.offsets.data,
      .words = args.accumulate,
      .bias_scale = args.bias_scale,
      .dbias_scale = args.dbias_scale,
      .bound = p.rows,
      .experts = p.experts,
      .column_blocks = int((p.n + kColumns - 1) / kColumns),
      .accumulate = p.accumulate,
      .zero_tail = p.tail == Tail::kZero};
  // The host cannot read discrete pointers, so it assumes no alignment behind them.
  if (!job.dy.is_wide())
    launch<Narrow>(p, job, stream_of(stream));
  else if (p.discrete || !job.bias.packed.is_wide())
    launch<WideRows>(p, job, stream_of(stream));
  else if (p.dy == DType::kF32 || p.bias == DType::kF32)
    launch<Wide>(p, job, stream_of(stream));
  else
    launch<WideHalves>(p, job, stream_of(stream));
}

}  // namespace cadre::cuda::portable
