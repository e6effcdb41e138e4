#pragma once
#include "cuda/portable/sixteens_part.cuh"
#include "formats/hadamard.h"

// Codes and scales of bf16 in blocks of 16, along K, along rows or both, by warps. A lane has all
// rows of its columns, so that blocks along rows, and their transform, are its own.
namespace cadre::cuda::portable {

/// Draws of two lines at eight positions.
class TwoDraws {
 public:
  __device__ TwoDraws(const formats::StochasticBits& bits, int expert, int position)
      : lines_(bits.lines(uint32_t(expert), uint32_t(position))) {}
  /// Of an even line and the next one.
  __device__ void draw(int line) { lines_.draw({uint32_t(line), uint32_t(line) | 1}, draws_); }
  /// What line i of the two has at a position, as StochasticBits::pick.
  __device__ RandomHalf at(int i, int position) const {
    return {draws_[i].word[position / 2], position % 2};
  }

 private:
  formats::PhiloxLines lines_;
  formats::PhiloxWords draws_[2];
};

/// Where codes are not random.
struct NoDraws {};
template <class Codes>
using OfDraws = std::conditional_t<Codes::kStochastic, TwoDraws, NoDraws>;

/// Those of a lane at a position and the next seven.
template <class Codes>
__device__ OfDraws<Codes> draws_of(const SixteensJob& job, const ColumnsPlace& at, Axis axis,
                                   int position) {
  if constexpr (Codes::kStochastic)
    return {{job.rng[0], job.rng[1], job.role, axis}, at.part.expert, position};
  else
    return {};
}

/// Of two lanes side by side, that of the one which makes the scale of a row.
template <class Value>
__device__ Value of_row_of_two(Value value, int row) {
  return __shfl_sync(~0u, value, (thread_x() & ~1) + row % 2);
}

/// Four rows along K: a lane and the one beside it share blocks, and of every two of them each
/// makes one scale.
struct FourRows {
  uint32_t pairs[4][kChunk / 2];

  __device__ FourRows(const StagedColumn& staged, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) staged.read(first + i, pairs[i]);
  }
  template <class Codes>
  __device__ TwoScales<Codes> scales(const ExpertFactors<Codes>& expert) const {
    const uint32_t half = thread_x() % 2 == 0 ? 0x1044 : 0x3244;
    float amax[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t two = largest_of_two(pairs[2 * k], pairs[2 * k + 1]);
      const uint32_t both = larger<DType::kBf16>(two, __shfl_xor_sync(~0u, two, 1));
      amax[k] = __uint_as_float(pick_bytes(both, 0, half) & formats::kMagnitudeBits);
    }
    return {amax, expert};
  }
  /// Makes products be below seven.
  __device__ void limit(auto& scales) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t own = scales.limit(i / 2);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t limit = of_row_of_two(own, k);
        for (uint32_t& pair : pairs[i + k]) pair = limited_pair(pair, limit, limit);
      }
    }
  }
};

template <class Codes>
__device__ void quantize_along_k(const SixteensJob& job, const ColumnsPlace& at,
                                 const StagedColumn& staged) {
  const SixteensCopy& copy = job.along_k;
  const ExpertFactors<Codes> expert(copy.amax[at.part.expert]);
  const int mine = thread_x() % 2;
  // A lane of a block that is beyond the last column has scales to store all the same.
  const int first = at.col / kSixteen * kSixteen;
  const int rows = first - at.part.col < at.part.cols && !copy.decoded ? at.part.rows : 0;
  uint8_t* to = as_one_number(copy.scales + bytes_to(at.part.expert, copy.scales_expert) +
                              bytes_to(at.row + mine, copy.scales_down) +
                              bytes_to(at.col / kSixteen, copy.scales_across));
  const auto step = uint32_t(copy.scales_down);
  const RowsOfCodes out(copy, at, at.row, at.rows);
  OfDraws<Codes> draws = draws_of<Codes>(job, at, Axis::kAlongK, at.col);
#pragma unroll 1
  for (int four = 0; four < kSixteen; four += 4) {
    FourRows of(staged, four);
    auto scales = of.template scales<Codes>(expert);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (const int i = four + 2 * k; i + mine < rows) to[short_way_to(i, step)] = scales.code(k);
    if (__any_sync(~0u, scales.beyond)) of.limit(scales);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float multiplier = of_row_of_two(scales.multipliers[i / 2], i);
      const auto numbers = [&] {
        return scales.numbers(of_row_of_two(uint32_t(scales.code(i / 2)), i) * 0x0101u);
      };
      if constexpr (Codes::kStochastic) {
        if (i % 2 == 0) draws.draw(at.part.row + four + i);
        const auto random = [&](int k) { return draws.at(i % 2, k); };
        out.store_row(four + i, random_codes(of.pairs[i], multiplier, random), numbers);
      } else {
        out.store_row(four + i, nearest_codes(of.pairs[i], multiplier), numbers);
      }
    }
  }
}

/// The Hadamard transform of two columns. Of the last sums, a quarter is rounded: the same, but for
/// sums that are infinite, whose expert has the codes of an infinite number all the same.
__device__ inline void transform_pair(uint32_t (&rows)[kSixteen]) {
  using formats::Hadamard16;
  constexpr int kHalf = Hadamard16::kPoints / 2;
  float v[2][Hadamard16::kPoints];
#pragma unroll
  for (int i = 0; i < Hadamard16::kPoints; ++i) {
    const float2 both = pair_of(DType::kBf16, rows[i]);
    v[0][i] = both.x, v[1][i] = both.y;
  }
#pragma unroll
  for (auto& column : v) {
    Hadamard16::sign(column);
    Hadamard16::add_pairs<kHalf>(column);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float a = column[i], b = formats::mul(column[i + kHalf], 0.25f);
      column[i] = formats::fma(a, 0.25f, b);
      column[i + kHalf] = formats::fma(a, 0.25f, -b);
    }
  }
#pragma unroll
  for (int i = 0; i < Hadamard16::kPoints; ++i)
    rows[i] = bits_of_pair(DType::kBf16, v[0][i], v[1][i]);
}

template <class Codes>
__device__ TwoScales<Codes> scales_of_pair(const uint32_t (&rows)[kSixteen],
                                           const ExpertFactors<Codes>& expert) {
  uint32_t largest = rows[0];
#pragma unroll
  for (int i = 1; i < kSixteen; ++i) largest = larger<DType::kBf16>(largest, rows[i]);
  const float amax[2] = {__uint_as_float(largest << 16 & formats::kMagnitudeBits),
                         __uint_as_float(largest & 0x7fff'0000u)};
  return {amax, expert};
}

/// Words of rows, where the codes of one pair of columns go, and what line the first column is.
struct CodeWords {
  int pair, line;
  uint32_t (&words)[kSixteen];
};

/// Adds the codes of two columns; each half of the rows has draws.
template <class Codes>
__device__ void add_codes(const uint32_t (&rows)[kSixteen], float2 multipliers,
                          OfDraws<Codes> (&draws)[2], const CodeWords& to) {
  const uint32_t place = 0x3210u + (uint32_t(4 - to.pair) << 4 * to.pair);
#pragma unroll
  for (int i = 0; i < kSixteen; ++i) {
    uint32_t codes;
    if constexpr (Codes::kStochastic) {
      TwoDraws& of = draws[i / kChunk];
      if (i % kChunk == 0) of.draw(to.line);
      codes = random_pair(rows[i], multipliers, [&](int k) { return of.at(k, i % kChunk); });
    } else {
      codes = nearest_pair(rows[i], multipliers);
    }
    to.words[i] = pick_bytes(to.words[i], codes, place);
  }
}

/// The codes of a lane's rows, and which block of the copy they are.
struct BlockCodes {
  int block;
  const uint32_t (&words)[kSixteen];
};

/// Stores them, or their numbers: the scales of the columns lie where their first row did.
__device__ inline void store_rows(const SixteensCopy& copy, const ColumnsPlace& at,
                                  const StagedColumn& staged, const BlockCodes& codes) {
  const int rows = copy.transformed && at.rows > 0 ? kSixteen : at.rows;
  if (copy.decoded) {
    const int first = copy.transformed ? copy.block_offsets[at.part.expert] + at.part.row : at.row;
    const RowsOfCodes out(copy, at, first, rows);
    PairScales scales;
    staged.read(0, scales);
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) out.store_numbers(i, codes.words[i], scales);
  } else {
    const RowsOfCodes out(copy, at, copy.transformed ? codes.block * kSixteen : at.row, rows);
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) out.store(i, codes.words[i]);
  }
}

/// Codes and scales of two columns of this lane at a time. Eight lanes beside each other begin with
/// other columns than the next eight, since their words lie in the same banks.
template <class Codes>
__device__ void quantize_along_rows(const SixteensJob& job, const ColumnsPlace& at,
                                    const StagedColumn& staged) {
  const SixteensCopy& copy = job.along_rows;
  const ExpertFactors<Codes> expert(copy.amax[at.part.expert]);
  const int before = copy.ragged ? int(first_block(at.part.first, at.part.expert, kSixteen)) : 0;
  const int block = before + at.part.row / kSixteen;
  uint8_t* to =
      as_one_number(copy.scales + bytes_to(at.part.expert, copy.scales_expert) +
                    bytes_to(block, copy.scales_down) + bytes_to(at.col, copy.scales_across));
  OfDraws<Codes> draws[2] = {draws_of<Codes>(job, at, Axis::kAlongRows, at.part.row),
                             draws_of<Codes>(job, at, Axis::kAlongRows, at.part.row + kChunk)};
  const auto across = uint32_t(copy.scales_across);
  uint32_t words[kSixteen] = {};
#pragma unroll 1
  for (int number = 0; number < kChunk / 2; ++number) {
    const int pair = (number + thread_x() / 8) % 4;
    uint32_t rows[kSixteen];
    staged.read_pair(pair, rows);
    if (copy.transformed) transform_pair(rows);
    auto scales = scales_of_pair<Codes>(rows, expert);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (at.rows > 0 && !copy.decoded) to[short_way_to(2 * pair + k, across)] = scales.code(k);
    if (copy.decoded) staged.keep(pair, scales.numbers(scales.codes));
    if (__any_sync(~0u, scales.beyond)) {
      const uint32_t first = scales.limit(0), second = scales.limit(1);
#pragma unroll
      for (uint32_t& row : rows) row = limited_pair(row, first, second);
    }
    add_codes<Codes>(rows, {scales.multipliers[0], scales.multipliers[1]}, draws,
                     {pair, at.col + 2 * pair, words});
  }
  store_rows(copy, at, staged, {block, words});
}

/// Blocks that an SM has at once, as many as registers allow.
template <class Codes>
constexpr int kSixteensAtOnce = Codes::kStochastic ? 2 : 3;

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, kSixteensAtOnce<Codes>)
    quantize_sixteens_kernel(const __grid_constant__ SixteensJob job) {
  begin_dependent();
  store_expert_scales<Codes>(job);
  walk_columns<Parts>(job, [&](const ColumnsPlace& at, const StagedColumn& staged) {
    if (job.along_k.codes != nullptr) quantize_along_k<Codes>(job, at, staged);
    if (job.along_rows.codes != nullptr) quantize_along_rows<Codes>(job, at, staged);
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
  const auto with = [&]<class Parts, bool kStochastic>() {
    using Codes = CodesOf<Row, Element, CodesKind{false, kStochastic}>;
    launch_columns<Parts>(quantize_sixteens_kernel<Codes, Parts>, all, on);
  };
  if (all.of.offsets == nullptr)
    with.template operator()<WeightParts<kColumnsPart>, false>();
  else if (all.copies[0].stochastic)
    with.template operator()<BatchParts<kColumnsPart>, true>();
  else
    with.template operator()<BatchParts<kColumnsPart>, false>();
}

}  // namespace cadre::cuda::portable
