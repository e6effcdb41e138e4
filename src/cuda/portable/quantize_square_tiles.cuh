#pragma once
#include "cuda/portable/quantize_tiles.cuh"

// Codes and scales of bf16 weights in square blocks as large as a tile: row by row, turned, or both
// from one read. A block takes a tile at a time, whose one amax its warps show each other, and the
// codes are made once. It is compiled for what is written, and for wide chunks and whole words
// alone.
namespace cadre::cuda::portable {

/// Eight chunks side by side in a warp, and four patches below each other, which fill sectors of
/// turned codes.
using SquarePatch = Patch<kAcross / 2>;

/// The largest magnitude of a tile, of all threads of a block. Tiles that follow each other have
/// words of their own, so that one wait a tile is enough.
struct TileMagnitude {
  uint32_t of_warp[2][kQuantizeThreads / kLanes];

  __device__ uint32_t largest(const SourcePatch& patch, int turn) {
    uint32_t(&words)[kQuantizeThreads / kLanes] = of_warp[turn];
    const uint32_t mine = __reduce_max_sync(~0u, largest_of<DType::kBf16>(patch));
    if (threadIdx.x % kLanes == 0) words[threadIdx.x / kLanes] = mine;
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (const uint32_t word : words) all = max(all, word);
    return all;
  }
};

template <class Element>
__device__ void store_codes(const CopyLines& copy, const Part& part, PatchPlace at,
                            const EightCodes<Element> (&rows)[kPatchRows]) {
  uint8_t* to = copy.codes + bytes_to(part.expert, copy.expert) +
                bytes_to(part.row + at.row, copy.pitch) + part.col + at.col;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i, to += copy.pitch)
    if (i < at.rows) *reinterpret_cast<uint64_t*>(to) = rows[i].word;
}

template <class Element>
__device__ void store_turned(const CopyLines& copy, const Part& part, PatchPlace at,
                             EightCodes<Element> (&rows)[kPatchRows]) {
  turn(rows);
  uint8_t* to = copy.codes + bytes_to(part.expert, copy.expert) +
                bytes_to(part.col + at.col, copy.pitch) + part.row + at.row;
  const int lines = at.rows > 0 ? at.cols : 0;
#pragma unroll
  for (int k = 0; k < kChunk; ++k, to += copy.pitch)
    if (k < lines) *reinterpret_cast<uint64_t*>(to) = rows[k].word;
}

/// Which copies are written, and what a kernel is compiled for.
struct SquareCopies {
  bool as_rows, turned;
};
template <class RowOfList, class ElementOfIt, SquareCopies kCopiesOfIt>
struct SquaresOf {
  using Row = RowOfList;
  using Element = ElementOfIt;
  static constexpr SquareCopies kCopies = kCopiesOfIt;
};

template <class Of>
__global__ void __launch_bounds__(kQuantizeThreads, 3)
    quantize_square_tiles_kernel(const __grid_constant__ PartsJob job) {
  begin_dependent();
  using Row = typename Of::Row;
  using Element = typename Of::Element;
  __shared__ TileMagnitude magnitude;
  const auto mine = SquarePatch::of_thread(0);
  const auto store_scale = [&](const CopyLines& copy, const Part& part, auto code) {
    if (threadIdx.x == 0)
      *reinterpret_cast<typename Row::Scale::Code*>(
          copy.scales + bytes_to(part.expert, copy.scales_expert) +
          bytes_to(part.row / kTileSide, copy.scales_down) +
          bytes_to(part.col / kTileSide, copy.scales_across)) = code;
  };
  Part part;
  int turn = 0;
  for (WeightParts<kTilePart> parts(job.of); parts.next(part); turn = 1 - turn) {
    if (part.cols <= 0) return;
    const PatchPlace at(mine, part.rows, part.cols);
    const SourcePatch patch = load_part(job, part, at);
    const auto scale =
        block_scale<Row, Element>(magnitude.largest(patch, turn), {}, job.along_k.options);
    Factors multipliers;
    for (float& of_line : multipliers.of_line) of_line = scale.multiplier;
    EightCodes<Element> rows[kPatchRows];
    encode_rows<DType::kBf16, typename Row::Scale, Element>(
        patch, multipliers, true,
        [&](int i, const EightCodes<Element>& codes) { rows[i] = codes; });
    if constexpr (Of::kCopies.as_rows) {
      store_scale(job.along_k, part, scale.code);
      store_codes(job.along_k, part, at, rows);
    }
    if constexpr (Of::kCopies.turned) {
      store_scale(job.along_rows, part, scale.code);
      store_turned(job.along_rows, part, at, rows);
    }
  }
}

/// Whether the kernel takes all copies: rows of codes, turned ones, or both by the same options.
template <class Element>
bool takes_square_tiles(const QuantizeJob& job) {
  const auto in_words = [](const Lines& to) {
    return (reinterpret_cast<uintptr_t>(to.data) | uint64_t(to.pitch | to.expert)) % 8 == 0;
  };
  const bool distinct = job.count == 1 || !job.copies[0].to.codes.columns;
  return job.of.offsets == nullptr && has_wide_rows(job) && distinct &&
         std::all_of(job.copies, job.copies + job.count, [&](const QuantizeCopy& copy) {
           const QuantizedMatrix& to = copy.to;
           const bool last = &copy == &job.copies[job.count - 1];
           return to.across && to.down && !to.decoded && in_words(to.codes) &&
                  copy.options.power_of_two == job.copies[0].options.power_of_two &&
                  (to.codes.columns ? last && job.of.rows % 8 == 0 : !last || job.count == 1);
         });
}

template <class Row, class Element>
void launch_quantize_square_tiles(const QuantizeJob& all, const QuantizeStream& on) {
  const QuantizeCopy &first = all.copies[0], &last = all.copies[all.count - 1];
  // Options are those of along_k, which one copy has in both places.
  const PartsJob job{all.of, all.source, CopyLines(first), CopyLines(last), {}};
  if (job.of.rows == 0 || job.of.cols == 0) return;
  const auto with = [&]<SquareCopies kCopies>() {
    launch_parts<WeightParts<kTilePart>>(
        quantize_square_tiles_kernel<SquaresOf<Row, Element, kCopies>>, job, on, kManyPartsBlocks);
  };
  if (!last.to.codes.columns) return with.template operator()<SquareCopies{true, false}>();
  all.count == 1 ? with.template operator()<SquareCopies{false, true}>()
                 : with.template operator()<SquareCopies{true, true}>();
}

}  // namespace cadre::cuda::portable
