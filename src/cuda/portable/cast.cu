#include "cuda/portable/cast.h"

#include "cuda/portable/owned_rows.cuh"
#include "cuda/portable/quantize_job.h"
#include "cuda/portable/row_grid.h"
#include "formats/fp16.h"

// to[r, c] = from[r, c], rounded once, into one copy or two.
//
// Routed rows [R, C], of which those that belong to an expert are read and written; or weights
// [E, N, K], which may be read through E pointers. A warp takes 1024 columns of a row. The kernel
// reads the pointers' alignment: an expert is moved in wide chunks if all of its rows allow it.
namespace cadre::cuda::portable {
namespace {

constexpr int kRounds = 4;  // chunks that a thread has in flight
constexpr int kCopies = 2;
constexpr int kMostBlocksAlongExperts = 1024;

/// The parameters of the kernel.
struct Job {
  ExpertMatrices from, to[kCopies];  ///< copies that are not wanted have no data
  const int32_t* offsets = nullptr;
  int64_t bound = 0;              ///< R, or N
  int experts = 1, matrices = 1;  ///< matrices: 1 of routed rows
  schedule::RowTokens tokens{};   ///< where rows are gathered
};

/// What is cast of one matrix.
struct Cast {
  Matrix from, to[kCopies];
  schedule::RowTokens tokens;

  __device__ Cast(const Job& job, int matrix) : from(job.from.of(matrix)), tokens(job.tokens) {
    for (int i = 0; i < kCopies; ++i) to[i] = job.to[i].of(matrix);
  }
  /// Where a row is read; -1: it has zeros.
  __device__ int64_t source_of(int64_t row) const {
    return tokens.gather() ? tokens.token_of(row) : row;
  }
  __device__ bool is_wide() const { return from.is_wide() && to[0].is_wide() && to[1].is_wide(); }
};

/// A chunk in another dtype.
__device__ Chunk cast_chunk(const Chunk& chunk, DType from, DType to) {
  float x[kChunk];
  decode(chunk, from, x);
  // The instruction that converts f16 to f32 drops the payload of a NaN.
  if (from == DType::kF16 && to == DType::kF32)
    for (int i = 0; i < kChunk; ++i)
      x[i] = formats::Fp16::decode(uint16_t(word(chunk, i / 2) >> (i % 2 * 16)));
  return encode(x, to);
}

template <bool kWide>
__device__ void cast_rows(const Cast& cast, schedule::ExpertRows rows) {
  const int64_t first = first_column(kRounds);
  for_rows(rows.count(), [&](int64_t i) {
    const int64_t row = rows.first + i, source = cast.source_of(row);
    Chunk chunks[kRounds] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
      if (source >= 0 && first + round * kRound < cast.from.columns)
        chunks[round] = load<kWide>(cast.from, {source, first + round * kRound});
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
      for (const Matrix& to : cast.to)
        if (to.data != nullptr && first + round * kRound < cast.from.columns)
          store<kWide>(cast_chunk(chunks[round], cast.from.dtype, to.dtype), to,
                       {row, first + round * kRound});
  });
}

__global__ void __launch_bounds__(kGridWarps* kLanes) cast_kernel(const Job job) {
  begin_dependent();
  const schedule::ExpertRows rows = owned_rows(job.offsets, job.experts, job.bound);
  for (int matrix = int(blockIdx.z); matrix < job.matrices; matrix += int(gridDim.z)) {
    const Cast cast(job, matrix);
    cast.is_wide() ? cast_rows<true>(cast, rows) : cast_rows<false>(cast, rows);
  }
}

void launch_cast(const Job& job, cudaStream_t stream) {
  if (job.bound == 0 || job.from.first.columns == 0) return;
  RowGrid grid = RowGrid::of(job.bound, job.from.first.columns, kRounds);
  grid.blocks.z = unsigned(std::min(job.matrices, kMostBlocksAlongExperts));
  launch(cast_kernel, grid.on(stream), job);
}

/// Of no copy yet.
Job job_of(const QuantizeProblem& p, const QuantizeArgs& args) {
  return {.from = ExpertMatrices(args.source, args.discrete),
          .to = {},
          .offsets = args.offsets.data,
          .bound = p.rows,
          .experts = p.experts,
          .matrices = p.kind == RowsKind::kWeights ? p.experts : 1,
          .tokens = tokens_of(p, args)};
}

std::string refuses_format(const Device& device, std::string_view what, const Format& format) {
  if (!is_plain(format))
    return text(what, " is ", to_string(format), ", and only f32, bf16 and f16 are casts");
  return needs_sm80(format, device);
}

}  // namespace

std::string refuses_cast(const QuantizeProblem& p, const Device& device) {
  std::string why = p.along_k ? refuses_format(device, "along_k", *p.along_k) : std::string();
  if (why.empty() && p.along_rows) why = refuses_format(device, "along_rows", *p.along_rows);
  return why;
}

std::string refuses_cast(const DequantizeProblem& p, const Device& device) {
  return refuses_format(device, "format", p.source.format);
}

void cast(const QuantizePlan& plan, const QuantizeArgs& args, Workspace, Stream stream) {
  const QuantizeProblem& p = plan.problem;
  Job job = job_of(p, args);
  if (p.along_k) job.to[0] = ExpertMatrices(args.along_k.codes);
  if (p.along_rows) job.to[1] = ExpertMatrices(args.along_rows.codes);
  launch_cast(job, stream_of(stream));
}

void cast_copy(const QuantizeProblem& p, const QuantizeArgs& args, Axis axis, Stream stream) {
  Job job = job_of(p, args);
  job.to[0] = ExpertMatrices((axis == Axis::kAlongK ? args.along_k : args.along_rows).codes);
  launch_cast(job, stream_of(stream));
}

void cast(const DequantizePlan& plan, const DequantizeArgs& args, Workspace, Stream stream) {
  const QuantizedShape& shape = plan.problem.source;
  launch_cast({.from = ExpertMatrices(args.source.codes),
               .to = {ExpertMatrices(args.out), ExpertMatrices()},
               .offsets = args.offsets.data,
               .bound = shape.rows,
               .experts = shape.experts,
               .matrices = shape.kind == RowsKind::kWeights ? shape.experts : 1},
              stream_of(stream));
}

}  // namespace cadre::cuda::portable
