#pragma once
#include "cuda/portable/sixteens_codes.cuh"
#include "formats/hadamard.h"

// Codes and scales of bf16 in blocks of 16, along K, along rows or both, by warps. A lane has all
// rows of its columns, so that blocks along rows, and their transform, are its own.
namespace cadre::cuda::portable {

/// Draws of two lines at eight positions.
class TwoDraws {
 public:
  __device__ TwoDraws(const formats::StochasticBits& bits, int expert, int position)
      : lines_(bits.lines(uint32_t(expert), uint32_t(position))),
        rest_(__shfl_sync(~0u, RandomHalf::kRest, 0)) {}
  /// Of a line and another one.
  __device__ void draw(int line, int other) {
    lines_.draw({uint32_t(line), uint32_t(other)}, draws_);
  }
  /// What line i of the two has at a position, as StochasticBits::pick.
  __device__ RandomHalf at(int i, int position) const {
    return {draws_[i].word[position / 2], position % 2, rest_};
  }

 private:
  formats::PhiloxLines lines_;
  formats::PhiloxWords draws_[2];
  uint32_t rest_;  ///< shown by a shuffle, so that no instruction has a number of its own for it
};

/// Where codes are not random.
struct NoDraws {};
template <class Codes>
using OfDraws = std::conditional_t<Codes::kStochastic, TwoDraws, NoDraws>;

/// Those of a lane at a position and the next seven.
template <class Codes>
__device__ OfDraws<Codes> draws_of(const SixteensJob& job, const Part& part, Axis axis,
                                   int position) {
  if constexpr (Codes::kStochastic)
    return {{job.rng[0], job.rng[1], job.role, axis}, part.expert, position};
  else
    return {};
}

/// Two rows along K: of every four, a lane and the one beside it have two each, and whole blocks.
struct TwoRows {
  static constexpr int kStep = 2;  ///< from row to row

  uint32_t pairs[2][kSixteen / 2];

  __device__ TwoRows(const StagedColumn& staged, int first) {
#pragma unroll
    for (int k = 0; k < 2; ++k) staged.read_block(first + kStep * k, pairs[k]);
  }
  /// Makes products be below seven.
  __device__ void limit(auto& scales, const ExpertFactors& expert) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t limit = scales.limit(k, expert);
#pragma unroll
      for (uint32_t& pair : pairs[k]) pair = limited_pair(pair, limit, limit);
    }
  }
  /// The codes of a half of one row.
  template <class Codes>
  __device__ uint32_t codes(int k, int half, float multiplier,
                            const OfDraws<Codes> (&draws)[2]) const {
    const uint32_t* first = pairs[k] + half * kChunk / 2;
    const uint32_t four[kChunk / 2] = {first[0], first[1], first[2], first[3]};
    const float2 two = {multiplier, multiplier};
    if constexpr (Codes::kStochastic)
      return random_codes(four, two, [&](int i) { return draws[half].at(k, i); });
    else
      return nearest_codes(four, two);
  }
};

/// Where the codes of blocks go: of both halves, of which the last may not be there.
template <class Codes>
struct BlocksOfCodes {
  RowsOfCodes<Codes> first, last;

  __device__ BlocksOfCodes(const SixteensCopy& copy, const ColumnsPart& part, int mine)
      : first(copy, ColumnsPlace(part, thread_x() & ~1), part.first + part.row + mine,
              ColumnsPlace(part, thread_x() & ~1).rows - mine),
        last(first.next(ColumnsPlace(part, thread_x() | 1).rows - mine)) {}
  /// Two rows from that one on. Which way is asked once, since rows of either are stored together.
  __device__ void store(int row, const uint2 (&codes)[2], const TwoScales<Codes>& scales) const {
    constexpr int kStep = TwoRows::kStep;
    if (!is_decoded<Codes>(first.copy) && first.copy.wide_codes) {
#pragma unroll
      for (int k = 0; k < 2; ++k) first.store_block(row + kStep * k, codes[k]);
      return;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto numbers = [&] { return scales.numbers(uint32_t(scales.code(k)) * 0x0101u); };
      first.store_row(row + kStep * k, codes[k].x, numbers);
      last.store_row(row + kStep * k, codes[k].y, numbers);
    }
  }
};

template <class Codes>
__device__ void quantize_along_k(const SixteensJob& job, const ColumnsPart& part,
                                 const StagedColumn& staged) {
  const SixteensCopy& copy = job.along_k;
  const ExpertFactors expert = part.along_k;
  const int mine = thread_x() % 2;
  const ColumnsPlace block(part, thread_x() - mine);
  const int rows = is_decoded<Codes>(copy) ? 0 : block.rows - mine;
  uint8_t* to = as_one_number(copy.scales + bytes_to(part.expert, copy.scales_expert) +
                              bytes_to(block.row + mine, copy.scales_down) +
                              bytes_to(block.col / kSixteen, copy.scales_across));
  const auto step = uint32_t(copy.scales_down);
  const BlocksOfCodes<Codes> out(copy, part, mine);
  OfDraws<Codes> draws[2] = {draws_of<Codes>(job, part, Axis::kAlongK, block.col),
                             draws_of<Codes>(job, part, Axis::kAlongK, block.col + kChunk)};
#pragma unroll 1
  for (int four = 0; four < kSixteen; four += 2 * TwoRows::kStep) {
    TwoRows of(staged, four + mine);
    TwoScales<Codes> scales(largest_of_two(of.pairs[0], of.pairs[1]), expert);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (const int i = four + TwoRows::kStep * k; i < rows)
        to[short_way_to(i, step)] = scales.code(k);
    if (__any_sync(~0u, scales.beyond)) of.limit(scales, expert);
    if constexpr (Codes::kStochastic)
      for (TwoDraws& half : draws) {
        const int line = part.row + four + mine;
        half.draw(line, line + TwoRows::kStep);
      }
    uint2 codes[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      codes[k] = {of.codes<Codes>(k, 0, scales.multipliers[k], draws),
                  of.codes<Codes>(k, 1, scales.multipliers[k], draws)};
    out.store(four, codes, scales);
  }
  __syncwarp();  // for who writes over what another lane has read
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

/// The largest magnitudes of two columns, as halves with any sign.
__device__ inline uint32_t largest_of_pair(const uint32_t (&rows)[kSixteen]) {
  uint32_t largest = rows[0];
#pragma unroll
  for (int i = 1; i < kSixteen; ++i) largest = larger<DType::kBf16>(largest, rows[i]);
  return largest;
}

/// Where words of a pair of columns are kept until all have been read: the codes of four rows each,
/// then the scales.
constexpr int kCodesOfRows = 4, kKeptScales = kSixteen / kCodesOfRows;

/// Makes the codes of two columns, of which the first is that line. Half of the rows share draws.
template <class Codes>
__device__ void keep_codes(const uint32_t (&rows)[kSixteen], float2 multipliers,
                           OfDraws<Codes> (&draws)[2], int line, auto&& keep) {
#pragma unroll
  for (int i = 0; i < kSixteen; i += kCodesOfRows) {
    const uint32_t four[kCodesOfRows] = {rows[i], rows[i + 1], rows[i + 2], rows[i + 3]};
    if constexpr (Codes::kStochastic) {
      TwoDraws& of = draws[i / kChunk];
      if (i % kChunk == 0) of.draw(line, line | 1);
      const auto random = [&](int k) { return of.at(k % 2, (i + k / 2) % kChunk); };
      keep(i / kCodesOfRows, random_codes(four, multipliers, random));
    } else {
      keep(i / kCodesOfRows, nearest_codes(four, multipliers));
    }
  }
}

/// Stores the scales of this lane's columns, which were kept as pairs of codes.
__device__ inline void store_scales(const SixteensCopy& copy, const ColumnsPlace& at,
                                    const StagedColumn& staged, int block) {
  if (at.rows <= 0) return;
  uint8_t* to = copy.scales + bytes_to(at.part.expert, copy.scales_expert) +
                bytes_to(block, copy.scales_down) + bytes_to(at.col, copy.scales_across);
  PairScales pairs;
  staged.read(kKeptScales, pairs);
  const uint2 codes = {pick_bytes(pairs[0], pairs[1], 0x5410),
                       pick_bytes(pairs[2], pairs[3], 0x5410)};
  if (copy.wide_scales) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll 1
  for (uint32_t k = 0; k < kChunk; ++k, to += copy.scales_across)
    *to = uint8_t(pick_bytes(codes.x, codes.y, k));
}

/// Calls store(row, codes) with all rows of codes that were kept by pairs of columns.
__device__ inline void turn_kept(const StagedColumn& staged, auto&& store) {
#pragma unroll
  for (int i = 0; i < kSixteen; i += kCodesOfRows) {
    uint32_t codes[kCodesOfRows];
    staged.read(i / kCodesOfRows, codes);
    turn_bytes(codes);
#pragma unroll
    for (int k = 0; k < kCodesOfRows; ++k) store(i + k, codes[k]);
  }
}

/// Stores what was kept: codes and scales, or their numbers.
template <class Codes>
__device__ void store_kept(const SixteensCopy& copy, const ColumnsPlace& at,
                           const StagedColumn& staged) {
  const Part& part = at.part;
  const int rows = copy.transformed && at.rows > 0 ? kSixteen : at.rows;
  if (is_decoded<Codes>(copy)) {
    const int first = copy.transformed ? copy.block_offsets[part.expert] + part.row : at.row;
    const RowsOfCodes<Codes> out(copy, at, first, rows);
    PairScales scales;
    staged.read(kKeptScales, scales);
    turn_kept(staged, [&](int i, uint32_t codes) { out.store_numbers(i, codes, scales); });
  } else {
    const int before = copy.ragged ? int(first_block(part.first, part.expert, kSixteen)) : 0;
    const int block = before + part.row / kSixteen;
    store_scales(copy, at, staged, block);
    const RowsOfCodes<Codes> out(copy, at, copy.transformed ? block * kSixteen : at.row, rows);
    turn_kept(staged, [&](int i, uint32_t codes) { out.store(i, codes); });
  }
}

/// Codes and scales of two columns of this lane at a time. Eight lanes beside each other begin with
/// other columns than the next eight, since their words lie in the same banks.
template <class Codes>
__device__ void quantize_along_rows(const SixteensJob& job, const ColumnsPart& part,
                                    const StagedColumn& staged) {
  const SixteensCopy& copy = job.along_rows;
  const ExpertFactors expert = part.along_rows;
  const int col = ColumnsPlace(part).col;
  OfDraws<Codes> draws[2] = {draws_of<Codes>(job, part, Axis::kAlongRows, part.row),
                             draws_of<Codes>(job, part, Axis::kAlongRows, part.row + kChunk)};
#pragma unroll 1
  for (int number = 0; number < kChunk / 2; ++number) {
    const int pair = int((uint32_t(number) + uint32_t(thread_x()) / 8) % 4);
    uint32_t rows[kSixteen];
    staged.read_pair(pair, rows);
    if (copy.transformed) transform_pair(rows);
    TwoScales<Codes> scales(largest_of_pair(rows), expert);
    staged.keep(kKeptScales, pair,
                is_decoded<Codes>(copy) ? scales.numbers(scales.codes) : scales.codes);
    if (__any_sync(~0u, scales.beyond)) {
      const uint32_t first = scales.limit(0, expert), second = scales.limit(1, expert);
#pragma unroll
      for (uint32_t& row : rows) row = limited_pair(row, first, second);
    }
    keep_codes<Codes>(rows, {scales.multipliers[0], scales.multipliers[1]}, draws, col + 2 * pair,
                      [&](int i, uint32_t codes) { staged.keep(i, pair, codes); });
  }
  // Found again, which takes no register of the loop.
  store_kept<Codes>(copy, ColumnsPlace(part), staged);
}

/// Blocks that an SM has at once, as many as registers allow.
template <class Codes>
constexpr int kSixteensAtOnce = Codes::kStochastic ? 2 : 3;

template <class Codes, class Parts>
__global__ void __launch_bounds__(kGridWarps* kLanes, kSixteensAtOnce<Codes>)
    quantize_sixteens_kernel(const __grid_constant__ SixteensJob job) {
  begin_dependent();
  store_expert_scales<Codes>(job);
  walk_columns<Codes, Parts>(job, [&](const ColumnsPart& part, const StagedColumn& staged) {
    if (job.along_k.codes != nullptr) quantize_along_k<Codes>(job, part, staged);
    if (job.along_rows.codes != nullptr) quantize_along_rows<Codes>(job, part, staged);
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
  const auto with = [&]<class Parts, CodesKind kKind>() {
    using Codes = CodesOf<Row, Element, kKind>;
    launch_columns<Parts>(quantize_sixteens_kernel<Codes, Parts>, all, on);
  };
  const auto with_kind = [&]<bool kDecoded>() {
    if (all.of.offsets == nullptr)
      with.template operator()<WeightParts<kColumnsPart>, CodesKind{kDecoded, false}>();
    else if (all.copies[0].stochastic)
      with.template operator()<BatchParts<kColumnsPart>, CodesKind{kDecoded, true}>();
    else
      with.template operator()<BatchParts<kColumnsPart>, CodesKind{kDecoded, false}>();
  };
  all.copies[0].to.decoded || all.copies[all.count - 1].to.decoded
      ? with_kind.template operator()<true>()
      : with_kind.template operator()<false>();
}

}  // namespace cadre::cuda::portable
