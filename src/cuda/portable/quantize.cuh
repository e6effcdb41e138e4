#pragma once
#include "cuda/device/magnitude.h"
#include "cuda/portable/patch.cuh"
#include "cuda/portable/quantize_job.h"
#include "cuda/portable/quantize_rows.cuh"
#include "cuda/portable/source_tile.cuh"
#include "formats/list.h"

// Codes and scales of routed rows or weights, along K, along rows, or both from one read.
//
// Persistent blocks take tiles of 128 x 128 elements, which hold whole blocks of every format. The
// source is copied to shared memory, amaxes meet there, one thread makes each scale, and then all
// threads encode. A thread takes eight rows and a chunk of eight columns. Rows that no expert owns
// are neither read nor written.
namespace cadre::cuda::portable {

constexpr int kQuantizeBlocks = 4;  // of an SM at once

template <int kBlock>
struct QuantizeShared {
  TileQueue queue;
  uint32_t blocks[TileBlocks<kBlock>::kMost];  ///< amaxes, then multipliers, as bits
  uint32_t scales[TileBlocks<kBlock>::kMost];  ///< of a decoded copy, as bits
  alignas(128) SourcePlanes source;
};

/// The amaxes of blocks that are within rows, which lie within the lanes of a warp.
template <DType kSource, int kBlock>
__device__ void amaxes_within_rows(uint32_t* amax, const SourcePlanes& source,
                                   const TileBlocks<kBlock>& blocks) {
  const Patch patch = Patch::along_row();
  const int first = blocks.of(patch.row, patch.col());
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    ColumnMagnitudes<kSource> columns;
    columns.add(read_chunk<kSource>(source, patch.place(i)));
    const uint32_t largest = largest_of_lanes<kBlock / kChunk>(columns.of_all());
    if (patch.col() % kBlock == 0) amax[first + (i << blocks.col_bits())] = largest;
  }
}

/// Those of blocks of several rows, which must be zero before.
template <DType kSource, int kBlock>
__device__ void amaxes_across_rows(uint32_t* amax, const SourcePlanes& source,
                                   const TileBlocks<kBlock>& blocks) {
  const Patch patch = Patch::along_row();
  ColumnMagnitudes<kSource> columns;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) columns.add(read_chunk<kSource>(source, patch.place(i)));
  if (blocks.across) {
    const uint32_t largest = largest_of_lanes<kBlock / kChunk>(columns.of_all());
    if (patch.col() % kBlock == 0) atomicMax(&amax[blocks.of(patch.row, patch.col())], largest);
    return;
  }
  for (int k = 0; k < kChunk; ++k)
    atomicMax(&amax[blocks.of(patch.row, patch.col() + k)], columns.of_column(k));
}

/// Those of whole lines, which were found before.
template <int kBlock>
__device__ void amaxes_of_lines(uint32_t* amax, const QuantizeCopy& copy, const ExpertTile& tile,
                                const TileBlocks<kBlock>& blocks) {
  const int i = int(threadIdx.x);
  if (i < (blocks.down ? tile.cols : tile.rows))
    amax[blocks.down ? blocks.place(0, i) : blocks.place(i, 0)] = copy.lines_of(tile)[i];
}

template <class Row, class Element>
__device__ formats::ExpertScale expert_scale(const QuantizeCopy& copy, int expert) {
  const float amax = copy.amax == nullptr ? 0 : __uint_as_float(copy.amax[expert]);
  return Row::template expert_scale<Element>(amax, copy.options);
}

/// Stores the scales of a tile's blocks, those of a decoded copy in shared memory, and leaves their
/// multipliers in place of their amaxes. Of a line that many tiles have the first stores the scale.
template <class Row, class Element>
__device__ void make_scales(QuantizeShared<kBlockOf<Row>>& shared, const QuantizeCopy& copy,
                            const ExpertTile& tile) {
  using Code = typename Row::Scale::Code;
  constexpr int kBlock = Row::kInfo.block;
  const TileBlocks<kBlockOf<Row>> blocks(copy.to);
  const Lines scales = copy.to.scales_of(tile, kBlock);
  const formats::ExpertScale expert = expert_scale<Row, Element>(copy, tile.expert);
  const int rows = blocks.block_row(copy.to.rows_of(tile) - 1) + 1;
  const int cols = blocks.block_col(tile.cols - 1) + 1;
  uint8_t* first = scales.at(copy.to.down ? tile.row / kBlock : tile.row,
                             copy.to.across ? tile.col / kBlock : tile.col);
  const int row_bits = blocks.row_bits(), col_bits = blocks.col_bits();
#pragma unroll 1
  for (int i = int(threadIdx.x); i >> (row_bits + col_bits) == 0; i += kQuantizeThreads) {
    const int row = scales.columns ? i & ((1 << row_bits) - 1) : i >> col_bits;
    const int col = scales.columns ? i >> row_bits : i & ((1 << col_bits) - 1);
    if (row >= rows || col >= cols) continue;
    const int place = blocks.place(row, col);
    uint32_t& of_block = shared.blocks[place];
    const auto scale =
        Row::template block_scale<Element>(__uint_as_float(of_block), expert, copy.options);
    of_block = __float_as_uint(scale.multiplier);
    if (copy.to.decoded) {
      shared.scales[place] = __float_as_uint(Row::Scale::decode(scale.code));
      continue;
    }
    if (kBlock == kWholeLine && (copy.to.down ? tile.row : tile.col) != 0) continue;
    const int line = scales.columns ? col : row, inside = scales.columns ? row : col;
    reinterpret_cast<Code*>(first + line * scales.pitch)[inside] = scale.code;
  }
}

/// The random bits of a thread's patch.
struct PatchBits {
  formats::StochasticBits bits;
  uint32_t expert, row, col;

  __device__ PatchBits(const QuantizeCopy& copy, const uint64_t* rng, const ExpertTile& tile,
                       Patch patch)
      : bits(copy.random),
        expert(uint32_t(tile.expert)),
        row(uint32_t(tile.row) + uint32_t(patch.row)),
        col(uint32_t(tile.col) + uint32_t(patch.col())) {
    bits.seed = rng[0], bits.offset = rng[1];
  }
  /// Of one of its eight lines: rows along K, columns along rows.
  __device__ formats::PhiloxWords of_line(uint32_t line) const {
    return bits.axis == Axis::kAlongK ? bits.draw(expert, row + line, col)
                                      : bits.draw(expert, col + line, row);
  }
};

/// Encodes row by row; column-major codes are gathered in registers.
template <DType kSource, class Row, class Element>
__device__ void encode_rows(const PatchCodes& to, const BlockFactors<Row>& multipliers,
                            const SourcePlanes& source) {
  EightCodes<Element> columns[kChunk];
  const bool by_row = multipliers.by_row();
  float of_column[kChunk];
  for (int k = 0; k < kChunk; ++k) of_column[k] = multipliers.at(0, k);
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    float x[kChunk];
    decode(read_chunk<kSource>(source, to.patch.place(i)), kSource, x);
    const float of_row = multipliers.at(i, 0);
    if (by_row)
      for (float& value : x) value = formats::mul(value, of_row);
    else
      for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], of_column[k]);
    const auto row = EightCodes<Element>::of(x);
    if (!to.columns) to.store_line(i, row);
    for (int k = 0; k < kChunk && to.columns; ++k) columns[k].push(row.get(k));
  }
  for (int k = 0; k < kChunk && to.columns; ++k) to.store_line(k, columns[k]);
}

/// The same with random bits, in lines that share a draw; codes of the other order are gathered in
/// registers. `to` takes lines of codes: PatchCodes, or PatchNumbers.
template <DType kSource, class Row, class Element>
__device__ __noinline__ void encode_stochastically(const auto& to,
                                                   const BlockFactors<Row>& multipliers,
                                                   const SourcePlanes& source,
                                                   const PatchBits& random) {
  const bool down = random.bits.axis == Axis::kAlongRows, turned = down != to.columns;
  EightCodes<Element> across[kChunk];
#pragma unroll 1
  for (int line = 0; line < kChunk; ++line) {
    const formats::PhiloxWords draw = random.of_line(uint32_t(line));
    EightCodes<Element> codes;
    for (int p = 0; p < kChunk; ++p) {
      const int i = down ? p : line, k = down ? line : p;
      const float x = read_element<kSource>(source, to.patch.row + i, to.patch.chunk, k);
      codes.put(p, Element::encode_stochastic_word(formats::mul(x, multipliers.at(i, k)),
                                                   random.bits.pick(draw, uint32_t(p))));
    }
    if (!turned) to.store_line(line, codes);
    for (int p = 0; p < kChunk && turned; ++p) across[p].push(codes.get(p));
  }
  for (int p = 0; p < kChunk && turned; ++p) to.store_line(p, across[p]);
}

/// Amaxes and scales of a tile's blocks; their multipliers are in shared memory.
template <DType kSource, class Row, class Element>
__device__ void scale_tile(QuantizeShared<kBlockOf<Row>>& shared, const QuantizeCopy& copy,
                           const ExpertTile& tile) {
  const TileBlocks<kBlockOf<Row>> blocks(copy.to);
  if constexpr (Row::kInfo.block == kWholeLine) {
    amaxes_of_lines(shared.blocks, copy, tile, blocks);
  } else if (blocks.down) {
    for (int i = int(threadIdx.x); i < blocks.kMost; i += kQuantizeThreads) shared.blocks[i] = 0;
    __syncthreads();
    amaxes_across_rows<kSource>(shared.blocks, shared.source, blocks);
  } else {
    amaxes_within_rows<kSource>(shared.blocks, shared.source, blocks);
  }
  __syncthreads();
  make_scales<Row, Element>(shared, copy, tile);
  __syncthreads();
}

/// The multipliers of a thread's patch.
template <class Row, class Element>
__device__ BlockFactors<Row> multipliers_of(const QuantizeShared<kBlockOf<Row>>& shared,
                                            const QuantizeCopy& copy, const ExpertTile& tile,
                                            Patch patch) {
  const bool one = Row::kInfo.block == 0;  // for all
  return {shared.blocks, copy.to, patch,
          one ? expert_scale<Row, Element>(copy, tile.expert).encode : 1.0f};
}

/// The numbers of a decoded copy. A function of its own, since others must not wait for its
/// registers.
template <DType kSource, class Row, class Element>
__device__ __noinline__ void decode_tile(const QuantizeJob& job, const QuantizeCopy& copy,
                                         const QuantizeShared<kBlockOf<Row>>& shared,
                                         const ExpertTile& tile) {
  const PatchNumbers<Row> to(copy.to, tile, shared.scales);
  if (to.is_empty()) return;
  const auto multipliers = multipliers_of<Row, Element>(shared, copy, tile, to.patch);
  if constexpr (Row::kInfo.takes_stochastic)
    if (copy.stochastic)
      return encode_stochastically<kSource, Row, Element>(to, multipliers, shared.source,
                                                          PatchBits(copy, job.rng, tile, to.patch));
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    float x[kChunk];
    decode(read_chunk<kSource>(shared.source, to.patch.place(i)), kSource, x);
    for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], multipliers.at(i, k));
    to.store_line(i, EightCodes<Element>::of(x));
  }
}

/// One copy of the tile that is in shared memory.
template <DType kSource, class Row, class Element>
__device__ __noinline__ void quantize_tile(const QuantizeJob& job, const QuantizeCopy& copy,
                                           QuantizeShared<kBlockOf<Row>>& shared,
                                           const ExpertTile& tile) {
  if constexpr (Row::kInfo.block != 0) scale_tile<kSource, Row, Element>(shared, copy, tile);
  if (copy.to.decoded) return decode_tile<kSource, Row, Element>(job, copy, shared, tile);
  const PatchCodes to(copy.to, tile);
  if (to.is_empty()) return;
  const auto multipliers = multipliers_of<Row, Element>(shared, copy, tile, to.patch);
  if constexpr (Row::kInfo.takes_stochastic)
    if (copy.stochastic)
      return encode_stochastically<kSource, Row, Element>(to, multipliers, shared.source,
                                                          PatchBits(copy, job.rng, tile, to.patch));
  encode_rows<kSource, Row, Element>(to, multipliers, shared.source);
}

/// All copies; a transformed one is of bf16 numbers.
template <DType kSource, class Row, class Element>
__device__ void quantize_copies(const QuantizeJob& job, QuantizeShared<kBlockOf<Row>>& shared,
                                const ExpertTile& tile) {
#pragma unroll 1
  for (int i = 0; i < job.count; ++i) {
    const QuantizeCopy& copy = job.copies[i];
    __syncthreads();
    if constexpr (Row::kInfo.takes_hadamard)
      if (copy.to.transformed) {
        transform_tile<kSource>(shared.source);
        __syncthreads();
        if constexpr (kSource != DType::kBf16) {
          quantize_tile<DType::kBf16, Row, Element>(job, copy, shared, tile);
          continue;
        }
      }
    quantize_tile<kSource, Row, Element>(job, copy, shared, tile);
  }
}

/// By a grid-stride loop.
template <class Row, class Element>
__device__ void store_expert_scales(const QuantizeJob& job, const QuantizeCopy& copy) {
#pragma unroll 1
  for (int64_t e = int64_t(blockIdx.x) * kQuantizeThreads + threadIdx.x; e < job.of.experts;
       e += int64_t(gridDim.x) * kQuantizeThreads)
    copy.to.expert_scale[e] = expert_scale<Row, Element>(copy, int(e)).scale;
}

template <DType kSource, class Row, class Element>
__global__ void __launch_bounds__(kQuantizeThreads, kQuantizeBlocks)
    quantize_kernel(const __grid_constant__ QuantizeJob job) {
  auto& shared = *reinterpret_cast<QuantizeShared<kBlockOf<Row>>*>(dynamic_shared());
  for (int i = 0; i < job.count && Row::kInfo.has_expert_scale; ++i)
    store_expert_scales<Row, Element>(job, job.copies[i]);
  walk_tiles<kSource>(job, shared, [&](const ExpertTile& tile) {
    quantize_copies<kSource, Row, Element>(job, shared, tile);
  });
}

template <class Row, class Element>
void launch_quantize(const QuantizeJob& job, const QuantizeStream& on) {
  if constexpr (kHasRowCodes<Row>)
    if (takes_row_codes<Row>(job)) return launch_quantize_rows<Row, Element>(job, on);
  using Shared = QuantizeShared<kBlockOf<Row>>;
  visit_plain(job.source.first.dtype, [&]<DType kSource>() {
    launch(quantize_kernel<kSource, Row, Element>,
           on.grid(job.of, kQuantizeBlocks, kSharedBytes<Shared, kSource>), job);
  });
}

}  // namespace cadre::cuda::portable
