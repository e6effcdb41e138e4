#pragma once
#include "cuda/device/word.h"
#include "cuda/portable/column_patch.cuh"
#include "cuda/portable/four_draws.cuh"
#include "cuda/portable/quantize_parts.cuh"

// Codes and scales of bf16 in blocks of 16, along K, along rows or both, by warps. A warp takes 16
// rows of one expert and 256 columns at a time, and finds them by itself; a lane has all rows of
// eight columns, so that blocks along rows, and their transform, are its own. For wide chunks and
// whole words alone; quantize.cuh has a kernel for all else.
namespace cadre::cuda::portable {

constexpr PartShape kColumnsPart{1, false, kSixteen};
constexpr int kSixteensBlocks = 4;  // of an SM, at most

/// Whether a format has blocks of 16 with scales of e4m3, and one scale an expert.
template <class Row>
constexpr bool kHasSixteens = Row::kInfo.block == kSixteen&& Row::kInfo.has_expert_scale;

/// One way, and what its experts have in common.
struct SixteensCopy : CopyLines {
  const uint32_t* amax = nullptr;  ///< [E]
  float* expert_scale = nullptr;   ///< [E]
  bool transformed = false;

  SixteensCopy() = default;
  explicit SixteensCopy(const QuantizeCopy& copy)
      : CopyLines(copy),
        amax(copy.amax),
        expert_scale(copy.to.expert_scale),
        transformed(copy.to.transformed) {}
};

/// The parameters of the kernel.
struct SixteensJob {
  ExpertsRows of;
  ExpertMatrices source;
  SixteensCopy along_k, along_rows;
  const uint64_t* rng = nullptr;  ///< [2] seed and offset
  TensorRole role = TensorRole::kX;

  /// Of square copies the one or the first is along K.
  static SixteensJob from(const QuantizeJob& all) {
    SixteensJob job{all.of, all.source, {}, {}, all.rng, all.copies[0].random.role};
    for (int i = 0; i < all.count; ++i)
      (all.copies[i].to.across && i == 0 ? job.along_k : job.along_rows) =
          SixteensCopy(all.copies[i]);
    return job;
  }
};

/// Where the lane's patch lies in a part, and how many rows of it are there.
struct ColumnsPlace {
  const Part& part;
  int col, rows;

  __device__ explicit ColumnsPlace(const Part& of) : part(of), col(of.col + thread_x() * kChunk) {
    rows = col - of.col < of.cols ? of.rows : 0;
  }
  /// Of the batch, or the expert.
  __device__ int row() const { return part.first + part.row; }
};

/// The patch of this lane. Rows that are not there are zero; a chunk that is not there is the last
/// one, in whose block it may be.
__device__ inline ColumnPatch load_columns(const SixteensJob& job, const ColumnsPlace& at) {
  const Matrix& from = job.source.first;
  const int col = min(at.col, int(job.of.cols) - kChunk);
  const char* first = as_one_number(from.data + bytes_to(at.part.expert, job.source.pitch) +
                                    bytes_to(at.row(), from.pitch) + bytes_to(col, 2));
  const auto pitch = uint32_t(from.pitch);  // of 32 bits: one instruction a line
  const int rows = at.part.rows;
  ColumnPatch patch;
#pragma unroll
  for (int i = 0; i < kSixteen; ++i)
    patch.set(i, load_line(first + bytes_to(min(i, rows - 1), pitch)));
  if (rows < kSixteen)
#pragma unroll
    for (int i = 0; i < kSixteen; ++i)
      if (i >= rows) patch.set(i, {});
  return patch;
}

/// The scale of an expert, and what an amax is multiplied by.
struct ExpertFactors {
  formats::ExpertScale scale;
  float of_amax;
};

/// Those of both ways, of which an even lane finds the one and an odd lane the other.
template <class Row, class Element>
struct BothFactors {
  ExpertFactors along_k, along_rows;

  __device__ BothFactors(const SixteensJob& job, int expert) {
    const uint32_t *first = job.along_k.amax, *second = job.along_rows.amax;
    const uint32_t* amax =
        second == nullptr || (first != nullptr && threadIdx.x % 2 == 0) ? first : second;
    const auto mine = Row::template expert_scale<Element>(__uint_as_float(amax[expert]), {});
    const float of_amax = Row::template number_of_scale<Element>(1.0f, mine);
    const auto of_lane = [&](int lane) {
      return ExpertFactors{{__shfl_sync(~0u, mine.scale, lane), 0},
                           __shfl_sync(~0u, of_amax, lane)};
    };
    along_k = of_lane(0), along_rows = of_lane(1);
  }
};

/// Rows of codes that a lane stores, from that row on.
struct RowsOfCodes {
  uint8_t* to;
  uint32_t pitch;
  int rows;

  __device__ RowsOfCodes(const SixteensCopy& copy, const ColumnsPlace& at, int row, int count)
      : to(as_one_number(copy.codes + bytes_to(at.part.expert, copy.expert) +
                         bytes_to(row, copy.pitch) + at.col / 2)),
        pitch(uint32_t(copy.pitch)),
        rows(count) {}
  __device__ void store(int i, uint32_t codes) const {
    store_word_below(i, rows, to + bytes_to(i, pitch), codes);
  }
};

/// Of two lanes side by side, that of the one which makes the scale of a row.
template <class Value>
__device__ Value of_row_of_two(Value value, int row) {
  return __shfl_sync(~0u, value, (thread_x() & ~1) + row % 2);
}

/// The random bits of a lane's rows along K, or of its columns along rows.
__device__ inline FourDraws draws_of(const SixteensJob& job, const ColumnsPlace& at, Axis axis,
                                     int position, int first) {
  const formats::StochasticBits bits{job.rng[0], job.rng[1], job.role, axis};
  return {bits,
          {uint32_t(at.part.expert), uint32_t(position), uint32_t(first),
           uint32_t(job.of.experts) >> 31}};
}

/// Makes products be below seven.
__device__ inline void limit_rows(auto& scales, ColumnPatch& patch) {
#pragma unroll
  for (int i = 0; i < kSixteen; i += 2) {
    const uint32_t own = scales.limit(i / 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t limit = of_row_of_two(own, k);
      for (uint32_t& pair : patch.rows[i + k]) pair = limited_pair(pair, limit, limit);
    }
  }
}
__device__ inline void limit_columns(auto& scales, ColumnPatch& patch) {
#pragma unroll
  for (int k = 0; k < kChunk; k += 2) {
    const uint32_t first = scales.limit(k), second = scales.limit(k + 1);
#pragma unroll
    for (auto& row : patch.rows) row[k / 2] = limited_pair(row[k / 2], first, second);
  }
}

/// Codes of all rows, each of which has a multiplier.
__device__ inline void encode_along_k(const ColumnPatch& patch, const RowsOfCodes& out,
                                      auto&& multiplier) {
#pragma unroll
  for (int i = 0; i < kSixteen; ++i) {
    const float of_row = multiplier(i);
    out.store(i, nearest_codes(patch.rows[i], [&](int) { return of_row; }));
  }
}
__device__ inline void encode_along_k(const ColumnPatch& patch, const RowsOfCodes& out,
                                      auto&& multiplier, FourDraws draws) {
#pragma unroll
  for (int i = 0; i < kSixteen; ++i) {
    if (i % 4 == 0) draws.draw(uint32_t(i), 1);
    const float of_row = multiplier(i);
    const auto codes = [&]<int kOdd>() {
      return random_codes<kOdd>(
          patch.rows[i], [&](int) { return of_row; }, [&](int k) { return draws.at(i % 4, k); });
    };
    out.store(i, RandomCode::word(codes.template operator()<0>(), codes.template operator()<1>(),
                                  PairCodes::signs(patch.rows[i])));
  }
}

/// Random codes of eight rows, where each column has a multiplier and a draw.
__device__ inline void encode_along_rows(const ColumnPatch& patch, const RowsOfCodes& out,
                                         auto&& multiplier, int first, FourDraws draws) {
  uint32_t words[kChunk];
  const auto codes = [&]<int kOdd>(int i) {
    return random_codes<kOdd>(patch.rows[first + i], multiplier,
                              [&](int k) { return draws.at(k / 2, i); });
  };
  draws.draw(0, 2);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) words[i] = codes.template operator()<0>(i);
  draws.draw(1, 2);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t signs = PairCodes::signs(patch.rows[first + i]);
    out.store(first + i, RandomCode::word(words[i], codes.template operator()<1>(i), signs));
  }
}

/// Along K: a lane and the one beside it share blocks, and of every two of them each makes one
/// scale. Says whether numbers of the patch were changed.
template <class Codes>
__device__ bool quantize_along_k(const SixteensJob& job, const ColumnsPlace& at,
                                 const ExpertFactors& expert, ColumnPatch& patch) {
  const SixteensCopy& copy = job.along_k;
  const int mine = thread_x() % 2;
  const uint32_t half = mine == 0 ? 0x1044 : 0x3244;
  float amax[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t pair = patch.largest_of_rows(i);
    const uint32_t both = larger<DType::kBf16>(pair, __shfl_xor_sync(~0u, pair, 1));
    amax[i] = __uint_as_float(pick_bytes(both, 0, half) & formats::kMagnitudeBits);
  }
  EightScales<typename Codes::Row, typename Codes::Element> scales(amax, expert.scale,
                                                                   expert.of_amax);
  // A lane of a block that is beyond the last column has scales to store all the same.
  const int first = at.col / kSixteen * kSixteen;
  const int rows = first - at.part.col < at.part.cols ? at.part.rows : 0;
  uint8_t* to = as_one_number(copy.scales + bytes_to(at.part.expert, copy.scales_expert) +
                              bytes_to(at.row() + mine, copy.scales_down) +
                              bytes_to(at.col / kSixteen, copy.scales_across));
  const auto step = uint32_t(copy.scales_down);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (2 * i + mine < rows) to[bytes_to(2 * i, step)] = scales.code(i);
  const bool beyond = __any_sync(~0u, scales.beyond);
  if (beyond) limit_rows(scales, patch);
  const RowsOfCodes out(copy, at, at.row(), at.rows);
  const auto multiplier = [&](int i) { return of_row_of_two(scales.multipliers[i / 2], i); };
  if constexpr (Codes::kStochastic)
    encode_along_k(patch, out, multiplier, draws_of(job, at, Axis::kAlongK, at.col, at.part.row));
  else
    encode_along_k(patch, out, multiplier);
  return beyond;
}

/// Along rows: a lane has whole blocks.
template <class Codes>
__device__ void quantize_along_rows(const SixteensJob& job, const ColumnsPlace& at,
                                    const ExpertFactors& expert, ColumnPatch& patch) {
  const SixteensCopy& copy = job.along_rows;
  if (copy.transformed) patch.transform();
  float amax[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; k += 2) {
    const uint32_t both = patch.largest_of_columns(k / 2);
    amax[k] = __uint_as_float(both << 16 & formats::kMagnitudeBits);
    amax[k + 1] = __uint_as_float(both & 0x7fff'0000u);
  }
  EightScales<typename Codes::Row, typename Codes::Element> scales(amax, expert.scale,
                                                                   expert.of_amax);
  const int before = copy.ragged ? int(first_block(at.part.first, at.part.expert, kSixteen)) : 0;
  const int block = before + at.part.row / kSixteen;
  uint8_t* to = copy.scales + bytes_to(at.part.expert, copy.scales_expert) +
                bytes_to(block, copy.scales_down) + bytes_to(at.col, copy.scales_across);
#pragma unroll
  for (int k = 0; k < kChunk; ++k, to += copy.scales_across)
    if (at.rows > 0) *to = scales.code(k);
  if (__any_sync(~0u, scales.beyond)) limit_columns(scales, patch);
  const int row = copy.transformed ? block * kSixteen : at.row();
  const int rows = copy.transformed && at.rows > 0 ? kSixteen : at.rows;
  const RowsOfCodes out(copy, at, row, rows);
  const auto multiplier = [&](int k) { return scales.multipliers[k]; };
  if constexpr (Codes::kStochastic) {
#pragma unroll
    for (int i = 0; i < kSixteen; i += kChunk)
      encode_along_rows(patch, out, multiplier, i,
                        draws_of(job, at, Axis::kAlongRows, at.part.row + i, at.col));
  } else {
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) out.store(i, nearest_codes(patch.rows[i], multiplier));
  }
}

/// What a thread knows lies in shared memory, since a patch leaves no registers for it.
template <class Codes, class Parts>
struct SixteensThread {
  using Factors = BothFactors<typename Codes::Row, typename Codes::Element>;
  Parts parts;
  Part part;
  Factors factors;
};

/// The scales of all experts, by a grid-stride loop.
template <class Row, class Element>
__device__ void store_expert_scales(const SixteensJob& job, int thread) {
  const int number = int(blockIdx.y * gridDim.x + blockIdx.x) * kGridWarps * kLanes + thread;
  const int step = int(gridDim.x * gridDim.y) * kGridWarps * kLanes;
  for (const SixteensCopy* copy : {&job.along_k, &job.along_rows})
#pragma unroll 1
    for (int e = number; copy->codes != nullptr && e < job.of.experts; e += step)
      copy->expert_scale[e] =
          Row::template expert_scale<Element>(__uint_as_float(copy->amax[e]), {}).scale;
}

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, 2)
    quantize_sixteens_kernel(const __grid_constant__ SixteensJob job) {
  using Thread = SixteensThread<Codes, Parts>;
  begin_dependent();
  const int thread = int(threadIdx.x + kLanes * (threadIdx.y + blockDim.y * threadIdx.z));
  store_expert_scales<typename Codes::Row, typename Codes::Element>(job, thread);
  Thread& mine = reinterpret_cast<Thread*>(dynamic_shared())[thread];
  mine.parts = Parts(job.of);
  while (mine.parts.next(mine.part)) {
    if (mine.part.cols <= 0) return;
    const ColumnsPlace at(mine.part);
    ColumnPatch patch = load_columns(job, at);
    mine.factors = typename Thread::Factors(job, mine.part.expert);
    if (job.along_k.codes != nullptr &&
        quantize_along_k<Codes>(job, at, mine.factors.along_k, patch))
      patch = load_columns(job, at);
    if (job.along_rows.codes != nullptr)
      quantize_along_rows<Codes>(job, at, mine.factors.along_rows, patch);
  }
}

/// Whether kernels of such parts take all copies, which are of codes.
template <class Element>
bool takes_columns(const QuantizeJob& job, auto&& takes) {
  return has_wide_rows(job) && job.of.rows > 0 && job.of.cols > 0 &&
         std::all_of(job.copies, job.copies + job.count, [&](const QuantizeCopy& copy) {
           return takes(copy) && is_whole<Element>(copy) && !copy.to.decoded &&
                  copy.to.codes.pitch <= UINT32_MAX && copy.to.scales.pitch <= UINT32_MAX;
         });
}

/// Whether the kernel takes all copies.
template <class Element>
bool takes_sixteens(const QuantizeJob& job) {
  return takes_columns<Element>(job, [&](const QuantizeCopy& copy) {
    return copy.to.across != copy.to.down && !(copy.stochastic && job.of.offsets == nullptr);
  });
}

template <class Row, class Element>
void launch_quantize_sixteens(const QuantizeJob& all, const QuantizeStream& on) {
  const SixteensJob job = SixteensJob::from(all);
  const auto with = [&]<class Parts, bool kStochastic>() {
    using Codes = CodesOf<Row, Element, CodesKind{false, kStochastic}>;
    Grid grid = Parts::grid(job.of, std::max(on.units, 1) * kSixteensBlocks).on(on.stream);
    grid.shared_bytes = int(sizeof(SixteensThread<Codes, Parts>)) * kGridWarps * kLanes;
    launch(quantize_sixteens_kernel<Codes, Parts>, grid, job);
  };
  if (job.of.offsets == nullptr)
    with.template operator()<WeightParts<kColumnsPart>, false>();
  else if (all.copies[0].stochastic)
    with.template operator()<BatchParts<kColumnsPart>, true>();
  else
    with.template operator()<BatchParts<kColumnsPart>, false>();
}

}  // namespace cadre::cuda::portable
