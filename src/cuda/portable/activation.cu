#include "cuda/portable/activation.h"

#include "cuda/portable/activation_rows.cuh"

// h = act(z) * prob; dz = dh * prob * act'(z), dprob[r] = sum_f dh[r, f] act(z)[r, f], h again if
// wanted.
//
// Rows at or beyond offsets[E] are not read, and written as zero or not at all. A warp takes 512
// features of a row, backward the whole row; dprob is a tree over 256 partial sums, in a fixed
// order.
namespace cadre::cuda::portable {
namespace {

constexpr int kRounds = 2;  // chunks that a thread has in flight

/// Blocks of backward for each that is resident; their warps then take several rows.
constexpr unsigned kBackwardWaves = 8;

/// Blocks of backward that are resident on an SM, at least: of one type as many as registers allow.
constexpr int backward_blocks(ActivationKind kind, bool one_dtype) {
  if (!one_dtype) return 1;
  return kind == ActivationKind::kClampedSwiGlu ? 2 : 3;
}

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kOneDType ? 5 : 1)
    forward_kernel(const ActivationJob job) {
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

template <class Config>
__global__ void __launch_bounds__(kGridWarps* kLanes, Config::kBackwardBlocks)
    backward_kernel(const ActivationJob job) {
  begin_dependent();
  assume_dtypes<Config>(job);
  const int64_t used = job.used(), step = int64_t(gridDim.y) * blockDim.z;
  const PlainGradients<Config> out;
  BackwardRows<Config, PlainGradients<Config>> rows(job, used, out);
  for_rows(job.zero_tail ? job.bound : used, [&](int64_t row) {
    row < used ? rows.take(row, row + step) : zero_row<Config>(job, row);
  });
}

template <class Row, class OfRows, bool kNeighbours>
struct Config : ActivationConfig<Row, OfRows, kNeighbours> {
  static constexpr int kBackwardBlocks = backward_blocks(Row::kInfo.kind, OfRows::kOneDType);
};

template <class Config>
void launch(const ActivationPlan& plan, const ActivationJob& job, cudaStream_t stream) {
  const ActivationProblem& p = plan.problem;
  if (!p.backward) {
    const RowGrid grid = RowGrid::of(p.rows, p.features, kRounds);
    return cuda::launch(forward_kernel<Config>, grid.on(stream), job);
  }
  RowGrid grid = RowGrid::of(p.rows, p.features, kWholeRows);
  if constexpr (Config::kOneDType)
    grid.blocks.y = std::min(grid.blocks.y, unsigned(std::max(plan.device.units, 1)) *
                                                Config::kBackwardBlocks * kBackwardWaves);
  cuda::launch(backward_kernel<Config>, grid.on(stream), job);
}

}  // namespace

void activation(const ActivationPlan& plan, const ActivationArgs& args, Workspace, Stream stream) {
  const ActivationProblem& p = plan.problem;
  const ActivationJob job(p, args);
  const bool pairs = p.layout == GluLayout::kInterleave1;
  activations::All::visit(p.kind, [&]<class Row>(Row) {
    visit_chunks(job.is_wide(), {p.z, p.h}, [&]<class OfRows>(OfRows) {
      pairs ? launch<Config<Row, OfRows, Row::kInfo.gated>>(plan, job, stream_of(stream))
            : launch<Config<Row, OfRows, false>>(plan, job, stream_of(stream));
    });
  });
}

}  // namespace cadre::cuda::portable
