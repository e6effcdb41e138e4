#pragma once
#include "cuda/portable/owned_rows.cuh"
#include "cuda/portable/row_codes.cuh"
#include "cuda/portable/row_grid.h"
#include "cuda/portable/source_patch.cuh"

// Codes and scales along K alone, in formats whose scales belong to blocks of a row: of routed
// rows, or of weights whose experts lie one after the other, as rows of one matrix.
// A warp takes 256 columns of four rows at a time, in registers: nothing waits for a block.
namespace cadre::cuda::portable {

constexpr int kRowsAtOnce = 4;
constexpr int kStreamBlocks = 128;  // of an SM, at most, of which six and more are resident

/// The parameters of the kernel.
template <class Codes>
struct RowsJob {
  Matrix from;
  schedule::RowTokens tokens;
  Codes to;
  ExpertsRows of;
};

/// As many as are resident without a spill.
template <DType kSource, class Codes>
constexpr int kResidentBlocks = kSource == DType::kF32 || Codes::kNibbles ? 4
                                : Codes::kLanesOfBlock < kChunk           ? 5
                                                                          : 6;

template <DType kSource, class Codes>
__global__ void __launch_bounds__(kGridWarps* kLanes, kResidentBlocks<kSource, Codes>)
    quantize_rows_kernel(const __grid_constant__ RowsJob<Codes> job) {
  begin_dependent();
  const schedule::ExpertRows rows = owned_rows(job.of.offsets, job.of.experts, job.of.rows);
  const int64_t column = first_column(1);
  const char* first = job.from.data + column * (kSource == DType::kF32 ? 4 : 2);
  const int64_t warp = int64_t(blockIdx.y) * blockDim.z + threadIdx.z;
  const int64_t step = int64_t(gridDim.y) * blockDim.z * kRowsAtOnce;
  for (int64_t row = rows.first + warp * kRowsAtOnce; row < rows.last; row += step) {
    const int count = int(min(rows.last - row, int64_t(kRowsAtOnce)));
    const ChunkColumn at{{row, column}, column < job.of.cols ? count : 0};
    int64_t source[kRowsAtOnce];  // -1: a row of zeros
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) source[i] = i < at.rows ? row + i : -1;
    if (job.tokens.gather())
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
        if (i < at.rows) source[i] = job.tokens.token_of(row + i);
    Chunk chunks[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (source[i] >= 0) load_wide<kSource>(chunks[i], first + source[i] * job.from.pitch);
    job.to.template write<kSource>(chunks, at);
  }
}

/// Whether there are offsets, or the rows of the next expert follow those of one.
inline bool are_rows_of_one(const QuantizeJob& job) {
  const auto follow = [&](int64_t pitch, int64_t expert) { return expert == job.of.rows * pitch; };
  const QuantizedMatrix& to = job.copies[0].to;
  return job.of.offsets != nullptr ||
         (job.source.discrete == nullptr && follow(job.source.first.pitch, job.source.pitch) &&
          follow(to.codes.pitch, to.codes.expert) && !to.scales.columns &&
          follow(to.scales.pitch, to.scales.expert));
}

/// Whether the kernel takes the copy: of wide chunks, in which numbers are written too.
inline bool takes_row_codes(const QuantizeJob& job) {
  const QuantizeCopy& copy = job.copies[0];
  const Lines& to = copy.to.codes;
  const bool wide = (reinterpret_cast<uintptr_t>(to.data) | uint64_t(to.pitch)) % 16 == 0;
  return job.count == 1 && are_rows_of_one(job) && job.source.first.is_wide() && copy.to.across &&
         !copy.to.down && !copy.stochastic && (wide || !copy.to.decoded);
}

template <class Codes>
void launch_row_codes(const QuantizeJob& job, const QuantizeStream& on) {
  RowsJob<Codes> rows{job.source.first, job.tokens, Codes(job.copies[0]), job.of};
  if (job.of.offsets == nullptr) rows.of.rows *= job.of.experts;
  RowGrid grid = RowGrid::of((rows.of.rows + kRowsAtOnce - 1) / kRowsAtOnce, job.of.cols, 1);
  const unsigned most = unsigned(std::max(on.units, 1)) * kStreamBlocks;
  grid.blocks.y = std::clamp(most / grid.blocks.x, 1u, grid.blocks.y);
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    launch(quantize_rows_kernel<kSource, Codes>, grid.on(on.stream), rows);
  });
}

template <class Row, class Element>
void launch_quantize_rows(const QuantizeJob& job, const QuantizeStream& on) {
  if (job.of.rows == 0 || job.of.cols == 0) return;
  job.copies[0].to.decoded ? launch_row_codes<RowCodes<Row, Element, true>>(job, on)
                           : launch_row_codes<RowCodes<Row, Element, false>>(job, on);
}

}  // namespace cadre::cuda::portable
