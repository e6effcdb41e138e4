#pragma once
#include "cuda/portable/sixteens_part.cuh"

// Codes and scales of bf16 weights in square blocks of 16, by warps. Along K and along rows they
// are the same: made once, stored in each copy.
namespace cadre::cuda::portable {

/// The largest magnitude of the block that two lanes share.
__device__ inline float largest_of_square(const StagedColumn& staged) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kSixteen; i += 2) {
    uint32_t first[kChunk / 2], second[kChunk / 2];
    staged.read(i, first), staged.read(i + 1, second);
    largest = larger<DType::kBf16>(largest, largest_of_two(first, second));
  }
  largest = larger<DType::kBf16>(largest, largest >> 16);
  largest = larger<DType::kBf16>(largest, __shfl_xor_sync(~0u, largest, 1));
  return __uint_as_float(largest << 16 & formats::kMagnitudeBits);
}

template <class Codes>
__device__ void quantize_squares(const SixteensJob& job, const ColumnsPlace& at,
                                 const StagedColumn& staged) {
  const uint32_t* amax = (job.along_k.codes != nullptr ? job.along_k : job.along_rows).amax;
  const float largest = largest_of_square(staged), both[2] = {largest, largest};
  TwoScales<Codes> scales(both, ExpertFactors<Codes>(amax[at.part.expert]));
  const bool beyond = __any_sync(~0u, scales.beyond);
  const uint32_t limit = beyond ? scales.limit(0) : 0;
  const auto rows_of = [&](const SixteensCopy& copy) {
    if (copy.codes != nullptr && !copy.decoded && at.rows > 0 && at.col % kSixteen == 0)
      copy.scales[bytes_to(at.part.expert, copy.scales_expert) +
                  bytes_to(at.part.row / kSixteen, copy.scales_down) +
                  bytes_to(at.col / kSixteen, copy.scales_across)] = scales.code(0);
    return RowsOfCodes(copy, at, at.row, copy.codes != nullptr ? at.rows : 0);
  };
  const RowsOfCodes along_k = rows_of(job.along_k), along_rows = rows_of(job.along_rows);
#pragma unroll 4
  for (int i = 0; i < kSixteen; ++i) {
    uint32_t pairs[kChunk / 2];
    staged.read(i, pairs);
    if (beyond)
      for (uint32_t& pair : pairs) pair = limited_pair(pair, limit, limit);
    const uint32_t codes = nearest_codes(pairs, scales.multipliers[0]);
    const auto numbers = [&] { return scales.numbers(scales.codes); };
    along_k.store_row(i, codes, numbers), along_rows.store_row(i, codes, numbers);
  }
}

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, 3)
    quantize_squares_kernel(const __grid_constant__ SixteensJob job) {
  begin_dependent();
  store_expert_scales<Codes>(job);
  walk_columns<Parts>(job, [&](const ColumnsPlace& at, const StagedColumn& staged) {
    quantize_squares<Codes>(job, at, staged);
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
  using Codes = CodesOf<Row, Element, CodesKind{false, false}>;
  using Parts = WeightParts<kColumnsPart>;
  launch_columns<Parts>(quantize_squares_kernel<Codes, Parts>, all, on);
}

}  // namespace cadre::cuda::portable
