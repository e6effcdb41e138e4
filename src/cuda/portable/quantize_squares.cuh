#pragma once
#include "cuda/portable/quantize_sixteens.cuh"

// Codes and scales of bf16 weights in square blocks of 16, by warps as those of
// quantize_sixteens.cuh. Along K and along rows they are the same: made once, stored in each copy.
namespace cadre::cuda::portable {

/// The expert's factors, and the scale of the block that two lanes share.
template <class Codes>
class SquareScale {
  using Row = typename Codes::Row;
  using Element = typename Codes::Element;

 public:
  float multiplier;
  uint8_t code;
  uint32_t limit;  ///< as of EightScales, or none where no product is seven or more

  __device__ SquareScale(const formats::ExpertScale& expert, const ColumnPatch& patch) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      largest = larger<DType::kBf16>(largest, patch.largest_of_rows(i));
    largest = larger<DType::kBf16>(largest, largest >> 16);
    largest = larger<DType::kBf16>(largest, __shfl_xor_sync(~0u, largest, 1)) & 0x7fff;
    const float amax = __uint_as_float(largest << 16);
    const auto scale = block_scale<Row, Element>(__float_as_uint(amax), expert, {});
    code = scale.code, multiplier = scale.multiplier;
    const bool is_nan = code == Row::Scale::kNanCode;
    if (is_nan) multiplier = 1.0f;
    limit = is_nan ? ~0u << 16 : limit_of(multiplier);
    beyond_ = is_nan || formats::mul(amax, multiplier) >= 7.0f;
  }
  /// Makes products be below seven.
  __device__ void limit_products(ColumnPatch& patch) const {
    if (!__any_sync(~0u, beyond_)) return;
#pragma unroll
    for (auto& row : patch.rows)
      for (uint32_t& pair : row) pair = limited_pair(pair, limit, limit);
  }

 private:
  bool beyond_;
};

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, 2)
    quantize_squares_kernel(const __grid_constant__ SixteensJob job) {
  begin_dependent();
  const int thread = int(threadIdx.x + kLanes * (threadIdx.y + blockDim.y * threadIdx.z));
  store_expert_scales<typename Codes::Row, typename Codes::Element>(job, thread);
  const uint32_t* amax = (job.along_k.codes != nullptr ? job.along_k : job.along_rows).amax;
  Part part;
  formats::ExpertScale expert;
  int has_factors = -1;  // of that expert
  for (Parts parts(job.of); parts.next(part);) {
    if (part.cols <= 0) return;
    const ColumnsPlace at(part);
    ColumnPatch patch = load_columns(job, at);
    if (part.expert != has_factors)
      expert = Codes::Row::template expert_scale<typename Codes::Element>(
          __uint_as_float(amax[part.expert]), {});
    has_factors = part.expert;
    const SquareScale<Codes> scale(expert, patch);
    scale.limit_products(patch);
    for (const SixteensCopy* copy : {&job.along_k, &job.along_rows})
      if (copy->codes != nullptr && at.rows > 0 && at.col % kSixteen == 0)
        copy->scales[bytes_to(part.expert, copy->scales_expert) +
                     bytes_to(part.row / kSixteen, copy->scales_down) +
                     bytes_to(at.col / kSixteen, copy->scales_across)] = scale.code;
    const auto rows_of = [&](const SixteensCopy& copy) {
      return RowsOfCodes(copy, at, at.row(), copy.codes != nullptr ? at.rows : 0);
    };
    const RowsOfCodes along_k = rows_of(job.along_k), along_rows = rows_of(job.along_rows);
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) {
      const uint32_t codes = nearest_codes(patch.rows[i], [&](int) { return scale.multiplier; });
      along_k.store(i, codes), along_rows.store(i, codes);
    }
  }
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
  using Parts = WeightParts<kColumnsPart>;
  const SixteensJob job = SixteensJob::from(all);
  launch(quantize_squares_kernel<CodesOf<Row, Element, CodesKind{false, false}>, Parts>,
         Parts::grid(job.of, std::max(on.units, 1) * kSixteensBlocks).on(on.stream), job);
}

}  // namespace cadre::cuda::portable
