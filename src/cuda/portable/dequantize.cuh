#pragma once
#include "cuda/device/small_float.h"
#include "cuda/portable/quantize_job.h"
#include "formats/list.h"

// out = (code * scale of the block) * scale of the expert, rounded to the type of out.
namespace cadre::cuda::portable {

constexpr int kDequantizeBlocks = 4;  // of an SM at once

/// The codes of a thread's patch by rows, from the first one on; column-major ones are turned.
template <class Element>
__device__ void load_rows(EightCodes<Element> (&of_row)[kChunk], const uint8_t* first,
                          const Lines& lines, int rows, int cols) {
  EightCodes<Element> of_line[kChunk];
  for (int i = 0; i < kChunk; ++i)
    if (i < (lines.columns ? cols : rows))
      of_line[i] = load_codes<Element>(first + i * lines.pitch, lines.columns ? rows : cols);
  for (int i = 0; i < kChunk; ++i) {
    if (!lines.columns) of_row[i] = of_line[i];
    for (int k = 0; k < kChunk && lines.columns; ++k) of_row[i].push(of_line[k].get(i));
  }
}

/// The scales of a patch: those of a row, column by column.
template <class Row>
class PatchScales {
 public:
  __device__ PatchScales(const QuantizedMatrix& m, const ExpertTile& tile, int64_t row,
                         int64_t col) {
    if constexpr (kBlock != 0) {
      const Lines scales = m.scales_of(tile, kBlock);
      first_ = scales.at(m.down ? row / kBlock : row, m.across ? col / kBlock : col);
      row_step_ = m.down ? 0 : scales.columns ? sizeof(Code) : scales.pitch;
      column_step_ = m.across ? 0 : scales.columns ? scales.pitch : sizeof(Code);
    }
  }
  /// Of row i, if those of the row before are there; only `cols` of them exist.
  __device__ void of_row(int i, int cols, float (&columns)[kChunk]) const {
    if (row_step_ != 0) {
      const float of_row = at(i, 0);
      for (int k = 0; k < kChunk; ++k) columns[k] = of_row;
    } else if (i == 0) {
      for (int k = 0; k < kChunk && k < cols; ++k) columns[k] = at(0, k);
    }
  }

 private:
  using Code = typename Row::Scale::Code;
  static constexpr int kBlock = Row::kInfo.block;

  __device__ float at(int i, int k) const {
    const uint8_t* stored = first_ + i * row_step_ + k * column_step_;
    return Row::Scale::decode(*reinterpret_cast<const Code*>(stored));
  }

  const uint8_t* first_ = nullptr;
  int64_t row_step_ = 0, column_step_ = 0;
};

/// A thread's eight rows and columns of a tile.
template <DType kOut, class Row, class Element>
__device__ void decode_patch(const DequantizeJob& job, const ExpertTile& tile) {
  const Lines codes = job.from.codes_of(tile);
  const int inner = int(threadIdx.x) % kAcross, outer = int(threadIdx.x) / kAcross;
  const int first_row = kChunk * (codes.columns ? inner : outer);
  const int first_col = kChunk * (codes.columns ? outer : inner);
  const int rows = job.from.rows_of(tile) - first_row, cols = tile.cols - first_col;
  if (rows <= 0 || cols <= 0) return;
  const int64_t row = tile.row + first_row, col = tile.col + first_col;
  EightCodes<Element> of_row[kChunk];
  load_rows(of_row, codes.at(row, col), codes, rows, cols);
  const PatchScales<Row> scales(job.from, tile, row, col);
  const bool scaled = Row::kInfo.has_expert_scale && job.from.expert_scale != nullptr;
  const float expert = scaled ? job.from.expert_scale[tile.expert] : 1.0f;
  Matrix out = job.to.of(tile.expert);
  const int64_t first_out =
      job.block_offsets == nullptr ? job.from.first_code_row(tile) : job.block_offsets[tile.expert];
  out.data += first_out * out.pitch;
  out.dtype = kOut;
  const bool wide = out.is_wide();
  float scale[kChunk] = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= rows) continue;
    float x[kChunk];
    decode_codes(of_row[i], x);
    if constexpr (Row::kInfo.block != 0) {
      scales.of_row(i, cols, scale);
      for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], scale[k]);
    }
    if constexpr (Row::kInfo.has_expert_scale)
      for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], expert);
    const Chunk chunk = encode(x, kOut);
    wide ? store<true>(chunk, out, {row + i, col}) : store_narrow(chunk, out, {row + i, col});
  }
}

struct DequantizeShared {
  TileFinder finder;
  ExpertTile tile;
};

template <DType kOut, class Row, class Element>
__global__ void __launch_bounds__(kQuantizeThreads, kDequantizeBlocks)
    dequantize_kernel(const __grid_constant__ DequantizeJob job) {
  auto& shared = *reinterpret_cast<DequantizeShared*>(dynamic_shared());
  if (threadIdx.x == 0) shared.finder.start(job.of);
  while (true) {
    if (threadIdx.x == 0) shared.finder.next(job.of, shared.tile);
    __syncthreads();
    if (shared.tile.expert < 0) return;
    decode_patch<kOut, Row, Element>(job, shared.tile);
    __syncthreads();
  }
}

template <class Row, class Element>
void launch_dequantize(const DequantizeJob& job, const QuantizeStream& on) {
  visit_plain(job.to.first.dtype, [&]<DType kOut>() {
    launch(dequantize_kernel<kOut, Row, Element>,
           on.grid(job.of, kDequantizeBlocks, sizeof(DequantizeShared)), job);
  });
}

}  // namespace cadre::cuda::portable
