#pragma once
#include "cuda/portable/expert_parts.cuh"
#include "formats/list.h"

// out = (code * scale of the block) * scale of the expert, rounded to the type of out. A thread has
// a patch of eight rows and a chunk of eight columns, in registers: nothing waits for a block.
namespace cadre::cuda::portable {

constexpr int kDequantizeBlocks = 12, kDequantizeWeightBlocks = 48;  // of an SM, at most

/// Blocks that an SM has at once.
template <class Chunks>
constexpr int kBlocksAtOnce = Chunks::kWide ? 3 : 2;

/// Which codes of a patch share a scale. That of no blocks is shared by all, and is one.
enum class Sharing { kRow, kColumn, kAll };

/// What a kernel is compiled for.
template <class RowOfList, class ElementOfIt, class PartsOfIt>
struct Decoding {
  using Row = RowOfList;
  using Element = ElementOfIt;
  using Parts = PartsOfIt;
  using Codes = EightCodes<Element>;
  using Word = typename Codes::Word;
  static constexpr int kBlock = Row::kInfo.block;
};

/// Line i of so many; beyond the last that one again, so that no load has a condition.
template <class Pointer>
__device__ Pointer line_of(Pointer first, int64_t step, int i, int count) {
  return first + min(i, count - 1) * step;
}

/// Lines of at most eight codes, all of which are asked for before one is waited for.
template <bool kWide, class Element>
__device__ void load_lines(EightCodes<Element> (&of_line)[kChunk], const uint8_t* first,
                           int64_t pitch, int2 count_and_length) {
  using Word = typename EightCodes<Element>::Word;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint8_t* line = line_of(first, pitch, i, count_and_length.x);
    if constexpr (kWide)
      of_line[i].word = *reinterpret_cast<const Word*>(line);
    else
      of_line[i] = load_codes<Element>(line, count_and_length.y);
  }
}

/// The scales of a patch, of which so many rows and columns are there.
template <Sharing kSharing, class Scale>
struct PatchScales {
  using Code = typename Scale::Code;
  static constexpr int kCount = kSharing == Sharing::kAll ? 1 : kChunk;

  Code codes[kCount] = {};

  __device__ void load(const Lines& scales, Place first, int2 size) {
    constexpr bool kDown = kSharing == Sharing::kRow;  // the patch, from one scale to the next
    const uint8_t* from = scales.at(first.row, first.column);
    const int64_t step = kDown == scales.columns ? int64_t(sizeof(Code)) : scales.pitch;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      codes[i] = *reinterpret_cast<const Code*>(line_of(from, step, i, kDown ? size.x : size.y));
  }
  __device__ float number(int i) const {
    if constexpr (Scale::kDType == DType::kE4m3)
      return decode_pair<Scale>(codes[i]).x;
    else
      return Scale::decode(codes[i]);
  }
};

/// Where the first code of a patch lies.
template <class Of>
__device__ const uint8_t* first_code(const Lines& codes, const Part& part, Place at) {
  constexpr bool kTurned = Of::Parts::kShape.turned;
  const int64_t row = part.code_row + at.row;
  const int64_t line = kTurned ? at.column : row, place = kTurned ? row : at.column;
  return codes.data + part.expert * codes.expert + line * codes.pitch +
         place / (8 / Of::Codes::kBits);
}

/// Out from a patch on.
template <class Chunks>
__device__ Matrix out_of(const DequantizeJob& job, const Part& part, Place at) {
  Matrix out = job.to.first;
  Chunks::assume(out);
  out.data += part.expert * job.to.pitch;
  out.data = address(out, {part.out_row + at.row, at.column});
  out.columns -= at.column;
  return out;
}

/// What this thread has of a part: so many rows and columns from a place on.
template <Sharing kSharing, class Of, class Chunks>
__device__ void decode_patch(const DequantizeJob& job, const Part& part, Place at, int2 size) {
  constexpr bool kTurned = Of::Parts::kShape.turned;
  using Row = typename Of::Row;
  const Matrix out = out_of<Chunks>(job, part, at);
  const bool scaled = Row::kInfo.has_expert_scale && job.from.expert_scale != nullptr;
  const float expert = scaled ? job.from.expert_scale[part.expert] : 1.0f;
  PatchScales<kSharing, typename Row::Scale> of_patch;
  if constexpr (Of::kBlock != 0) {
    const Place first{kSharing == Sharing::kRow ? at.row : at.row / Of::kBlock,
                      kSharing == Sharing::kColumn ? at.column : at.column / Of::kBlock};
    of_patch.load(job.from.scales_of(part, Of::kBlock), first, size);
  }
  typename Of::Codes codes[kChunk];
  load_lines<Chunks::kWide>(codes, first_code<Of>(job.from.codes, part, at), job.from.codes.pitch,
                            kTurned ? int2{size.y, size.x} : size);
  if constexpr (kTurned) turn(codes);
  float shared[of_patch.kCount];  // scales of more than a row
  for (int i = 0; i < of_patch.kCount && kSharing != Sharing::kRow; ++i)
    shared[i] = of_patch.number(i);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= size.x) continue;
    float x[kChunk];
    decode_codes(codes[i], x);
    if constexpr (kSharing == Sharing::kRow)
      for (float& value : x) value = formats::mul(value, of_patch.number(i));
    else if constexpr (Of::kBlock != 0)
      for (int k = 0; k < kChunk; ++k) x[k] = formats::mul(x[k], shared[k % of_patch.kCount]);
    if constexpr (Row::kInfo.has_expert_scale)
      for (float& value : x) value = formats::mul(value, expert);
    store<Chunks::kWide>(encode(x, out.dtype), out, {i, 0});
  }
}

template <class Of, class Chunks>
__device__ void decode_part(const DequantizeJob& job, const Part& part) {
  constexpr PartShape kShape = Of::Parts::kShape;
  const int row = kShape.row(), col = kShape.col();
  const int2 size{min(part.rows - row, kChunk), min(part.cols - col, kChunk)};
  if (size.x <= 0 || size.y <= 0) return;
  const Place at{part.row + row, part.col + col};
  constexpr bool kSquare = Of::Row::kInfo.takes_square;
  if (Of::kBlock == 0 || (kSquare && job.from.across && job.from.down))
    decode_patch<Sharing::kAll, Of, Chunks>(job, part, at, size);
  else if (job.from.across)
    decode_patch<Sharing::kRow, Of, Chunks>(job, part, at, size);
  else
    decode_patch<Sharing::kColumn, Of, Chunks>(job, part, at, size);
}

template <class Of, class Chunks>
__global__ void __launch_bounds__(kGridWarps* kLanes, kBlocksAtOnce<Chunks>)
    dequantize_kernel(const __grid_constant__ DequantizeJob job) {
  begin_dependent();
  Part part;
  for (typename Of::Parts parts(job); parts.next(part);) decode_part<Of, Chunks>(job, part);
}

/// Whether all lines of codes of a patch are whole words, and all chunks of out are wide.
template <class Of>
bool is_wide(const DequantizeJob& job) {
  const Lines& codes = job.from.codes;
  const auto bits = reinterpret_cast<uintptr_t>(codes.data) | uint64_t(codes.pitch | codes.expert);
  return bits % sizeof(typename Of::Word) == 0 && job.to.first.is_wide() &&
         job.to.pitch % 16 == 0 && (!codes.columns || job.of.rows % kChunk == 0);
}

template <class Of>
void launch_parts(const DequantizeJob& job, const QuantizeStream& on, int blocks) {
  const int most = std::max(on.units, 1) * blocks;
  const Grid grid = Of::Parts::grid(job, most).on(on.stream);
  if (!is_wide<Of>(job)) return launch(dequantize_kernel<Of, AnyChunks>, grid, job);
  visit_plain(job.to.first.dtype,
              [&]<DType kOut>() { launch(dequantize_kernel<Of, WideChunksOf<kOut>>, grid, job); });
}

template <class Row, class Element>
void launch_dequantize(const DequantizeJob& job, const QuantizeStream& on) {
  if (job.of.offsets != nullptr)
    launch_parts<Decoding<Row, Element, RoutedParts>>(job, on, kDequantizeBlocks);
  else if (job.from.codes.columns)
    launch_parts<Decoding<Row, Element, WeightParts<kTurnedPart>>>(job, on,
                                                                   kDequantizeWeightBlocks);
  else
    launch_parts<Decoding<Row, Element, WeightParts<kRowsPart>>>(job, on, kDequantizeWeightBlocks);
}

}  // namespace cadre::cuda::portable
