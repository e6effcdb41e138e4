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
  using Word = typename EightCodes<Element>::Word;
  EightCodes<Element> of_line[kChunk];
  const int count = lines.columns ? cols : rows, length = lines.columns ? rows : cols;
  const auto bits = reinterpret_cast<uintptr_t>(first) | uint64_t(lines.pitch);
  // Whole lines are all asked for before one of them is waited for.
  if (bits % sizeof(Word) == 0 && length >= kChunk) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < count) of_line[i].word = *reinterpret_cast<const Word*>(first + i * lines.pitch);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < count) of_line[i] = load_codes<Element>(first + i * lines.pitch, length);
  }
  for (int i = 0; i < kChunk; ++i) {
    if (!lines.columns) of_row[i] = of_line[i];
    for (int k = 0; k < kChunk && lines.columns; ++k) of_row[i].push(of_line[k].get(i));
  }
}

/// The scales of a patch, of which so many rows and columns are there: one a row, or one a column.
template <class Row>
struct PatchScales {
  float of_line[kChunk] = {};
  bool by_row = true;

  __device__ PatchScales(const QuantizedMatrix& m, const ExpertTile& tile, Place at,
                         int2 rows_and_cols) {
    constexpr int kBlock = Row::kInfo.block;
    using Code = typename Row::Scale::Code;
    if constexpr (kBlock != 0) {
      const Lines scales = m.scales_of(tile, kBlock);
      const uint8_t* first =
          scales.at(m.down ? at.row / kBlock : at.row, m.across ? at.column / kBlock : at.column);
      by_row = m.across;
      const int64_t along = by_row == scales.columns ? sizeof(Code) : scales.pitch;
      const int64_t step = m.across && m.down ? 0 : along;
      const int count = by_row ? rows_and_cols.x : rows_and_cols.y;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (i < count)
          of_line[i] = Row::Scale::decode(*reinterpret_cast<const Code*>(first + i * step));
    }
  }
};

/// A thread's eight rows and columns of a tile.
template <DType kOut, class Row, class Element>
__device__ void decode_patch(const DequantizeJob& job, const ExpertTile& tile, int column) {
  const Lines codes = job.from.codes_of(tile);
  const int inner = int(threadIdx.x) % kAcross, outer = int(threadIdx.x) / kAcross;
  const int first_row = kChunk * (codes.columns ? inner : outer);
  const int first_col = column + kChunk * (codes.columns ? outer : inner);
  const int rows = job.from.rows_of(tile) - first_row, cols = tile.cols - first_col;
  if (rows <= 0 || cols <= 0) return;
  const int64_t row = tile.row + first_row, col = tile.col + first_col;
  EightCodes<Element> of_row[kChunk];
  load_rows(of_row, codes.at(row, col), codes, rows, cols);
  const PatchScales<Row> scales(job.from, tile, {row, col}, {rows, cols});
  const bool scaled = Row::kInfo.has_expert_scale && job.from.expert_scale != nullptr;
  const float expert = scaled ? job.from.expert_scale[tile.expert] : 1.0f;
  Matrix out = job.to.of(tile.expert);
  const int64_t first_out =
      job.block_offsets == nullptr ? job.from.first_code_row(tile) : job.block_offsets[tile.expert];
  out.data += first_out * out.pitch;
  out.dtype = kOut;
  const bool wide = out.is_wide();
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= rows) continue;
    float x[kChunk];
    decode_codes(of_row[i], x);
    if constexpr (Row::kInfo.block != 0)
      for (int k = 0; k < kChunk; ++k)
        x[k] = formats::mul(x[k], scales.by_row ? scales.of_line[i] : scales.of_line[k]);
    if constexpr (Row::kInfo.has_expert_scale)
      for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], expert);
    const Chunk chunk = encode(x, kOut);
    wide ? store<true>(chunk, out, {row + i, col}) : store_narrow(chunk, out, {row + i, col});
  }
}

template <DType kOut, class Row, class Element>
__global__ void __launch_bounds__(kQuantizeThreads, kDequantizeBlocks)
    dequantize_kernel(const __grid_constant__ DequantizeJob job) {
  walk_tiles(job.of, *reinterpret_cast<TileQueue*>(dynamic_shared()),
             [&](const ExpertTile& tile, int column) {
               decode_patch<kOut, Row, Element>(job, tile, column);
             });
}

template <class Row, class Element>
void launch_dequantize(const DequantizeJob& job, const QuantizeStream& on) {
  visit_plain(job.to.first.dtype, [&]<DType kOut>() {
    on.launch_strips(dequantize_kernel<kOut, Row, Element>, {kDequantizeBlocks, sizeof(TileQueue)},
                     job);
  });
}

}  // namespace cadre::cuda::portable
