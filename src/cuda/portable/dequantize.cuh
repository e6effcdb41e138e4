#pragma once
#include "cuda/device/small_float.h"
#include "cuda/portable/quantize_job.h"
#include "formats/list.h"

// out = (code * scale of the block) * scale of the expert, rounded to the type of out.
namespace cadre::cuda::portable {

constexpr int kDequantizeBlocks = 4;  // of an SM at once

/// Eight codes of eight lines, as they are stored.
template <class Element>
struct CodePatch {
  EightCodes<Element> lines[kChunk];
  bool columns;

  __device__ CodePatch(const Lines& codes, int64_t row, int64_t col, int rows, int cols)
      : columns(codes.columns) {
    for (int i = 0; i < kChunk; ++i)
      if (i < (columns ? cols : rows))
        lines[i] = load_codes<Element>(codes.at(row + (columns ? 0 : i), col + (columns ? i : 0)),
                                       columns ? rows : cols);
  }
  __device__ uint8_t get(int row, int col) const {
    return columns ? lines[col].get(row) : lines[row].get(col);
  }
};

/// The scale of each column of a row of a patch, which changes from row to row along K.
template <class Row>
struct PatchScales {
  using Scale = typename Row::Scale;
  static constexpr int kBlock = Row::kInfo.block == 0 ? 1 : Row::kInfo.block;
  Lines scales;
  int64_t row, col;
  bool by_row;
  float of[kChunk];

  __device__ PatchScales(const QuantizedMatrix& m, const ExpertTile& tile, int64_t r, int64_t c,
                         int cols)
      : scales(m.scales_of(tile, kBlock)),
        row(m.down ? r / kBlock : r),
        col(m.across ? c / kBlock : c),
        by_row(Row::kInfo.block != 0 && !m.down) {
    for (int k = 0; k < kChunk; ++k)
      of[k] = Row::kInfo.block == 0 ? 1.0f
              : by_row || k >= cols ? 0.0f
                                    : at(row, m.across ? col : col + k);
  }
  __device__ void seek(int i) {
    if (!by_row) return;
    const float of_row = at(row + i, col);
    for (float& scale : of) scale = of_row;
  }

 private:
  __device__ float at(int64_t r, int64_t c) const {
    return Scale::decode(*reinterpret_cast<const typename Scale::Code*>(scales.at(r, c)));
  }
};

/// A thread's eight rows and columns of a tile.
template <class Row, class Element>
__device__ void decode_patch(const DequantizeJob& job, const ExpertTile& tile) {
  const Lines codes = job.from.codes_of(tile);
  const int across = int(threadIdx.x) % kAcross, down = int(threadIdx.x) / kAcross;
  const int first_row = kChunk * (codes.columns ? across : down);
  const int first_col = kChunk * (codes.columns ? down : across);
  const int rows = job.from.rows_of(tile) - first_row, cols = tile.cols - first_col;
  if (rows <= 0 || cols <= 0) return;
  const int64_t row = tile.row + first_row, col = tile.col + first_col;
  const CodePatch<Element> patch(codes, row, col, rows, cols);
  PatchScales<Row> scales(job.from, tile, row, col, cols);
  const float expert = Row::kInfo.has_expert_scale ? job.from.expert_scale[tile.expert] : 1.0f;
  Matrix out = job.to.of(tile.expert);
  out.data += job.from.first_code_row(tile) * out.pitch;
  const bool wide = out.is_wide();
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= rows) continue;
    scales.seek(i);
    float x[kChunk];
    for (int k = 0; k < kChunk; ++k) {
      x[k] = formats::mul(Element::decode(patch.get(i, k)), scales.of[k]);
      if constexpr (Row::kInfo.has_expert_scale) x[k] = formats::mul(x[k], expert);
    }
    const Chunk chunk = encode(x, out.dtype);
    wide ? store<true>(chunk, out, {row + i, col}) : store<false>(chunk, out, {row + i, col});
  }
}

struct DequantizeShared {
  TileFinder finder;
  ExpertTile tile;
};

template <class Row, class Element>
__global__ void __launch_bounds__(kQuantizeThreads, kDequantizeBlocks)
    dequantize_kernel(const __grid_constant__ DequantizeJob job) {
  auto& shared = *reinterpret_cast<DequantizeShared*>(dynamic_shared());
  if (threadIdx.x == 0) shared.finder.start(job.of);
  for (int64_t number = blockIdx.x;; number += gridDim.x) {
    if (threadIdx.x == 0) shared.tile = shared.finder.find(job.of, number);
    __syncthreads();
    if (shared.tile.expert < 0) return;
    decode_patch<Row, Element>(job, shared.tile);
    __syncthreads();
  }
}

template <class Row, class Element>
void launch_dequantize(const DequantizeJob& job, const QuantizeStream& on) {
  launch(dequantize_kernel<Row, Element>,
         on.grid(job.of, kDequantizeBlocks, sizeof(DequantizeShared)), job);
}

}  // namespace cadre::cuda::portable
