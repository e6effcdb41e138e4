#pragma once
#include "cuda/portable/sixteens_codes.cuh"

// Codes and scales of bf16 weights in square blocks of 16, by warps. Along K and along rows they
// are the same: made once, stored in each copy.
namespace cadre::cuda::portable {

/// The largest magnitude of the block that two lanes share, in both halves.
__device__ inline uint32_t largest_of_square(const StagedColumn& staged) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kSixteen; i += 2) {
    uint32_t first[kChunk / 2], second[kChunk / 2];
    staged.read(i, first), staged.read(i + 1, second);
    largest = larger<DType::kBf16>(largest, largest_of_two(first, second));
  }
  largest = larger<DType::kBf16>(largest, largest >> 16);
  largest = larger<DType::kBf16>(largest, __shfl_xor_sync(~0u, largest, 1));
  return pick_bytes(largest, largest, 0x1010);
}

template <class Codes>
__device__ void quantize_squares(const SixteensJob& job, const ColumnsPlace& at,
                                 const StagedColumn& staged) {
  const bool has_along_k = job.along_k.codes != nullptr;
  const ExpertFactors expert = has_along_k ? at.part.along_k : at.part.along_rows;
  TwoScales<Codes> scales(largest_of_square(staged), expert);
  const bool beyond = __any_sync(~0u, scales.beyond);
  const uint32_t limit = beyond ? scales.limit(0, expert) : 0;
  const float2 both_multipliers = {scales.multipliers[0], scales.multipliers[0]};
  const auto rows_of = [&](const SixteensCopy& copy) {
    if (copy.codes != nullptr && !copy.decoded && at.rows > 0 && at.col % kSixteen == 0)
      copy.scales[bytes_to(at.part.expert, copy.scales_expert) +
                  bytes_to(at.part.row / kSixteen, copy.scales_down) +
                  bytes_to(at.col / kSixteen, copy.scales_across)] = scales.code(0);
    return RowsOfCodes<Codes>(copy, at, at.row, copy.codes != nullptr ? at.rows : 0);
  };
  const RowsOfCodes<Codes> along_k = rows_of(job.along_k), along_rows = rows_of(job.along_rows);
#pragma unroll 4
  for (int i = 0; i < kSixteen; ++i) {
    uint32_t pairs[kChunk / 2];
    staged.read(i, pairs);
    if (beyond)
      for (uint32_t& pair : pairs) pair = limited_pair(pair, limit, limit);
    const uint32_t codes = nearest_codes(pairs, both_multipliers);
    const auto numbers = [&] { return scales.numbers(scales.codes); };
    along_k.store_row(i, codes, numbers), along_rows.store_row(i, codes, numbers);
  }
}

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, 3)
    quantize_squares_kernel(const __grid_constant__ SixteensJob job) {
  begin_dependent();
  store_expert_scales<Codes>(job);
  walk_columns<Codes, Parts>(job, [&](const ColumnsPart& part, const StagedColumn& staged) {
    quantize_squares<Codes>(job, ColumnsPlace(part), staged);
  });
}

/// Whether the kernel takes all copies.
template <class Element>
bool takes_squares(const QuantizeJob& job) {
  return job.of.offsets == nullptr && takes_columns<Element>(job, [](const QuantizeCopy& copy) {
           return copy.to.across && copy.to.down && !copy.stochastic;
         });
}

template <class Row, class Element>
void launch_quantize_squares(const QuantizeJob& all, const QuantizeStream& on) {
  using Codes = CodesOf<Row, Element, CodesKind{true, false}>;
  using Parts = WeightParts<kColumnsPart>;
  launch_columns<Parts>(quantize_squares_kernel<Codes, Parts>, all, on);
}

}  // namespace cadre::cuda::portable
