#include "cuda/portable/bias_grad.h"

#include "cuda/portable/row_grid.h"
#include "schedule/expert_rows.h"

// dbias[e, n] (+)= sum_r dy[r, n] bias_scale[r]      over the rows of expert e
// dbias_scale[r] = sum_n dy[r, n] bias[e, n]
//
// dy [R, N]; dbias, bias [E, N], or E pointers to [N]; bias_scale, dbias_scale [R]. Rows at or
// beyond offsets[E] are not read; their dbias_scale is written as zero or not at all. Some blocks
// compute dbias: 128 columns of one expert each, in which row i of the expert goes to partial sum
// i % 32; a tree adds those. Others compute dbias_scale, of 16 rows each: half a warp takes a row,
// which has 128 partial sums, as on the CPU.
namespace cadre::cuda::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kSums = 32;                     // partial sums of a column
constexpr int kAcross = 16;                   // threads of a row, a chunk each
constexpr int kColumns = kAcross * kChunk;    // of a block
constexpr int kDown = kThreads / kAcross;     // rows of a block at a time
constexpr int kOwnSums = kSums / kDown;       // of a column, that one thread adds up
constexpr int kRowsAtOnce = 4;                // that a thread has in flight
constexpr int kHalf = 16;                     // threads of a row of dbias_scale
constexpr int kScaleRows = kThreads / kHalf;  // of a block
constexpr int kChunksAtOnce = 4;              // of such a row, that a thread has in flight
constexpr int64_t kFewRows = 1024;            // of an expert

static_assert(kRowsAtOnce % kOwnSums == 0, "a row's place in flight is not that of its sum");

/// [E, N], packed or discrete: the matrix of one expert has one row.
struct PerExpert {
  Matrix packed;
  void* const* discrete = nullptr;

  PerExpert(const TensorView& v, void* const* pointers, DType dtype, int64_t columns)
      : packed(v, dtype), discrete(pointers) {
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
  int groups, dbias_blocks, scale_blocks;  ///< the blocks are of one group
  Accumulate accumulate;
  bool zero_tail;

  __device__ bool adds(int expert) const {
    if (accumulate == Accumulate::kDevice) return words[0] != 0;
    if (accumulate == Accumulate::kPerExpert) return words[expert] != 0;
    return accumulate == Accumulate::kYes;
  }
};

/// The rows of one expert as ExpertWalk gives them: after those of all experts before it. All
/// lanes of a warp must call it.
__device__ schedule::ExpertRows walked_rows(const Job& job, int expert) {
  const int64_t used = schedule::rows_used(job.offsets, job.experts, job.bound);
  const int32_t end = job.offsets[expert + 1];
  int highest = 0;
  for (int e = int(threadIdx.x % kLanes); e <= expert; e += kLanes)
    highest = max(highest, int(schedule::clamp_row(job.offsets[e], 0, used)));
  const int64_t first = __reduce_max_sync(~0u, highest);
  return {first, schedule::clamp_row(end, first, used)};
}

/// The partial sums of a thread in its chunk of columns: of rows i, i + kDown, ... of 32.
struct Sums {
  float of[kOwnSums][kChunk] = {};
};

template <class Config>
__device__ Sums sum_rows(const Job& job, schedule::ExpertRows rows, int64_t column) {
  Config::assume(job.dy);
  Sums sums;
  for (int64_t first = rows.first + threadIdx.x / kAcross; first < rows.last;
       first += kRowsAtOnce * kDown) {
    Chunk chunks[kRowsAtOnce];
    float scale[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t row = first + i * kDown;
      if (row >= rows.last) continue;
      chunks[i] = load<Config::kWide>(job.dy, {row, column});
      scale[i] = job.bias_scale == nullptr ? 1.0f : job.bias_scale[row];
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i * kDown >= rows.last) continue;
      float x[kChunk];
      decode(chunks[i], job.dy.dtype, x);
      for (int k = 0; k < kChunk; ++k) sums.of[i % kOwnSums][k] += scale[i] * x[k];
    }
  }
  return sums;
}

/// A tree over the partial sums of a column: its first levels are a thread's own sums, the others
/// are those of one thread for each column, which returns it.
__device__ float total_of_column(Sums sums) {
  __shared__ float shared[kDown][kColumns];
#pragma unroll
  for (int half = kOwnSums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      for (int k = 0; k < kChunk; ++k) sums.of[i][k] += sums.of[i + half][k];
  for (int k = 0; k < kChunk; ++k)
    shared[threadIdx.x / kAcross][threadIdx.x % kAcross * kChunk + k] = sums.of[0][k];
  __syncthreads();
  float of[kDown];
#pragma unroll
  for (int i = 0; i < kDown; ++i) of[i] = shared[i][threadIdx.x % kColumns];
#pragma unroll
  for (int half = kDown / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) of[i] += of[i + half];
  return of[0];
}

/// dbias of one expert in 128 columns.
template <class Config>
__device__ void make_dbias(const Job& job, int block) {
  const int expert = block / job.column_blocks;
  const int64_t first = int64_t(block % job.column_blocks) * kColumns;
  const schedule::ExpertRows rows = walked_rows(job, expert);
  const bool add = job.adds(expert);
  if (add && rows.count() == 0) return;
  const int64_t chunk = first + threadIdx.x % kAcross * kChunk;
  const float sum =
      total_of_column(chunk < job.dy.columns ? sum_rows<Config>(job, rows, chunk) : Sums());
  const int64_t column = first + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= job.dy.columns) return;
  const Matrix dbias = job.dbias.of(expert);
  const Place at{0, column};
  const float before = add ? element_of(element_bits(dbias, at), dbias.dtype) : 0.0f;
  store_element(add ? sum + before : sum, dbias, at);
}

/// The first expert whose rows end behind `row`, E if there is none: the one that ExpertWalk gives
/// that row to, where it is none of the tail. All lanes of a warp must call it.
__device__ int expert_ending_behind(const Job& job, int64_t row) {
  int lowest = job.experts;
  for (int e = int(threadIdx.x % kLanes); e < lowest; e += kLanes)
    if (job.offsets[e + 1] > row) lowest = e;
  return __reduce_min_sync(~0u, lowest);
}

/// <dy[row], bias>, in the first thread of the half warp.
template <class Config>
__device__ float product(const Job& job, const Matrix& bias, int64_t row) {
  constexpr int64_t kStep = kHalf * kChunk;
  Config::assume(job.dy);
  Config::assume(bias);
  float sums[kChunk] = {};
  for (int64_t first = threadIdx.x % kHalf * kChunk; first < job.dy.columns;
       first += kChunksAtOnce * kStep) {
    Chunk of_dy[kChunksAtOnce], of_bias[kChunksAtOnce];
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      if (first + i * kStep >= job.dy.columns) continue;
      of_dy[i] = load<Config::kWide>(job.dy, {row, first + i * kStep});
      of_bias[i] = load<Config::kWideBias>(bias, {0, first + i * kStep});
    }
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      if (first + i * kStep >= job.dy.columns) continue;
      float x[kChunk], b[kChunk];
      decode(of_dy[i], job.dy.dtype, x);
      decode(of_bias[i], bias.dtype, b);
      for (int k = 0; k < kChunk; ++k) sums[k] += x[k] * b[k];
    }
  }
  return total<kHalf>(sums);
}

/// dbias_scale of 16 rows. All lanes take part in the warp shuffles, so a half warp whose row has
/// no expert repeats the row of the other half.
template <class Config>
__device__ void make_dbias_scale(const Job& job, int64_t block) {
  const int64_t used = schedule::rows_used(job.offsets, job.experts, job.bound);
  const int64_t row = block * kScaleRows + threadIdx.x / kHalf;
  int expert = expert_ending_behind(job, row - threadIdx.x / kHalf % 2);
  while (expert < job.experts && job.offsets[expert + 1] <= row) ++expert;
  const bool zero = row >= used && row < job.bound && job.zero_tail;
  const bool owned = row < used && expert < job.experts && job.offsets[0] <= row;
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

/// Blocks of both kinds in groups, which read about the same rows where experts have equally many,
/// so that the second reads them from L2.
template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kOneDType ? 4 : 1)
    bias_grad_kernel(const Job job) {
  begin_dependent();
  const int blocks = job.dbias_blocks + job.scale_blocks;
  const int group = int(blockIdx.x) / blocks, block = int(blockIdx.x) % blocks;
  if (block < job.dbias_blocks)
    make_dbias<Config>(job, group * job.dbias_blocks + block);
  else
    make_dbias_scale<Config>(job, int64_t(group) * job.scale_blocks + block - job.dbias_blocks);
}

/// Chunks of dy, and whether those of the bias are as wide.
template <class OfDy, bool kWideOfBias>
struct Config : OfDy {
  static constexpr bool kWideBias = kWideOfBias;
};

template <class Config>
void launch(const Job& job, cudaStream_t stream) {
  const int64_t blocks = int64_t(job.groups) * (job.dbias_blocks + job.scale_blocks);
  cuda::launch(
      bias_grad_kernel<Config>,
      {.blocks = unsigned(blocks), .threads = kThreads, .stream = stream, .dependent = true}, job);
}

}  // namespace

void bias_grad(const BiasGradPlan& plan, const BiasGradArgs& args, Workspace, Stream stream) {
  const BiasGradProblem& p = plan.problem;
  const DType bias = p.bias_scale ? p.bias : p.dy;
  const int column_blocks = int((p.n + kColumns - 1) / kColumns);
  // An expert of many rows keeps its blocks for long, so that they had better be the first.
  const int groups = p.rows <= p.experts * kFewRows ? p.experts : 1;
  const int64_t scale_blocks = p.bias_scale ? (p.rows + kScaleRows - 1) / kScaleRows : 0;
  const Job job{
      .dy = Matrix(args.dy, p.dy),
      .dbias = PerExpert(args.dbias, args.discrete_dbias, p.dbias, p.n),
      .bias = PerExpert(args.bias, const_cast<void* const*>(args.discrete_bias), bias, p.n),
      .offsets = args.offsets.data,
      .words = args.accumulate,
      .bias_scale = args.bias_scale,
      .dbias_scale = args.dbias_scale,
      .bound = p.rows,
      .experts = p.experts,
      .column_blocks = column_blocks,
      .groups = groups,
      .dbias_blocks = p.experts / groups * column_blocks,
      .scale_blocks = int((scale_blocks + groups - 1) / groups),
      .accumulate = p.accumulate,
      .zero_tail = p.tail == Tail::kZero};
  // The host cannot read discrete pointers, so it assumes no alignment behind them.
  const bool wide_bias = !p.discrete && job.bias.packed.is_wide();
  visit_chunks(job.dy.is_wide(), {p.dy, bias}, [&]<class OfDy>(OfDy) {
    wide_bias ? launch<Config<OfDy, OfDy::kWide>>(job, stream_of(stream))
              : launch<Config<OfDy, false>>(job, stream_of(stream));
  });
}

}  // namespace cadre::cuda::portable
